"""Finite tasks: problems from a data set, split into training and held-out problems."""

import json
import math
import warnings
from abc import abstractmethod
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from corral.lab.run.files import read_regular, require_regular
from corral.lab.run.text import visible
from corral.lab.tasks.imports import library
from corral.lab.tasks.messages import Message
from corral.lab.tasks.procedural import SeededTask, digest, epochs, shuffled
from corral.validate import limited

Row = dict[str, Any]


# ----------------------------------------------------------------------------------------------------------------- rows

_MOST = 2**36
"""Largest size of a file of problems, in bytes."""


class Malformed(ValueError):
    """Raised for a row of a data set that cannot be used. The error message is the reason."""


def read_file(path: Path, owner: str) -> Iterator[tuple[str, Row | Malformed]]:
    """Yield (place, row) for every row of a .parquet, .json or JSON-lines file. Raises ValueError for an empty file.

    A .json file holds one list of rows. Any other ending but .parquet means JSON lines.
    """
    parquet = library("pyarrow.parquet", owner) if path.suffix == ".parquet" else None
    values: Any
    try:
        if parquet is not None:
            require_regular(path)
            values = parquet.read_table(path).to_pylist()
        else:
            content = read_regular(path, _MOST).removeprefix(b"\xef\xbb\xbf")
            values = content.split(b"\n")
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or str(error)
        raise ValueError(f"{owner}: {path} cannot be read: {why.rstrip('.')}.") from error
    if path.suffix == ".json":
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{owner}: {path} is not JSON: {error}. A file of one row per line is named .jsonl.") from error
        if not isinstance(values, list):
            raise ValueError(f"{owner}: {path} should hold a list of rows, [{{…}}, …]; got {type(values).__name__}.")
    unit, empty = "row" if path.suffix in (".parquet", ".json") else "line", True
    for number, value in enumerate(values, 1):
        row = value
        if isinstance(value, bytes):  # a line
            if not value.strip():
                continue
            try:
                row = json.loads(value)
            except (ValueError, RecursionError) as error:  # not UTF-8, not JSON
                row = Malformed(f"this is not JSON: {error}")
        if not isinstance(row, dict | Malformed):
            row = Malformed(f"a row is an object, {{…}}; got {row!r:.60}")
        empty = False
        yield f"{path.name}, {unit} {number}", row
    if empty:
        raise ValueError(f"{owner}: {path} is empty: there is no problem in it.")


def read_hub(name: str, config: str | None, split: str, owner: str) -> Iterator[tuple[str, Row | Malformed]]:
    """Yield (place, row) for every row of a data set's split, from the Hugging Face Hub or its local cache."""
    datasets = library("datasets", owner)
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # no network, no such name, no permission, no space: it has an error for each
        reason = str(error).partition("\n")[0].rstrip(".")
        raise ValueError(
            f"{owner}: {name} ({split}) cannot be loaded from the hub: {type(error).__name__}: {reason}. "
            f"Without a network, get its files elsewhere and give them as `path`: --set task_config.path=FOLDER."
        ) from error
    for number, row in enumerate(rows, 1):
        yield f"{name} {split}, row {number}", row


def find_split(folder: Path, split: str, owner: str) -> Path:
    """Find the single file of a split in a folder, such as train.jsonl, test.parquet or test-00000-of-00001.parquet."""
    kinds = (".jsonl", ".json", ".parquet")
    found = sorted(path for path in folder.iterdir() if path.suffix in kinds and path.stem.partition("-")[0] == split)
    if len(found) != 1:
        there = ", ".join(path.name for path in found) or "none"
        raise ValueError(
            f"{owner}: {folder} should hold one file {split}.jsonl, {split}.json or {split}.parquet; there is {there}."
        )
    return found[0]


def text_column(row: Row, *names: str) -> str:
    """Return the text in the first of the named columns that a row has. Numbers become text: 142.0 becomes 142."""
    for name in names:
        if name in row:
            value = row[name]
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
                value = str(value)
            if not isinstance(value, str) or not value.strip():
                raise Malformed(f"`{name}` should be a text that is not empty; got {str(value)[:60]!r}")
            return value
    raise Malformed(f"there is no `{'` or `'.join(names)}`; the row has {', '.join(map(str, row)) or 'nothing'}")


def conversation(prompt: Any, column: str) -> tuple[str, list[Message]]:
    """Read a prompt (a text or a chat) from a column, and return the prompt as text and as chat messages.

    A chat ends with a message of the user's.

    The text of one message is its content. The text of several messages has each role before its content.
    """
    chat = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
    for one in chat:
        if not isinstance(one, dict) or not all(
            isinstance(one.get(key), str) and one[key].strip() for key in ("role", "content")
        ):
            what = "a text that is not empty, or a chat, every message with a role and a content"
            raise Malformed(f"`{column}` should be {what}; got {str(prompt)[:60]!r}")
    if not chat or chat[-1]["role"] != "user":
        raise Malformed(f"`{column}` should be a chat that ends with the user's message; got {str(prompt)[:60]!r}")
    messages = [{"role": one["role"], "content": one["content"]} for one in chat]
    if len(messages) == 1:
        return messages[0]["content"], messages
    return "\n\n".join(f"{one['role']}: {one['content']}" for one in messages), messages


# ---------------------------------------------------------------------------------------------------------------- tasks

_MAX_LISTED = 10
"""Largest number of rows listed in an error or a warning. Further rows are only counted."""

Rows = Iterable[tuple[str, Row | Malformed]]

_RESERVED_COLUMNS = ("prompt", "completion", "completion_ids")
"""Names of data columns that are not passed to reward functions, because TRL passes arguments of the same names."""


class _Tally:
    """Counter of rows, which keeps place and reason of only the first few rows, because there may be millions."""

    def __init__(self) -> None:
        self.count, self.first = 0, ""

    def add(self, place: str, why: str) -> None:
        """Count a row, given its place in the data and the reason for counting it."""
        self.count += 1
        if self.count <= _MAX_LISTED:
            self.first += f"\n  {place}: {why}"

    def sentence(self, what: str) -> str:
        """Return a sentence with the number of counted rows and the places of the first few. `what` describes the rows."""
        more = f"\n  … and {self.count - _MAX_LISTED} more" if self.count > _MAX_LISTED else ""
        return visible(f"{self.count} {'row is' if self.count == 1 else 'rows are'} {what}:{self.first}{more}")


@dataclass(frozen=True)
class Hub:
    """Location of a data set on the Hugging Face Hub: its name, its configuration and the names of its splits.

    The data set may have a single split.
    """

    name: str
    config: str | None = None
    train: str = "train"
    held_out: str | None = None


@dataclass(frozen=True, kw_only=True)
class FiniteTask(SeededTask):
    """Base class of tasks whose problems come from a data set.

    Subclasses define `name`, `HUB`, `problem` (row → prompt and answer) and a verifier.
    """

    HUB: ClassVar[Hub | None] = None

    path: str | None = None
    """File of problems (.jsonl, .json, .parquet), or folder with files train.… and test.…. None loads problems from the hub."""
    held_out: str | float | int | None = None
    """File of held-out problems, or share of the problems in `path` to hold out. None uses the data's own test split."""
    skip_malformed: bool = False
    """True to skip unusable rows with a warning that counts and names them. By default, an unusable row is an error."""
    max_completion_length: int = limited(1024, at_least=1, at_most=1_000_000)
    """Largest number of tokens that a correct completion may need."""

    @classmethod
    def hub_names(cls) -> tuple[str, ...]:
        """Names of the data sets that the task loads from the hub if there is no `path`."""
        return () if cls.HUB is None else (cls.HUB.name,)

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.held_out, int | float) and (self.held_out is True or not 0 < self.held_out <= 1):
            raise ValueError(f"{self.name}: `held_out` is a file, or a share above 0 and up to 1; got {self.held_out!r}.")
        self._splits  # noqa: B018 - data that cannot be used are refused now

    @cached_property
    def _splits(self) -> dict[bool, dict[str, tuple[Any, Row]]]:
        """Training problems (key False) and held-out problems (key True), each a dict from prompt to answer and data row."""
        if isinstance(self.held_out, int | float):
            train, held_out = split_by_share(self._collect(self._rows("train")), float(self.held_out))
        else:
            rows = self._rows("test") if self.held_out is None else read_file(Path(self.held_out).expanduser(), self.name)
            if rows is None:
                raise ValueError(f"{self.name}: {self.path or 'the hub'} has one split. Say with `held_out` what is held out.")
            held_out = self._collect(rows)
            train = self._collect(self._rows("train"), leaked=held_out)
        if not held_out:
            raise ValueError(f"{self.name}: there is no held-out problem to measure success on.")
        columns = dict.fromkeys(name for _, row in (train | held_out).values() for name in row)
        return {
            split: {prompt: (answer, {name: row.get(name) for name in columns}) for prompt, (answer, row) in problems.items()}
            for split, problems in ((False, train), (True, held_out))
        }

    @abstractmethod
    def problem(self, row: Row) -> tuple[str, Any]:
        """Read the prompt and the answer from a row of the data. Raises Malformed if the row is unusable."""

    def reward_columns(self, row: Row) -> Row:
        """Select the columns of a data row to pass to reward functions. By default, all columns are passed."""
        return row

    @property
    def sizes(self) -> tuple[int, int]:
        """Numbers of training problems and of held-out problems."""
        return len(self._splits[False]), len(self._splits[True])

    def _prompts(self, seed: int, *, held_out: bool) -> Iterator[str]:
        """Yield each held-out prompt once, or the training prompts again and again, in a new order on every pass."""
        prompts = list(self._splits[held_out])
        if held_out:
            yield from shuffled(prompts, self.name, seed, held_out=True)
            return
        if not prompts:
            raise ValueError(
                f"{self.name}: every problem is held out, as the data are for evaluation. To train, give `held_out` as a "
                f"share, 0.2 say, or other problems as `path` and these as `held_out`."
            )
        yield from epochs(prompts, f"{self.name} epoch", seed)

    def answer(self, prompt: str) -> Any:
        """Return the correct answer to one of the task's prompts."""
        return self._problem(prompt)[0]

    def row(self, prompt: str) -> Row:
        """Return all columns of the data row of a prompt. A column that the row lacks is None."""
        return self._problem(prompt)[1]

    def _problem(self, prompt: str) -> tuple[Any, Row]:
        for problems in self._splits.values():
            if prompt in problems:
                return problems[prompt]
        raise self.foreign(prompt)

    def columns(self, prompt: str) -> Row:
        """Return the data columns that reward functions get for a prompt, besides the prompt itself."""
        row = self.row(prompt)
        return {
            name: row[name] for name in row if name not in _RESERVED_COLUMNS and not (name == "problem" and row[name] == prompt)
        }

    def _rows(self, split: Literal["train", "test"]) -> Rows | None:
        """Return the rows of a split of the data, or None for the test split of data without splits."""
        if self.path is None:
            if self.HUB is None:
                raise ValueError(f"{self.name}: `path` is missing: a file of problems, --set task_config.path=FILE.")
            name = self.HUB.train if split == "train" else self.HUB.held_out
            return read_hub(self.HUB.name, self.HUB.config, name, self.name) if name else None
        path = Path(self.path).expanduser()
        if path.is_dir():
            return read_file(find_split(path, split, self.name), self.name)
        return read_file(path, self.name) if split == "train" else None

    def _collect(self, rows: Rows | None, leaked: Container[str] = ()) -> dict[str, tuple[Any, Row]]:
        """Map each prompt to its answer and data row. Unusable rows raise ValueError, or a warning with `skip_malformed`.

        A prompt is the key to its answer: the same prompt with another answer cannot be used, nor one that is held out already.
        """
        found: dict[str, tuple[Any, Row]] = {}
        places: dict[str, str] = {}
        bad, repeated = _Tally(), _Tally()
        for place, row in rows or ():
            try:
                if isinstance(row, Malformed):
                    raise row
                prompt, answer = self.problem(row)
                if prompt in leaked:
                    raise Malformed("this prompt is held out")
                if prompt in found and found[prompt][0] != answer:
                    raise Malformed(f"the prompt of {places[prompt]} with another answer")
            except Malformed as error:
                bad.add(place, str(error))
                continue
            if prompt in found:
                repeated.add(place, f"as {places[prompt]}")
            else:
                found[prompt], places[prompt] = (answer, self.reward_columns(row)), place
        if bad.count and not self.skip_malformed:
            hint = "Mend them, or go on without them: skip_malformed=true."
            raise ValueError(f"{self.name}: {bad.sentence('malformed')}\n{hint}")
        for tally, what in ((bad, "malformed and skipped"), (repeated, "repeated and used once")):
            if tally.count:
                warnings.warn(f"{self.name}: {tally.sentence(what)}", stacklevel=2)
        return found


def split_by_share(problems: dict[str, Any], share: float) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split problems into training and held-out problems by hashes of their prompts, so that all machines split alike."""
    held_out = set(sorted(problems, key=lambda prompt: (digest(prompt), prompt))[: max(1, round(share * len(problems)))])
    train = {prompt: answer for prompt, answer in problems.items() if prompt not in held_out}
    return train, {prompt: answer for prompt, answer in problems.items() if prompt in held_out}
