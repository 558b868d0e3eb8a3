"""Completions in several turns: the model writes until a stop, a tool answers, the model goes on. TRL's `rollout_func`.

What a tool wrote is in the completion and in what the model reads, and has no part in the loss (TRL's `env_mask`). Functions
that a chat model calls are in `calls.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteria,
    StoppingCriteriaList,
)
from trl.models.utils import unwrap_model_for_generation

from corral.llm.problems import Problems, Sampling, cut_at_end, end_tokens, own_settings_aside, plain_sampling
from corral.llm.processes import base_model
from corral.task.tool import Tool
from corral.validate import RewardError

if TYPE_CHECKING:
    from corral.llm.run_trainer import RunTrainer


@dataclass
class Dialogue:
    """One completion: its tokens, which of them the model wrote, and their log-probs when it did."""

    problem: str
    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    """1 where the model wrote the token, 0 where the tool did."""
    logps: list[float] = field(default_factory=list)
    replies: int = 0
    over: bool = False
    answer: str = ""
    """The text that is graded."""
    transcript: str = ""
    """The text that is shown, with what others wrote."""
    reward: float | None = None
    """What the environment paid for it, where that pays."""

    def add(self, tokens: Sequence[int], logps: Sequence[float] | None = None, *, own: bool = True) -> None:
        """Tokens of the model, with their log-probs where they are known, or of the tool."""
        self.tokens += tokens
        self.own += [int(own)] * len(tokens)
        self.logps += [0.0] * len(tokens) if logps is None else logps


@runtime_checkable
class MultiTurn(Protocol):
    """Completions in which somebody answers the model: for held-out success, evaluations and audits."""

    def template(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Arguments for the chat template, such as `tools`; ValueError where the model has no way to use them."""

    def trainer_arguments(self) -> dict[str, Any]:
        """GRPOTrainer's arguments, with which TRL plays the same in training."""

    def play(
        self, model: PreTrainedModel, problems: Problems, asked: Sequence[str], sampling: Sampling, *, greedy: bool
    ) -> list[Dialogue]:
        """One completion per problem, sampled or greedy."""


@dataclass(frozen=True)
class TextTool:
    """A `Tool`, which writes into the text of any model whenever that has written one of its stops."""

    tool: Tool

    def template(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Nothing: no template knows of it."""
        return {}

    def trainer_arguments(self) -> dict[str, Any]:
        """TRL's `rollout_func`."""
        return {"rollout_func": rollout}

    def play(
        self, model: PreTrainedModel, problems: Problems, asked: Sequence[str], sampling: Sampling, *, greedy: bool
    ) -> list[Dialogue]:
        """One completion per problem; all of its text is graded."""
        given = (model, problems.tokenizer, asked, problems.tokens(asked), self.tool, sampling.max_tokens)
        found = converse(*given, greedy=greedy, temperature=sampling.temperature, top_p=sampling.top_p)
        for one in found:
            one.answer = one.transcript = str(problems.tokenizer.decode(one.tokens, skip_special_tokens=True))
        return found


@torch.no_grad()
def converse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[str],
    prompts: Sequence[list[int]],
    tool: Tool,
    max_tokens: int,
    *,
    greedy: bool = False,
    temperature: float = 1.0,
    top_p: float = 1.0,
) -> list[Dialogue]:
    """One completion per prompt, of at most `max_tokens` tokens of both, sampled or greedy."""
    found = [Dialogue(problem, prompt) for problem, prompt in zip(problems, prompts, strict=True)]
    ends = end_tokens(model, tokenizer)
    while live := [one for one in found if not one.over]:
        room = max_tokens - min(len(one.tokens) for one in live)
        config = plain_sampling(tokenizer, ends, room, greedy=greedy, top_p=top_p)  # the temperature is `_Scores`' own
        written = _turn(model, tokenizer, [one.prompt + one.tokens for one in live], tool, config, temperature)
        for one, (tokens, logps) in zip(live, written, strict=True):
            left = max_tokens - len(one.tokens)
            one.add(tokens[:left], logps[:left])
            one.over = len(one.tokens) >= max_tokens or one.tokens[-1] in ends
            if not one.over:
                _answer(one, tokenizer, tool, max_tokens, ends)
    return found


def _answer(one: Dialogue, tokenizer: PreTrainedTokenizerBase, tool: Tool, max_tokens: int, ends: set[int]) -> None:
    """Let the tool write; writes into `one`."""
    text = str(tokenizer.decode(one.tokens, skip_special_tokens=True))
    try:
        reply = tool.reply(one.problem, text)
    except Exception as error:  # whatever a user's tool raises
        raise RewardError(
            f"the tool {type(tool).__name__} raised {type(error).__name__}: {error}. The completion was {text!r}."
        ) from error
    if reply is None:
        one.over = True
        one.add([min(ends)] if ends else [], own=False)  # the tool ends it: nothing was cut off
        return
    ids: list[int] = tokenizer(reply, add_special_tokens=False)["input_ids"]
    one.add(ids[: max_tokens - len(one.tokens)], own=False)
    one.replies += 1
    one.over = len(one.tokens) >= max_tokens


def _turn(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    ids: list[list[int]],
    tool: Tool,
    config: GenerationConfig,
    temperature: float,
) -> list[tuple[list[int], list[float]]]:
    """What the model writes until a stop, the end or no room: tokens with their log-probs."""
    batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model.device)
    start = batch["input_ids"].shape[1]
    stops, scores = _Stops(tokenizer, tool.stops, start), _Scores(temperature)
    writer: Any = model  # causal models can generate; transformers' base class does not say so
    with own_settings_aside(model):
        out = writer.generate(
            **batch,
            generation_config=config,
            logits_processor=LogitsProcessorList([scores]),
            stopping_criteria=StoppingCriteriaList([stops]),
        )
    logps = scores.gather(out[:, start:]).tolist()
    rows = []
    for index, tokens in enumerate(out[:, start:].tolist()):
        length = stops.lengths.get(index, len(tokens))
        kept = cut_at_end(tokens[:length], set(config.eos_token_id or ()))
        rows.append((kept, logps[index][: len(kept)]))
    return rows


class _Stops(StoppingCriteria):
    """Ends a row when a stop is in what it wrote."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], start: int) -> None:
        self.tokenizer, self.stops, self.start = tokenizer, stops, start
        self.tail = max(map(len, stops)) + 4  # a token has a letter at least, but for parts of one
        self.lengths: dict[int, int] = {}
        """By row, how many tokens it had written when it stopped."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        written = input_ids[:, self.start :]
        texts = self.tokenizer.batch_decode(written[:, -self.tail :], skip_special_tokens=True)
        done = torch.zeros(len(texts), dtype=torch.bool, device=input_ids.device)
        for row, text in enumerate(texts):
            if row not in self.lengths and any(stop in text for stop in self.stops):  # a token may go on behind one
                self.lengths[row] = written.shape[1]
            done[row] = row in self.lengths
        return done


class _Scores(LogitsProcessor):
    """Divides logits by the temperature, and keeps the log-probs of what is drawn: one vocabulary at a time."""

    def __init__(self, temperature: float) -> None:
        self.temperature = temperature
        self.before: Tensor | None = None
        self.found: list[Tensor] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if self.before is not None:
            self.found.append(self.before.gather(1, input_ids[:, -1:]))
        scores = scores.float() / self.temperature
        self.before = scores.log_softmax(-1)
        return scores

    def gather(self, written: Tensor) -> Tensor:
        """Log-probs of all tokens that were written, in the order of `written`."""
        assert self.before is not None
        return torch.cat([*self.found, self.before.gather(1, written[:, -1:])], 1)


def rollout(prompts: list[Any], trainer: "RunTrainer") -> dict[str, Any]:
    """TRL's rollout_func: completions of the run's tool, in the trainer's own policy."""
    session = trainer.session
    assert isinstance(session.turns, TextTool)
    problems = [session.problem_of[str(prompt)] for prompt in prompts]
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as unwrapped:
        model = base_model(unwrapped)
        found = converse(
            model, trainer.processing_class, problems, session.problems.tokens(problems), session.turns.tool,
            trainer.max_completion_length, temperature=trainer.temperature,
        )  # fmt: skip
    trainer._metrics[trainer.mode]["tools/replies"].append(sum(one.replies for one in found) / len(found))
    return {
        "prompt_ids": [one.prompt for one in found],
        "completion_ids": [one.tokens for one in found],
        "logprobs": [one.logps for one in found],
        "env_mask": [one.own for one in found],
    }
