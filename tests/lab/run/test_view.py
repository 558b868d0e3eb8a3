"""What is shown: plain lines, a live panel, or next to nothing."""

import io
import re
from typing import Any

import pytest
from rich.console import Console

from corral.lab.run.life import STOPPING
from corral.lab.run.text import count
from corral.lab.run.view import Clock, LiveView, PatientConsole, PlainView, RunView, make_view, number, readable, shorten

LINE = {
    "step": 1, "update": 8, "success": 0.25, "reward": 0.3, "entropy": 0.5, "tokens_per_second": 12345.6, "loss": 1.0,
    "tr/active_frac": 0.01, "tr/kl_before": 0.002, "tr/kl_after": 0.001, "tr/kl_max": 1.5,
}  # fmt: skip
ROWS = [
    {"prompt": "3 7>10:", "completion": "3+7=10", "reward": 1.0},
    {"prompt": "3 7>10:", "completion": "[bold]3", "reward": 0.0},
]


def shown(view_cls: type[RunView], *, terminal: bool, verbose: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100)
    view = view_cls(console, console)
    view.verbose = verbose
    view.begin([("objective", "troll [bound=0.05]")], steps=4, done=0)
    view.line({**LINE, "step": 0})
    view.line(LINE)
    view.completions(ROWS)
    view.say("good to know")
    view.warn("the [policy] is collapsing")
    view.end("finished after 4 steps")
    view.close()
    return out.getvalue()


EVIL = "\x1b]52;c;b3duZWQ=\x07\x1b]0;owned\x07\x1b[2J\x9b31m\ud800\r\nx"


@pytest.mark.parametrize("view_cls", [PlainView, LiveView])
def test_texts_cannot_steer_the_terminal(view_cls: type[RunView]) -> None:
    out = io.StringIO()
    console = PatientConsole(file=out, force_terminal=view_cls is LiveView, width=200)
    view = view_cls(console, console)
    view.begin([("task", EVIL)], steps=4, done=0)
    view.line({**LINE, f"tr/{EVIL}": 1.0})
    view.completions([{"prompt": EVIL, "completion": EVIL, "reward": 1.0}])
    for tell in (view.say, view.warn, view.end):
        tell(EVIL)
    text = out.getvalue()
    assert "⟨U+001B⟩]52;c;" in text
    assert "\x1b]" not in text
    assert "\x1b[2J" not in text
    assert not any(mark in text for mark in "\x07\x9b\ud800")
    assert text.encode()


def test_only_a_verifiers_full_reward_is_marked_as_right() -> None:
    out = io.StringIO()
    view = PlainView(Console(file=out, width=100), Console(file=out))
    rows = [{"prompt": "", "completion": "x", "reward": reward} for reward in (1.0, 0.4, 0.0, -2.0)]
    view.completions(rows)
    view.completions(rows, verified=False)
    heading = "Sampled in this step, as reward, prompt and completion:\n"
    assert out.getvalue().count(heading) == 2
    assert out.getvalue().replace(heading, "").split() == [
        "✓",
        "x",
        "0.4",
        "x",
        "✗",
        "x",
        "✗",
        "x",
        "1",
        "x",
        "0.4",
        "x",
        "0",
        "x",
        "-2",
        "x",
    ]


def test_plain_lines() -> None:
    rows = shown(PlainView, terminal=False).splitlines()
    assert rows[0] == "objective  troll [bound=0.05]"
    assert re.fullmatch(r"step 1/4  success 0.25  reward 0.3  entropy 0.5  tr/kl_after 0.001  \d:\d\d left", rows[2])
    assert rows[3:] == [
        "Sampled in this step, as reward, prompt and completion:",
        "  ✓ 3 7>10:3+7=10",
        "  ✗ 3 7>10:[bold]3",
        "good to know",
        "warning: the [policy] is collapsing",
        "finished after 4 steps",
    ]


@pytest.mark.supports("run: a live panel in a terminal", door="command line")
def test_the_live_panel_shows_five_numbers_or_all() -> None:
    text = shown(LiveView, terminal=True)
    for part in ("1/4", "left", "success", "tr/kl_after", "3+7=10", "[bold]3", "the [policy] is", "finished after"):
        assert part in text
    assert "\x1b[?25h" in text, "the cursor is given back"
    assert "tr/kl_max" not in text
    text = shown(LiveView, terminal=True, verbose=True)
    assert all(part in text for part in ("tr/kl_max", "tr/active_frac", "12,346"))
    rows = shown(PlainView, terminal=False, verbose=True).splitlines()
    assert "tr/kl_after 0.001  tokens/s 12,346  tr/active_frac 0.01  tr/kl_before 0.002  tr/kl_max 1.5  " in rows[2]


def test_an_echoed_signal_leaves_no_frame_behind() -> None:
    # A terminal echoes ^C at the cursor, after the panel's last line. The next frame covers this one only if the cursor is
    # still in that line.
    frame = shown(LiveView, terminal=True).split("╰")[1].splitlines()[0]
    assert len(f"╰{frame}^C^C") < 100


def test_a_signal_is_announced_where_nothing_paints_over_it(capfd: pytest.CaptureFixture[str]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    live = LiveView(console, console)
    live.begin([], steps=4, done=0)
    assert "Stopping" not in out.getvalue()
    live.stopping(STOPPING)
    live.end("interrupted")  # with a last look at the panel
    assert "Once more to stop" in out.getvalue()
    assert capfd.readouterr().err == "", "past the console it would be gone with the next frame"
    make_view(quiet=True).stopping(STOPPING)
    assert capfd.readouterr().err == f"\n{STOPPING}\n"
    make_view(quiet=False, silent=True).stopping(STOPPING)
    assert capfd.readouterr().err == ""


def test_a_panel_that_never_began_can_be_closed() -> None:
    console = Console(file=io.StringIO(), force_terminal=True)
    LiveView(console, console).close()


def test_quiet_shows_warnings_and_the_end() -> None:
    assert shown(RunView, terminal=False).splitlines() == ["warning: the [policy] is collapsing", "finished after 4 steps"]


def test_the_view_follows_the_output(monkeypatch: pytest.MonkeyPatch) -> None:
    assert type(make_view(quiet=False)) is PlainView
    assert type(make_view(quiet=True)) is RunView
    monkeypatch.setattr(PatientConsole, "is_terminal", True)
    monkeypatch.setattr(PatientConsole, "is_dumb_terminal", False)
    assert type(make_view(quiet=False)) is LiveView
    assert type(make_view(quiet=False, silent=True)) is RunView


def test_a_silent_view_says_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    view = make_view(quiet=False, silent=True)
    view.warn("trouble")
    view.end("the end")
    assert capsys.readouterr() == ("", "")


def test_a_reader_who_leaves_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    moved: list[Any] = []
    monkeypatch.setattr("corral.lab.run.view.os.dup2", lambda *files: moved.append(files))
    console = PatientConsole(file=Closed())
    console.print("step 1")
    console.print("step 2")
    assert len(moved) == 1


def test_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("corral.lab.run.view.time.monotonic", lambda: now[0])
    clock = Clock(steps=20, done=10)  # resumed: five seconds a step from here on
    assert clock.left(10) is None
    now[0] = 110.0
    assert clock.left(12) == "0:40"
    now[0] = 113.0
    assert clock.left(12) == "0:37"
    now[0] = 100.0 + 3600 * 4
    assert clock.left(14) == "6:00:00"


def test_numbers_and_texts() -> None:
    assert [number(value) for value in (0.0, 7e-15, 0.12345, 999.4, 12345.6)] == ["0", "0", "0.123", "999", "12,346"]
    assert [count(n, "step") for n in (0, 1, 2000)] == ["0 steps", "1 step", "2,000 steps"]
    assert shorten("a\nb") == "a⏎b"
    assert len(shorten("x" * 500)) == 120
    assert readable({"success": None, "reward": 0.5, "skipped": 2, "warnings": []}) == [("reward", "0.5"), ("skipped", "2")]
    certified = {"learning_rate": 1.9853e-4, "tr/deployed_kl_mean": 0.0168, "tr/kl_after": 0.1}
    assert readable(certified) == [("tr/deployed_kl_mean", "0.0168")], "one KL, of the deployed network where it is known"
    every = [("tr/deployed_kl_mean", "0.0168"), ("learning_rate", "0.000199"), ("tr/kl_after", "0.1")]
    assert readable(certified, verbose=True) == every
