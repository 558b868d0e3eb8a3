"""Prompts and completions of a model: chat template, training set, token ids, and sampling."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from datasets import Dataset
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from corral.lab.tasks import Task, columns_of, messages_of
from corral.lab.tasks.procedural import ProceduralTask
from corral.trl import MODEL_IDS, TEACHER_PROMPT
from corral.validate import RunError, run_errors

Prompt = str | list[dict[str, str]]

_LONGEST = 1000
"""Number of prompts, the longest in characters, that are tokenised to check that prompts fit into the model's context."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters: length, temperature, top-p, or greedy decoding."""

    temperature: float = 1.0
    top_p: float = 1.0
    max_tokens: int
    greedy: bool = False
    """True for greedy decoding: the likeliest token at every step."""


@dataclass(frozen=True, kw_only=True)
class Problems:
    """Converter of a task's problems into a model's prompts, with the model's chat template if the model has one."""

    task: Task
    tokenizer: PreTrainedTokenizerBase
    instruction: str
    template: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of the chat template: TRL's `chat_template_kwargs`, and tools."""

    def prompt(self, problem: str, instruction: str = "", values: Mapping[str, Any] | None = None) -> Prompt:
        """Put a problem into an instruction, by default the run's. In a chat, the instruction surrounds the last message.

        The instruction's {problem} and names of `values` are filled in.
        """
        *before, last = messages_of(self.task, problem) if self.tokenizer.chat_template else [{"content": problem}]
        known = {**(values or {}), "problem": last["content"]}
        text = re.sub(r"\{(\w+)\}", lambda found: str(known.get(found[1], found[0])), instruction or self.instruction)
        return [*before, {**last, "content": text}] if self.tokenizer.chat_template else text

    def tokens(self, problems: Sequence[str]) -> list[list[int]]:
        """Return the token ids of each problem's prompt, which are equal to the trainer's."""
        return self.tokenise(map(self.prompt, problems))

    def tokenise(self, prompts: Iterable[Prompt]) -> list[list[int]]:
        """Tokenise prompts that already contain the instruction."""
        render, how = self.tokenizer.apply_chat_template, {"tokenize": False, "add_generation_prompt": True, **self.template}
        texts = [p if isinstance(p, str) else render(p, **how) for p in prompts]
        # A chat template writes special tokens itself.
        ids: list[list[int]] = self.tokenizer(texts, add_special_tokens=not self.tokenizer.chat_template)["input_ids"]
        return ids

    def dataset(self, count: int, seed: int, teacher_instruction: str = "") -> Dataset:
        """Make the training set of `count` problems in training order, each with a teacher's prompt if there is a teacher."""
        with run_errors():
            problems = self.task.train_prompts(count, seed)
        if len(problems) < count:
            raise RunError(
                f"the task {self.task.name} has {len(problems)} problems to train on, and this run needs {count}. Use fewer "
                f"steps or a smaller batch, or mend `train_prompts`."
            )
        columns: dict[str, Any] = {"prompt": [self.prompt(problem) for problem in problems], "problem": problems}
        if not teacher_instruction:
            return Dataset.from_dict(columns)
        values = columns_of(self.task, problems)
        if isinstance(self.task, ProceduralTask):  # its own answers; other names stand for columns of the task's rows
            values["solution"] = [answer for _, answer in self.task.demonstrations(len(problems), seed)]
        if "{solution}" in teacher_instruction and "solution" not in values:
            known = ", ".join(f"{{{name}}}" for name in values) or "none"
            raise RunError(
                f"the teacher should read {{solution}}, and the task {self.task.name} has no such column. Set "
                f"`teacher_instruction` with one that it has ({known}), or name another model as the `teacher`."
            )
        rows = [{name: column[i] for name, column in values.items()} for i in range(len(problems))]
        told = [self.prompt(problem, teacher_instruction, row) for problem, row in zip(problems, rows, strict=True)]
        return Dataset.from_dict(columns | {TEACHER_PROMPT: told})

    def check_length(
        self,
        problems: Sequence[str],
        config: PreTrainedConfig,
        longest: int,
        *,
        least: int | None = None,
        prompts: Sequence[Prompt] | None = None,
    ) -> int:
        """Return the number of completion tokens that fit after the longest prompt, at most `longest`.

        Raises RunError for fewer than `least`.

        Args:
            prompts: the teacher's; by default those of the problems.
        """
        positions = getattr(config, "max_position_embeddings", None)  # not every family has a limit
        what = "a prompt" if prompts is None else "a teacher's prompt"
        if prompts is None:
            rows = [(problem, self.prompt(problem)) for problem in sorted(set(problems), key=len)[-_LONGEST:]]
        else:
            rows = sorted(zip(problems, prompts, strict=True), key=lambda row: len(str(row[1])))[-_LONGEST:]
        if positions is None or not rows:
            return longest
        lengths = map(len, self.tokenise(prompt for _, prompt in rows))
        tokens, problem = max(zip(lengths, (problem for problem, _ in rows), strict=True))
        room: int = positions - tokens
        if room < longest and (least is None or room < least):
            raise RunError(
                f"{what} has {tokens} tokens, and with max_completion_length={longest} that is more than the {positions} "
                f"positions of the model: {problem[:80]!r}. Use shorter problems, a smaller max_completion_length, or another "
                f"model."
            )
        return min(room, longest)


@contextmanager
def sampling_config(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, sampling: Sampling
) -> Iterator[GenerationConfig]:
    """Context with settings for `model.generate`: sample from the unmodified policy, or decode greedily.

    Inside it the model's own generation_config is hidden except for its token ids, since transformers takes missing arguments
    from there. A list of what to switch off would miss what the next release adds.
    """
    drawn = {"do_sample": True, "temperature": sampling.temperature, "top_k": 0, "top_p": sampling.top_p}
    config = GenerationConfig(
        max_new_tokens=sampling.max_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(end_tokens(model, tokenizer)) or None,
        **({"do_sample": False} if sampling.greedy else drawn),
    )
    own = model.generation_config
    ids = {name: value for name in MODEL_IDS if (value := vars(own).get(name)) is not None}
    model.generation_config = GenerationConfig(**ids)
    try:
        yield config
    finally:
        model.generation_config = own


@torch.no_grad()
def generate(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[list[int]], sampling: Sampling
) -> list[list[int]]:
    """Generate one completion per prompt, as tokens up to and including the end-of-sequence token if there is one."""
    batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model.device)
    ends = end_tokens(model, tokenizer)
    writer: Any = model  # causal models can generate; transformers' base class does not say so
    with sampling_config(model, tokenizer, sampling) as config:
        tokens = writer.generate(**batch, generation_config=config)[:, batch["input_ids"].shape[1] :].tolist()
    return [cut_at_end(row, ends) for row in tokens]


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Token ids that end a completion. Instruction-tuned models often have several such tokens."""
    ends = model.generation_config.eos_token_id
    ends = tokenizer.eos_token_id if ends is None else ends  # 0 is a token like any other
    return {ends} if isinstance(ends, int) else set(ends or ())


def cut_at_end(tokens: list[int], ends: set[int]) -> list[int]:
    """Cut a completion after its first end-of-sequence token, because all later tokens are padding."""
    last = next((index for index, token in enumerate(tokens) if token in ends), len(tokens))
    return tokens[: last + 1]


@dataclass
class Dialogue:
    """A completion in one or several turns: its tokens, a mask of the model's own tokens, and log-probs if known."""

    problem: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    """Mask: 1 for a token that the model wrote, 0 for a token of the tool."""
    logps: list[float] = field(default_factory=list)
    replies: int = 0
    over: bool = False
    ended: bool = False
    """False if the evaluation's length limit cut the completion off."""
    answer: str = ""
    """Text of the completion to grade."""
    transcript: str = ""
    """Text of the completion to show, including replies of tools."""
    reward: float | None = None
    """Reward from the environment, if the environment gives rewards."""

    def add(self, tokens: Sequence[int], logps: Sequence[float] | None = None, *, own: bool = True) -> None:
        """Append tokens to the completion: the model's, with log-probs if known, or the tool's."""
        self.tokens += tokens
        self.own += [int(own)] * len(tokens)
        self.logps += [0.0] * len(tokens) if logps is None else logps


@dataclass(frozen=True)
class OneTurn:
    """Generator of completions in a single turn, without a tool or environment."""

    pays: ClassVar[bool] = False
    """True if an environment gives the rewards."""

    def template(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return no arguments for the chat template, because there are no tools."""
        return {}

    def trainer_arguments(self) -> dict[str, Any]:
        """Return no arguments for GRPOTrainer, because TRL samples single turns by itself."""
        return {}

    def play(self, model: PreTrainedModel, problems: Problems, asked: Sequence[str], sampling: Sampling) -> list[Dialogue]:
        """Generate one completion per problem. The whole text of a completion is graded."""
        prompts = problems.tokens(asked)
        found = [Dialogue(problem, prompt) for problem, prompt in zip(asked, prompts, strict=True)]
        for one, tokens in zip(found, generate(model, problems.tokenizer, prompts, sampling), strict=True):
            one.add(tokens)
            one.answer = one.transcript = str(problems.tokenizer.decode(tokens, skip_special_tokens=True))
        return found
