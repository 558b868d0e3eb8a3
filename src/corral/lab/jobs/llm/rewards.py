"""Reward functions with TRL's signature, given by name or as Python functions, with weights. Every result is checked."""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

from corral.lab.run.settings import guess
from corral.lab.tasks import Task, columns_of, text_of, verify_all
from corral.lab.tasks.imports import by_path
from corral.lab.tasks.messages import answer_of
from corral.validate import RewardError, RunError, run_errors

Reward = Callable[..., list[float | None]]

_VERIFIER = "verifier"
"""Name that stands for the task's verifier in a list of rewards."""

_HOW = "`reward` is module:function or file.py:function, with a weight module:function=0.5"

_TAKEN = {"prompts", "completions", "completion_ids", "problem", "trainer_state", "log_extra", "log_metric", "environments"}
"""Names of arguments that the trainer passes to reward functions. A task's columns must not have these names."""


_LARGEST = 2.0**128 - 2.0**104
"""Largest float32 number, and so the largest reward: the trainer adds rewards in float32.

It is a literal, because importing torch takes seconds.
"""


def as_functions(given: Any, how: str = _HOW) -> tuple[str | Reward, ...]:
    """Convert a user's function or a list of functions into a tuple, which is empty if nothing is given.

    Args:
        how: the accepted forms, for the error; by default those of rewards, of which none stands for the task's verifier.
    """
    found: list[Any] = []
    for one in map(guess, given if isinstance(given, list | tuple) else [given]):  # a text may be a list in TOML
        found += [] if one is None else one if isinstance(one, list) else [one]
    for one in found:
        if not isinstance(one, str) and not callable(one):
            raise RunError(f"{how}, a Python function, or a list of these; got {one!r}.")
    return tuple(found)


def path_of(reward: str | Reward) -> str:
    """Path of a user's function or class: `module:name` of a Python object, or the text that was given."""
    if isinstance(reward, str):
        return reward
    of = reward if hasattr(reward, "__qualname__") else type(reward)  # an instance has none, its class has
    return f"{of.__module__}:{of.__qualname__}"


def make_rewards(
    given: Sequence[str | Reward], task: Task, weights: list[float] | None = None
) -> tuple[list[Reward], list[float] | None]:
    """Make reward functions that check their results, and their weights. The weights are None if none are given.

    The functions also get the task's columns.

    Weights stand behind the names, or beside all of them as TRL's `reward_weights`.
    """
    names, own = list[str | Reward](), list[float | None]()
    for one in given or (_VERIFIER,):
        path, equals, text = one.rpartition("=") if isinstance(one, str) else ("", "", "")
        try:
            weight = float(text) if equals else None
        except ValueError:
            weight = math.nan
        if weight is not None and not math.isfinite(weight):
            raise RunError(f"{_HOW}; got {one!r}.")
        names.append(path if equals else one)
        own.append(weight)
    if weights is not None and (len(weights) != len(names) or any(weight is not None for weight in own)):
        raise RunError(
            f"`reward_weights` are {list(weights)}, and the rewards {', '.join(map(path_of, given)) or _VERIFIER}. Give one "
            f"for each and none behind the names, or leave `reward_weights` out."
        )
    if any(weight is not None for weight in own):
        weights = [1.0 if weight is None else weight for weight in own]
    # TRL logs each reward by a name: the function's own, or its whole path where two functions have one name.
    paths = [path_of(one) for one in names]
    short = [path.rpartition(":")[2].rpartition(".")[2] for path in paths]
    labels = [path if short.count(name) > 1 else name for path, name in zip(paths, short, strict=True)]
    twice = next((label for label in labels if labels.count(label) > 1), None)
    if twice is not None:
        raise RunError(f"two rewards are {twice}. Give it once, with the weight of both, or name functions apart.")
    pairs = zip(names, labels, strict=True)
    return [verifier(task) if one == _VERIFIER else _own(one, label, task) for one, label in pairs], weights


def check_columns(task: Task, problem: str) -> None:
    """Raise RunError if a task's column has the name of an argument that the trainer passes to reward functions."""
    if taken := sorted(_TAKEN & columns_of(task, [problem]).keys()):
        raise RunError(
            f"{task.name} has a column `{taken[0]}`, and reward functions get something else under that name from the trainer. "
            f"Rename the column."
        )


def verifier(task: Task) -> Reward:
    """Make a reward function from a task's verifier."""

    def score(prompts: list[Any], completions: list[Any], problem: list[str], **_: Any) -> list[Any]:
        return verify_all(task, problem, [answer_of(completion) for completion in completions])

    return _with_checks(f"{task.name}.verify", score)


def _with_checks(name: str, score: Reward, label: str | None = None) -> Reward:
    """Wrap a reward function with checks: errors name the function and the completion. TRL logs the reward as `label`."""

    def reward(prompts: list[Any], completions: list[Any], **columns: Any) -> list[float | None]:
        try:
            rewards = _call(score, prompts=prompts, completions=completions, **columns)
        except (Exception, SystemExit) as error:  # whatever a user's function raises; sys.exit(0) would end the run as finished
            culprit = _culprit(score, prompts, completions, columns)
            raise RewardError(
                f"the reward function {name} raised {type(error).__name__}: {error}. The completion was {culprit!r}."
            ) from error
        if not isinstance(rewards, list):
            kind = type(rewards).__name__
            raise RewardError(
                f"the reward function {name} gave {'an' if kind[0] in 'aeiou' else 'a'} {kind}. It must give a list with one "
                f"reward for each completion."
            )
        if len(rewards) != len(completions):
            raise RewardError(
                f"the reward function {name} gave {len(rewards)} rewards for {len(completions)} completions, the first of "
                f"which was {text_of(completions[0])!r}. It must give one for each."
            )
        for index, value in enumerate(rewards):
            if value is None:
                continue
            try:  # a NumPy or torch reward becomes a float
                number = math.nan if isinstance(value, str | bytes | bytearray) else float(value)
            except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one is torch's, for more than one element
                number = math.nan
            if not abs(number) <= _LARGEST:
                raise RewardError(
                    f"the reward function {name} gave {value!r:.200} for the completion {text_of(completions[index])!r}. A "
                    f"reward is a finite number that fits into float32 (up to 3.4e38), or None where there is nothing to judge."
                )
            rewards[index] = number
        return rewards

    reward.__name__ = label or name
    return reward


def _own(reward: str | Reward, label: str, task: Task) -> Reward:
    """Wrap a user's reward function, which is imported if given by path, so that it gets the task's columns as lists.

    The columns are not in the dataset, since values may not fit Arrow's types.
    """
    with run_errors():
        function = by_path(reward, _HOW) if isinstance(reward, str) else reward

    def score(problem: list[str], **others: Any) -> Any:
        return function(problem=problem, **others | columns_of(task, problem))  # an environment's rows have them already

    return _with_checks(path_of(reward), score, label)


def _call(score: Reward, **arguments: Any) -> Any:
    """Call a reward function, also an `async` one, and return its rewards as a list. Other results are returned unchanged."""
    found = score(**arguments)
    found = asyncio.run(found) if inspect.iscoroutine(found) else found
    unordered = isinstance(found, Mapping | Set | str | bytes | bytearray) or not isinstance(found, Iterable)
    return found if unordered else list(found)


def _culprit(score: Reward, prompts: list[Any], completions: list[Any], columns: Mapping[str, Any]) -> str:
    """Find the completion to name in an error: the first that fails when scored alone, or else the first of all."""
    for index, completion in enumerate(completions):
        one = {key: [value[index]] if isinstance(value, list) else value for key, value in columns.items()}
        try:
            _call(score, prompts=[prompts[index]], completions=[completion], **one)
        except (Exception, SystemExit):  # the same function, so the same freedom
            return text_of(completion)
    return text_of(completions[0])
