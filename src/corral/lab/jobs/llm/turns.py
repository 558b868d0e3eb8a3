"""Multi-turn completions: tool calls, environments, and the transcript that is graded."""

import asyncio
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
import trl
from packaging.version import Version
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.utils.chat_template_utils import get_json_schema
from trl import chat_template_utils
from trl.models.utils import unwrap_model_for_generation

from corral.lab.jobs.llm.problems import (
    Dialogue,
    OneTurn,
    Problems,
    Sampling,
    cut_at_end,
    end_tokens,
    generate,
    sampling_config,
)
from corral.lab.jobs.llm.rewards import path_of
from corral.lab.tasks import columns_of
from corral.lab.tasks.imports import Tool, by_path, make_tool
from corral.lab.tasks.messages import answer_of, transcript
from corral.trl.old_policy import Behaviour
from corral.trl.processes import base_model
from corral.validate import RewardError

if TYPE_CHECKING:
    from corral.lab.jobs.llm.trainer import RunTrainer


@dataclass(frozen=True)
class TextTool(OneTurn):
    """Generator of completions with a tool that replies whenever the model has written one of the tool's stop strings."""

    tool: Tool

    def trainer_arguments(self) -> dict[str, Any]:
        """Pass `rollout` to TRL as its `rollout_func`."""
        return {"rollout_func": rollout}

    def play(self, model: PreTrainedModel, problems: Problems, asked: Sequence[str], sampling: Sampling) -> list[Dialogue]:
        """Generate one completion per problem. The whole text is graded, including the tool's replies."""
        return converse(model, problems.tokenizer, asked, problems.tokens(asked), self.tool, sampling)


@torch.no_grad()
def converse(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[str],
    prompts: Sequence[list[int]],
    tool: Tool,
    sampling: Sampling,
) -> list[Dialogue]:
    """Generate one completion per prompt with a tool, of at most `max_tokens` tokens from model and tool together."""
    found = [Dialogue(problem, prompt) for problem, prompt in zip(problems, prompts, strict=True)]
    ends, max_tokens = end_tokens(model, tokenizer), sampling.max_tokens
    writer: Any = model  # causal models can generate; transformers' base class does not say so
    while live := [one for one in found if not one.over]:
        room = max_tokens - min(len(one.tokens) for one in live)
        ids = [one.prompt + one.tokens for one in live]
        batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model.device)
        start = batch["input_ids"].shape[1]
        stops, behaviour = _Stops(tokenizer, tool.stops, start), Behaviour()
        with sampling_config(model, tokenizer, replace(sampling, max_tokens=room)) as config, behaviour.record(model):
            out = writer.generate(**batch, generation_config=config, stopping_criteria=StoppingCriteriaList([stops]))
        drawn = out[:, start:].tolist()
        for row, (one, tokens, logps) in enumerate(zip(live, drawn, behaviour.logps(drawn), strict=True)):
            # Until a stop, the end or no room.
            kept = cut_at_end(tokens[: stops.lengths.get(row, len(tokens))], ends)[: max_tokens - len(one.tokens)]
            one.add(kept, logps[: len(kept)])
            one.over = len(one.tokens) >= max_tokens or one.tokens[-1] in ends
            one.answer = one.transcript = str(tokenizer.decode(one.tokens, skip_special_tokens=True))
            if one.over:
                continue
            try:
                reply = tool.reply(one.problem, one.answer)
            except Exception as error:  # whatever a user's tool raises
                raise RewardError(
                    f"the tool {type(tool).__name__} raised {type(error).__name__}: {error}. The completion was {one.answer!r}."
                ) from error
            if reply is None:
                one.over = True
                one.add([min(ends)] if ends else [], own=False)  # the tool ends it: nothing was cut off
            else:
                written: list[int] = tokenizer(reply, add_special_tokens=False)["input_ids"]
                one.add(written[: max_tokens - len(one.tokens)], own=False)
                one.replies += 1
                one.over = len(one.tokens) >= max_tokens
            one.answer = one.transcript = str(tokenizer.decode(one.tokens, skip_special_tokens=True))
    return found


class _Stops(StoppingCriteria):
    """Stopping criterion of transformers that ends a completion after a stop string."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: Sequence[str], start: int) -> None:
        self.tokenizer, self.stops, self.start = tokenizer, stops, start
        self.tail = max(map(len, stops)) + 4  # a token has a letter at least, but for parts of one
        self.lengths: dict[int, int] = {}
        """Number of tokens in each row of the batch when a stop string appeared."""

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        written = input_ids[:, self.start :]
        texts = self.tokenizer.batch_decode(written[:, -self.tail :], skip_special_tokens=True)
        done = torch.zeros(len(texts), dtype=torch.bool, device=input_ids.device)
        for row, text in enumerate(texts):
            if row not in self.lengths and any(stop in text for stop in self.stops):  # a token may go on behind one
                self.lengths[row] = written.shape[1]
            done[row] = row in self.lengths
        return done


def rollout(prompts: list[Any], trainer: "RunTrainer") -> dict[str, Any]:
    """TRL's `rollout_func`: sample completions from the trainer's policy, with the run's tool."""
    parts = trainer.parts
    assert isinstance(parts.turns, TextTool)
    problems = [parts.problem_of[str(prompt)] for prompt in prompts]
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as unwrapped:
        model = base_model(unwrapped)
        sampling = Sampling(temperature=trainer.temperature, max_tokens=trainer.max_completion_length)
        prompts = parts.problems.tokens(problems)
        found = converse(model, trainer.processing_class, problems, prompts, parts.turns.tool, sampling)
    trainer._metrics[trainer.mode]["tools/replies"].append(sum(one.replies for one in found) / len(found))
    return {
        "prompt_ids": [one.prompt for one in found],
        "completion_ids": [one.tokens for one in found],
        "logprobs": [one.logps for one in found],
        "env_mask": [one.own for one in found],
    }


_Function = Callable[..., Any]

_RESERVED = ("reset", "get_reward")
"""Methods of an environment that are never offered as tools."""

_HOW_TOOLS = "`tools` are module:function or file.py:function"
_HOW_ENVIRONMENT = "`environment_factory` is module:Class or file.py:Class"


def make_turns(
    tool: str, tools: Sequence[str | _Function], environment_factory: str | _Function, max_turns: int | None = None
) -> "Turns":
    """Make the generator of completions with the tool, functions or environment in the settings, else in single turns."""
    if tool:
        return TextTool(make_tool(tool))
    if not tools and not environment_factory:
        return OneTurn()
    environment = environment_factory or None
    factory = by_path(environment, _HOW_ENVIRONMENT) if isinstance(environment, str) else environment
    functions: list[_Function] = [by_path(one, _HOW_TOOLS) if isinstance(one, str) else one for one in tools]
    for function, given in zip(functions, tools, strict=True):
        if not callable(function) or isinstance(function, type):
            raise ValueError(f"{_HOW_TOOLS}, and {given!r} is {type(function).__name__}, not a function.")
        _check_schema(function, path_of(given))
    return FunctionCalls(functions, factory, sys.maxsize if max_turns is None else max_turns)


def _check_schema(function: _Function, name: str) -> None:
    """Raise ValueError for a function without type hints and docstring, from which the model learns to call the function."""
    try:
        get_json_schema(function)
    except Exception as error:  # transformers has one each for a docstring and for hints
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ValueError(
            f"the tool {name} needs a type for every argument and a docstring that describes each under `Args:`, which is what "
            f"the model is told of it. transformers says: {reason}"
        ) from error


@dataclass
class FunctionCalls:
    """Generator of completions in which a chat model calls functions or an environment.

    Every completion gets its own environment.
    """

    functions: list[_Function]
    factory: Callable[[], Any] | None = None
    max_turns: int = sys.maxsize
    """Largest number of tool replies within a completion (TRL's `max_tool_calling_iterations`)."""
    _pool: list[Any] = field(default_factory=list)
    """Environments that are reused between batches. Each environment is reset before use."""

    def __post_init__(self) -> None:
        if self.factory is None:
            return
        if not callable(self.factory):
            raise ValueError(f"{_HOW_ENVIRONMENT}, and {self.factory!r} cannot be called.")
        name = path_of(self.factory)
        try:
            self._pool = [self.factory()]
        except Exception as error:  # whatever a user's class raises
            raise ValueError(
                f"the environment {name} cannot be made without arguments: {type(error).__name__}: {error}."
            ) from error
        if not callable(getattr(self._pool[0], "reset", None)):
            raise ValueError(
                f"the environment {name} has no `reset`. It is called as reset(prompt=…, problem=…, **columns) before every "
                f"completion, and may return text for the prompt."
            )
        for method in _methods(self._pool[0]):
            _check_schema(method, f"{name}.{method.__name__}")
        if self.pays and Version(trl.__version__) < Version("1.8"):
            raise ValueError(
                f"the environment {name} has `get_reward`, which TRL {trl.__version__} would show to the model as a tool. "
                f"Install TRL 1.8 or newer, or rename it and use a reward function."
            )

    @property
    def pays(self) -> bool:
        """True if the environment gives rewards itself."""
        return bool(self._pool) and callable(getattr(self._pool[0], "get_reward", None))

    def template(self, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the chat template's arguments: the tools, and TRL's template for tools.

        Also sets the tokenizer's parser of tool calls.
        """
        if not chat_template_utils.supports_tool_calling(tokenizer):
            raise ValueError(
                "`tools` and `environment_factory` need a chat model whose template has tool calls, such as Qwen/Qwen3-0.6B, "
                "and this model's has none. With any model, `tool` answers within the text."
            )
        _teach_parsing(tokenizer)
        kept = chat_template_utils.is_chat_template_prefix_preserving(tokenizer)
        own = {} if kept else {"chat_template": chat_template_utils.get_training_chat_template(tokenizer)}
        return {"tools": [*self.functions, *(_methods(self._pool[0]) if self._pool else [])] or None, **own}

    def trainer_arguments(self) -> dict[str, Any]:
        """Return the arguments `tools` and `environment_factory` for GRPOTrainer."""
        return {"tools": self.functions or None, "environment_factory": self.factory}

    @torch.no_grad()
    def play(self, model: PreTrainedModel, problems: Problems, asked: Sequence[str], sampling: Sampling) -> list[Dialogue]:
        """Generate one completion per problem. The model's last message is graded, unless the environment gives the reward."""
        while self.factory is not None and len(self._pool) < len(asked):
            self._pool.append(self.factory())
        columns, chats = columns_of(problems.task, asked), list[_Chat]()
        for row, problem in enumerate(asked):
            prompt, environment = problems.prompt(problem), self._pool[row] if self._pool else None
            if environment is not None:
                given = {name: column[row] for name, column in columns.items()} | {"prompt": prompt, "problem": problem}
                observation = _ask(environment, "reset", [], given)
                if observation is not None:  # goes behind the last message
                    assert not isinstance(prompt, str)  # a template with tool calls is there
                    prompt = [*prompt[:-1], {**prompt[-1], "content": prompt[-1]["content"] + observation}]
            chats.append(_Chat(Dialogue(problem, problems.tokenise([prompt])[0]), environment))
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", sys.maxsize)  # not all have a limit
        while live := [chat for chat in chats if not chat.dialogue.over]:
            room = sampling.max_tokens - min(len(chat.dialogue.tokens) for chat in live)
            read = [chat.dialogue.prompt + chat.dialogue.tokens for chat in live]
            written = generate(model, problems.tokenizer, read, replace(sampling, max_tokens=room))
            for chat, before, tokens in zip(live, read, written, strict=True):
                longest = min(sampling.max_tokens, positions - 1 - len(chat.dialogue.prompt))
                self._take(chat, problems, before, tokens[: sampling.max_tokens - len(chat.dialogue.tokens)], longest)
                chat.dialogue.over |= len(chat.dialogue.tokens) >= sampling.max_tokens
        for chat in chats:
            chat.dialogue.answer, chat.dialogue.transcript = answer_of(chat.messages), transcript(chat.messages)
            if self.pays:
                chat.dialogue.reward = float(_ask(chat.environment, "get_reward", chat.messages, {}))
        return [chat.dialogue for chat in chats]

    def _take(self, chat: "_Chat", problems: Problems, before: list[int], tokens: list[int], longest: int) -> None:
        """Add the model's next message and the results of its tool calls, unless the results exceed `longest` tokens."""
        one, tools = chat.dialogue, problems.template.get("tools")
        one.add(tokens)
        more: dict[str, Any] = {"prefix": before, "tools": tools}
        known = {name: value for name, value in more.items() if name in _PARSE_ARGUMENTS}
        message: dict[str, Any] = chat_template_utils.parse_response(problems.tokenizer, tokens, **known)
        chat.messages.append(message)
        requests: list[dict[str, Any]] = message.get("tool_calls") or []
        one.over = not requests or one.replies == self.max_turns
        if one.over:
            return
        table = {function.__name__: function for function in (*self.functions, *_methods(chat.environment))}
        results = [{"role": "tool", **_result(request, table)} for request in requests]
        ids = _rendered(results, problems)
        one.over = len(one.tokens) + len(ids) > longest
        if not one.over:  # without room for the results they are not read
            one.add(ids, own=False)
            one.replies += 1
            chat.messages += results


Turns = OneTurn | FunctionCalls
"""Generator of completions in one or several turns.

`template` has arguments for the chat template, `trainer_arguments` has arguments of GRPOTrainer, and `play` generates one
completion per problem.
"""


@dataclass
class _Chat:
    """A chat in progress: one completion with its environment, and the messages after the prompt."""

    dialogue: Dialogue
    environment: Any
    messages: list[dict[str, Any]] = field(default_factory=list)


def _ask(environment: Any, method: str, messages: list[dict[str, Any]], arguments: Mapping[str, Any]) -> Any:
    """Call a method of an environment. An error names the method and shows the chat until then."""
    try:
        return _wait(getattr(environment, method)(**arguments))
    except Exception as error:  # whatever a user's environment raises
        name = f"{type(environment).__name__}.{method}"
        raise RewardError(f"{name} raised {type(error).__name__}: {error}. {transcript(messages)!r}") from error


def _result(request: dict[str, Any], table: Mapping[str, _Function]) -> dict[str, Any]:
    """Run one tool call. An error becomes the call's result, since the model's arguments may be wrong."""
    function = request.get("function", request)
    name = function["name"]
    try:
        if name not in table:
            raise ValueError(f"Tool {name} not found.")
        result = _wait(table[name](**function["arguments"]))
    except Exception as error:  # a function's own, or of arguments that it does not have
        result = {"error": str(error)}
    return {"name": name, "content": result if isinstance(result, list) else str(result)}  # parts of a message are a list


def _rendered(results: list[dict[str, Any]], problems: Problems) -> list[int]:
    """Return the tokens between two messages of the model: the tool results, as the chat template writes them."""
    tokenizer: Any = problems.tokenizer  # transformers types its templates by a dozen unions
    how = {key: value for key, value in problems.template.items() if key != "tools"} | {"return_dict": False}
    call = {"type": "function", "function": {"name": results[0]["name"], "arguments": {}}}
    chat = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    start = tokenizer.apply_chat_template(chat, **how)
    whole = tokenizer.apply_chat_template([*chat, *results], add_generation_prompt=True, **how)
    if tokenizer.eos_token_id in start:  # there the model's message ends; the template's line behind it is still to come
        start = start[: len(start) - start[::-1].index(tokenizer.eos_token_id)]
    if whole[: len(start)] != start:
        raise ValueError("the chat template writes a message differently once a tool's result follows it.")
    return whole[len(start) :]


def _methods(environment: Any) -> list[_Function]:
    """Public methods of an environment, which the model may call as tools."""
    named = inspect.getmembers(type(environment), predicate=inspect.isfunction) if environment is not None else []
    return [getattr(environment, name) for name, _ in named if name not in _RESERVED and not name.startswith("_")]


def _wait(result: Any) -> Any:
    """Return a tool's result, which is awaited if the tool is `async`."""
    return asyncio.run(result) if inspect.iscoroutine(result) else result


def _teach_parsing(tokenizer: Any) -> None:
    """Set the tokenizer's parser of tool calls: TRL's for templates it supports, or Qwen's for templates of that format."""
    if any(getattr(tokenizer, name, None) is not None for name in ("response_template", "response_schema")):
        return
    own = tokenizer.chat_template
    try:
        chat_template_utils.add_response_schema(tokenizer)
    except ValueError as error:
        if "<tool_call>" not in own:
            raise ValueError(f"how this model writes tool calls is not known to TRL {trl.__version__}: {error}") from error
        tokenizer.chat_template = chat_template_utils.qwen3_chat_template
        try:
            chat_template_utils.add_response_schema(tokenizer)
        finally:
            tokenizer.chat_template = own


_PARSE_ARGUMENTS = inspect.signature(chat_template_utils.parse_response).parameters
"""Names of the parameters of TRL's response parser. Some releases of TRL lack the parameters for prefix and tools."""
