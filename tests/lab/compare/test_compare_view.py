"""What is seen of a comparison: a table that fits the screen, plain lines, or next to nothing."""

import io
import os
import pty
import re
import select
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from corral.lab.compare.plan import Training, make_plan
from corral.lab.compare.record import Comparison, Progress
from corral.lab.compare.view import CompareView, LiveCompareView, PlainCompareView, align_columns, run_cells, visible_records


def comparison(path: Path, *names: str, seeds: int = 2) -> Comparison:
    plan = make_plan("llm", names, {}, seeds=seeds, choosing=1)
    return Comparison(path=path, plan=plan, training=Training(recipe="demo"), command="corral compare")


def progress(path: Path, step: int, success: float | None) -> Progress:
    found = Progress(path, 40, step=step, success=success)
    found.inode = 1
    return found


def consoles() -> tuple[Console, Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=70, height=12, force_terminal=False), Console(file=file, width=70), file


def test_plain_lines_tell_what_changes(tmp_path: Path) -> None:
    console, problems, file = consoles()
    view = PlainCompareView(console, problems)
    all_runs = comparison(tmp_path, "ppo_clip", "troll")
    view.banner([("compare", "demo: ppo_clip, troll")])
    view.open(all_runs)
    first, second = all_runs.records[:2]
    first.state = "running"
    view.update_run(first, progress(tmp_path, 0, None))
    first.state = "finished"
    view.update_run(first, progress(tmp_path, 40, 0.6754))
    second.state, second.error = "failed", "ValueError: [red]no[/red]"
    view.update_run(second, progress(tmp_path, 3, 0.2))
    view.update_time(90.0)
    assert file.getvalue().splitlines() == [
        "compare    demo: ppo_clip, troll",
        "ppo_clip seed 0: running",
        "ppo_clip seed 0: finished at step 40 of 40, success 0.675",
        "warning: troll seed 0 failed: ValueError: [red]no[/red]",
    ]
    view.spoke -= 61  # a minute later
    view.update_time(750.0)
    assert file.getvalue().splitlines()[-1] == "1 of 4 runs done, 1 failed, about 12 min left"


def test_a_quiet_view_shows_failures_alone(tmp_path: Path) -> None:
    console, problems, file = consoles()
    view = CompareView(console, problems)
    all_runs = comparison(tmp_path, "ppo_clip", "troll")
    view.banner([("compare", "demo")])
    view.open(all_runs)
    view.update_run(all_runs.records[0], progress(tmp_path, 1, None))
    view.say("nothing")
    assert file.getvalue() == ""
    all_runs.records[0].state, all_runs.records[0].error = "failed", "out of luck"
    view.update_run(all_runs.records[0], progress(tmp_path, 1, None))
    assert "ppo_clip seed 0 failed: out of luck" in file.getvalue()


def test_cells_say_how_far_everybody_is(tmp_path: Path) -> None:
    all_runs = comparison(tmp_path, "ppo_clip", "troll", seeds=1)
    all_runs.records[0].state = "running"
    rows = run_cells(all_runs.records, {"ppo_clip_seed0": progress(tmp_path, 7, 0.25)})
    assert rows == [
        ["contestant", "seed", "state", "step", "success", "left"],
        ["ppo_clip", "0", "running", "7/40", "0.25", ""],
        ["troll", "0", "waiting", "", "", ""],
    ]
    all_runs.records[1].state, all_runs.records[1].error = "failed", "why"
    assert run_cells(all_runs.records, {})[2][-1] == "why"
    assert align_columns([["a", "bcd", "e"], ["fg", "h", ""]]) == ["a   bcd  e", "fg  h"]


def test_what_matters_stays_on_a_small_screen(tmp_path: Path) -> None:
    all_runs = comparison(tmp_path, "ppo_clip", "troll", seeds=5)
    for record, state in zip(
        all_runs.records, ["finished"] * 4 + ["failed", "running", "running"] + ["waiting"] * 3, strict=True
    ):
        record.state = state
    shown = visible_records(all_runs.records, 5)
    assert [record.state for record in shown] == ["finished", "finished", "failed", "running", "running"]
    assert shown[0] is all_runs.records[2]  # of those that ended the latest
    assert len(visible_records(all_runs.records, 100)) == 10
    console, problems, file = consoles()
    view = LiveCompareView(console, problems)
    view.open(all_runs)
    view.close()
    console.print(view.table())
    assert "4 of 10 runs done, 2 running, 1 failed; 4 not shown" in file.getvalue()
    view.stopping("Stopping after this step.")
    console.print(view.table())
    assert file.getvalue().rstrip().endswith("4 not shown\nStopping after this step.")
    LiveCompareView(console, problems).close()  # one that never began


def test_in_a_terminal_there_is_a_live_table(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("fake_comparisons.py")), str(tmp_path)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=dict(os.environ, TERM="xterm-256color", COLUMNS="100", LINES="30"),
    )
    os.close(theirs)
    seen, until = b"", time.monotonic() + 120
    while time.monotonic() < until:
        if select.select([ours], [], [], 0.5)[0]:
            try:
                seen += os.read(ours, 65_536)
            except OSError:  # the other end is closed
                break
        elif process.poll() is not None:
            break
    os.close(ours)
    assert process.wait(60) == 1
    text = seen.decode(errors="replace")
    assert "\x1b[?25l" in text  # the cursor is hidden while the table is live…
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")  # …and comes back
    plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)
    assert re.search(r"slow +0 +running", plain)
    assert re.search(r"[012] of 3 runs done, [12] running", plain)
    assert re.search(r"slow +0 +finished +120/120 +0.8", plain)
    assert "warning: crash seed 0 failed: RuntimeError: out of luck" in plain
    assert re.search(r"The end of [^\n]*log.txt:[\s\S]*RuntimeError: out of luck", plain)
    assert "The report is in" in plain
    assert "Try failed runs again with: corral compare --resume" in plain
