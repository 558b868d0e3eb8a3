"""An evaluation of a robot's run as a table."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from corral.lab.jobs.robot.evaluate import WAYS
from corral.lab.run.text import count
from corral.lab.run.view import PatientConsole, number


def show(result: Mapping[str, Any], where: Path, video: Path | None, *, quiet: bool) -> None:
    """Print what came out, and where it is."""
    console, problems = PatientConsole(), PatientConsole(stderr=True)
    for sentence in result["complaints"]:
        problems.print(f"[yellow]warning:[/] {escape(sentence)}", soft_wrap=True, highlight=False)
    if not quiet:
        console.print(_table(result))
    console.print(escape(_last_words(result, where, video)), soft_wrap=True, highlight=False)


def _table(result: Mapping[str, Any]) -> Table:
    """Every estimate with its interval, without exploration and with it."""
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    rows.add_column("")
    for way in WAYS:
        rows.add_column(way, justify="right")
        rows.add_column(f"{result['level']:.0%} interval")
    for name in result["estimates"]["mean"]:
        cells = []
        for way in WAYS:
            one = result["estimates"][way].get(name)
            cells += [number(one["value"]), _interval(one)] if one else ["–", ""]
        rows.add_row(name, *cells)
    return rows


def _interval(one: Mapping[str, float | None]) -> str:
    """From … to, or a dash where one episode leaves nothing to say."""
    low, high = one["low"], one["high"]
    return "–" if low is None or high is None else f"{number(low)} … {number(high)}"


def _last_words(result: Mapping[str, Any], where: Path, video: Path | None) -> str:
    """The numbers that matter most, in a sentence."""
    found = result["estimates"]["mean"]
    text = f"{result['algorithm']} on {result['environment']['name']} after {result['step']} steps: "
    if "success" in found:
        one = found["success"]
        text += f"success {one['value']:.1%} ({one['low']:.1%} – {one['high']:.1%}), "
    contexts = count(result["episodes"], "held-out context")
    text += f"return {number(found['return']['value'])} over {contexts}. In {where / 'eval.json'}"
    return text + (f"; film: {video}" if video is not None else "")
