"""Code problems: extract the program from a completion, run its tests in the sandbox, and return the share that passes."""

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
    """Extract the program: the last block fenced as Python, else the last block without a label, else the whole text.

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
    """Tests of a whole program: runs with a standard input and the expected output. Spaces at the ends of lines are ignored."""

    cases: tuple[tuple[str, str], ...]
    tolerance: float = 0.0
    """Tolerance for expected numbers with a decimal point. With a tolerance, spacing and empty lines are ignored."""

    def pass_rate(self, program: str, pool: SandboxPool, limits: SandboxLimits, stop: bool) -> float:
        """Share of runs that exit without error and print the expected output; with `stop`, runs end at the first failure."""
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
    """Tests of a function: calls with arguments and the expected result, both as lines of `value.dumps`."""

    entry: str
    cases: tuple[tuple[str, str], ...]
    tolerance: float = 0.0
    """Tolerance for floats, absolute or relative."""
    how: Literal["same", "apps", "sets", "presence"] = "same"
    """Comparison of results with expected results: a key of `COMPARISONS`."""

    def pass_rate(self, program: str, pool: SandboxPool, limits: SandboxLimits, stop: bool) -> float:
        """Share of correct results, with all calls in one process."""
        arguments, expected = zip(*self.cases, strict=True)
        output = _call_function(program, self.entry, arguments, pool, limits, room=sum(map(len, expected)))
        return _pass_rate(self.how, self.tolerance, output, expected, limits)


@dataclass(frozen=True)
class Agreement:
    """Tests that compare a function with a reference program. The reference runs in the sandbox first."""

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
    """Tests that are programs (assertions). They run in a second sandbox, which calls the function in the first."""

    entry: str
    setup: str
    tests: tuple[str, ...]

    def pass_rate(self, program: str, pool: SandboxPool, limits: SandboxLimits, stop: bool) -> float:
        """Share of tests that pass. It is 0, and counted as an error, if no verdict carries the nonce of this run."""
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
    """A prompt's tests, and the code to add to a completion before they run."""

    tests: Tests
    stem: str = ""
    """Code that a completion may continue, prepended to completions that do not define the function."""
    preamble: str = ""
    """Imports and helpers in `stem` before the function, prepended to completions that define the function."""
    reference: str = field(default="", compare=False)
    """A correct program, if the data have one."""

    def program(self, completion: str) -> str:
        """Build the program to test from a completion."""
        found = extract_program(completion)
        if not self.stem:
            return found
        if not isinstance(self.tests, Runs) and defines(found, self.tests.entry):  # whole programs have no function
            return self.preamble + "\n" + found
        return self.stem + (found if found.lstrip("\r\n")[:1] in " \t" else textwrap.indent(found, "    "))

    def grade(self, completion: str, pool: SandboxPool, limits: SandboxLimits, partial: bool) -> float:
        """Reward of a completion: 1.0 iff every test passes, else 0.0; with `partial`, the share of tests that pass."""
        program = self.program(completion)
        if not program.strip():
            return 0.0
        share = self.tests.pass_rate(program, pool, limits, stop=not partial)
        return share if partial else float(share == 1.0)


def grade_all(
    problems: Sequence[Problem], completions: Sequence[str], pool: SandboxPool, limits: SandboxLimits, partial: bool = False
) -> list[float]:
    """Grade completions in parallel and return their rewards in order. Reference programs without known results run first."""
    _run_references([problem.tests for problem in problems if isinstance(problem.tests, Agreement)], pool, limits)
    return pool.map(lambda problem, completion: problem.grade(completion, pool, limits, partial), problems, completions)


# --------------------------------------------------------------------------------------------- functions in the sandbox


def _call_function(
    program: str, entry: str, arguments: Sequence[str], pool: SandboxPool, limits: SandboxLimits, room: int = 0
) -> str:
    """Call function `entry` of a program in the sandbox, once per line of `arguments`, and return all that was written.

    That is one line per call, unless the program forged lines or ended early. `room` is the size of the expected output: twice
    as much may be written, as by whole programs.
    """
    roomy = replace(limits, output=max(limits.output, 2 * room))
    stdin = "".join(line + "\n" for line in arguments)
    return pool.run_one(SandboxJob(code=harness(f"serve({program!r}, {entry!r})"), stdin=stdin, limits=roomy)).stdout


def _pass_rate(how: str, tolerance: float, output: str, expected: Sequence[str], limits: SandboxLimits) -> float:
    """Share of correct results, counted in a process that can be killed, within the program's own time limit."""
    (verdict,) = grader_pool("code").grade([(how, tolerance, output, list(expected))], limits.timeout)
    return verdict.score / len(expected)


@cache
def _harness() -> bytes:
    """Compile the code that runs before every function under test, once."""
    texts = [Path(__file__).with_name(name).read_text() for name in ("value.py", "harness.py")]
    text = "\n".join(texts).replace("from corral.lab.tasks.code.value import", "#")
    return marshal.dumps(compile(text, "<harness>", "exec", dont_inherit=True))


def harness(last_line: str) -> str:
    """Build a program for the sandbox: the compiled harness, and a last line that starts it."""
    return f"import marshal\nexec(marshal.loads({_harness()!r}))\n{last_line}\n"


# ----------------------------------------------------------------------------------------------------------- references

_REFERENCE_OUTPUT = 8 << 20
"""Largest number of bytes that a reference program's results may have."""

_PATIENCE = 10.0
"""Multiple of the time limit for reference programs, since other processes may slow the machine down."""

_references: dict[Agreement, tuple[str, ...]] = {}
"""Results of reference programs by test, as lines of `value.dumps`."""


def _run_references(tests: Sequence[Agreement], pool: SandboxPool, limits: SandboxLimits) -> None:
    """Run the reference programs whose results are not known yet. Raises ValueError if one fails."""
    missing = [one for one in dict.fromkeys(tests) if one not in _references]
    patient = replace(limits, timeout=min(_PATIENCE * limits.timeout, MAX_TIMEOUT))
    for one, results in zip(missing, pool.map(lambda one: _reference_results(one, pool, patient), missing), strict=True):
        if results is None:
            raise ValueError(
                f"code: the reference of {one.entry} fails on some of its own inputs within {patient.timeout:g} s."
            )
        _references[one] = results


def _reference_results(tests: Agreement, pool: SandboxPool, limits: SandboxLimits) -> tuple[str, ...] | None:
    """Results of a reference program, as lines; None if a result is missing or cannot be serialized."""
    output = _call_function(tests.reference, tests.reference_entry, tests.arguments, pool, limits, room=_REFERENCE_OUTPUT)
    try:
        results = tuple(json.dumps(json.loads(line)["value"]) for line in output.splitlines())
    except (ValueError, LookupError, TypeError, RecursionError):
        return None
    whole = len(results) == len(tests.arguments) and _pass_rate("same", 0.0, output, results, limits) == 1.0
    return results if whole else None
