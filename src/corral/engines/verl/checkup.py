"""Check that corral is active in verl on this machine, and that its policy losses have the right gradients."""

import importlib
import os
from importlib.metadata import entry_points
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch

from corral.engines.adapter import sampled_token_names
from corral.engines.checkup import Checkup
from corral.engines.verl.settings import CONFIG, MODEL_TYPE, PREFIX, TRAINERS, VERL_RANGE, VerlSettings, loss_modes
from corral.objective import make_objective
from corral.objective.config import Reduction
from corral.objective.reduction import reduce_loss
from corral.tensors import TokenBatch

_LOSS = "actor_rollout_ref.actor.policy_loss"
_COMMON = f"""{_LOSS}._target_={CONFIG}
'+{_LOSS}.bypass_mode=${{algorithm.rollout_correction.bypass_mode}}'
trainer.v1.trainer_mode={PREFIX}sync"""
_TROLL = f"""{_COMMON}
{_LOSS}.loss_mode=corral_troll
+{_LOSS}.objective.bound=0.05
+{_LOSS}.support_size=64
+actor_rollout_ref.model.model_type={MODEL_TYPE}"""
_DPPO = f"""{_COMMON}
{_LOSS}.loss_mode=corral_dppo
+{_LOSS}.objective.bound=0.2"""
_FSDP2 = "actor_rollout_ref.actor.strategy=fsdp2"
LINES = {
    "TROLL": f"{_TROLL}\n{_FSDP2}",
    "TROLL, with Megatron": f"model_engine=megatron\n{_TROLL}",
    "DPPO, on the sampler's log-probs": f"""{_DPPO}
algorithm.rollout_correction.bypass_mode=true
actor_rollout_ref.rollout.calculate_log_probs=true""",
    "DPPO, on a support": f"""{_DPPO}
+{_LOSS}.objective.estimator=topk
+{_LOSS}.support_size=20
+actor_rollout_ref.model.model_type={MODEL_TYPE}
{_FSDP2}""",
    "anything else, such as SPO": f"""{_COMMON}
{_LOSS}.loss_mode=corral_spo""",
}
"""Command-line overrides for `python -m verl.trainer.main_ppo`, for each purpose.
A test composes verl's configuration with each."""
SDPA = "+actor_rollout_ref.model.override_config.attn_implementation=sdpa"
"""Command-line override that selects PyTorch's attention, for installations without flash-attn."""


def checkup() -> Checkup:
    """Import verl as a verl worker does, and report which losses and trainers corral registered."""
    found = Checkup(lines=LINES)
    if not found.check_release("verl", VERL_RANGE):
        return found
    policy = os.getenv("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    if not any(point.value == "corral.engines.verl.plugin" for point in entry_points(group="verl.plugins")):
        found.trouble.append("corral's entry point is not there: install it with pip, on every node")
    elif policy != "auto" and "corral" not in policy.split(","):
        found.trouble.append(f"VERL_USE_EXTERNAL_PLUGINS={policy} leaves corral out: use auto, or add corral")
    else:
        found.rows.append(("entry point", "corral, in verl.plugins"))
    try:
        importlib.import_module("verl")
        plugin: Any = importlib.import_module("corral.engines.verl.plugin")
    except Exception as error:  # verl imports half of the world, and any of it may be missing
        found.trouble.append(f"verl cannot be imported: {type(error).__name__}: {error}")
        return found
    found.rows.append(("flash-attn", attention()))
    found.rows.append(("policy losses", ", ".join(loss_modes())))
    megatron = ", megatron" if plugin.HAS_MEGATRON else ""
    found.rows.append(("engine", f"{MODEL_TYPE} (fsdp, fsdp2{megatron})"))
    found.rows.append(("trainers", ", ".join(PREFIX + name for name in TRAINERS)))
    found.trouble += [f"{part} not registered: {why}" for part, why in plugin.FAILED.items()]
    found.trouble += [why for mode in loss_modes() if (why := plugin.missing(mode)) is not None]
    if not found.trouble:
        gap = self_test(plugin.core_algos.get_policy_loss_fn)
        found.rows.append(
            ("self-test", f"two sequences, {len(sampled_token_names())} objectives: gradients differ by {gap:.1e}")
        )
        if not gap <= 1e-6:
            found.trouble.append(f"policy losses compute another gradient than corral alone, by {gap:.3g}")
    return found


def attention() -> str:
    """Return "installed", or a sentence on how to install flash-attn and how to train without it."""
    if find_spec("flash_attn") is not None:
        return "installed"
    return f"– verl's default attention needs it: pip install 'verl[vllm,fsdp]', or {SDPA}"


def self_test(get_policy_loss: Any) -> float:
    """Compute the largest difference between policy-loss gradients through verl and through corral alone.

    All losses on sampled tokens are compared.
    """
    # Half a nat apart on average, or the first batch's policies would be said to differ.
    logp = torch.tensor([[-0.1, -2.0, -0.7], [-1.1, -0.4, -1.0]])
    old = torch.tensor([[-0.9, -1.2, -0.7], [-1.5, -0.2, -1.0]])
    credit, mask = torch.tensor([[1.0, -1.0, 0.5], [-0.5, 2.0, 1.0]]), torch.tensor([[True, True, False], [True] * 3])
    worst = 0.0
    for name in sampled_token_names():
        mode, objective = PREFIX + name, make_objective(name)
        settings = VerlSettings(loss_mode=mode, bypass_mode=objective.config.anchor == "rollout")
        info = {"dp_size": 1, "batch_num_tokens": 5, "global_batch_size": 2, "loss_scale_factor": None}
        config = SimpleNamespace(policy_loss=settings, global_batch_info=info)
        how: Reduction = "seq-mean-token-mean"
        here, alone = (logp.clone().requires_grad_() for _ in range(2))
        loss, _ = get_policy_loss(mode)(
            old_log_prob=old, log_prob=here, advantages=credit, response_mask=mask, loss_agg_mode=how, config=config
        )
        reduced = reduce_loss(objective(TokenBatch(alone, old, credit, mask)).loss, mask, how)
        gradients = [torch.autograd.grad(value, x)[0] for value, x in ((loss, here), (reduced, alone))]
        worst = max(worst, float((gradients[0] - gradients[1]).abs().max()))
    return worst
