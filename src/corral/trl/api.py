"""Compatibility with TRL: supported releases, loss types as reductions, a check of TRL methods that corral overrides."""

import ast
import inspect
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any

import trl
from packaging.version import Version
from trl import GRPOConfig

from corral.objective.config import Reduction
from corral.trl import LAST_TESTED, TRL_RANGE, IncompatibleTRL, is_untested


@dataclass(frozen=True)
class Clause:
    """Requirements on one function, method or class of TRL; each string is a list of names separated by spaces."""

    parameters: str
    """Names of the parameters of a TRL function, in order. A final `*` allows more parameters if all of them are optional.
    The override passes further parameters on unchanged."""

    names: str = ""
    """Names that the code of a TRL function must contain: attributes, keys and functions.
    For a class: names of parameters, in any order."""

    returns: str = ""
    """Names in the last `return` statement of a TRL function, in order. A final `*` allows more names."""


_ROLLOUTS = "prompt_ids prompt_mask completion_ids completion_mask advantages old_per_token_logps"
"""Keys that corral reads from TRL's batch of rollouts in every run. Some runs have further keys in the batch."""

CONTRACT = {
    "trl.GRPOConfig": Clause(
        "*",
        "beta num_iterations steps_per_generation gradient_accumulation_steps loss_type epsilon epsilon_high delta temperature "
        "max_completion_length num_generations importance_sampling_level top_entropy_quantile scale_rewards reward_weights "
        "use_vllm vllm_mode vllm_importance_sampling_correction use_bias_correction_kl off_policy_mask_threshold "
        "cast_lm_head_to_fp32 multi_objective_aggregation",
    ),
    "trl.GRPOTrainer.__init__": Clause(
        "self model reward_funcs args *",
        "beta temperature ref_model rollout_func tools use_vllm vllm_generation num_generations num_generations_eval "
        "num_iterations reward_weights loss_type epsilon_low epsilon_high importance_sampling_level top_entropy_quantile "
        "max_completion_length aux_loss_enabled vllm_importance_sampling_correction _tokenizer _step _metrics _logs train eval "
        "prompt completion rewards advantages add_fused_lm_head",
    ),
    "trl.GRPOTrainer._calculate_rewards": Clause("self inputs prompts completions completion_ids_list", "rewards_per_func"),
    "trl.GRPOTrainer._generate_and_score_completions": Clause(
        "self inputs",
        f"{_ROLLOUTS} num_items_in_batch sampling_per_token_logps importance_sampling_ratio tool_mask pixel_values _logs "
        "_get_per_token_logps_and_entropies _calculate_rewards gradient_accumulation_steps steps_per_generation num_iterations",
        returns="output",
    ),
    "trl.GRPOTrainer._get_per_token_logps_and_entropies": Clause(
        "self model input_ids attention_mask logits_to_keep batch_size compute_entropy *",
        "labels fused_lm_head log_probs entropy",
        returns="logps entropies *",
    ),
    "trl.GRPOTrainer._compute_loss": Clause(
        "self model inputs",
        f"{_ROLLOUTS} num_items_in_batch compute_entropy _get_per_token_logps_and_entropies _metrics beta top_entropy_quantile "
        "current_gradient_accumulation_steps grpo bnpo dr_grpo dapo luspo",
        returns="loss",
    ),
    "trl.GRPOTrainer.get_high_entropy_mask": Clause("self entropies mask threshold"),
    "trl.GRPOTrainer._prepare_inputs": Clause(
        "self generation_batch", "_step _buffered_inputs steps_per_generation num_iterations", returns="inputs"
    ),
    "trl.GRPOTrainer.training_step": Clause("self model inputs num_items_in_batch *", "_step _metrics", returns="output"),
    "trl.GRPOTrainer.log": Clause("self logs start_time *", "_metrics"),
    "trl.GRPOTrainer._tokenize_prompts": Clause("self prompts *", returns="prompt_ids *"),
    "trl.GRPOTrainer._generate": Clause(
        "self prompts *",
        "rollout_func env_mask logprobs completion_ids vllm_generation",
        returns="prompt_ids completion_ids tool_mask *",
    ),
    "trl.GRPOTrainer._generate_single_turn": Clause(
        "self prompt_ids images multimodal_fields num_generations *",
        "unwrap_model_for_generation generate generation_config",
        returns="completion_ids logprobs",
    ),
    "trl.GRPOTrainer._save_checkpoint": Clause("self model trial", "_save_checkpoint"),
    "trl.GRPOTrainer.create_model_card": Clause("self *"),
    "trl.trainer.utils._ChunkedLogProbFunction.forward": Clause(
        "ctx hidden weight bias targets temperature chunk_size final_logit_softcapping logit_scale outputs"
    ),
    "trl.trainer.utils.add_fused_lm_head": Clause(
        "model temperature cast_lm_head_to_fp32 *",
        "_ChunkedLogProbFunction apply labels fused_lm_head log_probs entropy log_sum_sq_probs mean_logits is_top1",
    ),
    "trl.trainer.utils.pad": Clause("tensors padding_value padding_side *"),
    "trl.models.utils.unwrap_model_for_generation": Clause("model accelerator *"),
    "trl.generation.vllm_generation.VLLMGeneration.generate": Clause(
        "self prompts images num_generations *", returns="prompt_ids completion_ids logprobs logprob_token_ids"
    ),
    "trl.chat_template_utils.supports_tool_calling": Clause("processing_class *"),
    "trl.chat_template_utils.is_chat_template_prefix_preserving": Clause("processing_class *"),
    "trl.chat_template_utils.get_training_chat_template": Clause("processing_class *"),
    "trl.chat_template_utils.add_response_schema": Clause("processing_class *"),
    "trl.chat_template_utils.parse_response": Clause("tokenizer ids *"),
    "trl.chat_template_utils.qwen3_chat_template": Clause(""),
    "transformers.GenerationMixin._get_logits_processor": Clause(
        "self generation_config *", "logits_processor TemperatureLogitsWarper"
    ),
    "transformers.Trainer.__init__": Clause("self *", "callback_handler model_wrapped state lr_scheduler processing_class"),
    "transformers.Trainer.create_accelerator_and_postprocess": Clause("self", "accelerator is_fsdp_enabled"),
    "transformers.Trainer.get_batch_samples": Clause("self epoch_iterator num_batches device", returns="batch_samples *"),
    "transformers.Trainer.get_tp_size": Clause("self"),
    "transformers.Trainer._get_output_dir": Clause("self trial"),
    "transformers.Trainer.train": Clause("self *", "inner_training_loop"),
    "transformers.Trainer._maybe_log_save_evaluate": Clause(
        "self tr_loss grad_norm model trial epoch ignore_keys_for_eval start_time *",
        "should_log should_evaluate should_save log _evaluate _save_checkpoint",
    ),
    "transformers.Trainer._load_from_checkpoint": Clause("self resume_from_checkpoint *"),
    "transformers.Trainer._load_rng_state": Clause("self checkpoint"),
    "transformers.Trainer._save_checkpoint": Clause("self model trial", "_get_output_dir PREFIX_CHECKPOINT_DIR global_step"),
}
"""Assumptions about TRL's functions and classes, checked on untested releases. The newest tested release satisfies all of them.
Older releases may differ; the version tests cover them."""


def breaches(contract: Mapping[str, Clause] | None = None) -> list[str]:
    """List the ways in which the installed TRL and transformers violate corral's assumptions, as phrases for a message."""
    wrong = list[str]()
    for place, clause in (CONTRACT if contract is None else contract).items():
        try:
            found: Any = resolve_name(place)
        except (AttributeError, ImportError):
            wrong.append(f"{place} is gone")
            continue
        if not callable(found):  # a constant is there, or it is not
            continue
        parameters = inspect.signature(found).parameters
        if isinstance(found, type):
            if missing := [name for name in clause.names.split() if name not in parameters]:
                wrong.append(f"{place} has no {', '.join(missing)}")
            continue
        more = list(parameters.values())[len(clause.parameters.removesuffix("*").split()) :]
        optional = all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in more)
        if not (optional and _is_prefix(clause.parameters, list(parameters))):
            wrong.append(f"{place} takes ({', '.join(parameters)}), not ({', '.join(clause.parameters.split())})")
        source = inspect.getsource(inspect.unwrap(found))
        body = ast.parse(f"if True:\n{source}" if source[0].isspace() else source)
        if missing := sorted(set(clause.names.split()) - _names(body)):
            wrong.append(f"{place} does without {', '.join(missing)}")
        last = max((x for x in ast.walk(body) if isinstance(x, ast.Return)), key=lambda x: x.lineno, default=None)
        value = None if last is None else last.value
        parts = value.elts if isinstance(value, ast.Tuple) else [] if value is None else [value]
        returned = [part.id if isinstance(part, ast.Name) else "?" for part in parts]
        if clause.returns and not _is_prefix(clause.returns, returned):
            wrong.append(f"{place} returns ({', '.join(returned)}), not ({', '.join(clause.returns.split())})")
    return wrong


def _is_prefix(expected: str, found: list[str]) -> bool:
    """True if the list `found` begins with the names in `expected`. Without a final `*`, `found` must have no more names."""
    names = expected.removesuffix("*").split()
    return found[: len(names)] == names and (expected.endswith("*") or len(found) == len(names))


def _names(body: ast.AST) -> set[str]:
    """Collect the names of variables, attributes, parameters and arguments, and all strings, from a syntax tree."""
    found: set[str] = set()
    for node in ast.walk(body):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                found.add(name)
            case ast.keyword(arg=str(name)) | ast.Constant(value=str(name)):
                found.add(name)
    return found


logger = logging.getLogger(__name__)

REDUCTIONS: dict[str, Reduction] = {
    "grpo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",  # of a micro-batch
    "dr_grpo": "seq-mean-token-sum-norm",
    "luspo": "seq-mean-token-sum",
}
"""TRL's loss types with PPO's clipped loss, each mapped to its way of averaging (reduction).
"auto" takes the first loss type with the objective's reduction."""

FUSED = Version(trl.__version__) >= Version("1.15")
"""True if TRL computes log-probs with a fused LM head, without storing all logits (TRL 1.15 or newer)."""

WRONG_BEFORE = {"dapo": "1.10", "luspo": "1.10"}
"""TRL's loss types that older releases normalised by a wrong count, each mapped to the first correct release of TRL."""

_SHOWN = 3
"""Largest number of incompatible changes in TRL that an error message lists."""


def check_trl(version: str) -> None:
    """Raise an error if TRL is too old, or untested with changed methods. If TRL is only untested, log a warning."""
    low, high = TRL_RANGE
    tested = f"tested with TRL {low} to {LAST_TESTED}; found {version}"
    install = f"pip install 'trl>={low},<{high}'"
    if Version(version) < Version(low):
        raise IncompatibleTRL(
            f"corral.llm: {tested}, whose methods have other signatures than those that corral overrides. Install a tested "
            f"one: {install}."
        )
    if not is_untested(version):
        return
    found = breaches()
    if found:
        shown = "; ".join(found[:_SHOWN]) + (f"; and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
        raise IncompatibleTRL(
            f"corral.llm: {tested}, which changed what corral builds on: {shown}. Install a tested one, {install}, or a newer "
            f"corral."
        )
    logger.warning(
        "corral.llm: %s. The methods that corral builds on look unchanged, so it is tried; if it misbehaves: %s.",
        tested,
        install,
    )


check_trl(trl.__version__)


def steps_per_batch(config: GRPOConfig) -> int:
    """Number of micro-batches per batch of rollouts."""
    assert config.steps_per_generation is not None  # TRL has filled it in
    return config.steps_per_generation * config.num_iterations


def updates_per_step(config: GRPOConfig) -> int:
    """Number of optimizer updates in a step: the smallest number that uses up whole batches of rollouts."""
    every = config.gradient_accumulation_steps
    return math.lcm(every, steps_per_batch(config)) // every
