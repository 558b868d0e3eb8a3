"""Numbers, tables and groups of runs as the study's page writes them."""

import json
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, stdev

from scipy import stats
from spec import START
from study_table import Row, certificate, steps_of

OBJECTIVES = ("troll", "dppo", "ppo_clip", "reinforce")
RESULTS = Path(__file__).with_name("results")
Values = dict[str, float]
"""A number per seed, and per device: draws of one are not those of another."""


def short(value: float) -> str:
    """`.578`, and `1.000` for what does not fit that."""
    return f"{value:.3f}".removeprefix("0")


def signed(value: float) -> str:
    """`+.062`, `−.013`."""
    return f"{'−' if value < 0 else '+'}{abs(value):.3f}".replace("0.", ".")


def numbers(values: Iterable[float]) -> str:
    """Several of them, with blanks between."""
    return " ".join(map(short, values)) or "–"


def rate_text(rate: float | str) -> str:
    """`3e-4`, or `auto`."""
    return rate if isinstance(rate, str) else f"{rate:.0e}".replace("e-0", "e-")


def two_digits(value: float) -> str:
    """Two significant digits; a dash for what is no number."""
    return "–" if math.isnan(value) else f"{float(f'{value:.2g}'):g}".removeprefix("0")


def half_width(values: Sequence[float]) -> float:
    """Of the 95 % interval of a mean (Student), of two values or more."""
    return float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))


def with_interval(values: Sequence[float], text: Callable[[float], str] = short) -> str:
    """Mean and 95 % interval over seeds."""
    return text(fmean(values)) + (f" ± {short(half_width(values))}" if len(values) > 1 else "")


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table."""
    body = [f"| {' | '.join(row)} |\n" for row in (head, *lines)]
    return "".join([body[0], f"|{'---|' * len(head)}\n", *body[1:]])


def group(runs: Iterable[Row], *keys: str) -> dict[tuple[object, ...], list[Row]]:
    """Runs that agree in `keys`, each group by seed."""
    found: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run["seed"]):
        found[tuple(run.get(key) for key in keys)].append(run)
    return found


def by_seed(runs: Sequence[Row], read: Callable[[Row], float]) -> Values:
    """A number per seed and device: runs are paired within a device alone."""
    return {f"{run['seed']} {run.get('device', 'cpu')}": read(run) for run in runs}


def kl(runs: Sequence[Row], name: str) -> str:
    """A statistic of the deployed network's KL, in the mean over steps and runs."""
    return two_digits(fmean(certificate(line, name) for run in runs for line in steps_of(run)))


def start_success(file: Path = RESULTS / "starts.jsonl") -> dict[str, dict[float, float]]:
    """Held-out success by temperature of every start that was measured; 0 is greedy."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return {line["start"]: {float(key): value for key, value in line["success"].items()} for line in lines}


def best_temperature(success: dict[float, float]) -> float:
    """The one with the highest success; of equals the highest."""
    return max(success, key=lambda temperature: (success[temperature], temperature))


def with_start(table: str) -> str:
    """A table, and below it what the start can do before any training."""
    if (found := start_success().get(START)) is None:
        return table
    best = best_temperature(found)
    at = "greedy" if best == 0 else two_digits(best)
    tuned = f"{short(found[best])} at its best temperature ({at})"
    return f"{table}\nStart: success {short(found[1.0])} at temperature 1, {short(found[0.0])} greedy, {tuned}.\n"
