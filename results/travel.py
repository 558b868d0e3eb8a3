"""Carry a study to a machine without a network: a pinned commit and its files, in digested loads of a limited size.

    python -m results.travel --out loads --mib 58 vllm=archives/vllm models=runs/pretrained packages=wheels
    python receive.py load-00 there        on the other machine, once per load; receive.py lies in every load

results/there.sh has what the other machine runs: receive loads, start studies, pack rows.

Each item is a file or folder and arrives in `there/NAME`; the commit arrives in `there/code` and its name in `there/COMMIT`.
An item is unpacked once its last piece is there and its digest is right. Loads may arrive in any order, and twice. Study
drivers append rows as runs end, so that a study goes on where it stopped: carry its rows back often, and `there/COMMIT` with
every row (`python -m results.study --commit`).
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Literal

from results.packed import FOLDER

MIB = 1 << 20
MODES: dict[bool, Literal["w:", "w:gz"]] = {False: "w:", True: "w:gz"}
"""Of a tar file of one file, or of a folder."""


def archive(source: Path) -> Path:
    """A temporary tar file of a file or folder, whose members lie at the top; folders are compressed."""
    with tempfile.NamedTemporaryFile(delete=False) as place, tarfile.open(fileobj=place, mode=MODES[source.is_dir()]) as tar:
        for member in sorted(source.iterdir()) if source.is_dir() else [source]:
            tar.add(member, member.name)
    return Path(place.name)


def checkout(commit: str) -> tuple[str, Path]:
    """The full name of a commit, and a temporary tar file of its tree."""
    git = partial(subprocess.run, check=True, cwd=FOLDER.parent, stdout=subprocess.PIPE)
    full = git(["git", "rev-parse", "--verify", f"{commit}^{{commit}}"], text=True).stdout.strip()
    with tempfile.NamedTemporaryFile(delete=False) as place:
        place.write(git(["git", "archive", "--format=tar.gz", full]).stdout)
    return full, Path(place.name)


def pieces(file: Path, room: int, size: int) -> Iterator[bytes]:
    """Contents of a file in pieces: the first has at most `room` bytes, all others at most `size`."""
    with file.open("rb") as source:
        while piece := source.read(room):
            yield piece
            room = size


def pack(items: dict[str, Path], out: Path, mib: int, commit: str = "HEAD") -> list[Path]:
    """Write loads of at most `mib` MiB into a new folder and return their folders."""
    if out.exists():
        raise SystemExit(f"travel: {out} exists already; choose another --out or remove it.")
    if missing := [f"{name}={path}" for name, path in items.items() if not path.exists()]:
        raise SystemExit(f"travel: there is nothing at {', '.join(missing)}.")
    full, tree = checkout(commit)
    archives = {"code": tree} | {name: archive(path) for name, path in items.items()}
    size, used, number, loads = mib * MIB, 0, 0, [out / "load-00"]
    manifest: dict[str, dict[str, object]] = {}
    loads[0].mkdir(parents=True)
    for name, file in archives.items():
        names = []
        for piece in pieces(file, size - used, size):
            if used + len(piece) > size:
                loads.append(out / f"load-{len(loads):02}")
                loads[-1].mkdir()
                used = 0
            names.append(f"piece-{number:03}")
            (loads[-1] / names[-1]).write_bytes(piece)
            number, used = number + 1, (used + len(piece)) % size
            if not used:
                used = size
        manifest[name] = {"pieces": names, "sha256": digest(file)}
        file.unlink()
    for load in loads:
        (load / "manifest.json").write_text(json.dumps({"commit": full, "items": manifest}))
        shutil.copyfile(FOLDER / "receive.py", load / "receive.py")
    return loads


def digest(file: Path) -> str:
    """SHA-256 of a file."""
    with file.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("items", nargs="+", metavar="NAME=PATH", help="files and folders that travel with the commit")
    parser.add_argument("--out", type=Path, required=True, help="a new folder for the loads")
    parser.add_argument("--mib", type=int, default=58, help="largest size of a load")
    parser.add_argument("--commit", default="HEAD")
    given = parser.parse_args()
    items = {name: Path(path) for name, _, path in (item.partition("=") for item in given.items)}
    for load in pack(items, given.out, given.mib, given.commit):
        print(load, f"{sum(piece.stat().st_size for piece in load.iterdir()) / MIB:.1f} MiB")


if __name__ == "__main__":
    main()
