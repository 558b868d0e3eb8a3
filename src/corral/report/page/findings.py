"""The first section of a page: claims, each group's results, and the statistical method."""

from collections.abc import Sequence
from typing import Any

from corral.report.content import RunReport, report_looks
from corral.report.html import Safe, join, note, table, tag
from corral.report.outcomes import BESIDE
from corral.report.page.forest import hero
from corral.report.statistics import ENOUGH, plain, signed
from corral.run.text import count

_METHOD = """
Final is the last measured {name}; area is its mean over the run by steps (trapezia), where a run that was stopped early keeps
its last value to the end of its budget. Both are interquartile means over seeds, which of fewer than four seeds are plain
means, with 95 % stratified bootstrap intervals (rliable); those of the probability of improvement are bootstrapped too. With
fewer than ten seeds such intervals are too narrow: they show where the runs lie, and decide nothing.

A claim rests on the differences of runs with equal seeds, which saw the same problems: their mean, Student's 95 % interval, and
Holm's correction over all pairs that are shown for the same measure. It needs three seeds, and between two objectives one
reduction and one advantage.

Steps to threshold is the median over seeds of the first measurement at {threshold} or above. A run collapsed if it ended below
half of its best {name} and at least .1 lower, or if the guard stopped it; one that began below zero must also have lost half
of what it had gained.

Runs that were interrupted, failed or still go on are drawn, and left out of every number. Where they failed because of their
objective, that flatters it: look at the failures below. A curve is of the runs that measured something at a step: once one was
stopped, it is of the others alone, which flatters it too.
"""


_CHOSEN = "Each contestant has the setting that was chosen for it in the sweep, and runs with seeds that the choice never saw."

_ACROSS = """
Over all tasks together, on one scale: success as it is; returns so that 0 is where a task's runs began and 1 what the best
contestant ended with there. Interquartile mean and mean over tasks and seeds, with 95 % bootstrap intervals that draw runs
within each task (rliable); chance is how likely a run ends above one of another contestant, on a task drawn at random.
"""


def findings(report: RunReport, headline: Safe | None = None) -> Safe:
    """Sentences, the picture of where everybody ended, the table, and the method.

    Args:
        headline: what a sweep has to say, where there is one.
    """
    rows = sorted(report.tables["comparisons"], key=lambda row: not row["claimed"])
    final, area, returns = ([row for row in rows if row["measure"] == name] for name in ("final", "area", "return"))
    titles = {f"On the mean {report.measure.name} over the run": area, "On the final return": returns}
    more = [tag("details", tag("summary", title), _sentences(part)) for title, part in titles.items() if part]
    text = _METHOD.format(
        name=report.measure.name,
        threshold="90 % of the best end" if report.threshold is None else report.measure.text(report.threshold),
    )
    if report.is_single:
        return _single_run(report)
    return join(
        *_warnings(report),
        headline,
        tag("p", _CHOSEN, class_="count") if rows and any(group.chosen for group in report.groups) else None,
        hero(final, report_looks(report), f"final {report.measure.name}", _sentences) if final else None,
        *more,
        tag("details", tag("summary", "All comparisons in numbers"), _comparison_table(report)) if rows else None,
        tag("div", id="finals", class_="figures wide"),
        _result_table(report),
        _overall_table(report),
        tag("details", tag("summary", "How this was judged"), *(tag("p", part) for part in text.strip().split("\n\n"))),
    )


def _single_run(report: RunReport) -> Safe:
    """One run: its numbers, large. There is nothing to compare it with, and no interval."""
    (run,), (row,) = report.runs, report.tables["runs"]
    numbers = {f"{name} {report.measure.name}": row[name] for name in ("start", "best", "final")}
    shown = {name: report.measure.text(value) for name, value in numbers.items() if value is not None}
    if row["greedy"] is not None:
        shown["final greedy success"] = report.measure.text(row["greedy"])
    reached = report.tables["results"][0]["steps_to_threshold"]
    if report.threshold is not None and reached is not None:
        shown[f"steps to {report.measure.text(report.threshold)}"] = f"{reached:,.0f}"
    shown |= {"steps": f"{run.steps:,} of {run.planned_steps:,}", "time": _duration(row["seconds"])}
    boxes = [tag("div", tag("dt", name), tag("dd", text)) for name, text in shown.items()]
    ended = run.stopped if run.stopped != "not ended" else "goes on, or was killed"
    verb = "" if not run.summary else "has " if ended == "finished" else "was "
    text = f"One run of {run.objective}, seed {run.seed}: it {verb}{ended}. "
    text += "With three seeds or more of two objectives, this page says who is better."
    return join(tag("dl", *boxes, class_="big"), tag("p", text, class_="count"))


def _duration(seconds: float | None) -> str:
    """`57 s`, `12 min`, `3.4 h`."""
    if seconds is None:
        return "—"
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def _sentences(rows: Sequence[dict[str, Any]]) -> Safe:
    """A list, claims first."""
    return sentence_list([(row["sentence"], "claim" if row["claimed"] else "tie") for row in rows])


def sentence_list(said: list[tuple[str, str]]) -> Safe:
    """Sentences, each with its kind, which is its mark: claim, tie or range."""
    return tag("ul", *(tag("li", text, class_=kind) for text, kind in said), class_="sentences")


def _comparison_table(report: RunReport) -> Safe:
    """One row per pair and measure."""
    columns = {"pair": "Difference", "measure": "Of", "difference": report.measure.unit.capitalize() or "Value"}
    columns |= {"interval": "95 % interval", "p": "p", "claimed": "Claimed", "probability": "Probability of improvement"}

    def show(key: str, row: dict[str, Any]) -> str:
        if key == "pair":
            return f"{row['ours']} − {row['theirs']}"
        if key == "interval":
            return "—" if row["low"] is None else f"{plain(row['low'])}…{plain(row['high'])}"
        if key == "probability":
            low, high = row["probability_low"], row["probability_high"]
            return f"{row[key]:.2f}" + ("" if low is None else f" [{low:.2f}…{high:.2f}]")
        if key == "difference":
            return signed(row[key])
        if key == "p":
            return "—" if row[key] is None else f"{row[key]:.2g}"
        return ("yes" if row[key] else "no") if key == "claimed" else row[key]

    return table(report.tables["comparisons"], columns, show, aria_label="Comparisons", data_table="comparisons")


def _warnings(report: RunReport) -> list[Safe]:
    """What to know before reading on."""
    found, rows = [], report.tables["comparisons"]
    out = sum(row["kind"] == "left out" for row in report.tables["events"])
    if out:
        said = f"{count(out, 'run')} did not finish and {'is' if out == 1 else 'are'} not in these numbers: "
        found.append(note(said, tag("a", "see below", href="#events"), "."))
    if len(report.groups) == 1:
        found.append(note("There is one objective with one setting, so nothing to compare it with."))
    elif not rows:
        found.append(note("No two groups can be compared: they have no runs that finished on the same problem and setting."))
    elif all(row["seeds"] < ENOUGH for row in rows):
        found.append(note(f"Fewer than {ENOUGH} seeds: differences are shown, none can be claimed."))
    return found


def _result_table(report: RunReport) -> Safe:
    """One row per group."""
    rows, name = report.tables["results"], report.measure.name
    columns = {"group": "Objective"}
    if any(group.chosen for group in report.groups):
        columns["setting"] = "Chosen setting"
    if len({row["problem"] for row in rows}) > 1:
        columns["problem"] = "Problem"
    columns |= {"counted": "Runs", "final": f"Final {name}", "area": "Mean over the run"}
    columns |= {key: key.capitalize() for key in BESIDE if key != name and any(row[key] is not None for row in rows)}
    threshold = "90 % of the best" if report.threshold is None else report.measure.text(report.threshold)
    columns |= {"steps_to_threshold": f"Steps to {threshold}", "collapsed": "Collapsed", "seconds": "Seconds"}

    def show(key: str, row: dict[str, Any]) -> str:
        if key == "group":
            return row["objective"] if "setting" in columns else f"{row['objective']} {row['setting']}".strip()
        if key in ("final", "area", "greedy"):
            return report.measure.estimate(row[key], row[f"{key}_low"], row[f"{key}_high"])
        if key == "return":
            return spread(row[key], row["return_low"], row["return_high"])
        number = "—" if row[key] is None else row[key] if isinstance(row[key], str) else f"{row[key]:,.0f}"
        of = {"counted": f" of {row['runs']}", "collapsed": f" of {row['counted']}"}
        of["steps_to_threshold"] = f" ({row['reached']} of {row['counted']})"
        return number + of.get(key, "")

    return table(rows, columns, show, aria_label="Results", data_table="results")


def _overall_table(report: RunReport) -> Safe | None:
    """Over several tasks, where there are."""
    rows = report.tables["overall"]
    if not rows:
        return None
    columns = {"objective": "Objective", "tasks": "Tasks", "seeds": "Seeds", "middle": "Interquartile mean", "mean": "Mean"}
    columns["chance"] = "Chance to be better"

    def show(key: str, row: dict[str, Any]) -> str:
        if key in ("middle", "mean"):
            return spread(row[key], row[f"{key}_low"], row[f"{key}_high"], digits=3)
        return f"{row[key]:.2f}" if key == "chance" else str(row[key])

    shown = table(rows, columns, show, aria_label="All tasks together", data_table="overall")
    return join(tag("h3", "All tasks together"), tag("p", _ACROSS, class_="count"), shown)


def spread(middle: float | None, low: float | None, high: float | None, digits: int = 4) -> str:
    """A number of no unit with its interval."""
    numbers = [None if end is None else f"{end:.{digits}g}".replace("-", "−") for end in (middle, low, high)]
    return (numbers[0] or "—") + ("" if numbers[1] is None else f" [{numbers[1]}…{numbers[2]}]")
