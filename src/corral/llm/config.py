"""Settings of the TRL door: GRPO's own, the axes that corral adds, and what is refused."""

import json
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, cast, get_args

import trl
from packaging.version import Version
from transformers import GenerationConfig
from trl import GRPOConfig

from corral.advantage import Advantage
from corral.llm import TRL_RANGE
from corral.llm.sampling import TRUNCATIONS, model_refusals, sampling_refusals
from corral.naming import nearest
from corral.objective import OBJECTIVES, Objective, make_objective, objective_names
from corral.objective.config import NEEDS_SUPPORT, Anchor
from corral.objective.correction import Correction, make_correction
from corral.objective.reduction import Reduction
from corral.validate import number_in

REDUCTIONS: dict[str, Reduction] = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",  # of a micro-batch
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
"""TRL's loss types that differ from PPO's clip in nothing but how they average. "auto" takes the first of its kind."""

WRONG_BEFORE = {"dapo": "1.10", "luspo": "1.10"}
"""Reductions that TRL averaged over the wrong count, and the first release that has them right."""

Sampler = Literal["transformers", "vllm", "rollout_func"]
"""Who draws the completions: the trainer's own model, vLLM, or a function of the user's."""


def check_trl(version: str) -> None:
    """Refuse a TRL whose methods may not be the ones that corral overrides."""
    low, high = TRL_RANGE
    if not Version(low) <= Version(version) < Version(high):
        raise ImportError(
            f"corral.llm: tested with TRL {low} and newer, below {high}; found {version}, which may do something else in the "
            f"methods that corral builds on. Install a tested one: pip install 'trl>={low},<{high}'."
        )


check_trl(trl.__version__)


def steps_per_batch(config: GRPOConfig) -> int:
    """Micro-batches that are trained on between one batch of rollouts and the next."""
    assert config.steps_per_generation is not None  # TRL has filled it in
    return config.steps_per_generation * config.num_iterations


@dataclass
class CorralConfig(GRPOConfig):
    """GRPOConfig with an objective of corral's. `loss_type` chooses the reduction, `objective` everything before it.

    Once made, `loss_type` is one of TRL's: "auto" has become the objective's own.
    """

    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "objective_config", "correction_config"]  # type: ignore[misc]  # TRL leaves ClassVar out

    objective: str = field(
        default="troll", metadata={"help": "Objective: a name from corral.objective_names(), such as troll, dppo or ppo_clip."}
    )
    objective_config: dict[str, Any] | str | None = field(
        default=None, metadata={"help": 'Settings of the objective, such as {"bound": 0.05}; its own defaults otherwise.'}
    )
    loss_type: str = field(
        default="auto",
        metadata={"help": "How the loss is averaged: grpo, dapo, bnpo, dr_grpo, luspo, or `auto` (what suits the objective)."},
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
        metadata={"help": "Sampler correction: tis, seq_tis, icepop or trm. Needs the log-probs that a sampler reports."},
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
    support: str = field(
        default="old",
        metadata={
            "help": "Tokens that a region is measured on: `old` (the old policy's likeliest) or `union` (the new policy's "
            "too). The tail is one more category either way."
        },
    )
    disable_dropout: bool = field(
        default=True,
        metadata={"help": "Dropout draws other masks in the old pass than in an update, and ratios move without any update."},
    )
    use_cache: bool | None = field(  # type: ignore[assignment]  # transformers has no None
        default=None,
        metadata={"help": "What a saved model's configuration says of its cache; None leaves that as it is."},
    )

    def __new__(cls, *args: Any, **settings: Any) -> "CorralConfig":
        """A setting that does not exist gets a sentence; Python's own says neither which is near nor whose it is."""
        known = [item.name for item in fields(cls) if item.init]
        for key in settings:
            if key not in known:
                hint = _belongs(key, settings) or suggest(key, known)
                raise TypeError(f"CorralConfig: there is no setting `{key}`.{hint} docs/trl.md has those that corral adds.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.loss_type == "auto":  # before TRL reads it
            first = self.make_objective().config.reductions[0]
            self.loss_type = next(name for name, how in REDUCTIONS.items() if how == first)
        super().__post_init__()
        self.make_objective()
        self.make_correction()
        if self.anchor not in ("auto", *get_args(Anchor)):
            raise ValueError(f"CorralConfig: `anchor` is auto, old or rollout; got {self.anchor!r}.")
        if self.advantage == "gae":
            raise ValueError(
                "CorralConfig: advantage='gae' needs a critic, which TRL's GRPO does not train. Use grpo, dr_grpo, rloo or "
                "reinforce++; in a loop of your own with a critic, corral.gae."
            )
        if self.advantage is not None and self.advantage not in get_args(Advantage):
            raise ValueError(f"CorralConfig: `advantage` is one of {', '.join(get_args(Advantage))}; got {self.advantage!r}.")
        whole = type(self.support_size) is int and self.support_size >= 1
        if not whole or not number_in(self.support_mass, 0, 1) or self.support_mass == 0:
            raise ValueError(
                f"CorralConfig: `support_size` is a whole number ≥ 1 and `support_mass` in (0, 1]; got {self.support_size!r} "
                f"and {self.support_mass!r}."
            )
        if self.support not in ("old", "union"):
            raise ValueError(f"CorralConfig: `support` is old or union; got {self.support!r}.")
        generation = _settings("generation_kwargs", self.generation_kwargs)
        _raise_first([*self._trl_refusals(), *sampling_refusals(self, generation)])
        if self.use_vllm:
            self.check_sampler("vllm")

    def make_objective(self) -> Objective:
        """The objective with its settings."""
        return make_objective(self.objective, **_settings("objective_config", self.objective_config))

    def make_correction(self) -> Correction | None:
        """The sampler correction with its settings, if any."""
        settings = _settings("correction_config", self.correction_config)
        if self.correction is None and settings:
            raise ValueError(f"CorralConfig: `correction_config` is {settings}, but there is no `correction` to set.")
        return None if self.correction is None else make_correction(self.correction, **settings)

    @property
    def other_reduction(self) -> str | None:
        """A sentence where the reduction that was asked for is none of the objective's own; None where it is."""
        own = self.make_objective().config.reductions
        if REDUCTIONS[self.loss_type] in own:
            return None
        return (
            f"loss_type={self.loss_type!r} is {REDUCTIONS[self.loss_type]}, which gives {self.objective} another gradient than "
            f"its own. Leave `loss_type` out, or use {' or '.join(name for name, how in REDUCTIONS.items() if how in own)}."
        )

    @property
    def prompts_per_batch(self) -> int:
        """Prompts of one batch of rollouts, over all processes."""
        assert self.generation_batch_size is not None  # TRL has filled it in
        assert self.num_generations is not None
        return self.generation_batch_size // self.num_generations

    @property
    def needs_support(self) -> bool:
        """Whether the objective looks at more than the sampled token."""
        return bool(self.make_objective().needs & NEEDS_SUPPORT)

    def resolve_anchor(self) -> Anchor:
        """The anchor, with "auto" settled: the objective's own, but a support needs the policy that the trainer recomputes."""
        if self.anchor != "auto":
            return cast(Anchor, self.anchor)  # nothing else gets through __post_init__
        return "old" if self.needs_support else self.make_objective().config.anchor

    def check_sampler(self, sampler: Sampler, generation_config: GenerationConfig | None = None) -> None:
        """Refuse an anchor or a correction that this sampler cannot supply; docs/trl.md has the table.

        Args:
            generation_config: the model's own, which transformers' generation follows where TRL sets nothing.
        """
        rollout = self.resolve_anchor() == "rollout"
        reports = sampler != "transformers"
        generation = _settings("generation_kwargs", self.generation_kwargs)
        top_p, top_k, min_p = (generation.get(key, getattr(self, key)) for key in TRUNCATIONS)
        regex = sampler == "vllm" and getattr(self, "vllm_structured_outputs_regex", None)  # not every release has it
        truncated = (top_p is not None and top_p < 1) or (top_k or 0) > 0 or bool(min_p or regex)
        _raise_first(
            [
                *([] if reports else model_refusals(generation_config)),
                (
                    # With the trainer's own model, "auto" means the recomputed policy, whatever was cut off while sampling.
                    rollout and truncated and (reports or self.anchor == "rollout"),
                    "anchor='rollout' needs the log-probs that the sampler drew from, but top_p, top_k, min_p or a regex "
                    "renormalise them. Switch those off, or use anchor='old'.",
                ),
                (
                    rollout and reports and self.needs_support,
                    f"objective={self.objective!r} needs a support, and the sampler reports its sampled tokens alone, not its "
                    f"top-K. Use anchor='old'.",
                ),
                (
                    rollout and self.use_vllm and self.vllm_importance_sampling_correction,
                    "with the sampler as the anchor its mismatch is in the ratio already. Set "
                    "vllm_importance_sampling_correction=False, or anchor='old'.",
                ),
                (
                    self.use_vllm and bool(generation.get("logprobs")),
                    "with `logprobs` in generation_kwargs vLLM ranks tokens by likelihood, and TRL takes the first for the "
                    "sampled one. Leave it out.",
                ),
                (
                    "logp_rollout" in self.make_objective().needs and not reports,
                    f"objective={self.objective!r} needs `logp_rollout`, and transformers' generation reports none. Use vLLM, "
                    f"or a rollout function.",
                ),
                (
                    self.correction is not None and not reports,
                    f"correction={self.correction!r} needs the sampler's log-probs, and transformers' generation reports none: "
                    f"there the sampler is the trainer's own model, and there is nothing to correct.",
                ),
                (
                    self.correction is not None and rollout,
                    f"correction={self.correction!r} weighs the old policy against the sampler, and with anchor='rollout' they "
                    f"are one. Use anchor='old'.",
                ),
                (
                    self.correction is not None and self.use_vllm and self.vllm_importance_sampling_correction,
                    f"correction={self.correction!r} and TRL's own would both correct the sampler's mismatch. Set "
                    f"vllm_importance_sampling_correction=False.",
                ),
            ]
        )

    def _trl_refusals(self) -> list[tuple[bool, str]]:
        """What TRL can do and this door cannot, or does elsewhere: nothing is ignored silently."""
        same_name = f" Did you mean objective={self.loss_type!r}?" if self.loss_type in objective_names() else ""
        of_others = [
            item.name
            for item in fields(GRPOConfig)
            if item.name.startswith(("sapo_", "vespo_")) and getattr(self, item.name) != item.default
        ]
        return [
            (
                self.loss_type not in REDUCTIONS,
                f"`loss_type` chooses the reduction here: auto, {', '.join(REDUCTIONS)}; got {self.loss_type!r}.{same_name}",
            ),
            (
                Version(trl.__version__) < Version(WRONG_BEFORE.get(self.loss_type, trl.__version__)),
                f"loss_type={self.loss_type!r} is averaged over the wrong count by TRL {trl.__version__}. Install TRL "
                f"{WRONG_BEFORE.get(self.loss_type)} or newer, or use grpo, bnpo or dr_grpo.",
            ),
            (
                self.loss_type == "dr_grpo" and self.max_completion_length is None,
                "loss_type='dr_grpo' divides by `max_completion_length`, which is None. Give it a number.",
            ),
            (
                self.epsilon != 0.2 or self.epsilon_high is not None,
                "`epsilon` is the clip range of TRL's own loss. Use objective='ppo_clip' with objective_config={'clip_low': …, "
                "'clip_high': …}.",
            ),
            (
                self.delta is not None,
                "`delta` is TRL's dual clip. Use objective='dual_clip' with objective_config={'dual_clip': …}.",
            ),
            (
                bool(of_others),
                f"`{'`, `'.join(of_others)}` set losses of TRL's own. Use objective='sapo' with objective_config="
                f"{{'tau_positive': …, 'tau_negative': …}}; there is no vespo.",
            ),
            (
                not self.temperature > 0,
                f"`temperature` divides the logits of the policy that is trained, and must be > 0; got {self.temperature}.",
            ),
            (
                self.importance_sampling_level != "token",
                "`importance_sampling_level` belongs to the objective. Use objective='gspo', or troll with level='sequence'.",
            ),
            (
                self.off_policy_mask_threshold is not None,
                "`off_policy_mask_threshold` is not supported. Use correction='trm', or objective='dppo'.",
            ),
            (
                self.advantage is not None
                and (self.scale_rewards != "group" or self.multi_objective_aggregation != "sum_then_normalize"),
                f"advantage={self.advantage!r} takes the place of `scale_rewards` and `multi_objective_aggregation`. Leave "
                f"those as they are, or `advantage` out.",
            ),
            (
                self.use_liger_kernel,
                "`use_liger_kernel` replaces layers and the head that corral reads. Leave it off.",
            ),
            (
                "unsloth" in sys.modules,
                "Unsloth rewrites GRPOTrainer's methods, and corral's would never run. Use a process that does not import it.",
            ),
        ]


def suggest(key: str, known: Iterable[str]) -> str:
    """The nearest match, but not the 200 names that there are."""
    return nearest(key, known).split(" There are:")[0]


def _belongs(key: str, settings: Mapping[str, Any]) -> str:
    """Where a setting of the objective was given beside it: `bound`, say."""
    name = settings.get("objective", CorralConfig.objective)
    if name not in objective_names() or key not in (item.name for item in fields(OBJECTIVES[name][1])):
        return ""
    return f" It is one of {name}'s: objective_config={{{key!r}: {settings[key]!r}}}."


def _raise_first(refusals: list[tuple[bool, str]]) -> None:
    for wrong, why in refusals:
        if wrong:
            raise ValueError(f"CorralConfig: {why}")


def _settings(name: str, config: dict[str, Any] | str | None) -> dict[str, Any]:
    if config is None:
        return {}
    if isinstance(config, str):  # from a command line, and transformers has not read it yet
        with suppress(ValueError):
            config = json.loads(config)
    if not isinstance(config, dict):
        raise ValueError(f"CorralConfig: `{name}` is a dictionary, or JSON on the command line; got {config!r}.")
    return config
