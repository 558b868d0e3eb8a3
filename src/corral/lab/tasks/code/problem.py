"""Grading of programs: extract a completion's program, run tests in the sandbox, and return the share of tests that pass."""

import json
import marshal
import re
import secrets
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Literal

from corral.lab.sandbox import SandboxJob, SandboxLimits
from corral.lab.sandbox.pool import SandboxPool
from corral.lab.sandbox.result import MAX_TIMEOUT, encode
from corral.lab.tasks.code.value import same_output
from corral.lab.tasks.grader import grader_pool

# ---------------------------------------------------------------------------------------------- programs in completions

# A fence stands alone on its line, indented or not; a block that is never closed reaches to the end: it was cut.
# *+ and ++ give nothing back: a label of thousands of letters without an end of line would be tried in every split.
_BLOCK = re.compile(r"^[ \t]*+```++[ \t]*+(?P<label>[\w+#.-]*+)[^\n`]*+\n(?P<body>.*?)(?:^[ \t]*+```++[ \t]*$|\Z)", re.M | re.S)
_PYTHON_LABELS = {"python", "python3", "py", "py3"}
_THINK_END = "</think>"


def extract_program(completion: str) -> str:
    """Extract a completion's program: the last code block labelled Python, else the last unlabelled block, else all text.

    Whatever comes before the last `</think>` does not count. A block that is indented as a whole is moved to the margin.
    """
    text = completion.rpartition(_THINK_END)[2]
    blocks = [(match["label"].lower(), match["body"]) for match in _BLOCK.finditer(text)]
    for wanted in (_PYTHON_LABELS, {""}):
        found = [body for label, body in blocks if label in wanted]
        if found:
            return textwrap.dedent(found[-1])
    return text


def defines(program: str, name: str) -> bool:
    """True if a program, valid Python or not, defines a name at its top level."""
    name = re.escape(name)
    defined, assigned = rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{name}\b", rf"^{name}[ \t]*(?::[^=\n]*)?=(?!=)"
    return re.search(f"{defined}|{assigned}", program, re.M) is not None


# ---------------------------------------------------------------------------------------------------------------- tests


@dataclass(frozen=True)
class Runs:
    """Tests of a whole program, as pairs of standard input and expected output. Spaces at the ends of lines are ignored."""

    cases: tuple[tuple[str, str], ...]
    tolerance: float = 0.0
    """Tolerance for numbers with a decimal point, absolute or relative. If above 0, spacing and empty lines are ignored."""

    def pass_rate(self, program: str, pool: SandboxPool, limits: SandboxLimits, stop: bool) -> float:
        """Share of runs that exit without error and print the expected output. With `stop`, no run follows a failed run."""
        right = 0
        for stdin, stdout in self.cases:
            room = max(limits.output, 2 * len(encode(stdout)))  # what is expected must be allowed
            result = pool.run_one(SandboxJob(code=program, stdin=stdin, limits=replace(limits, output=room)))
            if result.status == "ok" and same_output(result.stdout, stdout, self.tolerance):
                right += 1
            elif stop:
                break
        return right / len(self.cases)


@dataclass(frozen=True)
class Calls:
    """Tests of a function, as pairs of arguments and expected result. `value.dumps` has written both as lines of JSON."""

    entry: str
    cases: tuple[tuple[str, str], ...]
    tolerance: float = 0.0
    """Tolerance for floats in results, absolute or relative."""
    how: Literal["same", "apps", "sets", "presence"] = "same"
    """Name of the comparison of results with expected results, a key of `COMPARISONS`."""

    def pass_rate(self, program: str, pool: SandboxPool, limits: SandboxLimits, stop: bool) -> float:
        """Share of calls with a correct result. All calls run in one process."""
        arguments, expected = zip(*self.cases, strict=True)
        output = _call_function(program, self.entry, arguments, pool, limits, room=sum(map(len, expected)))
        return _pass_rate(self.how, self.tolerance, output, expected, limits)


@dataclass(frozen=True)
class Agreement:
    """Tests that compare a function with a reference program. The reference program runs in the sandbox first."""

    entry: str
    arguments: tuple[str, ...]
    reference: str
    reference_entry: str
    tolerance: float = 0.0

    def pass_rate(self, program: str, pool: SandboxPool, limits: SandboxLimits, stop: bool) -> float:
        """Share of calls on which the function and the reference agree."""
        cases = tuple(zip(self.arguments, _references[self], strict=True))
        return Calls(self.entry, cases, self.tolerance).pass_rate(program, pool, limits, stop)


@dataclass(frozen=True)
class Checks:
    """Tests that are programs (assertions). They run in a second sandbox, and call the function in the first sandbox."""

    entry: str
    setup: str
    tests: tuple[str, ...]

    def pass_rate(self, program: str, pool: SandboxPool, limits: SandboxLimits, stop: bool) -> float:
        """Share of tests that pass, or 0 if the tests' process fails or writes no valid verdict.

        A verdict is valid if it carries the nonce of this run. An invalid verdict is counted as an error.
        """
        nonce = secrets.token_hex(16)
        last_line = f"check({self.setup!r}, {list(self.tests)!r}, {self.entry!r}, {nonce!r})"
        _, result = pool.run_connected(
            SandboxJob(code=harness(f"serve({program!r}, {self.entry!r}, True)"), limits=limits),
            SandboxJob(code=harness(last_line), limits=limits),
        )
        if result.status != "ok":
            return 0.0
        kind, _, text = result.stderr.removeprefix(f"{nonce} ").removesuffix("\n").partition(" ")
        if result.stderr == f"{nonce} {kind} {text}\n":
            if kind == "unable":
                raise ValueError(f"code: the tests of {self.entry} cannot run: {text}. Only the standard library is there.")
            if kind == "passed" and text in map(str, range(len(self.tests) + 1)):
                return int(text) / len(self.tests)
        grader_pool("code").count("error")
        return 0.0


Tests = Runs | Calls | Agreement | Checks


# ------------------------------------------------------------------------------------------------------------- problems


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tests for a prompt's completions, and the code to add to a completion before the tests run."""

    tests: Tests
    stem: str = ""
    """Code in the prompt that a completion may continue. It is prepended to completions that do not define the function."""
    preamble: str = ""
    """Imports and helper functions from `stem`, prepended to completions that define the function under test."""
    reference: str = field(default="", compare=False)
    """A correct program from the data; "" if the data have none."""

    def program(self, completion: str) -> str:
        """Build the program to test from a completion and, where needed, from code in the prompt."""
        found = extract_program(completion)
        if not self.stem:
            return found
        if not isinstance(self.tests, Runs) and defines(found, self.tests.entry):  # whole programs have no function
            return self.preamble + "\n" + found
        return self.stem + (found if found.lstrip("\r\n")[:1] in " \t" else textwrap.indent(found, "    "))

    def grade(self, completion: str, pool: SandboxPool, limits: SandboxLimits, partial: bool) -> float:
        """Reward of a completion: 1.0 if every test passes, else 0.0. With `partial`, the share of tests that pass."""
        program = self.program(completion)
        if not program.strip():
            return 0.0
        share = self.tests.pass_rate(program, pool, limits, stop=not partial)
        return share if partial else float(share == 1.0)


def grade_all(
    problems: Sequence[Problem], completions: Sequence[str], pool: SandboxPool, limits: SandboxLimits, partial: bool = False
) -> list[float]:
    """Grade completions in parallel and return their rewards in order. Before that, each reference program runs once."""
    _run_references([problem.tests for problem in problems if isinstance(problem.tests, Agreement)], pool, limits)
    return pool.map(lambda problem, completion: problem.grade(completion, pool, limits, partial), problems, completions)


# --------------------------------------------------------------------------------------------- functions in the sandbox


def _call_function(
    program: str, entry: str, arguments: Sequence[str], pool: SandboxPool, limits: SandboxLimits, room: int = 0
) -> str:
    """Call the function `entry` of a program in the sandbox, once per line of `arguments`, and return the printed results.

    That is one line per call, unless the program forged lines or ended early. `room` is the size of the expected output: twice
    as much may be written, as by whole programs.
    """
    roomy = replace(limits, output=max(limits.output, 2 * room))
    stdin = "".join(line + "\n" for line in arguments)
    return pool.run_one(SandboxJob(code=harness(f"serve({program!r}, {entry!r})"), stdin=stdin, limits=roomy)).stdout


def _pass_rate(how: str, tolerance: float, output: str, expected: Sequence[str], limits: SandboxLimits) -> float:
    """Share of correct results. A grading process, which can be killed, counts them within the program's time limit."""
    (verdict,) = grader_pool("code").grade([(how, tolerance, output, list(expected))], limits.timeout)
    return verdict.score / len(expected)


@cache
def _harness() -> bytes:
    """Compile, once, the code that runs in the sandbox before every function under test."""
    texts = [Path(__file__).with_name(name).read_text() for name in ("value.py", "harness.py")]
    text = "\n".join(texts).replace("from corral.lab.tasks.code.value import", "#")
    return marshal.dumps(compile(text, "<harness>", "exec", dont_inherit=True))


def harness(last_line: str) -> str:
    """Build a program for the sandbox from the compiled harness and a last line that starts the harness."""
    return f"import marshal\nexec(marshal.loads({_harness()!r}))\n{last_line}\n"


# ----------------------------------------------------------------------------------------------------------- references

_REFERENCE_OUTPUT = 8 << 20
"""Largest expected size of a reference program's results, in bytes."""

_PATIENCE = 10.0
"""Factor on the time limit of reference programs, since other processes may slow the machine down."""

_references: dict[Agreement, tuple[str, ...]] = {}
"""Cache of reference programs' results: test → one line of JSON for each call."""


def _run_references(tests: Sequence[Agreement], pool: SandboxPool, limits: SandboxLimits) -> None:
    """Run the reference programs that have not run before. Raises ValueError if a reference program fails."""
    missing = [one for one in dict.fromkeys(tests) if one not in _references]
    patient = replace(limits, timeout=min(_PATIENCE * limits.timeout, MAX_TIMEOUT))
    for one, results in zip(missing, pool.map(lambda one: _reference_results(one, pool, patient), missing), strict=True):
        if results is None:
            raise ValueError(
                f"code: the reference of {one.entry} fails on some of its own inputs within {patient.timeout:g} s."
            )
        _references[one] = results


def _reference_results(tests: Agreement, pool: SandboxPool, limits: SandboxLimits) -> tuple[str, ...] | None:
    """Return a reference program's results as lines of JSON, or None if a result is missing or cannot be serialized."""
    output = _call_function(tests.reference, tests.reference_entry, tests.arguments, pool, limits, room=_REFERENCE_OUTPUT)
    try:
        results = tuple(json.dumps(json.loads(line)["value"]) for line in output.splitlines())
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    whole = len(results) == len(tests.arguments) and _pass_rate("same", 0.0, output, results, limits) == 1.0
    return results if whole else None
