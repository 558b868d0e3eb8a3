"""The code tasks: packaged problems, HumanEval, MBPP, APPS."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from corral.lab.sandbox import SandboxLimits
from corral.lab.sandbox.pool import SandboxPool, shared_pool
from corral.lab.tasks.code.problem import Problem, grade_all
from corral.lab.tasks.code.rows import apps_row, human_eval_row, mbpp_row, own_row
from corral.lab.tasks.dataset import FiniteTask, Hub, Row, Rows, read_file
from corral.validate import limited


@dataclass(frozen=True, kw_only=True)
class CodeTask(FiniteTask):
    """Base of code tasks: the reward is 1 iff every test passes; with `partial`, the pass rate.

    The program is the last block fenced as Python; without one, the last block without a label; without one, the whole text
    (corral.lab.tasks.code.problem).
    """

    partial: bool = limited(False, one_of=(True, False))
    """Reward the share of tests that pass instead of all or nothing."""
    timeout: float = 5.0
    """Seconds for each run of a program, or for all calls of a function."""
    memory_mb: int = 512
    """Memory for each program, in MiB."""
    workers: int = limited(0, at_least=0, at_most=1024)
    """Programs at a time; 0 for one per core."""
    unsafe_code_execution: bool = limited(False, one_of=(True, False))
    """Where the system offers no sandbox, run programs as yourself instead of refusing. See docs/safety.md."""

    def __post_init__(self) -> None:
        self.limits  # noqa: B018 - refuses impossible ones
        super().__post_init__()

    def reward_columns(self, row: Row) -> Row:
        """An empty row: tests can be millions of characters, and reward functions do not need them."""
        return {}

    @property
    def limits(self) -> SandboxLimits:
        """Resource limits of one program."""
        return SandboxLimits(timeout=self.timeout, memory_mb=self.memory_mb)

    @property
    def pool(self) -> SandboxPool:
        """The pool that runs programs, shared by all tasks with the same settings and started at the first use."""
        return shared_pool(self.workers or None, unsafe_code_execution=self.unsafe_code_execution)

    def verify_all(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        """`verify` of many at once, several programs at a time."""
        problems: list[Problem] = [self.answer(prompt) for prompt in prompts]
        if not problems:
            return []
        return grade_all(problems, completions, self.pool, self.limits, self.partial)


class Code(CodeTask):
    """Problems that come with corral, from one line to dynamic programming; or a file of one's own in the same shape.

    A row has `prompt` and `tests`: each {"stdin", "stdout"}, or {"args", "result"} for the function `entry`; then `tolerance`
    is by how much a float may differ. `reference` is a right program.
    """

    name: ClassVar[str] = "code"

    def problem(self, row: Row) -> tuple[str, Problem]:
        """The prompt and its tests."""
        return own_row(row)

    def _rows(self, split: Literal["train", "test"]) -> Rows | None:
        if self.path is None and self.held_out is None:
            return read_file(Path(__file__).parents[1] / "data" / "code" / f"{split}.jsonl", self.name)
        return super()._rows(split)


@dataclass(frozen=True, kw_only=True)
class HumanEval(CodeTask):
    """HumanEval (Chen et al. 2021) and HumanEval+ (Liu et al. 2023): complete a function from its head. For evaluation."""

    name: ClassVar[str] = "humaneval"
    HUB: ClassVar[Hub | None] = Hub("evalplus/humanevalplus", train="test")

    held_out: str | float | int | None = 1.0
    """A file of held-out problems, or the share of `path`'s problems that is held out: by default all of them."""

    def problem(self, row: Row) -> tuple[str, Problem]:
        """The function's head and its tests."""
        return human_eval_row(row)


@dataclass(frozen=True, kw_only=True)
class MBPP(CodeTask):
    """MBPP (Austin et al. 2021) and MBPP+ (Liu et al. 2023): a function described in a sentence."""

    name: ClassVar[str] = "mbpp"
    HUB: ClassVar[Hub | None] = Hub("evalplus/mbppplus", train="test")

    held_out: str | float | int | None = 0.2
    """A file of held-out problems, or the share of `path`'s problems that is held out."""
    shown_tests: int = limited(1, at_least=1, at_most=1000)
    """Assertions that the prompt shows, at least one: they name the function."""

    def problem(self, row: Row) -> tuple[str, Problem]:
        """The sentence with the first assertions, and the tests."""
        return mbpp_row(row, self.shown_tests)


@dataclass(frozen=True, kw_only=True)
class APPS(CodeTask):
    """APPS (Hendrycks et al. 2021) and data sets in its shape: programs from competitions, and functions.

    The hub's `codeparrot/apps` is a script, which `datasets` no longer runs; `metr-evals/apps` has the same rows as files. Rows
    without tests are among them: with `skip_malformed` they are passed over.
    """

    name: ClassVar[str] = "apps"
    HUB: ClassVar[Hub | None] = Hub("metr-evals/apps", train="train", held_out="test")

    max_completion_length: int = 2048
    """Tokens that a right completion may need."""

    def problem(self, row: Row) -> tuple[str, Problem]:
        """The question and its tests."""
        return apps_row(row)
