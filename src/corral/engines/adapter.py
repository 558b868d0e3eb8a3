"""Functions shared by corral's engine adapters: build an objective from settings, and compute its loss for each token."""

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from corral.head.batch_loss import batch_loss
from corral.objective import OBJECTIVES, Objective, make_objective
from corral.objective.check import FirstCall
from corral.objective.config import NEEDS_SUPPORT, NEEDS_TOKENS, Anchor
from corral.tensors import SparseDist, TokenBatch

_Logp = TypeVar("_Logp")

logger = logging.getLogger(__name__)

POLICY = {"old": "old policy, recomputed by the trainer", "rollout": "sampler's log-probs"}
"""Names of the two possible anchor policies in error messages."""
LEAST_TAIL = 1e-8
"""Lower limit on the tail mass 1 − Σ p, the probability of all tokens outside the top k."""


@functools.cache
def first_call(engine: str) -> FirstCall:
    """Return the checker of an engine's first batch. Each process has one per engine, since some engines rebuild objectives."""
    return FirstCall()


@dataclass(frozen=True)
class EngineObjective:
    """Objective and its anchor policy for an engine. The engine supplies all inputs that the objective needs."""

    engine: str
    objective: Objective
    anchor: Anchor
    """Policy whose log-probs the engine passes as `logp_old`: the old policy or the sampler."""

    @classmethod
    def of(
        cls, engine: str, name: str, settings: Mapping[str, Any], *, anchor: str = "auto", support: bool = False
    ) -> "EngineObjective":
        """Build the objective `name` for an engine. Raises ValueError if the engine cannot supply an input of the objective.

        Args:
            engine: who asks, for messages.
            anchor: "old", "rollout", or "auto" for what suits the objective; a support is always the old policy's.
            support: whether the engine supplies both policies on a support.
        """
        objective = make_objective(name, **settings)
        if "dist_teacher" in objective.needs:
            raise ValueError(
                f"{engine}: {name} with these settings reads a third policy, a teacher or a reference, and engines hand a loss "
                f"none. Use the TRL door."
            )
        needs = bool(objective.needs & NEEDS_SUPPORT)
        if needs and not support:
            raise ValueError(
                f"{engine}: {name} with these settings reads whole distributions on a support, and this engine hands a loss "
                f"the sampled tokens alone. Use dppo with estimator='binary', or an engine that docs/engines.md lists for it."
            )
        if anchor not in ("auto", *get_args(Anchor)):
            raise ValueError(f"{engine}: `anchor` is one of auto, {', '.join(get_args(Anchor))}; got {anchor!r}.")
        if needs and anchor == "rollout":
            raise ValueError(
                f"{engine}: {name} with these settings compares with a support of the old policy, which the trainer "
                f"recomputes; samplers report none. Use anchor='old'."
            )
        own: Anchor = "old" if needs else objective.config.anchor
        return cls(engine, objective, own if anchor == "auto" else cast(Anchor, anchor))

    @property
    def name(self) -> str:
        """Name of the objective."""
        return self.objective.name

    @property
    def needs_support(self) -> bool:
        """True if the objective reads log-probs of the policy's top-k tokens (a support), not only of the sampled tokens."""
        return bool(self.objective.needs & NEEDS_SUPPORT)

    def token_loss(
        self, batch: TokenBatch, policy_weights: Float[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T"], dict[str, Tensor]]:
        """Compute the objective's loss for each token, not reduced and 0 at masked tokens, and its metrics.

        Engines split batches as they like: where every token is masked out the loss is 0, still connected to the network, as
        distributed training wants it, and so are metrics, as engines want the same ones of every micro-batch.

        Args:
            batch: as the engine has it, [B T].
            policy_weights: of the policy term alone, such as a sampler correction of the engine's.
        """
        if not bool(batch.mask.any()):
            zero = batch.logp_new.new_zeros(())
            return torch.where(batch.mask, batch.logp_new, 0.0), dict.fromkeys(self.objective(_one_token(batch)).metrics, zero)
        first_call(self.engine).look(f"{self.engine}: {self.name}", batch)
        # A kernel knows the sum of policy term and regression alone.
        apart = policy_weights is not None and self.objective.config.regresses
        out = self.objective(batch) if apart else batch_loss(self.objective, batch)
        loss = out.loss if policy_weights is None else out.weigh(torch.where(batch.mask, policy_weights, 0.0))
        return loss, out.metrics

    def anchor_logp(self, policies: Mapping[Anchor, _Logp | None]) -> _Logp:
        """Return the log-probs of the anchor policy from `policies`. Raises ValueError if the engine did not pass them."""
        found = policies.get(self.anchor)
        if found is None:
            there = [anchor for anchor, logp in policies.items() if logp is not None]
            others = [f", or pass anchor='{anchor}' if the {POLICY[anchor]} will do" for anchor in there]
            raise ValueError(
                f"{self.engine}: {self.name} is anchored on the {POLICY[self.anchor]}, which is not there. Choose another "
                f"objective{''.join(others)}."
            )
        return found

    def other_reduction(self, how: str) -> str | None:
        """Return a warning if the engine's reduction `how` changes the objective's gradient, else None."""
        own = self.objective.config.reductions
        if how in own:
            return None
        return f"{how} gives {self.name} another gradient than its own. Use {' or '.join(own)}."


def scales_with_advantages(wanted: EngineObjective) -> bool:
    """True if scaling a sequence's advantages scales the losses of that sequence by the same factor, and changes nothing else.

    Then an engine may write its reduction into the advantages, each sequence's share of a mean included.
    """
    draw = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(8, 16, generator=draw, dtype=torch.float64)
    new = (old + 0.5 * torch.randn(8, 16, generator=draw, dtype=torch.float64)).clamp(max=-1e-3)
    credit, mask = torch.rand(8, 16, generator=draw, dtype=torch.float64), torch.ones(8, 16, dtype=torch.bool)
    credit[4:] *= -1  # so that either sign outweighs the other under one of the two

    def loss(factors: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):  # some objectives draw
            torch.manual_seed(0)
            return wanted.objective(TokenBatch(new, old, factors * credit, mask, logp_rollout=old)).loss / factors

    rising = torch.logspace(-2, 2, 8, dtype=torch.float64)[:, None]
    own = loss(torch.ones_like(rising))
    return all(torch.allclose(own, loss(factors), rtol=1e-9, atol=1e-12) for factors in (rising, rising.flip(0)))


def read_metrics(metrics: dict[str, Tensor]) -> dict[str, float]:
    """Copy all metrics from the device to the host in one transfer."""
    if not metrics:
        return {}
    values = torch.stack([value.detach().float() for value in metrics.values()]).tolist()
    return dict(zip(metrics, values, strict=True))


@functools.cache
def warn_once(engine: str, sentence: str | None) -> None:
    """Log the warning `sentence` once per engine; None logs nothing."""
    if sentence is not None:
        logger.warning("%s: %s", engine, sentence)


def dist_from_top(ids: Int[Tensor, "*b K"], logp: Float[Tensor, "*b K"]) -> SparseDist:
    """Build a policy's distribution on K token ids from their log-probs; the tail mass is 1 − Σ p.

    −1 among the ids is padding, whatever stands there in `logp`.
    """
    logp = torch.where(ids < 0, -torch.inf, logp)
    left = 1 - logp.double().exp().sum(-1)
    return SparseDist(ids, logp, left.clamp(min=LEAST_TAIL).log().to(logp.dtype))


def _one_token(batch: TokenBatch) -> TokenBatch:
    """Make a batch of one token with the same fields as `batch`, which serves to find the names of an objective's metrics.

    The token has probability ½.
    """
    half = torch.full((1, 1), -math.log(2))
    dist = None
    if batch.dist_old is not None:
        rest_max = None if batch.dist_old.rest_max is None else half
        dist = SparseDist(torch.zeros(1, 1, 1, dtype=torch.int64), half[..., None], half, rest_max)
    rollout = None if batch.logp_rollout is None else half
    return TokenBatch(half, half, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), dist, dist, rollout)


def sampled_token_names() -> list[str]:
    """Return the names of objectives that read only the log-probs of sampled tokens; any engine can run these objectives."""
    return [name for name, (_, config) in sorted(OBJECTIVES.items()) if not config().needs - NEEDS_TOKENS]
