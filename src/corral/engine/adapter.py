"""What every engine's adapter shares: settings → an objective with its anchor; log-probs → a loss per token."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast, get_args

import torch
from jaxtyping import Float
from torch import Tensor

from corral.kernels.batch_loss import batch_loss
from corral.objective import OBJECTIVES, Objective, make_objective
from corral.objective.config import NEEDS_SUPPORT, NEEDS_TOKENS, Anchor
from corral.types import SparseDist, TokenBatch


@dataclass(frozen=True)
class EngineObjective:
    """An objective as an engine runs it: its anchor is settled, and what the engine cannot supply was refused."""

    objective: Objective
    anchor: Anchor
    """Whose log-probs the engine passes as `logp_old`."""

    @classmethod
    def of(
        cls, engine: str, name: str, settings: Mapping[str, Any], *, anchor: str = "auto", support: bool = False
    ) -> "EngineObjective":
        """The objective `name` with these settings.

        Args:
            engine: who asks, for messages.
            anchor: "old", "rollout", or "auto" for what suits the objective; a support is always the old policy's.
            support: whether the engine supplies both policies on a support.
        """
        objective = make_objective(name, **settings)
        if "dist_teacher" in objective.needs:
            raise ValueError(f"{engine}: {name} learns from a teacher, and engines hand a loss none. Use the TRL door.")
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
        return cls(objective, own if anchor == "auto" else cast(Anchor, anchor))

    @property
    def name(self) -> str:
        """The objective's."""
        return self.objective.name

    @property
    def needs_support(self) -> bool:
        """Whether it reads more than the sampled token."""
        return bool(self.objective.needs & NEEDS_SUPPORT)

    def token_loss(
        self, batch: TokenBatch, policy_weights: Float[Tensor, "B T"] | None = None
    ) -> tuple[Float[Tensor, "B T"], dict[str, Tensor]]:
        """Loss of each token, unreduced and 0 where masked out, and metrics.

        Engines split batches as they like: where every token is masked out the loss is 0, still connected to the network, as
        distributed training wants it, and so are metrics, as engines want the same ones of every micro-batch.

        Args:
            batch: as the engine has it, [B T].
            policy_weights: of the policy term alone, such as a sampler correction of the engine's.
        """
        if not bool(batch.mask.any()):
            zero = batch.logp_new.new_zeros(())
            return torch.where(batch.mask, batch.logp_new, 0.0), dict.fromkeys(self.objective(_one_token(batch)).metrics, zero)
        # A kernel knows the sum of policy term and regression alone.
        apart = policy_weights is not None and self.objective.config.regresses
        out = self.objective(batch) if apart else batch_loss(self.objective, batch)
        loss = out.loss if policy_weights is None else out.weigh(torch.where(batch.mask, policy_weights, 0.0))
        return loss, out.metrics

    def other_reduction(self, how: str) -> str | None:
        """A sentence where the engine's reduction is none of the objective's own; None where it is."""
        own = self.objective.config.reductions
        if how in own:
            return None
        return f"{how} gives {self.name} another gradient than its own. Use {' or '.join(own)}."


def _one_token(batch: TokenBatch) -> TokenBatch:
    """A batch of one token with the same fields: two tokens of equal probability."""
    half = torch.full((1, 1), -math.log(2))
    support = SparseDist(torch.zeros(1, 1, 1, dtype=torch.int64), half[..., None], half, half)
    dist = None if batch.dist_old is None else support
    rollout = None if batch.logp_rollout is None else half
    return TokenBatch(half, half, torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool), dist, dist, rollout)


def sampled_token_names() -> list[str]:
    """Objectives that, by default, need the sampled tokens' two log-probs alone: what any engine can run."""
    return [name for name, (_, config) in sorted(OBJECTIVES.items()) if not config().needs - NEEDS_TOKENS]
