"""Texts and scores that an engine logged: verl's `rollout_data_dir`, TRL's `completions/*.parquet`."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from corral.audit.dump.find import Dump
from corral.audit.dump.lines import read_lines
from corral.audit.dump.record import DumpRecord
from corral.validate import RunError

_ROWS = 256
"""Of a parquet file that are held at a time."""


@dataclass(frozen=True)
class TextCompletion:
    """One completion as it was logged: special tokens are gone from it, and which tokens were sampled is not known."""

    step: int
    prompt: str | tuple[tuple[str, str], ...]
    """A text, or messages as pairs of role and content."""
    completion: str
    reward: float | None
    advantage: float | None
    """None: from the rewards of the same prompt and step."""


def read_texts(dump: Dump, progress: Callable[[int], object], note: Callable[[str], object]) -> Iterator[TextCompletion]:
    """Every completion of a dump of texts, one at a time; `progress` and `note` as in `read_lines`."""
    for path in dump.files:
        if dump.format == "verl":
            yield from map(_read_verl, read_lines(path, progress, note))
        else:
            yield from map(_read_trl, _parquet_rows(path))
            progress(path.stat().st_size)


def _read_verl(record: DumpRecord) -> TextCompletion:
    score = record.number("score")
    if score is None:
        raise record.error("`score` is a number.")
    return TextCompletion(record.whole("step", 0) or 0, record.text("input"), record.text("output"), score, None)


def _read_trl(record: DumpRecord) -> TextCompletion:
    advantage = record.number("advantage")
    if advantage is None:
        raise record.error("`advantage` is a number. TRL logs it with log_completions=True.")
    prompt, completion = (_messages(record, name) for name in ("prompt", "completion"))
    if not isinstance(completion, str):
        completion = "".join(content for role, content in completion if role == "assistant")
    return TextCompletion(record.whole("step", 0) or 0, prompt, completion, None, advantage)


def _messages(record: DumpRecord, name: str) -> str | tuple[tuple[str, str], ...]:
    """A text, or the messages of a conversation."""
    value = record.content.get(name)
    if not isinstance(value, list):
        return record.text(name)
    messages = [DumpRecord(message, f"{record.where}, `{name}`") for message in value]
    return tuple((message.text("role"), message.text("content")) for message in messages)


def _parquet_rows(path: Path) -> Iterator[DumpRecord]:
    try:
        with pq.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    if isinstance(step := row.get("step"), str) and step.isdecimal() and len(step) < 10:
                        row["step"] = int(step)  # a text in some releases of TRL
                    yield DumpRecord(row, f"{path}, row {number}")
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error
