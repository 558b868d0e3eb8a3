"""Logged completions of any engine: find the files, recognise their format, read records."""

import json
import pickle
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from corral.divergence import categorical_kl, categorical_tv
from corral.lab.audit.folder import NothingYet
from corral.validate import RunError

_LARGEST_ID = 2**31 - 1
_LARGEST = 1e100
_LOWEST_LOGP = -1e4
"""Smallest possible log-probability of a softmax: engines write smaller numbers for −inf."""

_ROUNDING = 1e-3
"""Largest log-probability above 0 that is accepted as a rounding error."""


_Column = TypeVar("_Column")


class DumpRecord:
    """Fields of one completion. Numbers that are null, not finite or beyond 1e100 become NaN, and their tokens are left out."""

    def __init__(self, content: Any, where: str) -> None:
        self.where = where
        if not isinstance(content, dict):
            raise self.error(f"should be a JSON object with the fields of one completion; it is {_kind(content)}.")
        self.content: Mapping[str, Any] = content

    def error(self, sentence: str) -> RunError:
        """Make an error that names the place and the fault."""
        return RunError(f"{self.where}: {sentence}")

    def has(self, name: str) -> bool:
        """Return True if a field exists and is not null."""
        return self.content.get(name) is not None

    def numbers(self, name: str, length: int | None = None) -> NDArray[np.float64]:
        """A list of numbers, with NaN for null, NaN and numbers too large for a sum."""
        values = self._list(name, length)
        kinds = set(map(type, values))
        if not kinds <= {float, int, type(None)}:
            self._refuse_item(name, values, (float, int, type(None)), "numbers")
        if type(None) in kinds:
            values = [np.nan if value is None else value for value in values]
        try:
            found = np.array(values, dtype=np.float64)
        except OverflowError:
            raise self.error(f"`{name}` holds an integer that no floating-point number can hold.") from None
        found[np.abs(found) > _LARGEST] = np.nan
        return found

    def log_probs(self, name: str, length: int | None = None) -> NDArray[np.float64]:
        """Log-probabilities, at most 0 up to rounding; NaN for values that stand for −inf."""
        found = self.numbers(name, length)
        found[found < _LOWEST_LOGP] = np.nan
        above = np.flatnonzero(found > _ROUNDING)
        if len(above):
            raise self.error(
                f"`{name}` holds {found[above[0]]:.4g} at token {above[0]}, and a log-probability is at most 0. Are these "
                f"logits or probabilities?"
            )
        return np.minimum(found, 0.0)

    def ids(self, name: str, length: int | None = None) -> NDArray[np.int64]:
        """Token ids."""
        values = self._list(name, length)
        if not set(map(type, values)) <= {int}:
            self._refuse_item(name, values, (int,), "token ids, whole numbers")
        wrong = next((value for value in values if not -1 <= value <= _LARGEST_ID), None)
        if wrong is not None:
            raise self.error(f"`{name}` holds {_short(wrong)}, which is no token id.")
        return np.array(values, dtype=np.int64)

    def flags(self, name: str, length: int | None = None) -> NDArray[np.bool_]:
        """A mask of true and false or 1 and 0; null is false."""
        values = self._list(name, length)
        wrong = [value for value in values if value not in (0, 1, None)]
        if wrong:
            raise self.error(f"`{name}` holds {_short(wrong[0])}; a mask holds true and false, or 1 and 0.")
        return np.array([bool(value) for value in values], dtype=np.bool_)

    def optional(self, read: Callable[[str, int], _Column], name: str, length: int) -> _Column | None:
        """A column read by a method above, or None if the field is missing or null."""
        return read(name, length) if self.has(name) else None

    def rows(self, name: str, length: int | None = None) -> list["DumpRecord"]:
        """A list of objects as records."""
        return [DumpRecord(item, f"{self.where}, `{name}`") for item in self._list(name, length)]

    def table(self, name: str, length: int) -> NDArray[np.float64]:
        """A list of equally long lists of numbers, [length, K]."""
        lines = self._list(name, length)
        widths = {len(line) if isinstance(line, list) else 0 for line in lines}
        if len(widths) != 1 or 0 in widths:
            raise self.error(f"`{name}` should hold one list per token, all equally long.")
        flat = DumpRecord({name: [value for line in lines for value in line]}, self.where)
        return flat.numbers(name).reshape(length, -1)

    def number(self, name: str) -> float | None:
        """A number, or None if it is missing, null or not finite."""
        value = self.content.get(name)
        if value is None:
            return None
        found = DumpRecord({name: [value]}, self.where).numbers(name)[0]
        return None if np.isnan(found) else float(found)

    def whole(self, name: str, default: int | None = None) -> int | None:
        """An integer of at most 18 digits."""
        value = self.content.get(name)
        if value is None:
            return default
        if type(value) is not int or abs(value) >= 10**18:
            raise self.error(f"`{name}` is a whole number; got {_short(value)}.")
        return value

    def text(self, name: str) -> str:
        """A text."""
        value = self.content.get(name)
        if not isinstance(value, str):
            raise self.error(f"`{name}` is a text; got {_short(value)}.")
        return value

    def _list(self, name: str, length: int | None) -> list[Any]:
        value = self.content.get(name)
        if not isinstance(value, list):
            found = "it is missing" if name not in self.content else f"it is {_kind(value)}"
            raise self.error(f"`{name}` should be a list with one entry per token; {found}.")
        if length is not None and len(value) != length:
            raise self.error(f"`{name}` has {len(value)} entries and the completion {length} tokens. Was one shifted twice?")
        return value

    def _refuse_item(self, name: str, values: list[Any], allowed: tuple[type, ...], what: str) -> None:
        place = next(index for index, value in enumerate(values) if type(value) not in allowed)
        raise self.error(f"`{name}` should hold {what}; at token {place} it holds {_short(values[place])}.")


def _kind(value: Any) -> str:
    kinds = {dict: "an object", list: "a list", str: "a text", bool: "true or false", int: "a number", float: "a number"}
    return kinds.get(type(value), "null")


def _short(value: Any) -> str:
    """A value from a file, shortened and safe for a terminal."""
    if isinstance(value, dict | list):
        return _kind(value)
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**30 else "a number with more than 30 digits"
    return text if len(text) <= 40 else f"{text[:40]}…"


Floats = NDArray[np.float64]

_TAIL_FLOOR = 1e-8
"""Smallest tail mass of both policies when it is computed as 1 − Σ p: smaller values are rounding errors."""

_LARGEST_SUM = 1.05
"""Largest sum of probabilities that is accepted as a rounding error of half precision."""


@dataclass(frozen=True, eq=False)
class LoggedCompletion:
    """Tokens of one completion in order: all logged tokens, or the tokens returned by `auditable`."""

    step: int
    tokens: NDArray[np.int64]
    advantages: Floats
    logp_old: Floats
    logp_new: Floats
    logp_rollout: Floats | None = None
    """Log-probs of the sampler; NaN for values that it did not report."""
    support: Floats | None = None
    """KL(new‖old), KL(old‖new) and TV on the logged support and its tail, [3 T]: lower bounds of the true divergences."""
    entropy: Floats | None = None
    reward: float | None = None
    age: int | None = None
    """Number of steps between sampling and training."""
    positions: NDArray[np.int64] | None = None
    """Positions of these tokens among all logged tokens; None if no token was left out."""
    left_out: dict[str, int] = field(default_factory=dict)
    """Number of unmasked tokens that were left out, by reason."""

    def auditable(self, mask: NDArray[np.bool_]) -> "LoggedCompletion":
        """The unmasked tokens with finite log-probs and an advantage. Masked tokens may hold any values."""
        finite = ~(np.isnan(self.logp_old) | np.isnan(self.logp_new))
        credited = ~np.isnan(self.advantages)
        kept = mask & finite & credited
        counts = {
            "tokens with a log-prob that is null or not finite": int((mask & ~finite).sum()),
            "trained tokens without an advantage": int((mask & finite & ~credited).sum()),
        }
        columns: dict[str, Any] = {
            name: column[..., kept] for name, column in vars(self).items() if isinstance(column, np.ndarray)
        }
        left_out = {reason: count for reason, count in counts.items() if count}
        return replace(self, **columns, positions=np.flatnonzero(kept), left_out=left_out)


def read_support(
    record: DumpRecord, tokens: NDArray[np.int64], mask: NDArray[np.bool_], logp_old: Floats, logp_new: Floats
) -> Floats:
    """KL(new‖old), KL(old‖new) and TV on the `top_ids` of a record, the sampled token and everything else, [3 T].

    Both policies' log-probs are of the full softmax. A token that one of them has no number for counts as part of the tail;
    what is masked may hold anything.
    """
    length = len(tokens)
    used = mask & ~np.isnan(logp_old) & ~np.isnan(logp_new)
    ids = record.table("top_ids", length)
    given = {name: record.table(name, length) for name in ("top_logp_old", "top_logp_new")}
    for name, logp in given.items():
        if logp.shape != ids.shape:
            raise record.error(f"`{name}` has {logp.shape[-1]} entries per token and `top_ids` {ids.shape[-1]}.")
    unknown = np.isnan(given["top_logp_old"]) | np.isnan(given["top_logp_new"]) | (ids == tokens[:, None]) | ~used[:, None]
    old, new = (
        _with_tail(record, name, np.where(unknown, -np.inf, given[name]), np.where(used, sampled, 0.0))
        for name, sampled in (("top_logp_old", logp_old), ("top_logp_new", logp_new))
    )
    return torch.stack([categorical_kl(new, old), categorical_kl(old, new), categorical_tv(new, old)]).numpy()


def _with_tail(record: DumpRecord, name: str, logp: Floats, sampled: Floats) -> torch.Tensor:
    """Whole distributions [T, K + 2]: the sampled token, the support and the tail mass."""
    known = np.concatenate([sampled[:, None], logp], axis=1)
    mass = np.exp(np.minimum(known, 1.0)).sum(-1)
    over = np.flatnonzero(mass > _LARGEST_SUM)
    if len(over):
        raise record.error(
            f"`{name}` and the sampled token sum to {mass[over[0]]:.3g} at token {over[0]}; log-probs of the full softmax sum "
            f"to 1 at most. Is an id repeated in `top_ids`?"
        )
    tail = np.log(np.maximum(1 - mass, _TAIL_FLOOR))
    return torch.from_numpy(np.concatenate([known, tail[:, None]], axis=1)).log_softmax(-1)


_LONGEST = 1 << 28
"""Largest size of a line in bytes: 256 MB, about a hundred times the longest completion of today."""


@dataclass
class FilePlace:
    """Progress of reading a file."""

    bytes: int = 0
    lines: int = 0
    size: int = -1
    """Last observed size of a file that is read whole: the file is complete once its size stays unchanged."""


def read_lines(
    path: Path,
    progress: Callable[[int], object],
    note: Callable[[str], object],
    place: FilePlace | None = None,
    *,
    growing: bool = False,
) -> Iterator[DumpRecord]:
    """Each object of a JSON-lines file.

    Args:
        progress: told how many bytes a line had.
        note: told, by name, of what was left out: a last line that is cut off, as in a file that is still being written.
        place: where to go on; it is moved along. None: at the beginning.
        growing: whether a last line without its end is left for the next time.
    """
    place = FilePlace() if place is None else place
    for data in _raw_lines(path, place.bytes):
        if growing and not data.endswith(b"\n"):
            return
        place.bytes, place.lines = place.bytes + len(data), place.lines + 1
        progress(len(data))
        if not data.strip():
            continue
        where = f"{path}, line {place.lines}"
        try:
            content = json.loads(data)
        except RecursionError:
            raise RunError(f"{where}: is nested too deeply to be a completion.") from None
        except ValueError as error:
            if not data.endswith(b"\n"):
                note("unfinished last lines")
                return
            raise RunError(f"{where}: is no JSON ({_reason(error)}).") from None
        yield DumpRecord(content, where)


def _raw_lines(path: Path, start: int) -> Iterator[bytes]:
    try:
        with path.open("rb") as file:
            file.seek(start)
            while data := file.readline(_LONGEST + 1):
                if len(data) > _LONGEST:
                    raise RunError(f"{path} has a line of more than {_LONGEST >> 20} MB; one completion has a line.")
                yield data
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}.") from error


def _reason(error: ValueError) -> str:
    if isinstance(error, UnicodeDecodeError):
        return "it is not UTF-8"
    return str(error) if isinstance(error, json.JSONDecodeError) else "a number has too many digits"


def _read_own(record: DumpRecord) -> LoggedCompletion:
    """Read a line of corral's own schema; docs/audit.md#the-format describes every field."""
    tokens = record.ids("tokens")
    length = len(tokens)
    mask = record.flags("mask", length) if record.has("mask") else np.ones(length, dtype=np.bool_)
    logp_old, logp_new = (record.log_probs(name, length) for name in ("logp_old", "logp_new"))
    step, sampled_at = record.whole("step", 0) or 0, record.whole("sampled_at")
    return LoggedCompletion(
        step=step,
        tokens=tokens,
        advantages=_advantages(record, length),
        logp_old=logp_old,
        logp_new=logp_new,
        logp_rollout=record.optional(record.log_probs, "logp_rollout", length),
        support=read_support(record, tokens, mask, logp_old, logp_new) if record.has("top_ids") and length else None,
        entropy=record.optional(record.numbers, "entropy", length),
        reward=record.number("reward"),
        age=None if sampled_at is None else step - sampled_at,
    ).auditable(mask)


def _advantages(record: DumpRecord, length: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Advantages per token, from a list or from a number for all tokens."""
    if isinstance(record.content.get("advantages"), list):
        return record.numbers("advantages", length)
    value = record.number("advantages")
    if value is None:
        raise record.error("`advantages` should be a number, or a list with one per token.")
    return np.full(length, value)


def _read_prime_rl(record: DumpRecord) -> LoggedCompletion:
    """Read a line of `token_exports/step_*/rank_*.jsonl`: old is the sampler, new the trainer before its update."""
    tokens = record.ids("token_ids")
    length = len(tokens)
    mask = record.flags("loss_mask", length)
    if record.has("losses"):  # other losses than RL's share the mask: of this one alone there are advantages
        channels = [entry.content.get("rl") for entry in record.rows("losses", length)]
        mask &= np.array([isinstance(channel, dict) and channel.get("mask") is True for channel in channels], dtype=np.bool_)
    rewards = record.numbers("rewards", length)[mask] if record.has("rewards") else np.empty(0)
    rewards = rewards[~np.isnan(rewards)]
    step = record.whole("export_step", record.whole("step", 0))
    return LoggedCompletion(
        step=step or 0,
        tokens=tokens,
        advantages=record.numbers("advantages", length),
        logp_old=record.log_probs("inference_logprobs", length),
        logp_new=record.log_probs("trainer_logprobs", length),
        entropy=record.optional(record.numbers, "entropy", length),
        reward=float(rewards[0]) if len(rewards) else None,
    ).auditable(mask)


def _read_open_instruct(record: DumpRecord) -> LoggedCompletion:
    """Read a line of `*_trainer_logprobs_step*.jsonl`: flat packed completions; old is the sampler (vLLM), new the trainer.

    Where it has no advantages, each token's is taken to push it further out, the most that a rule can block.
    """
    logp_new = record.log_probs("trainer_logprobs")
    length = len(logp_new)
    logp_old = record.log_probs("vllm_logprobs", length)
    trained_at, sampled_at = record.whole("trainer_model_step"), record.whole("model_step")
    return LoggedCompletion(
        step=record.whole("step", 0) or 0,
        tokens=record.ids("token_ids", length) if record.has("token_ids") else np.zeros(length, dtype=np.int64),
        advantages=record.numbers("advantages", length) if record.has("advantages") else np.sign(logp_new - logp_old),
        logp_old=logp_old,
        logp_new=logp_new,
        age=None if trained_at is None or sampled_at is None else trained_at - sampled_at,
    ).auditable(record.flags("response_mask", length))


_FIELDS = ("tokens", "response_lengths", "loss_masks", "advantages", "log_probs", "rollout_log_probs")


def read_slime(path: Path) -> Iterator[LoggedCompletion]:
    """Completions of a slime file in the flat form (`samples`) or the older form (`rollout_data`). No code in it is run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = "it holds objects that only code of its own could make" if "Unsupported" in str(error) else "it is damaged"
        raise RunError(f"{path} cannot be loaded as tensors and plain values: {reason}.") from None
    record = DumpRecord(content, str(path))
    step = record.whole("rollout_id", 0) or 0
    for number, sample in enumerate(_samples(record)):
        yield _read_sample(DumpRecord(sample, f"{record.where}, sample {number}"), step)


def _samples(record: DumpRecord) -> list[Any]:
    """A mapping for each completion of a file."""
    samples = record.content.get("samples")
    if isinstance(samples, list):
        return samples
    data = record.content.get("rollout_data")
    if not isinstance(data, Mapping):
        raise record.error("is no file of --save-debug-train-data: it has neither `samples` nor `rollout_data`.")
    missing = [name for name in _FIELDS if not isinstance(data.get(name), list | tuple)]
    if missing:
        raise record.error(f"has no list `{missing[0]}` in `rollout_data`.")
    counts = {len(data[name]) for name in _FIELDS}
    if len(counts) > 1:
        raise record.error("has fields of different lengths in `rollout_data`.")
    return [dict(zip(_FIELDS, values, strict=True)) for values in zip(*(data[name] for name in _FIELDS), strict=True)]


def _read_sample(sample: DumpRecord, step: int) -> LoggedCompletion:
    """Read one sample, whose tokens include the prompt; all other fields cover the response only."""
    plain = {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in sample.content.items()
        if name in (*_FIELDS, "rewards")
    }
    record = DumpRecord(plain, sample.where)
    length = record.whole("response_lengths")
    ids = record.ids("tokens")
    if length is None or not 0 <= length <= len(ids):
        raise record.error(f"`response_lengths` should be between 0 and {len(ids)}, the number of tokens.")
    return LoggedCompletion(
        step=step,
        tokens=ids[len(ids) - length :],
        advantages=record.numbers("advantages", length),
        logp_old=record.log_probs("rollout_log_probs", length),
        logp_new=record.log_probs("log_probs", length),
        reward=record.number("rewards"),
    ).auditable(record.flags("loss_masks", length) if record.has("loss_masks") else np.ones(length, dtype=np.bool_))


_KNOWN = """corral's own JSON lines (tokens, advantages, logp_old, logp_new), prime-rl's token_exports, open-instruct's \
trainer_logprobs, slime's debug train data (.pt), verl's rollout_data_dir and TRL's completions"""

SAMPLER_IS_OLD = (
    "The old policy here is the sampler, as the engine logs no other: a distance is staleness and the mismatch between sampler "
    "and trainer together, before the update."
)


@dataclass(frozen=True)
class Format:
    """A dump format: its identifying fields and its line reader."""

    compared: str
    """Names of the old and the new policy, for the first sentence of an audit."""
    remarks: tuple[str, ...] = ()
    """Remarks about these numbers, for a reader of the audit."""
    fields: frozenset[str] = frozenset()
    """Identifying fields: a file of JSON lines has this format if its first line has all of them. Empty for other files."""
    read: Callable[[DumpRecord], LoggedCompletion] | None = None
    """Reader of a line; None for files of other kinds and for texts."""


_BEFORE_UPDATE, _RESCORED = "as sampled, compared with the trainer before its update", "rescored by two models"

FORMATS = {
    "verl": Format(_RESCORED, fields=frozenset({"input", "output", "score"})),
    "corral": Format(
        "compared under the old and the new policy as logged",
        fields=frozenset({"tokens", "logp_old", "logp_new"}),
        read=_read_own,
    ),
    "prime-rl": Format(
        _BEFORE_UPDATE,
        (SAMPLER_IS_OLD,),
        frozenset({"token_ids", "loss_mask", "inference_logprobs", "trainer_logprobs"}),
        _read_prime_rl,
    ),
    "open-instruct": Format(
        _BEFORE_UPDATE,
        (
            f"{SAMPLER_IS_OLD} Where there are no advantages, every token counts as pushed further out, so that shares of "
            "blocked and missed tokens are upper bounds.",
        ),
        frozenset({"trainer_logprobs", "vllm_logprobs", "response_mask"}),
        _read_open_instruct,
    ),
    "slime": Format(_BEFORE_UPDATE, (SAMPLER_IS_OLD,)),
    "trl": Format(_RESCORED),
}
"""Formats by name; the first format whose fields occur in a file's first line is chosen."""


@dataclass(frozen=True)
class Dump:
    """The files of a dump, all in one format."""

    path: Path
    format: str
    files: tuple[Path, ...]
    notes: tuple[str, ...] = ()
    """Remarks about these files, for a reader of the audit."""

    @property
    def compared(self) -> str:
        """Names of the old and the new policy."""
        return FORMATS[self.format].compared

    @property
    def remarks(self) -> tuple[str, ...]:
        """Remarks for a reader of the audit."""
        return (*FORMATS[self.format].remarks, *self.notes)

    @property
    def bytes(self) -> int:
        """Size of all files, for a progress bar."""
        return sum(path.stat().st_size for path in self.files if path.exists())

    @property
    def texts(self) -> bool:
        """True for texts and scores without log-probs, which two models have to rescore."""
        return self.compared == _RESCORED


def find_dump(path: Path) -> Dump:
    """Find a dump in a file or below a folder; a RunError lists the supported formats if none is found."""
    lines, tables, tensors = (_files(path, suffix) for suffix in (".jsonl", ".parquet", ".pt"))
    if path.is_file() and not (tables or tensors):
        lines = (path,)
    if not lines and tables:
        return Dump(path, "trl", _only(tables, lambda file: file.name.startswith("completions")))
    if not lines and tensors:
        return Dump(path, "slime", tensors)
    if not lines:
        raise NothingYet(
            f"{path} holds nothing to audit: it is no audit (it has no audit.json), no run (it has no config.json) "
            f"and no dump. Known dumps are {_KNOWN}."
        )
    lines = _only(lines, lambda file: "token_exports" in file.parts)
    fields = _first_fields(lines)
    for name, form in FORMATS.items():
        if form.fields and fields >= form.fields:
            return _stable(path, lines) if name == "prime-rl" else Dump(path, name, lines)
    raise RunError(
        f"{lines[0]} is in no known format: its fields are {', '.join(sorted(map(ascii, fields)))[:200] or 'none'}. "
        f"Known are {_KNOWN}; docs/audit.md has a writer of ten lines for any trainer."
    )


def read_completions(
    dump: Dump,
    progress: Callable[[int], object],
    note: Callable[[str], object],
    places: dict[Path, FilePlace] | None = None,
    *,
    growing: bool = False,
) -> Iterator[LoggedCompletion]:
    """Completions of a dump, read one at a time; `progress`, `note` and `growing` have the meaning of `read_lines`.

    Args:
        places: how far each file was read already; moved along.
    """
    read = FORMATS[dump.format].read
    places = {} if places is None else places
    for path in dump.files:
        place = places.setdefault(path, FilePlace())
        if read is not None:
            yield from map(read, read_lines(path, progress, note, place, growing=growing))
        elif not place.bytes:
            before, place.size = place.size, path.stat().st_size
            if growing and before != place.size:
                continue
            yield from read_slime(path)
            progress(place.size)
            place.bytes = place.size


def _stable(path: Path, files: tuple[Path, ...]) -> Dump:
    """Completed steps of prime-rl, which are marked by a file STABLE; exports may lie below a folder with the run's id."""
    runs = {folder for file in files if (folder := file.absolute().parent.parent).name == "token_exports"}
    if len(runs) > 1:
        names = ", ".join(sorted(map(str, runs))[:3])
        raise RunError(f"{path} holds the exports of {len(runs)} runs ({names}): audit one of them.")
    marked = [file for file in files if re.fullmatch(r"step_\d+", file.parent.name)]
    open_steps = {file.parent for file in marked if not (file.parent / "STABLE").exists()}
    kept = tuple(file for file in files if file.parent not in open_steps)
    if not kept:
        raise NothingYet(f"no step in {path} is complete: none has a file STABLE. Is the run writing its first one?")
    steps = len(open_steps)
    note = f"{steps} step{'s' if steps > 1 else ''} without a file STABLE, still being written, left out."
    return Dump(path, "prime-rl", kept, (note,) if steps else ())


def _first_fields(files: tuple[Path, ...]) -> frozenset[str]:
    """Names of the fields of a dump's first object."""
    for path in files:
        for record in read_lines(path, lambda _: None, lambda _: None):
            return frozenset(record.content)
    raise NothingYet(f"{files[0]} is empty{'' if len(files) == 1 else ', and so are the others'}.")


def _files(path: Path, suffix: str) -> tuple[Path, ...]:
    """The file itself, or all files below a folder in natural order; links are not followed."""
    if path.is_file():
        return (path,) if path.suffix == suffix else ()
    found = (file for file in path.rglob(f"*{suffix}") if file.is_file() and not file.is_symlink())
    return tuple(sorted(found, key=_natural))


def _only(files: tuple[Path, ...], wanted: Callable[[Path], bool]) -> tuple[Path, ...]:
    """Files that match the pattern, or all files if none matches."""
    return tuple(file for file in files if wanted(file)) or files


def _natural(path: Path) -> list[tuple[int, str]]:
    """A sort key that puts step_9 before step_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", str(path))]


_ROWS = 256
"""Rows of a parquet file read at a time."""


@dataclass(frozen=True)
class TextCompletion:
    """A completion logged as text, without special tokens and without a mask of the sampled tokens."""

    step: int
    prompt: str | tuple[tuple[str, str], ...]
    """A text, or messages as pairs of role and content."""
    completion: str
    reward: float | None
    advantage: float | None
    """Advantage; None to compute it from the rewards of completions with an equal prompt and step."""


def read_texts(dump: Dump, progress: Callable[[int], object], note: Callable[[str], object]) -> Iterator[TextCompletion]:
    """Completions of a dump of texts, read one at a time; `progress` and `note` have the meaning of `read_lines`."""
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
    if not isinstance(record.content.get(name), list):
        return record.text(name)
    return tuple((message.text("role"), message.text("content")) for message in record.rows(name))


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
