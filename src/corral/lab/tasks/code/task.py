"""Tasks whose completions are programs: packaged problems, HumanEval, MBPP and APPS."""

import json
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

from corral.lab.sandbox import SandboxLimits
from corral.lab.sandbox.pool import SandboxPool, shared_pool
from corral.lab.tasks.code.problem import Agreement, Calls, Problem, Runs, Tests, grade_all
from corral.lab.tasks.code.tests import FLOAT_TOLERANCE, called_function, tests_from_asserts, tests_from_code
from corral.lab.tasks.code.value import dumps
from corral.lab.tasks.dataset import FiniteTask, Hub, Malformed, Row, Rows, read_file, text_column
from corral.validate import limited, number_in


@dataclass(frozen=True, kw_only=True)
class CodeTask(FiniteTask):
    """Base class of code tasks. The reward is 1 if every test passes, else 0; with `partial`, the share of tests that pass.

    The program is the last block fenced as Python; without one, the last block without a label; without one, the whole text
    (corral.lab.tasks.code.problem).
    """

    partial: bool = limited(False, one_of=(True, False))
    """True to reward the share of tests that pass. By default, only a program that passes all tests is rewarded."""
    timeout: float = 5.0
    """Time limit in seconds, for each run of a program or for all calls of a function."""
    memory_mb: int = 512
    """Memory limit of each program, in MiB."""
    workers: int = limited(0, at_least=0, at_most=1024)
    """Number of programs that run at the same time; 0 for one per core."""
    unsafe_code_execution: bool = limited(False, one_of=(True, False))
    """True to run programs as yourself if the system offers no sandbox, instead of refusing. See docs/safety.md."""

    def __post_init__(self) -> None:
        self.limits  # noqa: B018 - refuses impossible ones
        super().__post_init__()

    def reward_columns(self, row: Row) -> Row:
        """Return no columns: the task itself runs the tests, which can be millions of characters long."""
        return {}

    @property
    def limits(self) -> SandboxLimits:
        """Resource limits of one program in the sandbox."""
        return SandboxLimits(timeout=self.timeout, memory_mb=self.memory_mb)

    @property
    def pool(self) -> SandboxPool:
        """Pool of sandboxes for programs, shared by all tasks with the same settings and started at its first use."""
        return shared_pool(self.workers or None, unsafe_code_execution=self.unsafe_code_execution)

    def verify_all(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """Return the rewards of many completions. Several programs run at the same time."""
        problems: list[Problem] = [self.answer(prompt) for prompt in prompts]
        if not problems:
            return []
        return grade_all(problems, completions, self.pool, self.limits, self.partial)


class Code(CodeTask):
    """Packaged programming problems, from one line to dynamic programming, or a file of your own problems in the same format.

    A row has `prompt` and `tests`: each {"stdin", "stdout"}, or {"args", "result"} for the function `entry`; then `tolerance`
    is by how much a float may differ. `reference` is a right program.
    """

    name: ClassVar[str] = "code"

    def problem(self, row: Row) -> tuple[str, Problem]:
        """Read the prompt and the tests from a row of the data."""
        problem = problem_from_tests({key: row[key] for key in ("tests", "entry", "tolerance") if key in row})
        return text_column(row, "prompt"), Problem(tests=problem.tests, reference=_column(row, "reference", str, ""))

    def _rows(self, split: Literal["train", "test"]) -> Rows | None:
        if self.path is None and self.held_out is None:
            return read_file(Path(__file__).parents[1] / "data" / "code" / f"{split}.jsonl", self.name)
        return super()._rows(split)


@dataclass(frozen=True, kw_only=True)
class HumanEval(CodeTask):
    """HumanEval (Chen et al. 2021) and HumanEval+ (Liu et al. 2023) for evaluation: complete a function from its signature."""

    name: ClassVar[str] = "humaneval"
    HUB: ClassVar[Hub | None] = Hub("evalplus/humanevalplus", train="test")

    held_out: str | float | int | None = 1.0
    """File of held-out problems, or share of the problems in `path` to hold out. By default, all problems are held out."""

    def problem(self, row: Row) -> tuple[str, Problem]:
        """Read a row of HumanEval or HumanEval+. The prompt is the beginning of the function.

        Tests are in `test`, or in `base_input` and `plus_input` with a reference.
        """
        prompt, entry = text_column(row, "prompt"), text_column(row, "entry_point")
        solution = _column(row, "canonical_solution", str, "")
        if "base_input" in row and solution:
            inputs = [*_column(row, "base_input", list), *_column(row, "plus_input", list, [])]
            if not inputs or not all(isinstance(arguments, list) for arguments in inputs):
                raise Malformed("`base_input` and `plus_input` should be lists of lists of arguments")
            tolerance = max(_tolerance(row, "atol"), FLOAT_TOLERANCE)
            tests: Tests = Agreement(entry, tuple(map(dumps, inputs)), prompt + solution, entry, tolerance)
        else:
            tests = tests_from_code(text_column(row, "test"), entry)
        head = re.search(rf"^(?:async )?def {re.escape(entry)}\b", prompt, re.M)
        if head is None:
            raise Malformed(f"`prompt` should have the head of {entry}, the `entry_point`")
        reference = prompt + solution if solution else ""
        return prompt, Problem(tests=tests, stem=prompt, preamble=prompt[: head.start()], reference=reference)


@dataclass(frozen=True, kw_only=True)
class MBPP(CodeTask):
    """MBPP (Austin et al. 2021) and MBPP+ (Liu et al. 2023): write a function that a sentence describes."""

    name: ClassVar[str] = "mbpp"
    HUB: ClassVar[Hub | None] = Hub("evalplus/mbppplus", train="test")

    held_out: str | float | int | None = 0.2
    """File of held-out problems, or share of the problems in `path` to hold out."""
    shown_tests: int = limited(1, at_least=1, at_most=1000)
    """Number of assertions shown in the prompt. At least 1 is needed, because the assertions tell the function's name."""

    def problem(self, row: Row) -> tuple[str, Problem]:
        """Read a row of MBPP or MBPP+. The prompt is a sentence and the first assertions.

        Tests are in `test_list`, or in `test` for MBPP+.
        """
        text, asserts = text_column(row, "prompt", "text"), _column(row, "test_list", list)
        if not asserts or not all(isinstance(test, str) for test in asserts):
            raise Malformed("`test_list` should be a list of assertions, not empty")
        entry = called_function(asserts[0])
        setup = _column(row, "test_setup_code", str, "") or "\n".join(map(str, _column(row, "test_imports", list, [])))
        test = _column(row, "test", str, "")
        tests = tests_from_code(test, entry) if test else tests_from_asserts(asserts, entry, setup)
        prompt = f"{text.strip()}\nYour code should pass tests like these:\n" + "\n".join(asserts[: self.shown_tests])
        return prompt, Problem(tests=tests, reference=_column(row, "code", str, ""))


@dataclass(frozen=True, kw_only=True)
class APPS(CodeTask):
    """APPS (Hendrycks et al. 2021) and data sets in its format: competition problems, solved by a program or a function.

    The hub's `codeparrot/apps` is a script, which `datasets` no longer runs; `metr-evals/apps` has the same rows as files. Rows
    without tests are among them: with `skip_malformed` they are passed over.
    """

    name: ClassVar[str] = "apps"
    HUB: ClassVar[Hub | None] = Hub("metr-evals/apps", train="train", held_out="test")

    max_completion_length: int = 2048
    """Largest number of tokens that a correct completion may need."""

    def problem(self, row: Row) -> tuple[str, Problem]:
        """Read a row of APPS. The prompt is the question, followed by the starter code if there is any.

        Tests are in `input_output` (`inputs`, `outputs`, and `fn_name` for functions).
        """
        question, starter = text_column(row, "question", "prompt"), _column(row, "starter_code", str, "")
        if row.get("input_output") == "":
            raise Malformed("`input_output` is empty: there are no tests")
        cases = _column(row, "input_output", dict)
        inputs, outputs = _column(cases, "inputs", list), _column(cases, "outputs", list)
        if not inputs or len(inputs) != len(outputs):
            raise Malformed(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
        if name := _column(cases, "fn_name", str, ""):
            if not all(isinstance(arguments, list) for arguments in inputs):
                raise Malformed("`inputs` of a function should be lists of arguments")
            arguments, results = ([dumps(_with_int_keys(one)) for one in values] for values in (inputs, outputs))
            tests: Tests = Calls(name, tuple(zip(arguments, results, strict=True)), FLOAT_TOLERANCE, "apps")
        else:
            # A program's input or output is sometimes a list of lines.
            joined = ["\n".join(map(str, one)) if isinstance(one, list) else one for one in (*inputs, *outputs)]
            if wrong := [one for one in joined if not isinstance(one, str)]:
                raise Malformed(f"inputs and outputs of programs should be texts; got {wrong[0]!r:.60}")
            tests = Runs(tuple(zip(joined[: len(inputs)], joined[len(inputs) :], strict=True)), FLOAT_TOLERANCE)
        reference = ""
        with suppress(Malformed, IndexError):  # a reference is welcome and not needed
            reference = _column({"first": _column(row, "solutions", list, [])[0]}, "first", str, "")
        return question + (f"\n\n{starter}" if starter.strip() else ""), Problem(tests=tests, reference=reference)


def problem_from_tests(answer: Any) -> Problem:
    """Make a `Problem` from {"tests": […], "entry": …} or from a list of tests. Raises Malformed if the tests are unusable."""
    answer = answer if isinstance(answer, dict) else {"tests": answer}
    tests, entry = answer.get("tests"), answer.get("entry")
    if not isinstance(tests, list) or not tests or not all(isinstance(test, dict) for test in tests):
        raise Malformed("`tests` should be a list, not empty, of {stdin, stdout} or of {args, result}")
    if entry is None:
        return Problem(tests=Runs(tuple((_column(test, "stdin", str), _column(test, "stdout", str)) for test in tests)))
    if not isinstance(entry, str) or not entry.isidentifier():
        raise Malformed(f"`entry` should be the name of a function; got {entry!r:.60}")
    if not all(isinstance(test.get("args"), list) and "result" in test for test in tests):
        raise Malformed("every test of a function should have `args`, a list, and `result`")
    cases = tuple((dumps(test["args"]), dumps(test["result"])) for test in tests)
    return Problem(tests=Calls(entry, cases, _tolerance(answer, "tolerance")))


_KINDS: dict[type, str] = {str: "a text", list: "a list", dict: "an object"}


def _column(row: Row, name: str, kind: type, default: Any = None) -> Any:
    """Read a value of type `kind` from a row; None becomes the default. Text is parsed as JSON if `kind` is a list or dict."""
    value = default if row.get(name) is None else row[name]
    if isinstance(value, str) and kind is not str:
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise Malformed(f"`{name}` is not JSON: {error}") from error
    if not isinstance(value, kind):
        raise Malformed(f"`{name}` should be {_KINDS[kind]}; got {value!r:.60}")
    return value


def _tolerance(row: Row, name: str) -> float:
    value = 0.0 if row.get(name) is None else row[name]
    if not number_in(value, 0, sys.float_info.max):
        raise Malformed(f"`{name}` should be a number, 0 or above; got {value!r:.60}")
    return float(value)


def _with_int_keys(value: Any) -> Any:
    """Convert a dict's keys from text to integers if all keys are integers. JSON stores the integer keys of APPS as text."""
    if isinstance(value, list):
        return [_with_int_keys(item) if isinstance(item, dict) else item for item in value]
    with suppress(ValueError):
        return {int(key): item for key, item in value.items()} if isinstance(value, dict) else value
    return value
