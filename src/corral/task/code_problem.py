"""Problems with tests, and what a program is worth. What is expected stays on this side of the wall."""

import json
import marshal
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from corral.task.code_compare import COMPARISONS, same_output
from corral.task.code_extract import defines, extract_program
from corral.task.code_harness import REPORT, UNABLE
from corral.task.code_value import Opaque, decode, loads, same
from corral.task.pool import Pool
from corral.task.sandbox import Job, Limits
from corral.task.sandbox.result import encode

NO_RESULT = Opaque("no result")
"""Where a function raised, or the program ended before."""

ROOM = 16 << 20
"""Bytes of results that a function may give back, all calls together."""


@dataclass(frozen=True)
class Runs:
    """Whole programs: (standard input, standard output) of each run. Spaces at the ends of lines and the text do not count."""

    cases: tuple[tuple[str, str], ...]
    tolerance: float = 0.0
    """By how much a number may differ that is expected with a decimal point; then spaces and empty lines count less still."""

    def passed(self, program: str, pool: Pool, limits: Limits, stop: bool) -> float:
        """The share of runs that end well with the right output; with `stop`, none after the first that does not."""
        right = 0
        for stdin, stdout in self.cases:
            room = max(limits.output, 2 * len(encode(stdout)))  # what is expected must be allowed
            result = pool.run_one(Job(code=program, stdin=stdin, limits=replace(limits, output=room)))
            if result.status == "ok" and same_output(result.stdout, stdout, self.tolerance):
                right += 1
            elif stop:
                break
        return right / len(self.cases)


@dataclass(frozen=True)
class Calls:
    """Calls of a function: (arguments, result) of each, as lines of `code_value`."""

    entry: str
    cases: tuple[tuple[str, str], ...]
    tolerance: float = 0.0
    """By how much a float may differ."""
    how: Literal["same", "apps", "sets", "presence"] = "same"
    """What counts as equal: see `COMPARISONS`."""

    def passed(self, program: str, pool: Pool, limits: Limits, stop: bool) -> float:
        """The share of right results, all from one process."""
        results = call(program, self.entry, tuple(arguments for arguments, _ in self.cases), pool, limits)
        right = sum(self.right(got, loads(expected)) for got, (_, expected) in zip(results, self.cases, strict=True))
        return right / len(self.cases)

    def right(self, got: object, expected: object) -> bool:
        """Whether a result is the expected one."""
        try:
            return got is not NO_RESULT and COMPARISONS[self.how](got, expected, self.tolerance)
        except RecursionError:  # lists in lists, as deep as they could just be read
            return False


@dataclass(frozen=True)
class Agreement:
    """Calls of a function whose results are those of a reference, which is run first, in the sandbox too."""

    entry: str
    arguments: tuple[str, ...]
    reference: str
    reference_entry: str
    tolerance: float = 0.0

    def passed(self, program: str, pool: Pool, limits: Limits, stop: bool) -> float:
        """The share of calls on which both agree."""
        expected = _expected(self, pool, limits)
        results = call(program, self.entry, self.arguments, pool, limits)
        return sum(same(a, b, self.tolerance) for a, b in zip(results, expected, strict=True)) / len(expected)


@dataclass(frozen=True)
class Checks:
    """Tests that are programs themselves (assertions), run in a sandbox of their own that calls across the wall."""

    entry: str
    setup: str
    tests: tuple[str, ...]

    def passed(self, program: str, pool: Pool, limits: Limits, stop: bool) -> float:
        """The share of tests that pass."""
        tests = Job(code=harness(f"check({self.setup!r}, {list(self.tests)!r}, {self.entry!r})"), limits=limits)
        _, result = pool.run_connected(Job(code=harness(f"serve({program!r}, {self.entry!r})"), limits=limits), tests)
        last = (result.stderr.strip().splitlines() or [""])[-1]
        if last.startswith(UNABLE):
            raise ValueError(
                f"code: the tests of {self.entry} cannot run: {last.removeprefix(UNABLE)}. Only the standard library is there."
            )
        return int(last.removeprefix(REPORT)) / len(self.tests) if result.status == "ok" and last.startswith(REPORT) else 0.0


Tests = Runs | Calls | Agreement | Checks


@dataclass(frozen=True, kw_only=True)
class Problem:
    """How completions of one prompt are tested."""

    tests: Tests
    stem: str = ""
    """Code that a completion may go on from: it is put in front of one that does not define the function by itself."""
    preamble: str = ""
    """The part of it before the function (imports, helpers): put in front of one that does."""
    reference: str = field(default="", compare=False)
    """A right program, where the data have one."""

    def program(self, completion: str) -> str:
        """The program to test."""
        found = extract_program(completion)
        if not self.stem:
            return found
        entry = getattr(self.tests, "entry", "")  # whole programs have no function
        if defines(found, entry):
            return self.preamble + "\n" + found
        return self.stem + (found if found.lstrip("\r\n")[:1] in " \t" else textwrap.indent(found, "    "))

    def grade(self, completion: str, pool: Pool, limits: Limits, partial: bool) -> float:
        """1.0 iff every test passes, else 0.0; with `partial`, the share that does."""
        program = self.program(completion)
        if not program.strip():
            return 0.0
        share = self.tests.passed(program, pool, limits, stop=not partial)
        return share if partial else float(share == 1.0)


def grade_all(
    problems: Sequence[Problem], completions: Sequence[str], pool: Pool, limits: Limits, partial: bool = False
) -> list[float]:
    """Rewards of many completions, several at a time, in order."""
    return pool.map(lambda problem, completion: problem.grade(completion, pool, limits, partial), problems, completions)


def call(program: str, entry: str, arguments: tuple[str, ...], pool: Pool, limits: Limits) -> list[object]:
    """Results of a function, one per line of arguments; something that equals nothing where there is none."""
    roomy = replace(limits, output=ROOM)
    stdin = "".join(line + "\n" for line in arguments)
    result = pool.run_one(Job(code=harness(f"serve({program!r}, {entry!r})"), stdin=stdin, limits=roomy))
    answers = [_value(line) for line in result.stdout.splitlines()[: len(arguments)]]
    return answers + [NO_RESULT] * (len(arguments) - len(answers))


def _value(line: str) -> object:
    try:
        return decode(json.loads(line)["value"])
    except (ValueError, TypeError, LookupError, RecursionError):  # raised, or forged
        return NO_RESULT


@cache
def _harness() -> bytes:
    """What is put in front of every function under test, compiled once."""
    texts = [Path(__file__).with_name(name).read_text() for name in ("code_value.py", "code_harness.py")]
    text = "\n".join(texts).replace("from corral.task.code_value import", "#")
    return marshal.dumps(compile(text, "<harness>", "exec", dont_inherit=True))


def harness(last_line: str) -> str:
    """A program for the sandbox: the harness, and the one line that starts it."""
    return f"import marshal\nexec(marshal.loads({_harness()!r}))\n{last_line}\n"


_references: dict[Agreement, list[object]] = {}


def _expected(tests: Agreement, pool: Pool, limits: Limits) -> list[object]:
    """The reference's results, found once."""
    if tests not in _references:
        results = call(tests.reference, tests.reference_entry, tests.arguments, pool, limits)
        if any(isinstance(result, Opaque) for result in results):
            raise ValueError(
                f"code: the reference of {tests.entry} fails on some of its own inputs within {limits.timeout:g} s."
            )
        _references[tests] = results
    return _references[tests]
