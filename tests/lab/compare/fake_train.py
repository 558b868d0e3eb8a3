"""Stands in for `corral train` in tests of schedules: the same files and statuses, in milliseconds, and it can go wrong.

What it does depends on its objective: `fine` learns, `slow` learns until it is asked to stop, `crash` ends with an exception
until there is a file `mended` beside its folder, `refused` ends before it has a folder, `hang` says nothing and obeys nobody,
`killed` is killed, `collapse` is stopped by its guard.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from types import FrameType

STEPS = 4


def main(words: list[str]) -> int:
    given = dict(word[2:].split("=", 1) for word in words[1:] if word.startswith("--") and "=" in word)
    folder = Path(given.get("out") or given["resume"])
    if "resume" in given:
        given = json.loads((folder / "config.json").read_text())["settings"]
    what, mended = given["objective"], (folder.parent / "mended").exists()
    sys.stdout.write(f"{what} begins in {folder.name}, threads {os.environ.get('OMP_NUM_THREADS')}\n")
    sys.stdout.flush()
    if what == "refused" and not mended:
        sys.stdout.write("corral: there is no such thing.\n")
        return 1
    if not (folder / "config.json").exists():
        if folder.exists() and any(path.name != "log.txt" for path in folder.iterdir()):
            sys.stdout.write(f"corral: {folder} is not empty.\n")
            return 1
        folder.mkdir(exist_ok=True)
        steps = 120 if what == "slow" else STEPS
        settings = {**given, "steps": steps}
        (folder / "config.json").write_text(json.dumps({"settings": settings, "task": {"name": "fake"}}))
    if what == "hang":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    return learn(folder, what, given, mended)


def learn(folder: Path, what: str, given: dict[str, str], mended: bool) -> int:
    """Steps from the checkpoint on, one line each."""
    asked: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        asked.append(number)

    signal.signal(signal.SIGTERM, stop)
    metrics, checkpoint = folder / "metrics.jsonl", folder / "checkpoint"
    done = int(checkpoint.read_text()) if checkpoint.exists() else -1
    lines = metrics.read_text().splitlines(keepends=True)[: done + 1] if metrics.exists() else []
    (folder / "part").write_text("".join(lines))
    os.replace(folder / "part", metrics)
    steps = json.loads((folder / "config.json").read_text())["settings"]["steps"]
    rate, seed = float(given.get("learning-rate", 1e-4)), int(given["seed"])
    best = max(0.0, 0.8 - abs(rate - 1e-4) * 1e3) + 0.01 * seed
    for step in range(done + 1, steps + 1):
        with metrics.open("a") as file:
            line = {"step": step, "update": step, "seconds": 0.1 * step, "success": best * step / steps, "tr/kl_before": rate}
            file.write(json.dumps(line) + "\n")
        if what == "crash" and step == 2 and not mended:
            raise RuntimeError("out of luck")
        if what == "killed" and not mended:
            os.kill(os.getpid(), signal.SIGKILL)
        if asked:
            checkpoint.write_text(str(step))
            return end(folder, "interrupted", step, 130)
        time.sleep(0.02 if what == "slow" else 0.0)
    return end(folder, "collapsed" if what == "collapse" else "finished", steps, 1 if what == "collapse" else 0)


def end(folder: Path, stopped: str, steps: int, status: int) -> int:
    (folder / "summary.json").write_text(json.dumps({"stopped": stopped, "steps": steps, "seconds": 0.1 * steps}))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
