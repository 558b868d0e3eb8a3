"""Settings of the TRL door: GRPO's own, the axes that corral adds, and what is refused."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, cast, get_args

from transformers import GenerationConfig, SchedulerType
from trl import GRPOConfig

from corral.advantage import Advantage
from corral.llm.refusals import check_numbers, generation_refusals, model_refusals, sampler_refusals, trl_refusals
from corral.llm.trl_api import REDUCTIONS
from corral.naming import suggest
from corral.objective import OBJECTIVES, Objective, make_objective, objective_names
from corral.objective.config import NEEDS_SUPPORT, Anchor
from corral.objective.correction import Correction, make_correction
from corral.validate import require

Sampler = Literal["transformers", "vllm", "rollout_func"]
"""Who draws the completions: the trainer's own model, vLLM, or a function of the user's."""

AUTO_PASSES = 8
"""Passes over a batch that `reuse="auto"` makes at most, where `num_iterations` is TRL's default of 1."""
AUTO_RATE, AUTO_BOUND, PASSES_BOUND, REUSE_BOUND = 1e-3, 0.03, 0.01, 0.02
"""What `learning_rate="auto"` stands for: the rate that the search on the first batch begins with, and a `deployed_bound`: with
one pass over each batch, with several, and with `reuse="auto"`."""


@dataclass
class CorralConfig(GRPOConfig):
    """GRPOConfig with an objective of corral's. `loss_type` chooses the reduction, `objective` everything before it.

    Once made, `loss_type` is one of TRL's: "auto" has become the objective's own. `learning_rate="auto"` has become the
    first rate that is tried on the first batch, and `finds_rate` is True.
    """

    finds_rate = False
    """Whether `learning_rate` was "auto"; no setting of its own."""
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "objective_config", "correction_config"]  # type: ignore[misc]  # TRL leaves ClassVar out

    in_corral_trainer: ClassVar[bool] = False
    """Whether a CorralTrainer is being made with this configuration; it sets this on the instance for as long."""

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
    learning_rate: float | str = field(  # type: ignore[assignment]  # transformers has no word
        default=1e-6,
        metadata={
            "help": "Peak learning rate; `auto` finds it on the first batch, where a step moves the network by "
            "a few `deployed_bound`s, and adapts it; unless given that is .03 with one pass over each batch, .01 with several."
        },
    )
    deployed_bound: float | None = field(
        default=None,
        metadata={
            "help": "Mean KL of the network after a step's updates from the network before them that is allowed; what goes "
            "further is retracted, and the learning rate follows. inf measures alone, None does neither."
        },
    )
    reuse: str = field(
        default="fixed",
        metadata={
            "help": "Passes over a batch of rollouts: `fixed` makes `num_iterations`; `auto` at most so many (8 where that is "
            "1), until the network is 50 times `deployed_bound`, .02 unless given, away or the effective sample size below ½."
        },
    )
    lr_scheduler_type: SchedulerType | str = field(
        default="auto",
        metadata={
            "help": "The learning rate's schedule; `auto` is linear, and constant where the learning rate is `auto` and "
            "`reuse` is not."
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
        if self.lr_scheduler_type == "auto":
            # A decay takes the bound with it: it ends too tight. With `reuse="auto"` the constant one was not measured.
            self.lr_scheduler_type = "constant" if self.learning_rate == "auto" and self.reuse != "auto" else "linear"
        self.finds_rate = self.learning_rate == "auto"
        if self.finds_rate:  # transformers wants a number
            self.learning_rate = AUTO_RATE
            if self.deployed_bound is None:
                fixed = AUTO_BOUND if self.num_iterations == 1 else PASSES_BOUND
                self.deployed_bound = REUSE_BOUND if self.reuse == "auto" else fixed
        if self.reuse == "auto":
            self.deployed_bound = REUSE_BOUND if self.deployed_bound is None else self.deployed_bound
            self.num_iterations = AUTO_PASSES if self.num_iterations == 1 else self.num_iterations
        check_numbers(self)  # before TRL divides by them
        super().__post_init__()
        self.make_objective()
        self.make_correction()
        require(self, "anchor", one_of=("auto", *get_args(Anchor)), name="CorralConfig")
        if self.advantage == "gae":
            raise ValueError(
                "CorralConfig: advantage='gae' needs a critic, which TRL's GRPO does not train. Use grpo, dr_grpo, rloo or "
                "reinforce++; in a loop of your own with a critic, corral.gae."
            )
        require(self, "advantage", one_of=get_args(Advantage), optional=True, name="CorralConfig")
        require(self, "support_size", at_least=1, integer=True, name="CorralConfig")
        require(self, "support_mass", above=0, at_most=1, name="CorralConfig")
        require(self, "support", one_of=("old", "union"), name="CorralConfig")
        require(self, "reuse", one_of=("fixed", "auto"), name="CorralConfig")
        note = "inf measures alone"
        require(self, "deployed_bound", above=0, optional=True, what="a divergence", note=note, name="CorralConfig")
        _raise_first(trl_refusals(self))
        _raise_first(generation_refusals(self, _settings("generation_kwargs", self.generation_kwargs)))
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
    def place_model_on_device(self) -> bool | None:
        """transformers' own; raises while any other trainer than CorralTrainer is made with this configuration.

        Every trainer of transformers reads this when it is made, and nothing else does. A stock GRPOTrainer would train with
        TRL's own loss, and say nothing of the objective.
        """
        if not self.in_corral_trainer:
            raise ValueError(
                f"CorralConfig: objective={self.objective!r} is computed by CorralTrainer alone, and another trainer would "
                f"ignore it. Use from corral.llm import CorralTrainer; for TRL's own loss, give GRPOTrainer a GRPOConfig."
            )
        found: bool | None = super().place_model_on_device
        return found

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
        """The anchor, with "auto" resolved: the objective's own, but a support needs the policy that the trainer recomputes."""
        if self.anchor != "auto":
            return cast(Anchor, self.anchor)  # nothing else gets through __post_init__
        return "old" if self.needs_support else self.make_objective().config.anchor

    def check_sampler(self, sampler: Sampler, generation_config: GenerationConfig | None = None) -> None:
        """Raise where the sampler cannot supply what the anchor, the objective or the correction needs.

        Args:
            generation_config: the model's own, which transformers' generation follows where TRL sets nothing.
        """
        if sampler == "transformers":
            given = {"min_p": self.min_p} | _settings("generation_kwargs", self.generation_kwargs)
            _raise_first(model_refusals(generation_config, given))
        _raise_first(sampler_refusals(self, sampler, _settings("generation_kwargs", self.generation_kwargs)))


def _belongs(key: str, settings: Mapping[str, Any]) -> str:
    """Where a setting of the objective was given beside it: `bound`, say."""
    name = settings.get("objective", CorralConfig.objective)
    if name not in objective_names() or key not in (item.name for item in fields(OBJECTIVES[name][1])):
        return ""
    return f" It is one of {name}'s: objective_config={{{key!r}: {settings[key]!r}}}."


def _raise_first(refusals: Iterator[str]) -> None:
    for why in refusals:
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
