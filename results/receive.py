"""Unpack what `results.travel` packed: `python receive.py LOAD THERE`, once per load; needs Python alone."""

import hashlib
import json
import shutil
import sys
import tarfile
from pathlib import Path


def receive(load: Path, there: Path) -> list[str]:
    """Keep a load's pieces, unpack every item that is complete, and return the names of items that are not."""
    kept = there / "pieces"
    kept.mkdir(parents=True, exist_ok=True)
    for piece in load.glob("piece-*"):
        shutil.copyfile(piece, kept / piece.name)
    manifest, waiting = json.loads((load / "manifest.json").read_text()), []
    (there / "COMMIT").write_text(manifest["commit"][:8])
    for name, item in manifest["items"].items():
        if (there / name).exists():
            continue
        if not all((kept / piece).exists() for piece in item["pieces"]):
            waiting.append(name)
            continue
        whole, found = kept / f"{name}.tar", hashlib.sha256()
        with whole.open("wb") as out:
            for piece in item["pieces"]:
                found.update(part := (kept / piece).read_bytes())
                out.write(part)
        if found.hexdigest() != item["sha256"]:
            raise SystemExit(f"receive: {name} is damaged; send its pieces again: {', '.join(item['pieces'])}.")
        with tarfile.open(whole) as tar:
            tar.extractall(there / f".{name}", filter="data")
        (there / f".{name}").replace(there / name)
        whole.unlink()
    return waiting


if __name__ == "__main__":
    missing = receive(Path(sys.argv[1]), Path(sys.argv[2]))
    print(f"waiting for more of {', '.join(missing)}" if missing else "everything is there")
