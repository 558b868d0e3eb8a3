"""rLLM adapter: registers corral's objectives as rLLM losses, for each of rLLM's training backends.

+rllm.algorithm.loss_plugins=[corral.engines.rllm_plugin]
rllm.algorithm.loss_fn=corral_dppo
+rllm.algorithm.loss_params.bound=0.2                       # settings of the objective, and `anchor`
"""

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from corral.engines.adapter import EngineObjective, read_metrics, warn_once
from corral.objective import make_objective, objective_names
from corral.objective.config import Anchor
from corral.tensors import TokenBatch

OWN = {"eps_clip": 0.2, "eps_clip_high": None, "kl_beta": 0.0, "clip_ratio_c": None}
"""Settings that rLLM adds to every loss, with rLLM's default values.
`clip_ratio_c` comes from verl's configuration."""
_ENGINE = "corral for rLLM"
_ENOUGH = 8
"""Smallest number of identical log-probs from which the old policy and the sampler are taken to be the same policy."""


def register() -> list[str]:
    """Register every objective with rLLM as loss_fn "corral_" + its name, and return the registered names."""
    rllm: Any = importlib.import_module("rllm")
    for objective in objective_names():
        rllm.register_loss(f"corral_{objective}", agg_mode=_only_reduction(objective))(make_loss(objective))
    return [f"corral_{objective}" for objective in objective_names()]


def make_loss(objective: str) -> Callable[[Any], tuple[Tensor, dict[str, float]]]:
    """Make a loss function for rLLM from an objective's name.

    rLLM calls it with all sequences [B T] on verl, and with one sequence [T] on Tinker and Fireworks.
    """
    mode = _only_reduction(objective)

    def corral_loss(ctx: Any) -> tuple[Tensor, dict[str, float]]:
        wanted = _objective(objective, ctx.params)
        fields = (ctx.logp_curr, ctx.logp_old, ctx.advantages, ctx.action_mask.bool())
        new, old, advantages, mask = (torch.atleast_2d(field) for field in fields)
        rollout = None if ctx.logp_rollout is None else torch.atleast_2d(ctx.logp_rollout)
        anchor = wanted.anchor_logp(_policies(old, rollout, mask))
        loss, metrics = wanted.token_loss(TokenBatch(new, anchor, advantages, mask, logp_rollout=rollout))
        return ctx.aggregate(loss.reshape(ctx.logp_curr.shape), ctx.action_mask, mode=mode), read_metrics(metrics)

    return corral_loss


def _policies(old: Tensor, rollout: Tensor | None, mask: Tensor) -> dict[Anchor, Tensor | None]:
    """Return the log-probs of a batch for each anchor policy; None for a policy without log-probs.

    With bypass_mode, rLLM passes the sampler's log-probs as the old policy's.
    """
    bypassed = (
        rollout is not None
        and int((mask & (rollout < -0.01)).sum()) >= _ENOUGH  # certain tokens are 0 under every policy
        and torch.equal(old[mask], rollout[mask].to(old.dtype))
    )
    return {"old": None if bypassed else old, "rollout": rollout}


def _objective(name: str, params: dict[str, Any]) -> EngineObjective:
    """Build the objective from rLLM's loss parameters. Raises ValueError if a term of rLLM's own losses is switched on."""
    if params.get("kl_beta"):
        raise ValueError(f"{_ENGINE}: kl_beta is a term of rLLM's own losses, which this one replaces. Set it to 0.")
    unread = [key for key in ("eps_clip", "eps_clip_high") if params.get(key, OWN[key]) != OWN[key]]
    if unread:
        warn_once(_ENGINE, f"{unread[0]} is not read. Settings of {name} go into rllm.algorithm.loss_params.")
    settings = {key: value for key, value in params.items() if key not in OWN and key != "anchor"}
    return EngineObjective.of(_ENGINE, name, settings, anchor=params.get("anchor", "auto"))


def _only_reduction(objective: str) -> str | None:
    """Return the objective's reduction if it supports only one. Returns None otherwise: rLLM's setting then decides."""
    own = make_objective(objective).config.reductions
    return own[0] if len(own) == 1 else None
