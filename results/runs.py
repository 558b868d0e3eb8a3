"""Runs of the studies on language models: what a row says of a run, and runs by setting and seed."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from scipy import stats

from results.packed import FOLDER, Row, read
from results.pages import short, two_digits
from results.spec import START

DEPLOYED, EVIDENCE = (FOLDER / f"{study}/runs.parquet" for study in ("deployed", "evidence"))
Values = dict[str, float]
"""A number per seed, and per device: draws of one are not those of another."""


DEFAULTS = {
    "variant": "", "model": "tiny", "updates": 8, "sampler": "", "anchor": "auto", "start": START, "recipe": "demo",
    "device": "cpu", "end_size": 0, "base": "", "lag": 0,
}  # fmt: skip
"""What older rows do not name."""


def finished(*places: Path, by: Sequence[str] = ("key",)) -> list[Row]:
    """Finished runs of every file of rows; of runs that are equal in these fields the last."""
    runs = [DEFAULTS | run for run in read(*places) if run.get("finished")]
    return list({tuple(run[name] for name in by): run for run in runs}.values())


def where(runs: Iterable[Row], **wanted: object) -> list[Row]:
    """Runs with these values; of a tuple or another collection, with one of them. None is a value that a run does not have."""

    def fits(value: object, wish: object) -> bool:
        return value in wish if isinstance(wish, Collection) and not isinstance(wish, str) else value == wish

    return [run for run in runs if all(fits(run.get(name), wish) for name, wish in wanted.items())]


def group(runs: Iterable[Row], *keys: str) -> dict[tuple[Any, ...], list[Row]]:
    """Runs that agree in `keys`, each group by seed."""
    found: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["seed"]):
        found[tuple(run.get(key) for key in keys)].append(run)
    return found


def is_demo(run: Row) -> bool:
    """True if a run has the demo's own model and task."""
    return (run["start"], run["recipe"]) == (START, "demo")


def steps_of(run: Row) -> list[Row]:
    """Lines of steps with updates: a run of the trainer's has one more, from before the first."""
    return [line for line in run["lines"] if line["step"] > 0]


def held_out(run: Row) -> list[tuple[float, float]]:
    """Success on held-out problems by step; a dead run goes on at 0 from where it died."""
    points = [(float(line["step"]), line["success"]) for line in run["lines"] if "success" in line]
    if not run["dead"]:
        return points
    died = float(run["lines"][-1]["step"])
    return [*(point for point in points if point[0] < died), (died, 0.0), (float(run["steps"]), 0.0)]


def area(run: Row) -> float:
    """Mean success on held-out problems over the run, from its first measurement on: by trapezia, as reports have it."""
    points = held_out(run)
    below = sum((after - before) * (low + high) / 2 for (before, low), (after, high) in pairwise(points))
    return below / (points[-1][0] - points[0][0]) if len(points) > 1 else points[0][1]


def percent(run: Row) -> float:
    """Mean success over the run in per cent, so that differences are points."""
    return 100 * area(run)


def is_below_start(run: Row) -> bool:
    """True if any measurement is below the first."""
    points = held_out(run)
    return any(value < points[0][1] for _, value in points)


def final(run: Row, key: str = "success") -> float:
    """Success on the held-out problems after the last step, or greedy, on the most that were asked; 0 of a dead run."""
    return 0.0 if run["dead"] else (run.get("end") or run["lines"][-1])[key]


def greedy(run: Row) -> float:
    """Greedy success after the last step; 0 of a dead run."""
    return final(run, "greedy")


def certificate(line: Row, name: str) -> float:
    """A statistic of the deployed network's KL after a step; NaN where it was not published, as of too few tokens."""
    value = line["after"][name] if "after" in line else line.get(f"tr/deployed_kl_{name}", math.nan)
    return min(float(value), 99.0)  # a run that died may have had an infinite one


def mean_kl(runs: Sequence[Row], name: str) -> float:
    """A statistic of the deployed network's KL, in the mean over steps and runs."""
    return fmean(certificate(line, name) for run in runs for line in steps_of(run))


def kl(runs: Sequence[Row], name: str) -> str:
    """Mean statistic of the deployed network's KL, in two digits."""
    return two_digits(mean_kl(runs, name))


def mean(runs: Iterable[Row], read: Callable[[Row], float]) -> str:
    """A number of runs, in the mean over them."""
    return short(fmean(map(read, runs)))


def half_width(values: Sequence[float]) -> float:
    """Half the 95 % interval of a mean (Student), of two values or more."""
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def with_interval(values: Sequence[float], text: Callable[[float], str] = short) -> str:
    """Mean and 95 % interval over seeds."""
    return text(fmean(values)) + (f" ± {short(half_width(values))}" if len(values) > 1 else "")


def by_seed(runs: Sequence[Row], read: Callable[[Row], float]) -> Values:
    """A number per seed and device: runs are paired within a device alone."""
    return {f"{run['seed']} {run.get('device', 'cpu')}": read(run) for run in runs}


def starts(file: Path = FOLDER / "deployed/starts.parquet") -> dict[str, dict[float, float]]:
    """Held-out success by temperature of every start that was measured; 0 is greedy."""
    return {line["start"]: {float(key): value for key, value in line["success"].items()} for line in read(file)}


def best_temperature(success: dict[float, float]) -> float:
    """The one with the highest success; of equals the highest."""
    return max(success, key=lambda temperature: (success[temperature], temperature))


def at_best(success: dict[float, float], form: str) -> str:
    """The highest success, and at which temperature, as `{success}` and `{at}` of a form."""
    best = best_temperature(success)
    return form.format(success=short(success[best]), at="greedy" if best == 0 else two_digits(best))


def with_start(table: str) -> str:
    """A table, and below it what the start can do before any training."""
    if (found := starts().get(START)) is None:
        return table
    return f"{table}\nBefore training, success is {short(found[1.0])} at temperature 1 and {short(found[0.0])} greedily.\n"
