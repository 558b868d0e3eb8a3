"""CorralConfig: a GRPOConfig with settings for a corral objective. It raises an error for every unsupported setting of TRL."""

import json
import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import trl
from packaging.version import Version
from transformers import GenerationConfig, SchedulerType
from trl import GRPOConfig

from corral.advantage import Advantage
from corral.objective import OBJECTIVES, Objective, make_objective, objective_names
from corral.objective.config import NEEDS_SUPPORT, Anchor
from corral.trl import MODEL_IDS
from corral.trl.api import REDUCTIONS, WRONG_BEFORE
from corral.validate import literal_words, require, suggest

if TYPE_CHECKING:
    from corral.objective.correction import Correction

Sampler = Literal["transformers", "vllm", "rollout_func"]
"""Source of the completions: the trainer's own model in transformers, vLLM, or a user's rollout function."""

AUTO_PASSES = 8
"""Largest number of passes over a batch of rollouts with `reuse="auto"`, unless the user sets `num_iterations`."""
AUTO_RATE, AUTO_BOUND, PASSES_BOUND = 1e-3, 0.03, 0.02
"""Defaults with `learning_rate="auto"`: the first learning rate to try, and `deployed_bound` for one and for several passes.
`reuse="auto"` also uses the bound for several passes."""


def _setting(default: Any, about: str) -> Any:
    """Declare a field of CorralConfig with a default and a `--help` text."""
    return field(default=default, metadata={"help": about})


@dataclass
class CorralConfig(GRPOConfig):
    """GRPOConfig with a corral objective: `objective` selects the per-token loss, and `loss_type` selects its reduction.

    Once made, `loss_type` is one of TRL's: "auto" has become the objective's own. `learning_rate="auto"` has become the
    first rate that is tried on the first batch, and `finds_rate` is True.
    """

    chooses_checkpointing = False
    """True if `gradient_checkpointing` was left at None, so that the trainer chooses. This attribute is not a setting."""
    finds_rate = False
    """True if `learning_rate` was given as "auto". This attribute is not a setting."""
    _VALID_DICT_FIELDS: ClassVar[list[str]] = [*GRPOConfig._VALID_DICT_FIELDS, "objective_config", "correction_config"]  # type: ignore[misc]  # TRL leaves ClassVar out

    in_corral_trainer: ClassVar[bool] = False
    """True on a CorralConfig while a CorralTrainer is built from it."""

    objective: str = _setting("troll", "Objective: a name from corral.objective_names(), such as troll, dppo or ppo_clip.")
    objective_config: dict[str, Any] | str | None = _setting(
        None, 'Settings of the objective, such as {"bound": 0.05}; its own defaults otherwise.'
    )
    loss_type: str = _setting(
        "auto", "Reduction of the loss: grpo, dapo, bnpo, dr_grpo, luspo, or `auto` (what suits the objective)."
    )
    anchor: Literal["auto", "old", "rollout"] = _setting(
        "auto",
        "Centre of the trust region: `old` (recomputed by the trainer), `rollout` (the sampler's log-probs), or `auto` (what "
        "suits the objective).",
    )
    advantage: str | None = _setting(None, "grpo, dr_grpo, rloo or reinforce++; None keeps TRL's own (`scale_rewards`).")
    correction: str | None = _setting(
        None, "Sampler correction: tis, seq_tis, icepop or trm. Needs the log-probs that a sampler reports."
    )
    correction_config: dict[str, Any] | str | None = _setting(None, 'Settings of the correction, such as {"cap": 2.0}.')
    support_size: int = _setting(64, "Largest number of the old policy's most likely tokens in a support.")
    support_mass: float = _setting(1 - 1e-5, "Probability after which a support keeps no further token.")
    support: Literal["old", "union"] = _setting(
        "old",
        "Tokens that a region is measured on: `old` (the old policy's likeliest) or `union` (the new policy's too). The tail "
        "is one more category either way.",
    )
    learning_rate: float | str = _setting(  # type: ignore[assignment]  # transformers has no word
        1e-6,
        "Peak learning rate. `auto` finds a rate on the first batch, at which a step moves the network by a few times "
        "`deployed_bound`, and adapts it. Unless given, `deployed_bound` is then .03 with one pass over each batch, and .02 "
        "with several; less where completions average more than 66 or 100 tokens.",
    )
    packed_batches: Literal["auto", "off"] = _setting(
        "auto",
        "`auto` scores and trains on batches without padding, where the model allows it; `off` pads them as TRL does.",
    )
    tokens_per_pass: int | None = _setting(
        None,
        "Tokens in one forward and backward pass of packed batches: a micro-batch of more is cut into pieces with the same "
        "gradient. None takes what fits into a GPU's memory, and on a CPU whole micro-batches.",
    )
    compile_layers: bool = _setting(
        False, "Compile the layers of packed batches, once at the start of a run. Needs a compiler that torch can use."
    )
    deployed_bound: float | None = _setting(
        None,
        "Bound on the mean KL between the network after a step's updates and the network before them. Larger moves are "
        "retracted, and the learning rate follows. inf measures alone, None does neither.",
    )
    reuse: Literal["fixed", "auto"] = _setting(
        "fixed",
        "Passes over a batch of rollouts. `fixed` makes `num_iterations`. `auto` makes at most that number (8 if it is 1). It "
        "ends once the network is 50 times `deployed_bound` away, or the effective sample size is below ½. Unless given, "
        "`deployed_bound` is then .02.",
    )
    rollout_lag: int = _setting(
        0,
        "Batches of rollouts by which the weights that sample are behind those that are trained, as in asynchronous engines; "
        "the first batches have a smaller lag.",
    )
    lr_scheduler_type: SchedulerType | str = _setting(
        "auto",
        "Schedule of the learning rate. `auto` is linear, or constant if the learning rate is `auto` and `reuse` is not.",
    )
    disable_dropout: bool = _setting(
        True, "True to switch dropout off. It draws other masks in the old pass than in an update, which moves ratios."
    )
    gradient_checkpointing: bool | None = _setting(  # type: ignore[assignment]  # transformers has no None
        None, "Recompute layers in the backward pass, which takes a third longer; None only where memory asks for it."
    )
    use_cache: bool | None = _setting(  # type: ignore[assignment]  # transformers has no None
        None, "Entry `use_cache` of a saved model's configuration. None leaves it as it is."
    )

    def __new__(cls, *args: Any, **settings: Any) -> "CorralConfig":
        """Refuse an unknown setting. The error names the nearest setting, or the objective that has the setting."""
        known = [item.name for item in fields(cls) if item.init]
        for key in settings:
            if key not in known:
                hint, name = suggest(key, known), settings.get("objective", cls.objective)
                if name in objective_names() and key in (item.name for item in fields(OBJECTIVES[name][1])):
                    hint = f" It is one of {name}'s: objective_config={{{key!r}: {settings[key]!r}}}."
                raise TypeError(
                    f"CorralConfig: there is no setting `{key}`.{hint} docs/trl-details.md has those that corral adds."
                )
        return super().__new__(cls)

    def __post_init__(self) -> None:
        if self.loss_type == "auto":  # before TRL reads it
            first = self.make_objective().config.reductions[0]
            self.loss_type = next(name for name, how in REDUCTIONS.items() if how == first)
        if self.lr_scheduler_type == "auto":
            # A decay takes the bound with it: it ends too tight. With `reuse="auto"` the constant one was not measured.
            self.lr_scheduler_type = "constant" if self.learning_rate == "auto" and self.reuse != "auto" else "linear"
        self.chooses_checkpointing = self.gradient_checkpointing is None
        if self.chooses_checkpointing:  # TRL's default, until the first batch of rollouts
            self.gradient_checkpointing = True
        self.finds_rate = self.learning_rate == "auto"
        if self.finds_rate:  # transformers wants a number
            self.learning_rate = AUTO_RATE
        self.chooses_bound = self.deployed_bound is None and (self.finds_rate or self.reuse == "auto")
        if self.chooses_bound:
            self.deployed_bound = PASSES_BOUND if self.num_iterations > 1 or self.reuse == "auto" else AUTO_BOUND
        if self.reuse == "auto" and self.num_iterations == 1:
            self.num_iterations = AUTO_PASSES
        if self.advantage == "gae":
            raise ValueError(
                "CorralConfig: advantage='gae' needs a critic, which TRL's GRPO does not train. Use grpo, dr_grpo, rloo or "
                "reinforce++; in a loop of your own with a critic, corral.gae."
            )
        # Values, before TRL divides by them or torch fails with a traceback.
        check = partial(require, self, name="CorralConfig")
        counts = ("num_iterations", "per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
        check(*counts, at_least=1, integer=True)
        check("steps_per_generation", "generation_batch_size", "max_completion_length", at_least=1, integer=True, optional=True)
        check("num_generations", at_least=2, integer=True, note="a prompt's completions are compared with each other")
        check("dataloader_num_workers", at_least=0, integer=True)
        check("learning_rate", at_least=0, finite=True, note="or 'auto', which finds one")
        check("beta", at_least=0, finite=True, what="the weight of a KL")
        check("weight_decay", "adam_epsilon", at_least=0, finite=True)
        check("adam_beta1", "adam_beta2", at_least=0, below=1)
        check("max_grad_norm", at_least=0, optional=True, what="a norm", note="0 clips no gradient")
        check("top_p", above=0, at_most=1, optional=True, what="a probability")
        check("min_p", at_least=0, at_most=1, optional=True, what="a probability")
        check("scale_rewards", one_of=(True, False, "group", "batch", "none"))
        check("advantage", one_of=get_args(Advantage), optional=True)
        for name in ("anchor", "support", "reuse", "packed_batches"):
            check(name, one_of=literal_words(self.__dataclass_fields__[name].type))
        check("support_size", at_least=1, integer=True)
        check("support_mass", above=0, at_most=1)
        check("tokens_per_pass", at_least=1, integer=True, optional=True)
        check("rollout_lag", at_least=0, integer=True, what="a number of batches")
        check("deployed_bound", above=0, optional=True, what="a divergence", note="inf measures alone")
        super().__post_init__()
        self.make_correction()
        _refuse(_of_trl(self))
        if self.use_vllm:
            self.check_sampler("vllm")

    def make_objective(self) -> Objective:
        """Build the objective named in `objective`, with the settings in `objective_config`."""
        return make_objective(self.objective, **_settings("objective_config", self.objective_config))

    def make_correction(self) -> "Correction | None":
        """Build the sampler correction named in `correction`, with `correction_config`. Return None without a correction."""
        settings = _settings("correction_config", self.correction_config)
        if self.correction is None and settings:
            raise ValueError(f"CorralConfig: `correction_config` is {settings}, but there is no `correction` to set.")
        if self.correction is None:
            return None
        from corral.objective.correction import make_correction  # few runs need it

        return make_correction(self.correction, **settings)

    @property
    def place_model_on_device(self) -> bool | None:
        """Property that transformers' trainers read, overridden to raise an error in every trainer other than CorralTrainer.

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
        """Warning text if `loss_type` is a reduction that changes the objective's gradient; otherwise None."""
        own = self.make_objective().config.reductions
        if REDUCTIONS[self.loss_type] in own:
            return None
        return (
            f"loss_type={self.loss_type!r} is {REDUCTIONS[self.loss_type]}, which gives {self.objective} another gradient than "
            f"its own. Leave `loss_type` out, or use {' or '.join(name for name, how in REDUCTIONS.items() if how in own)}."
        )

    @property
    def prompts_per_batch(self) -> int:
        """Number of prompts in one batch of rollouts, over all processes."""
        assert self.generation_batch_size is not None  # TRL has filled it in
        assert self.num_generations is not None
        return self.generation_batch_size // self.num_generations

    @property
    def needs_support(self) -> bool:
        """True if the objective reads the policy's log-probs on more tokens than the sampled tokens (a support)."""
        return bool(self.make_objective().needs & NEEDS_SUPPORT)

    def resolve_anchor(self) -> Anchor:
        """Return the centre of the trust region, "old" or "rollout". The setting "auto" takes the objective's default."""
        if self.anchor != "auto":
            return self.anchor
        return "old" if self.needs_support else self.make_objective().config.anchor

    @property
    def records_logps(self) -> bool:
        """True if generation in transformers must record the log-probs of the tokens that it draws."""
        needed = self.correction is not None or "logp_rollout" in self.make_objective().needs
        return needed or self.anchor == "rollout" or self.rollout_lag > 0

    @property
    def truncations(self) -> dict[str, Any]:
        """Values of top_p, top_k and min_p, by name. Values in `generation_kwargs` override the settings of the config."""
        given = vars(self) | _settings("generation_kwargs", self.generation_kwargs)
        return {name: given[name] for name in _TRUNCATIONS}

    @property
    def truncates(self) -> bool:
        """True if sampling cuts off unlikely tokens and renormalises the others."""
        top_p, top_k, min_p = self.truncations.values()
        return (top_p is not None and top_p < 1) or (top_k or 0) > 0 or bool(min_p)

    def check_sampler(self, sampler: Sampler, generation_config: GenerationConfig | None = None) -> None:
        """Raise an error if the sampler does not report data that the anchor, the objective or the correction needs.

        Args:
            generation_config: the model's own, which transformers' generation follows where TRL sets nothing.
        """
        given = _settings("generation_kwargs", self.generation_kwargs)
        if sampler == "transformers":
            _refuse(dict.fromkeys(model_refusals(generation_config, {"min_p": self.min_p} | given), True))
        _refuse(_of_sampler(self, sampler, given))


def _settings(name: str, config: dict[str, Any] | str | None) -> dict[str, Any]:
    """Return a setting as a dictionary: in Python it is a dictionary already, on a command line it is JSON."""
    if config is None:
        return {}
    if isinstance(config, str):  # from a command line, and transformers has not read it yet
        with suppress(ValueError):
            config = json.loads(config)
    if not isinstance(config, dict):
        raise ValueError(f"CorralConfig: `{name}` is a dictionary, or JSON on the command line; got {config!r}.")
    return config


_Refusals = dict[str, object]
"""Type of a table that maps each error message to the condition under which the message is raised."""


def _refuse(refusals: _Refusals) -> None:
    """Raise a ValueError with the first message in `refusals` whose condition is true."""
    for why, applies in refusals.items():
        if applies:
            raise ValueError(f"CorralConfig: {why}")


_WHY = "completions must be drawn from the policy that is trained, or its ratios and gradient are of another one's tokens"

_HARMLESS = (
    "max_new_tokens", "max_tokens", "max_length", "max_time",
    "stop", "stop_strings", "stop_token_ids", "include_stop_str_in_output", "eos_token_id", "pad_token_id", "bos_token_id",
    "seed", "use_cache", "cache_implementation", "cache_config", "prefill_chunk_size",
    "detokenize", "skip_special_tokens", "spaces_between_special_tokens",
)  # fmt: skip
"""Keys of `generation_kwargs` that do not change the probability of any token, in transformers or vLLM."""

_NEUTRAL = {
    "num_beams": 1, "num_beam_groups": 1, "num_return_sequences": 1, "typical_p": 1, "guidance_scale": 1, "min_p": 0,
    "repetition_penalty": 1, "encoder_repetition_penalty": 1, "frequency_penalty": 0, "presence_penalty": 0,
    "no_repeat_ngram_size": 0, "min_length": 0, "min_new_tokens": 0, "epsilon_cutoff": 0, "eta_cutoff": 0, "penalty_alpha": 0,
    "do_sample": True, "return_dict_in_generate": False, "remove_invalid_values": False, "token_healing": False,
    "use_mtp": False, "bad_words_ids": [], "suppress_tokens": [], "begin_suppress_tokens": [], "stop_strings": [],
}  # fmt: skip
"""Generation settings that could change token probabilities, each mapped to the only allowed value, which has no effect.
None is also allowed in a model's generation_config."""

_TRUNCATIONS = ("top_p", "top_k", "min_p")
"""Sampling settings that cut off unlikely tokens and renormalise the others.
The ratio of two whole policies is then not that of what was sampled from: both are conditioned on the kept tokens, or the
setting is refused."""


_BY_TRL = (
    "do_sample", "max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "disable_compile", *MODEL_IDS,
)  # fmt: skip
"""Fields of a model's generation_config that TRL overrides, so that the values in the model's file have no effect."""

_UNREAD = (
    "max_length", "early_stopping", "length_penalty", "diversity_penalty", "renormalize_logits", "low_memory",
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size",
    "continuous_batching_config", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "decoder_start_token_id", "num_assistant_tokens",
    "num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size", "assistant_lookbehind",
    "target_lookbehind", "_from_model_config", "transformers_version",
)  # fmt: skip
"""Fields of generation_config that do not affect sampling, such as settings of beam search, caches and extra outputs."""


def model_refusals(generation_config: GenerationConfig | None, given: Mapping[str, Any]) -> Iterator[str]:
    """Yield error messages for settings in a model's generation_config that change the sampling distribution.

    Args:
        given: settings of the user's own, which come first.
    """
    own = {} if generation_config is None else vars(generation_config)
    read = vars(GenerationConfig()).keys() - {*_BY_TRL, *_UNREAD}  # transformers reads no others
    for key in sorted(read):
        value = own.get(key)
        if value is not None and value != _NEUTRAL.get(key) and given.get(key) is None:
            yield (
                f"the model's generation_config has {key}={value!r}: {_WHY}. Set model.generation_config.{key} = None, or "
                f"take it out of the model's generation_config.json."
            )


def _of_trl(config: CorralConfig) -> _Refusals:
    """Return error messages for TRL settings that corral replaces or does not support, each with its condition."""
    how, every, a_pass = config.loss_type, config.gradient_accumulation_steps, config.steps_per_generation
    assert a_pass is not None  # TRL has filled it in
    unknown, same_name = how not in REDUCTIONS, f" Did you mean objective={how!r}?" if how in objective_names() else ""
    right_since = Version(WRONG_BEFORE.get(how, trl.__version__))
    own = [f for f in fields(GRPOConfig) if f.name.startswith(("sapo_", "vespo_"))]
    of_others = [f.name for f in own if vars(config)[f.name] != f.default]
    own_scale = config.scale_rewards == "group" and config.multi_objective_aggregation == "sum_then_normalize"
    bound, plateau = config.deployed_bound, config.lr_scheduler_type == SchedulerType.REDUCE_ON_PLATEAU
    given = _settings("generation_kwargs", config.generation_kwargs)
    known, neutral = (*_HARMLESS, *_TRUNCATIONS, "logprobs"), _NEUTRAL | {"temperature": config.temperature}
    changing = [key for key in given if key not in known and neutral.get(key) != given[key]]
    taught, reuses = "dist_teacher" in config.make_objective().needs, config.reuse == "auto"
    return {
        f"`loss_type` chooses the reduction here: auto, {', '.join(REDUCTIONS)}; got {how!r}.{same_name}": unknown,
        f"loss_type={how!r} is averaged over the wrong count by TRL {trl.__version__}. Install TRL {right_since} or newer, or "
        f"use grpo, bnpo or dr_grpo.": Version(trl.__version__) < right_since,
        "loss_type='dr_grpo' divides by `max_completion_length`, which is None. Give it a number.": how == "dr_grpo"
        and config.max_completion_length is None,
        "`epsilon` is the clip range of TRL's own loss. Use objective='ppo_clip' with objective_config={'clip_low': …, "
        "'clip_high': …}.": config.epsilon != 0.2 or config.epsilon_high is not None,
        "`delta` is TRL's dual clip. Use objective='dual_clip' with objective_config={'dual_clip': …}.": config.delta
        is not None,
        f"`{'`, `'.join(of_others)}` set losses of TRL's own. Use objective='sapo' with objective_config={{'tau_positive': …, "
        f"'tau_negative': …}}, or objective='vespo' with {{'k_positive': …, 'lambda_positive': …}}.": of_others,
        "`temperature` divides the logits of the policy that is trained, and must be > 0; got "
        f"{config.temperature}.": not config.temperature > 0,
        "`importance_sampling_level` belongs to the objective. Use objective='gspo', or troll with "
        "level='sequence'.": config.importance_sampling_level != "token",
        "`off_policy_mask_threshold` is not supported. Use correction='trm', or "
        "objective='dppo'.": config.off_policy_mask_threshold is not None,
        f"advantage={config.advantage!r} takes the place of `scale_rewards` and `multi_objective_aggregation`. Leave those as "
        f"they are, or `advantage` out.": config.advantage is not None and not own_scale,
        f"objective={config.objective!r} has the union of student and teacher, or reference, for its support. Leave `support` "
        f"at 'old'.": config.support == "union" and taught,
        "`deployed_bound` scales the rates of a schedule, and reduce_lr_on_plateau has none that is known beforehand. Use "
        "another lr_scheduler_type.": bound is not None and bound < math.inf and plateau,
        "learning_rate='auto' follows `deployed_bound`, which must be finite, and inf measures alone. Give `learning_rate` a "
        "number, or leave `deployed_bound` out.": config.finds_rate and bound == math.inf,
        f"reuse='auto' decides after every pass over a batch, which must end with an update: `steps_per_generation` is "
        f"{a_pass}, no multiple of `gradient_accumulation_steps`, {every}. Make it one.": reuses and a_pass % every,
        f"learning_rate='auto' finds the rate on the first batch of rollouts, which must end with an update: "
        f"`steps_per_generation` · `num_iterations` is {a_pass * config.num_iterations}, no multiple of "
        f"`gradient_accumulation_steps`, {every}. Make it one, or give a number and "
        f"`deployed_bound`.": config.finds_rate and a_pass * config.num_iterations % every,
        f"rollout_lag counts batches of rollouts, each of which must end with an update: `steps_per_generation` · "
        f"`num_iterations` is {a_pass * config.num_iterations}, no multiple of `gradient_accumulation_steps`, {every}. Make it "
        f"one, or leave `rollout_lag` out.": config.rollout_lag > 0 and a_pass * config.num_iterations % every,
        "reuse='auto' skips updates, and the loss scaling of fp16 cannot. Use bf16 or float32.": reuses and config.fp16,
        "`use_liger_kernel` replaces layers and the head that corral reads. Leave it off.": config.use_liger_kernel,
        "Unsloth rewrites GRPOTrainer's methods, and corral's would never run. Use a process that does not import "
        "it.": "unsloth" in sys.modules,
        f"`repetition_penalty` is {config.repetition_penalty}: {_WHY}. Leave it at 1.": config.repetition_penalty != 1,
        f"generation_kwargs has temperature {given.get('temperature')}, and the trained policy {config.temperature}: {_WHY}. "
        f"Use `temperature`, which sets both.": "temperature" in changing,
        f"generation_kwargs has `{'`, `'.join(changing)}`, not known to leave every token its probability: {_WHY}. Leave that "
        f"out. Allowed: {', '.join(_HARMLESS)}.": changing,
    }


_VLLM_LOGPROBS = 20
"""Default of vLLM's `max_logprobs`, which limits `support_size` if vLLM runs in the trainer's process.
A vLLM server has no limit."""


def _of_sampler(config: CorralConfig, sampler: Sampler, generation: dict[str, Any]) -> _Refusals:
    """Return error messages for anchors, objectives and corrections that the sampler does not support, each with its condition.

    docs/trl-details.md has the table.
    """
    rollout, records = config.resolve_anchor() == "rollout", sampler == "transformers" and config.records_logps
    reports = sampler != "transformers" or records
    on_support = rollout and reports and config.needs_support  # of the sampler's own likeliest tokens
    corrects, correction = config.use_vllm and config.vllm_importance_sampling_correction, config.correction
    needs, objective = config.make_objective().needs, config.make_objective().config
    set_to = vars(config) | generation
    regex = sampler == "vllm" and set_to.get("vllm_structured_outputs_regex")  # not every release of TRL has it
    truncated = config.truncates or regex
    replays = config.truncates and sampler == "transformers"
    few = sampler == "vllm" and config.vllm_mode == "colocate" and config.support_size > _VLLM_LOGPROBS
    twice = objective.corrects_sampler and (corrects or correction is not None)
    return {
        "anchor='rollout' needs the log-probs that the sampler drew from, but top_p, top_k, min_p or a regex renormalise them, "
        "and TRL does not hand over the tokens that they kept. Switch those off, use anchor='old', or sample with "
        "transformers.": rollout and truncated and sampler != "transformers",
        "with top_p, top_k or min_p both policies are on the tokens that were kept, and there is no union. Leave `support` at "
        "'old'.": replays and config.support == "union",
        f"objective={config.objective!r} with these settings reads tokens that top_p, top_k or min_p cut off. Switch those "
        f"off.": replays and ("dist_teacher" in needs or objective.filled_tail is not None),
        "transformers' continuous batching does not record which tokens top_p, top_k or min_p keep. Leave "
        "use_transformers_continuous_batching out.": replays and set_to.get("use_transformers_continuous_batching"),
        f"objective={config.objective!r} needs the old policy on another model's tokens too. Use anchor='old'.": on_support
        and "dist_teacher" in needs,
        "estimator='full' reads every token, and a sampler reports its likeliest alone. Use estimator='topk', or "
        "anchor='old'.": on_support and objective.support == "full",
        "support='union' needs the old policy's log-probs of any token, and a sampler reports its likeliest alone. Use "
        "support='old', or anchor='old'.": on_support and config.support == "union",
        f"anchor='rollout' asks vLLM for `support_size` log-probs a token, and in the trainer's process it reports "
        f"{_VLLM_LOGPROBS} at most; got {config.support_size}. Use support_size={_VLLM_LOGPROBS}, a vLLM server, or "
        f"anchor='old'.": on_support and few,
        "with the sampler as the anchor its mismatch is in the ratio already. Set vllm_importance_sampling_correction=False, "
        "or anchor='old'.": rollout and corrects,
        "with `logprobs` in generation_kwargs vLLM ranks tokens by likelihood, and TRL takes the first for the sampled one. "
        "Leave it out.": config.use_vllm and generation.get("logprobs"),
        "an objective, a correction or `rollout_lag` reads the sampler's log-probs, and transformers' continuous batching "
        "reports none. Leave use_transformers_continuous_batching out.": records
        and set_to.get("use_transformers_continuous_batching"),
        "rollout_lag samples with earlier weights of the trainer's own model, and here another sampler draws: vLLM, a rollout "
        "function or a `tool`. Leave it out; such a sampler has an age of its own.": config.rollout_lag > 0
        and sampler != "transformers",
        f"objective={config.objective!r} weighs the old policy against the sampler itself, and a correction would do it twice. "
        f"Leave `correction` out, and set vllm_importance_sampling_correction=False.": twice,
        f"correction={correction!r} weighs the old policy against the sampler, and with anchor='rollout' they are one. Use "
        f"anchor='old'.": correction is not None and rollout,
        f"correction={correction!r} and TRL's own would both correct the sampler's mismatch. Set "
        f"vllm_importance_sampling_correction=False.": correction is not None and corrects,
    }
