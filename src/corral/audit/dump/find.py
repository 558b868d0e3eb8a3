"""A file or folder that an engine wrote → its format, and its files in the order of training."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from corral.audit.dump.completion import LoggedCompletion
from corral.audit.dump.formats import FORMATS, SAMPLER_IS_OLD, Format
from corral.audit.dump.lines import FilePlace, read_lines
from corral.audit.dump.slime import read_slime
from corral.audit.errors import NothingYet
from corral.validate import RunError

_KNOWN = """corral's own JSON lines (tokens, advantages, logp_old, logp_new), prime-rl's token_exports, open-instruct's \
trainer_logprobs, slime's debug train data (.pt), verl's rollout_data_dir and TRL's completions"""

_TEXTS = frozenset({"input", "output", "score"})


@dataclass(frozen=True)
class Dump:
    """Files of one format."""

    path: Path
    format: str
    files: tuple[Path, ...]
    compared: str
    remarks: tuple[str, ...] = ()
    """What a reader of the audit has to know."""

    @property
    def bytes(self) -> int:
        """Of all files, for a progress bar."""
        return sum(path.stat().st_size for path in self.files if path.exists())

    @property
    def texts(self) -> bool:
        """Whether it holds texts and scores alone, which two models have to rescore."""
        return self.format in ("verl", "trl")


def find_dump(path: Path) -> Dump:
    """What is in a file or below a folder; a RunError that lists what is known, if it is none of that."""
    lines, tables, tensors = (_files(path, suffix) for suffix in (".jsonl", ".parquet", ".pt"))
    if path.is_file() and not (tables or tensors):
        lines = (path,)
    if not lines and tables:
        return Dump(path, "trl", _only(tables, lambda file: file.name.startswith("completions")), "rescored by two models")
    if not lines and tensors:
        return Dump(path, "slime", tensors, "as sampled, compared with the trainer before its update", (SAMPLER_IS_OLD,))
    if not lines:
        raise NothingYet(
            f"{path} holds nothing to audit: it is no audit (it has no audit.json), no run (it has no config.json) "
            f"and no dump. Known dumps are {_KNOWN}."
        )
    lines = _only(lines, lambda file: "token_exports" in file.parts)
    fields = _first_fields(lines)
    if fields >= _TEXTS:
        return Dump(path, "verl", lines, "rescored by two models")
    for form in FORMATS:
        if fields >= form.fields:
            return _stable(path, form, lines) if form.name == "prime-rl" else _dump(path, form, lines)
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
    """Every completion of a dump, one at a time; `progress`, `note` and `growing` as in `read_lines`.

    Args:
        places: how far each file was read already; moved along.
    """
    form = next((form for form in FORMATS if form.name == dump.format), None)
    places = {} if places is None else places
    for path in dump.files:
        place = places.setdefault(path, FilePlace())
        if form is not None:
            for record in read_lines(path, progress, note, place, growing=growing):
                yield from form.read(record)
        elif not place.bytes:
            before, place.size = place.size, path.stat().st_size
            if growing and before != place.size:
                continue
            yield from read_slime(path)
            progress(place.size)
            place.bytes = place.size


def _dump(path: Path, form: Format, files: tuple[Path, ...], *remarks: str) -> Dump:
    own = () if form.remark is None else (form.remark,)
    return Dump(path, form.name, files, form.compared, (*own, *remarks))


def _stable(path: Path, form: Format, files: tuple[Path, ...]) -> Dump:
    """prime-rl marks a step that all ranks have written by a file STABLE; a run's id may stand above its exports."""
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
    remark = f"{steps} step{'s' if steps > 1 else ''} without a file STABLE, still being written, left out."
    return _dump(path, form, kept, *([remark] if open_steps else []))


def _first_fields(files: tuple[Path, ...]) -> frozenset[str]:
    """Names of the fields of the first object there is."""
    for path in files:
        for record in read_lines(path, lambda _: None, lambda _: None):
            return frozenset(record.content)
    raise NothingYet(f"{files[0]} is empty{'' if len(files) == 1 else ', and so are the others'}.")


def _files(path: Path, suffix: str) -> tuple[Path, ...]:
    """The file itself, or all below a folder in natural order; links are not followed."""
    if path.is_file():
        return (path,) if path.suffix == suffix else ()
    found = (file for file in path.rglob(f"*{suffix}") if file.is_file() and not file.is_symlink())
    return tuple(sorted(found, key=_natural))


def _only(files: tuple[Path, ...], wanted: Callable[[Path], bool]) -> tuple[Path, ...]:
    """Those that are wanted if there are any, else all."""
    return tuple(file for file in files if wanted(file)) or files


def _natural(path: Path) -> list[tuple[int, str]]:
    """step_9 before step_10."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", str(path))]
