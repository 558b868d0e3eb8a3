"""Settings of the TRL door: GRPO's own, and the axes that corral adds."""

import sys
from dataclasses import dataclass, field
from typing import Any, ClassVar

from trl import GRPOConfig

from corral.advantage import Advantage
from corral.objective import Objective, make_objective
from corral.objective.config import NEEDS_SUPPORT, Anchor
from corral.objective.correction import Correction, make_correction

REDUCTIONS = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""TRL's loss types that differ from PPO's clip in nothing but how they average."""


@dataclass
class CorralConfig(GRPOConfig):
    """GRPOConfig with an objective of corral's. `loss_type` chooses the reduction, `objective` everything before it."""

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "objective_config", "correction_config"]

    objective: str = field(
        default="troll", metadata={"help": "Objective: a name from corral.objective_names(), such as troll, dppo or ppo_clip."}
    )
    objective_config: dict[str, Any] | str | None = field(
        default=None, metadata={"help": 'Settings of the objective, such as {"bound": 0.05}; its own defaults otherwise.'}
    )
    anchor: str = field(
        default="auto",
        metadata={
            "help": "Centre of the trust region: `old` (recomputed by the trainer), `rollout` (the sampler's log-probs), or "
            "`auto` (what suits the objective)."
        },
    )
    advantage: str | None = field(
        default=None,
        metadata={"help": "grpo, dr_grpo, rloo or reinforce++; None keeps TRL's own (`scale_rewards`)."},
    )
    correction: str | None = field(
        default=None,
        metadata={"help": "Sampler correction: tis, seq_tis, icepop or trm. Needs the log-probs that vLLM reports."},
    )
    correction_config: dict[str, Any] | str | None = field(
        default=None, metadata={"help": 'Settings of the correction, such as {"cap": 2.0}.'}
    )
    support_size: int = field(
        default=64, metadata={"help": "How many of the old policy's most likely tokens a support keeps at most."}
    )
    support_mass: float = field(
        default=1 - 1e-5, metadata={"help": "Probability after which a support keeps no further token."}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        self.make_objective()
        self.make_correction()
        if self.anchor not in ("auto", "old", "rollout"):
            raise ValueError(f"CorralConfig: `anchor` is auto, old or rollout; got {self.anchor!r}.")
        if self.advantage == "gae":
            raise ValueError("CorralConfig: advantage='gae' needs a critic, which TRL's GRPO does not train; verl does.")
        if self.advantage is not None and self.advantage not in Advantage.__args__:
            raise ValueError(f"CorralConfig: `advantage` is one of {', '.join(Advantage.__args__)}; got {self.advantage!r}.")
        if not self.support_size >= 1 or not 0 < self.support_mass <= 1:
            raise ValueError(
                f"CorralConfig: `support_size` is ≥ 1 and `support_mass` in (0, 1]; got {self.support_size} and "
                f"{self.support_mass}."
            )
        for wrong, why in self._refusals():
            if wrong:
                raise ValueError(f"CorralConfig: {why}")

    def make_objective(self) -> Objective:
        """The objective with its settings."""
        return make_objective(self.objective, **_settings(self.objective_config))

    def make_correction(self) -> Correction | None:
        """The sampler correction with its settings, if any."""
        return make_correction(self.correction, **_settings(self.correction_config)) if self.correction else None

    def resolve_anchor(self) -> Anchor:
        """The anchor, with "auto" settled: the objective's own, but a support needs the policy that the trainer recomputes."""
        objective = self.make_objective()
        if self.anchor == "old" or (self.anchor == "auto" and objective.needs >= NEEDS_SUPPORT):
            return "old"
        return "rollout" if self.anchor == "rollout" else objective.config.anchor

    def _refusals(self) -> list[tuple[bool, str]]:
        """What TRL can do and this door cannot, or does elsewhere: nothing is ignored silently."""
        sampler_anchor = self.use_vllm and self.resolve_anchor() == "rollout"
        truncated = self.top_p < 1 or self.top_k > 0 or bool(self.min_p)
        support = self.make_objective().needs >= NEEDS_SUPPORT
        return [
            (
                self.loss_type not in REDUCTIONS,
                f"`loss_type` chooses the reduction here, one of {', '.join(REDUCTIONS)}; got {self.loss_type!r}. Its "
                f"objective is objective={self.loss_type!r}, if corral has it.",
            ),
            (
                self.epsilon != 0.2 or self.epsilon_high is not None,
                "`epsilon` is the clip range of TRL's own loss. Use objective='ppo_clip' with objective_config={'clip_low': …, "
                "'clip_high': …}.",
            ),
            (self.delta is not None, "`delta` is TRL's dual clip. Use objective='dual_clip'."),
            (
                self.importance_sampling_level != "token",
                "`importance_sampling_level` belongs to the objective. Use objective='gspo', or troll with level='sequence'.",
            ),
            (
                self.off_policy_mask_threshold is not None,
                "`off_policy_mask_threshold` is not supported. Use correction='trm'.",
            ),
            (self.use_liger_kernel, "`use_liger_kernel` replaces the head that corral reads. Leave it off."),
            (
                "unsloth" in sys.modules,
                "Unsloth replaces the trainer's methods by its own text. Import corral without it.",
            ),
            (
                sampler_anchor and truncated,
                "anchor='rollout' needs the log-probs that the sampler drew from, but top_p, top_k or min_p renormalise them. "
                "Switch those off, or use anchor='old'.",
            ),
            (
                self.use_vllm and self.anchor == "rollout" and support,
                f"objective={self.objective!r} needs a support, and vLLM reports the sampled tokens alone. Use anchor='old'.",
            ),
            (
                sampler_anchor and self.vllm_importance_sampling_correction,
                "with the sampler as the anchor its mismatch is in the ratio already. Set "
                "vllm_importance_sampling_correction=False, or anchor='old'.",
            ),
            (
                self.correction is not None and not self.use_vllm,
                f"correction={self.correction!r} needs the sampler's log-probs, and transformers' generation reports none: "
                f"there the sampler is the trainer's own model, and there is nothing to correct.",
            ),
            (
                self.correction is not None and self.vllm_importance_sampling_correction,
                f"correction={self.correction!r} and TRL's own would both correct the sampler's mismatch. Set "
                f"vllm_importance_sampling_correction=False.",
            ),
        ]


def _settings(config: dict[str, Any] | str | None) -> dict[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, dict):
        raise ValueError(f"CorralConfig: settings are a dictionary, or JSON on the command line; got {config!r}.")
    return config
