"""Which checkpoint `latest`, `best` or the number of a step names."""

import re

from corral.run.folder import Checkpoint, RunFolder
from corral.validate import RunError


def choose_checkpoint(folder: RunFolder, which: str) -> tuple[Checkpoint, list[str]]:
    """`latest`: the newest whole one. `best`: that with the highest measured success. A number: the one after that step."""
    if which == "latest":
        newest, complaints = folder.last_whole_checkpoint()
        if newest is None:
            why = f": {' '.join(complaints)}" if complaints else ". It ended before the first one was written."
            raise RunError(f"the run in {folder.path} has no whole checkpoint{why}")
        return newest, complaints
    whole = folder.whole_checkpoints()
    there = f"It has whole checkpoints of steps {', '.join(map(str, sorted(whole))) or '(none)'}."
    if which == "best":
        measured = {line["step"]: line["success"] for line in folder.lines() if isinstance(line.get("success"), float | int)}
        candidates = [step for step in whole if step in measured]
        if not candidates:
            raise RunError(f"no checkpoint of {folder.path} is of a step where success was measured. {there}")
        return whole[max(candidates, key=lambda step: (measured[step], step))], []
    if not re.fullmatch(r"[0-9]{1,18}", which):
        raise RunError(f"--checkpoint is latest, best or the number of a step; got {which!r}.")
    if int(which) not in whole:
        raise RunError(f"{folder.path} keeps no whole checkpoint of step {which}. {there}")
    return whole[int(which)], []
