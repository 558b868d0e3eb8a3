"""Reader for logged completions (dumps) of several RL frameworks: find files, recognise their format, read records."""

import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as short
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from pyarrow.types import is_boolean, is_floating, is_integer, is_null

from corral.divergence import categorical_kl, categorical_tv
from corral.lab.audit.folder import NothingYet
from corral.lab.audit.tokens import Bools, Floats, Ints
from corral.lab.report.read import is_run, newest_state
from corral.lab.run.text import count
from corral.validate import RunError

_LARGEST_ID = 2**31 - 1
_LARGEST = 1e100
_LOWEST_LOGP = -1e4
"""Limit below which a log-probability counts as −inf: some engines write a large negative number instead."""

_ROUNDING = 1e-3
"""Largest log-probability above 0 that is accepted as a rounding error."""


class DumpRecord:
    """Record of one logged completion. Numbers that are null, not finite or beyond 1e100 are read as NaN."""

    def __init__(self, content: Any, where: str) -> None:
        self.where = where
        if not isinstance(content, dict):
            raise self.error(f"should be a JSON object with the fields of one completion; got {short(content)}.")
        self.content: Mapping[str, Any] = content

    def error(self, sentence: str) -> RunError:
        """Build a RunError that names the file, the line and the fault."""
        return RunError(f"{self.where}: {sentence}")

    def has(self, name: str) -> bool:
        """Return True if the record has a field `name` and its value is not null."""
        return self.content.get(name) is not None

    def items(self, name: str, length: int | None) -> list[Any]:
        """Read a field that must be a list with one entry per token. Raises RunError if the field is anything else."""
        value = self.content.get(name)
        if not isinstance(value, list):
            found = f"got {short(value)}" if name in self.content else "it is missing"
            raise self.error(f"`{name}` should be a list with one entry per token; {found}.")
        if length is not None and len(value) != length:
            raise self.error(f"`{name}` has {len(value)} entries and the completion {length} tokens. Was one shifted twice?")
        return value

    def column(self, name: str, length: int | None, what: str, *kinds: Callable[[pa.DataType], bool]) -> Floats:
        """Read one number per token, with NaN for null. Values must be of one of the Arrow types in `kinds`."""
        values = self.items(name, length)
        try:
            found = pa.array(values, from_pandas=True)
        except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
            raise self.error(f"`{name}` should hold {what}. {str(error)[:200]}") from None
        if not any(is_kind(found.type) for is_kind in (is_null, *kinds)):
            raise self.error(f"`{name}` should hold {what}; it holds {str(found.type).partition('<')[0]} values.")
        return np.array(found.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))

    def numbers(self, name: str, length: int | None = None) -> Floats:
        """Read a field with a list of numbers. Null, and numbers beyond ±1e100, become NaN."""
        found = self.column(name, length, "numbers", is_floating, is_integer)
        found[np.abs(found) > _LARGEST] = np.nan
        return found

    def log_probs(self, name: str, length: int | None = None) -> Floats:
        """Read a field with log-probabilities. Values that stand for −inf become NaN. Raises RunError for values above 0."""
        found = self.numbers(name, length)
        found[found < _LOWEST_LOGP] = np.nan
        above = np.flatnonzero(found > _ROUNDING)
        if len(above):
            raise self.error(
                f"`{name}` holds {found[above[0]]:.4g} at token {above[0]}, and a log-probability is at most 0. Are these "
                f"logits or probabilities?"
            )
        return np.minimum(found, 0.0)

    def ids(self, name: str, length: int | None = None) -> Ints:
        """Read a field with a list of token ids. Raises RunError for ids below -1 or above 2³¹ − 1."""
        found = self.column(name, length, "token ids, whole numbers", is_integer)
        if not ((found >= -1) & (found <= _LARGEST_ID)).all():
            raise self.error(f"`{name}` should hold token ids, from -1 to {_LARGEST_ID}; got {short(self.content[name])}.")
        return found.astype(np.int64)

    def flags(self, name: str, length: int | None = None) -> Bools:
        """Read a field with a mask of tokens: true and false, or 1 and 0. Null counts as false."""
        found = np.nan_to_num(self.column(name, length, "true and false, or 1 and 0", is_boolean, is_integer, is_floating))
        if not np.isin(found, (0, 1)).all():
            raise self.error(f"`{name}` should hold true and false, or 1 and 0; got {short(self.content[name])}.")
        return found.astype(np.bool_)

    def credit(self, name: str, length: int | None = None) -> Floats:
        """Read a field with advantages, as one number per token or one number for all tokens."""
        if isinstance(self.content.get(name), list) or length is None:
            return self.numbers(name, length)
        if np.isnan(value := self.number(name)):
            raise self.error(f"`{name}` should be a number, or a list with one per token.")
        return np.full(length, value)

    def table(self, name: str, length: int) -> Floats:
        """Read a field with one list of numbers per token, all equally long, as an array [length, K]."""
        lines = self.items(name, length)
        if not all(isinstance(line, list) for line in lines) or len(set(map(len, lines))) != 1 or not lines[0]:
            raise self.error(f"`{name}` should hold one list per token, all equally long.")
        flat = DumpRecord({name: [value for line in lines for value in line]}, self.where)
        return flat.numbers(name).reshape(length, -1)

    def number(self, name: str) -> float:
        """Read a field with one number. Returns NaN if the field is missing, null or not finite."""
        return float(DumpRecord({name: [self.content.get(name)]}, self.where).numbers(name)[0])

    def whole(self, name: str, default: int | None = None) -> int | None:
        """Read a field with an integer of at most 18 digits. Returns `default` if the field is missing or null."""
        value = self.content.get(name)
        if value is None:
            return default
        if type(value) is not int or abs(value) >= 10**18:
            raise self.error(f"`{name}` is a whole number; got {short(value)}.")
        return value

    def text(self, name: str) -> str:
        """Read a field that must be a text. Raises RunError if the field is anything else."""
        value = self.content.get(name)
        if not isinstance(value, str):
            raise self.error(f"`{name}` is a text; got {short(value)}.")
        return value


_TAIL_FLOOR = 1e-8
"""Lower limit of the probability of all tokens outside a top-k list. Smaller values of 1 − Σ p are rounding errors."""

_LARGEST_SUM = 1.05
"""Largest accepted sum of a token's logged probabilities: half precision rounds a sum of 1 up to this value."""


def read_support(record: DumpRecord, tokens: Ints, mask: Bools, logp_old: Floats, logp_new: Floats) -> Floats:
    """Compute KL(new‖old), KL(old‖new) and TV as an array [3, T], for T tokens with logged top-k log-probs.

    They are over the record's `top_ids`, the sampled token, and a tail with the remaining probability. Both policies'
    log-probs are of the full softmax. A token without a number from one policy counts as part of the tail. Masked tokens may
    hold anything.
    """
    length = len(tokens)
    used = mask & ~np.isnan(logp_old) & ~np.isnan(logp_new)
    ids = record.table("top_ids", length)
    given = {name: record.table(name, length) for name in ("top_logp_old", "top_logp_new")}
    for name, logp in given.items():
        if logp.shape != ids.shape:
            raise record.error(f"`{name}` has {logp.shape[-1]} entries per token and `top_ids` {ids.shape[-1]}.")
    unknown = np.isnan(given["top_logp_old"]) | np.isnan(given["top_logp_new"]) | (ids == tokens[:, None]) | ~used[:, None]
    policies = []
    for name, sampled in (("top_logp_old", logp_old), ("top_logp_new", logp_new)):
        known = np.column_stack([np.where(used, sampled, 0.0), np.where(unknown, -np.inf, given[name])])
        mass = np.exp(np.minimum(known, 1.0)).sum(-1)
        over = np.flatnonzero(mass > _LARGEST_SUM)
        if len(over):
            raise record.error(
                f"`{name}` and the sampled token sum to {mass[over[0]]:.3g} at token {over[0]}; log-probs of the full softmax "
                f"sum to 1 at most. Is an id repeated in `top_ids`?"
            )
        tail = np.log(np.maximum(1 - mass, _TAIL_FLOOR))
        policies.append(torch.from_numpy(np.column_stack([known, tail])).log_softmax(-1))
    old, new = policies
    return torch.stack([categorical_kl(new, old), categorical_kl(old, new), categorical_tv(new, old)]).numpy()


_LONGEST = 1 << 28
"""Largest accepted size of a line in bytes: 256 MB, about a hundred times the longest completions of today."""

Progress = Callable[[int], object]
"""Progress callback that is called with the number of bytes read since the last call."""

Note = Callable[..., object]
"""Callback that counts omitted tokens and completions: `note(reason)`, or `note(reason, count)`."""


@dataclass
class FilePlace:
    """Position up to which a file of logged completions has been read."""

    bytes: int = 0
    lines: int = 0
    size: int = -1
    """Size of the file in bytes at the last read. A file that is read as a whole is complete once its size stays unchanged."""


def read_lines(
    path: Path, progress: Progress, note: Note, place: FilePlace | None = None, *, growing: bool = False
) -> Iterator[DumpRecord]:
    """Yield each JSON object of a JSON-lines file as a DumpRecord.

    Args:
        progress: called with the size of each line in bytes.
        note: called for a last line that is cut off, as in a file that is still being written.
        place: where reading resumes; it is moved along. None: at the beginning.
        growing: True if a last line without its end is left for the next call.
    """
    place = FilePlace() if place is None else place
    try:
        with path.open("rb") as file:
            file.seek(place.bytes)
            while data := file.readline(_LONGEST + 1):
                if len(data) > _LONGEST:
                    raise RunError(f"{path} has a line of more than {_LONGEST >> 20} MB; one completion has a line.")
                if growing and not data.endswith(b"\n"):
                    return
                place.bytes, place.lines = place.bytes + len(data), place.lines + 1
                progress(len(data))
                if not data.strip():
                    continue
                where = f"{path}, line {place.lines}"
                try:
                    content = json.loads(data)
                except (ValueError, RecursionError) as error:
                    if not data.endswith(b"\n"):
                        note("unfinished last lines")
                        return
                    raise RunError(f"{where}: is no JSON ({error}).") from None
                yield DumpRecord(content, where)
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error


Columns = dict[str, Any]
"""Values of one completion by column name, as in tokens.py: an array with a value per token, or one value for all tokens.
Also `mask`, and `support` if top-k tokens were logged: KL(new‖old), KL(old‖new) and TV on these tokens, [3 T]."""


def read_columns(record: DumpRecord, form: "Format") -> Columns:
    """Read one logged completion as columns, by the field names of its format.

    The first list sets the number of tokens. Without advantages each token counts as pushed further out, the most that a rule
    can block.
    """
    readers = {"token": record.ids, "mask": record.flags, "advantage": record.credit, "entropy": record.numbers}
    found: Columns = {"step": record.whole(form.step, record.whole("step", 0))}
    length: int | None = None
    for column, name in form.fields.items():
        if not name.endswith("?") or record.has(name[:-1]):
            found[column] = readers.get(column, record.log_probs)(name.rstrip("?"), length)
            length = len(found[column])
    old, new = found["logp_old"], found["logp_new"]
    missing = {"token": np.zeros(len(new), np.int64), "mask": np.ones(len(new), np.bool_), "advantage": np.sign(new - old)}
    found = {**missing, **found}
    trained_at, sampled_at = record.whole(form.age[0], found["step"]), record.whole(form.age[1])
    if trained_at is not None and sampled_at is not None:
        found["age"] = trained_at - sampled_at
    if form.losses and record.has("losses"):  # losses other than RL's share the mask: only tokens of RL's loss have advantages
        channels = [entry.get("rl") if isinstance(entry, dict) else None for entry in record.items("losses", length)]
        found["mask"] &= np.array([isinstance(channel, dict) and channel.get("mask") is True for channel in channels], bool)
    if isinstance(record.content.get(form.reward), list):
        rewards = record.numbers(form.reward, length)[found["mask"]]
        found["reward"] = next(iter(rewards[~np.isnan(rewards)]), np.nan)
    else:
        found["reward"] = record.number(form.reward)
    if form.support and record.has("top_ids") and length:
        found["support"] = read_support(record, *(found[name] for name in ("token", "mask", "logp_old", "logp_new")))
    return found


_SLIME_FIELDS = ("tokens", "response_lengths", "loss_masks", "advantages", "log_probs", "rollout_log_probs")


def read_samples(
    path: Path, progress: Progress, note: Note, place: FilePlace, *, growing: bool = False
) -> Iterator[DumpRecord]:
    """Yield the samples of slime's debug training data (a .pt file) as DumpRecords. No code in the file is run.

    They come from its field `samples` or the older `rollout_data`. Their `tokens` are those of the response.
    """
    before, place.size = place.size, path.stat().st_size
    if place.bytes or (growing and before != place.size):
        return
    progress(place.size)
    place.bytes = place.size
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = "it holds objects that only code of its own could make" if "Unsupported" in str(error) else "it is damaged"
        raise RunError(f"{path} cannot be loaded as tensors and plain values: {reason}.") from None
    record = DumpRecord(content, str(path))
    samples, data = record.content.get("samples"), record.content.get("rollout_data")
    if not isinstance(samples, list):
        if not isinstance(data, Mapping):
            raise record.error("is no file of --save-debug-train-data: it has neither `samples` nor `rollout_data`.")
        columns: list[Any] = [data.get(name) for name in _SLIME_FIELDS]
        if not all(isinstance(column, list | tuple) for column in columns) or len(set(map(len, columns))) > 1:
            raise record.error(f"should hold lists of one length in `rollout_data`: {', '.join(_SLIME_FIELDS)}.")
        samples = [dict(zip(_SLIME_FIELDS, values, strict=True)) for values in zip(*columns, strict=True)]
    for number, sample in enumerate(samples):
        found = DumpRecord(sample, f"{record.where}, sample {number}")
        plain = {name: one.tolist() if isinstance(one, torch.Tensor) else one for name, one in found.content.items()}
        found.content = {**plain, "step": record.whole("rollout_id", 0)}
        length, tokens = found.whole("response_lengths"), found.items("tokens", None)
        if length is None or not 0 <= length <= len(tokens):
            raise found.error(f"`response_lengths` should be between 0 and {len(tokens)}, the number of tokens.")
        found.content["tokens"] = tokens[len(tokens) - length :]
        yield found


def _parquet_rows(path: Path, progress: Progress, note: Note) -> Iterator[DumpRecord]:
    """Yield the rows of a parquet file of completions that TRL logged, as DumpRecords."""
    try:
        rows = pq.ParquetFile(path).read().to_pylist()
    except (OSError, pa.ArrowException) as error:
        raise RunError(f"{path} cannot be read as parquet: {str(error).splitlines()[0]}") from error
    progress(path.stat().st_size)
    for number, row in enumerate(rows, 1):
        if isinstance(step := row.get("step"), str) and step.isdecimal() and len(step) < 10:
            row["step"] = int(step)  # a text in some releases of TRL
        yield DumpRecord(row, f"{path}, row {number}")


_KNOWN = """corral's own JSON lines (tokens, advantages, logp_old, logp_new), prime-rl's token_exports, open-instruct's \
trainer_logprobs, slime's debug train data (.pt), verl's rollout_data_dir and TRL's completions"""

SAMPLER_IS_OLD = (
    "The old policy here is the sampler, as the engine logs no other: a distance is staleness and the mismatch between sampler "
    "and trainer together, before the update."
)


@dataclass(frozen=True, kw_only=True)
class Format:
    """Format of one framework's logged completions (dumps): names of the fields, and a remark on the numbers."""

    compared: str
    """Phrase on the compared policies in an audit's first sentence, such as `rescored by two models`."""
    remark: str | None = None
    """Remark on numbers in this format, printed with the audit; None for no remark."""
    fields: Mapping[str, str]
    """Mapping from each column to the field that holds the column's values. A name that ends in `?` marks an optional field."""
    step: str = "step"
    age: tuple[str, str] = ("step", "sampled_at")
    """Names of the fields with the training step and the sampling step of a completion's tokens."""
    reward: str = "reward"
    losses: bool = False
    """True if the field `losses` lists the losses of each token. Tokens without the RL loss are then masked."""
    support: bool = False
    """True if records may have log-probs of the top-k tokens, with their ids in `top_ids`."""
    read: Callable[..., Iterator[DumpRecord]] = read_lines
    """Function that reads a file of this format and yields its records."""

    @property
    def texts(self) -> bool:
        """True if the format stores texts without log-probs, so that the old and the new model have to score them again."""
        return "completion" in self.fields

    def fits(self, names: frozenset[str]) -> bool:
        """Return True if `names`, the fields of a file's first object, include all fields that this format needs."""
        needed = {name for column, name in self.fields.items() if column != "advantage" and "?" not in name}
        return self.read is read_lines and names >= needed


_BEFORE_UPDATE, _RESCORED = "as sampled, compared with the trainer before its update", "rescored by two models"

FORMATS = {
    "verl": Format(compared=_RESCORED, fields={"prompt": "input", "completion": "output", "reward": "score"}),
    "corral": Format(
        compared="compared under the old and the new policy as logged",
        fields={"token": "tokens", "mask": "mask?", "advantage": "advantages", "logp_old": "logp_old", "logp_new": "logp_new",
                "logp_rollout": "logp_rollout?", "entropy": "entropy?"},
        support=True,
    ),
    "prime-rl": Format(
        compared=_BEFORE_UPDATE, remark=SAMPLER_IS_OLD, step="export_step", reward="rewards", losses=True,
        fields={"token": "token_ids", "mask": "loss_mask", "advantage": "advantages", "logp_old": "inference_logprobs",
                "logp_new": "trainer_logprobs", "entropy": "entropy?"},
    ),
    "open-instruct": Format(
        compared=_BEFORE_UPDATE,
        remark=f"{SAMPLER_IS_OLD} Where there are no advantages, every token counts as pushed further out, so that shares of "
        "blocked and missed tokens are upper bounds.",
        age=("trainer_model_step", "model_step"),
        fields={"logp_new": "trainer_logprobs", "logp_old": "vllm_logprobs", "mask": "response_mask", "token": "token_ids?",
                "advantage": "advantages?"},
    ),
    "slime": Format(
        compared=_BEFORE_UPDATE, remark=SAMPLER_IS_OLD, reward="rewards", read=read_samples,
        fields={"token": "tokens", "mask": "loss_masks?", "advantage": "advantages", "logp_old": "rollout_log_probs",
                "logp_new": "log_probs"},
    ),
    "trl": Format(
        compared=_RESCORED, read=_parquet_rows,
        fields={"prompt": "prompt", "completion": "completion", "advantage": "advantage"},
    ),
}  # fmt: skip
"""Formats of logged completions by name. The first format that fits a file's first line is chosen."""


@dataclass(frozen=True)
class Dump:
    """Files of logged completions (a dump), all in one format."""

    path: Path
    format: str
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    """Remarks on the dump's files, printed with the audit."""

    @property
    def form(self) -> Format:
        """Format of the dump's files, as a `Format`."""
        return FORMATS[self.format]

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks on the dump's format and files, printed with the audit."""
        return (*filter(None, [self.form.remark]), *self.notes)

    @property
    def bytes(self) -> int:
        """Total size of the dump's files in bytes, for a progress bar."""
        return sum(path.stat().st_size for path in self.files if path.exists())


def find_dump(path: Path) -> Dump:
    """Find logged completions (a dump) in a file or below a folder. Raises RunError with the known formats if none is found."""

    def files(suffix: str) -> tuple[Path, ...]:
        """List the files with this suffix: `path` itself, or all files below it in natural order. Links are not followed."""
        if path.is_file():
            return (path,) if path.suffix == suffix else ()
        found = (file for file in path.rglob(f"*{suffix}") if file.is_file() and not file.is_symlink())
        return tuple(sorted(found, key=_natural))

    lines, tables, tensors = map(files, (".jsonl", ".parquet", ".pt"))
    if path.is_file() and not (tables or tensors):
        lines = (path,)
    if not lines and tables:
        return Dump(path, "trl", tuple(file for file in tables if file.name.startswith("completions")) or tables)
    state = newest_state(path)
    if not lines and (state is not None or ((path / "config.json").is_file() and not is_run(path))):
        old, new = ["MODEL", *(sorted(path.glob("checkpoint-*"), key=_natural) or [path])][-2:]
        raise RunError(
            f"{path} is the output folder of a trainer: it holds models, and no audit or log of tokens. Compare two models: "
            f"corral audit --old {old} --new {new} --task TASK. To audit the next training run, call "
            f"corral.llm.audit(trainer, out=…) before trainer.train()."
        )
    if not lines and tensors:
        return Dump(path, "slime", tensors)
    if not lines:
        raise NothingYet(
            f"{path} holds nothing to audit: it is no audit (it has no audit.json), no run (it has no config.json) "
            f"and no dump. Known dumps are {_KNOWN}."
        )
    lines = tuple(file for file in lines if "token_exports" in file.parts) or lines
    first = next((record for file in lines for record in read_lines(file, lambda _: None, lambda _: None)), None)
    if first is None:
        raise NothingYet(f"{lines[0]} is empty{'' if len(lines) == 1 else ', and so are the others'}.")
    for name, form in FORMATS.items():
        if form.fits(frozenset(first.content)):
            return _finished_steps(path, lines) if name == "prime-rl" else Dump(path, name, lines)
    raise RunError(
        f"{lines[0]} is in no known format: its fields are {', '.join(sorted(map(ascii, first.content)))[:200] or 'none'}. "
        f"Known are {_KNOWN}; docs/audit.md has a writer of ten lines for any trainer."
    )


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key for paths that orders numbers by value, so that step_9 comes before step_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", str(path))]


def _finished_steps(path: Path, files: tuple[Path, ...]) -> Dump:
    """Select the finished steps of a prime-rl export, each marked by a file named STABLE."""
    runs = {folder for file in files if (folder := file.absolute().parent.parent).name == "token_exports"}
    if len(runs) > 1:
        names = ", ".join(sorted(map(str, runs))[:3])
        raise RunError(f"{path} holds the exports of {len(runs)} runs ({names}): audit one of them.")
    steps = {file.parent for file in files if re.fullmatch(r"step_\d+", file.parent.name)}
    unfinished = {folder for folder in steps if not (folder / "STABLE").exists()}
    kept = tuple(file for file in files if file.parent not in unfinished)
    if not kept:
        raise NothingYet(f"no step in {path} is complete: none has a file STABLE. Is the run writing its first one?")
    note = f"{count(len(unfinished), 'step')} without a file STABLE, still being written, left out."
    return Dump(path, "prime-rl", kept, (note,) if unfinished else ())


def read_completions(
    dump: Dump,
    progress: Progress,
    note: Note,
    places: dict[Path, FilePlace] | None = None,
    *,
    growing: bool = False,
) -> Iterator[pd.DataFrame]:
    """Yield a table of auditable tokens for each completion of a dump. `progress` and `growing` are as in `read_lines`.

    Args:
        note: called with the reason for and the number of whatever is left out.
        places: progress in each file; moved along.
    """
    form, places = dump.form, {} if places is None else places
    assert not form.texts, "texts have to be rescored"
    for path in dump.files:
        for record in form.read(path, progress, note, places.setdefault(path, FilePlace()), growing=growing):
            if len(tokens := auditable(read_columns(record, form), note)):
                yield tokens


def auditable(found: Columns, note: Note) -> pd.DataFrame:
    """Select a completion's unmasked tokens that have finite log-probs and an advantage, as input of `make_tokens`."""
    mask, credited = found["mask"], ~np.isnan(found["advantage"])
    finite = ~(np.isnan(found["logp_old"]) | np.isnan(found["logp_new"]))
    kept = mask & finite & credited
    for reason, lost in (
        ("tokens with a log-prob that is null or not finite", mask & ~finite),
        ("trained tokens without an advantage", mask & finite & ~credited),
        ("completions without a token to audit", np.array([not kept.any()])),
    ):
        if lost.any():
            note(reason, int(lost.sum()))
    columns = {name: value[..., kept] if isinstance(value, np.ndarray) else value for name, value in found.items()}
    old, new, places = columns["logp_old"], columns["logp_new"], np.flatnonzero(kept)
    if (support := columns.pop("support", None)) is not None:
        columns |= dict(zip(("kl", "support_kl_old_new", "tv"), support, strict=True)) | {"support_tv": support[-1]}
    reward = np.full(len(places), np.nan)
    reward[:1] = columns.get("reward", np.nan)
    more = {"sequence": 0, "position": places - places[:1], "reward": reward}
    more["sequence_log_ratio"] = (new - old).sum() / max(len(places), 1)
    return pd.DataFrame({**columns, **more})


def read_texts(dump: Dump, progress: Progress, note: Note) -> Iterator[dict[str, Any]]:
    """Yield completions that were logged as text, without log-probs. `progress` and `note` are as in `read_lines`.

    Each has its `step`, a `prompt` (a text, or messages as pairs of role and content), a `completion` without special tokens,
    and a `reward` or an `advantage`.
    """
    form = dump.form
    prompt, completion, (column, number) = form.fields["prompt"], form.fields["completion"], [*form.fields.items()][-1]
    for path in dump.files:
        for record in form.read(path, progress, note):
            if np.isnan(credit := record.number(number)):
                raise record.error(f"`{number}` is a number. TRL logs `advantage` with log_completions=True.")
            said = _messages(record, completion)
            if not isinstance(said, str):
                said = "".join(content for role, content in said if role == "assistant")
            yield {"step": record.whole("step", 0), "prompt": _messages(record, prompt), "completion": said, column: credit}


def _messages(record: DumpRecord, name: str) -> str | tuple[tuple[str, str], ...]:
    """Read a field that holds a text, or a conversation as a list of messages."""
    if not isinstance(record.content.get(name), list):
        return record.text(name)
    messages = (DumpRecord(item, f"{record.where}, `{name}`") for item in record.content[name])
    return tuple((message.text("role"), message.text("content")) for message in messages)
