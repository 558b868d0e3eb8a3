"""Figures for papers and tables as CSV; and the command that makes them."""

import csv
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from report.synthetic import write_robot_run, write_run

from corral.lab.cli import main
from corral.lab.report.content import make_report
from corral.lab.report.export import export, write_csv
from corral.lab.report.read import read_runs


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def few_metrics(path: Path) -> None:
    """Keep two metrics of a run: every figure takes a while."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: line[key] for key in ("step", "update", "success", "tr/kl_before") if key in line} for line in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))


def test_every_figure_and_every_table(tmp_path: Path) -> None:
    for objective in ("troll", "dppo"):
        for seed in range(2):
            few_metrics(write_run(tmp_path / "runs" / f"{objective}{seed}", objective, seed))
    report = make_report(read_runs([tmp_path / "runs"]))
    written = export(report, tmp_path / "out")
    names = {path.name for path in written}
    assert {
        "results.csv",
        "comparisons.csv",
        "runs.csv",
        "settings.csv",
        "versions.csv",
        "commands.csv",
        "differences.csv",
    } <= names
    for name in ("success", "tr_kl_before", "differences-of-pairs", "final"):
        assert {f"{name}.svg", f"{name}.png"} <= names
    for name in ("success", "tr_kl_before"):
        assert {f"{name}.svg", f"{name}.png", f"{name}.csv"} <= names
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
        assert ET.parse(tmp_path / "out" / f"{name}.svg").getroot().tag.endswith("svg")
    points = rows_of(tmp_path / "out/success.csv")
    assert [row["step"] for row in points if row["objective"] == "troll"] == ["0", "2", "4", "6", "8"]
    assert float(points[-1]["low"]) <= float(points[-1]["value"]) <= float(points[-1]["high"])
    assert rows_of(tmp_path / "out/results.csv")[1]["objective"] == "troll"


def test_sweeps_ends_and_robots_are_exported_too(tmp_path: Path) -> None:
    for rate in (1e-4, 1e-3):
        for objective in ("troll", "dppo"):
            few_metrics(write_run(tmp_path / f"runs/{objective}{rate}", objective, learning_rate=rate))
    names = {path.name for path in export(make_report(read_runs([tmp_path / "runs"])), tmp_path / "out")}
    assert {"sweep.csv", "sweep.svg", "sweep.png", "final.svg"} <= names
    assert rows_of(tmp_path / "out/sweep.csv")[0]["axis"] == "learning_rate"
    write_robot_run(tmp_path / "robots/a")
    names = {path.name for path in export(make_report(read_runs([tmp_path / "robots"])), tmp_path / "robot")}
    assert {"return.svg", "motion_jerk.png", "final.png"} <= names
    assert rows_of(tmp_path / "robot/return.csv")[1]["env_steps"] == "6400.0"


def test_hostile_names_draw_and_do_not_compute(tmp_path: Path) -> None:
    few_metrics(write_run(tmp_path / "runs/a", "$\\frac{", 0, task="=1+1"))
    few_metrics(write_run(tmp_path / "runs/b", "_</svg>", 0, task="=1+1"))
    export(make_report(read_runs([tmp_path / "runs"])), tmp_path / "out")
    ET.parse(tmp_path / "out/success.svg")
    assert rows_of(tmp_path / "out/results.csv")[0]["problem"] == "'=1+1 with tiny"


def test_figures_of_several_problems_are_numbered(tmp_path: Path) -> None:
    for task in ("countdown", "gsm8k"):
        few_metrics(write_run(tmp_path / "runs" / task, task=task))
    names = {path.name for path in export(make_report(read_runs([tmp_path / "runs"])), tmp_path / "out")}
    assert {"success-1.svg", "success-2.svg", "final-1.png", "final-2.png", "success-2.csv"} <= names


def test_csv_quotes_what_a_spreadsheet_would_run(tmp_path: Path) -> None:
    write_csv([{"a": "=1+1", "b": -1.5, "c": 'x,"y"\n'}], tmp_path / "x.csv")
    assert rows_of(tmp_path / "x.csv") == [{"a": "'=1+1", "b": "-1.5", "c": 'x,"y"\n'}]


def test_headers_do_not_compute_either(tmp_path: Path) -> None:
    write_csv([{"=1+1": 1, "\t@x": "  =2+2", "b": "＝1"}], tmp_path / "x.csv")
    assert (tmp_path / "x.csv").read_text().splitlines() == ["'=1+1,'\t@x,b", "1,'  =2+2,'＝1"]


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_only_files_are_replaced(tmp_path: Path, kind: str) -> None:
    """A device node cannot be made without privileges; a pipe can, and a link may lead to a device."""
    write_run(tmp_path / "run", steps=2)
    out = tmp_path / "out.html"
    os.mkfifo(out) if kind == "pipe" else out.symlink_to("/dev/null")
    assert main(["report", str(tmp_path / "run"), "--out", str(out)]) == 1
    assert out.is_fifo() if kind == "pipe" else out.is_symlink()


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "runs/a", "troll")
    write_run(tmp_path / "more/b", "dppo")
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "runs"), str(tmp_path / "more"), "--out", str(out), "--title", "Mine"]) == 0
    said = capsys.readouterr().out
    assert "No difference can be claimed between troll and dppo on final success" in said
    assert f"The report of 2 runs is in {out}" in said
    assert "<title>Mine</title>" in out.read_text()


def test_the_command_names_what_was_swept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for rate in (1e-4, 3e-4):
        write_run(tmp_path / f"runs/{rate}", "troll", learning_rate=rate)
    assert main(["report", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html")]) == 0
    assert "Usable learning_rate of troll: cannot be told from one run each (2 rates)\n" in capsys.readouterr().out


def test_the_extra_of_reports_is_enough(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    others = ("rich", "transformers", "trl", "gymnasium", "yaml")  # of corral[llm] and corral[robot]
    report = ["report", str(tmp_path), "--out", str(tmp_path / "page.html")]
    script = f"import sys; sys.modules.update(dict.fromkeys({others}, None)); from corral.lab.cli import main\n"
    script += f"assert main({report}) == 0\nassert main(['compare', '--objectives', 'ppo_clip,troll']) == 1"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("corral: comparisons train, and training needs more")


def test_quiet_says_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a")
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html"), "--quiet", "--threshold", "0.4"]) == 0
    assert capsys.readouterr().out == ""
    assert "steps to 40.0 %" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("command", ["report", "explore"])
@pytest.mark.parametrize(("terminal", "works"), [(True, True), (True, False), (False, True)])
def test_a_browser_is_opened_in_a_terminal_alone(
    command: str,
    terminal: bool,
    works: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda page: opened.append(page) or works)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: terminal)
    page = tmp_path / "a page.html"
    assert (
        main([command, *([str(write_run(tmp_path / "a"))] if command == "report" else []), "--out", str(page), "--open"]) == 0
    )
    said = capsys.readouterr().out
    assert opened == ([page.as_uri()] if terminal else [])
    assert ("no browser was found to open" in said) == (terminal and not works)
    assert ("works in a terminal alone" in said) == (not terminal)


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["{tmp}/none"], 1, "is no folder. report takes runs' folders, or folders that hold runs."),
        (["{tmp}"], 1, "no runs in"),
        (["{tmp}/run", "--out", "{tmp}/x/page.html"], 1, "to write page.html into: make it first"),
        (["{tmp}/run", "--out", "{tmp}/run"], 1, "run is a folder, and the page is a file: name one in it, such as"),
        (["{tmp}/run", "--threshold", "60"], 1, "between 0 and 1; got 60. For 60 %, give 0.6."),
        (["{tmp}/run", "--threshold", "nan"], 1, "a threshold is a number; got nan"),
        (["{tmp}/run", "--wat"], 2, "report has no '--wat'"),
    ],
)
def test_errors_are_sentences(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], status: int, said: str
) -> None:
    if "{tmp}/run" in arguments:
        write_run(tmp_path / "run")
    assert main(["report", *(word.format(tmp=tmp_path) for word in arguments)]) == status
    assert said in capsys.readouterr().err
