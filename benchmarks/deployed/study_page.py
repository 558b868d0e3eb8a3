"""Write what benchmarks/deployed/results holds into docs/deployed.md, as tables and figures. Trains nothing.

A block between `<!-- study: NAME -->` and `<!-- /study -->` is written anew; whatever else the page says stays.

    python benchmarks/deployed/study_page.py
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean

from study_figure import draw
from study_table import Row, area, certificate, final, finished, held_out, steps_of

from corral.report.sweep.ranges import SweepRow
from corral.report.sweep.usable import usable_range
from corral.run.files import write_whole

RESULTS = Path(__file__).with_name("results")
PAGE = Path(__file__).parents[2] / "docs/deployed.md"
BLOCK = re.compile(r"<!-- study: (\w+) -->\n.*?<!-- /study -->", re.DOTALL)

ARMS = {
    "tuned": "nothing held",
    "auto_mean": "**controlled by the mean, retracted by the mean at 2 δ**",
    "auto": "controlled by the mean, retracted by p99.9",
    "auto_redo": "controlled, batches redone below a share of ½",
    "redo": "redone, not controlled",
    "mean": "retracted by the mean alone",
    "p999": "retracted by p99.9 alone",
    "cvar": "retracted by CVaR alone",
    "k3": "retracted by the sampled k3 alone",
    "accept": "retracted by the mean, accepted on a held-out quarter",
    "rate_first": "rate controlled by k3, first batch redone, no retraction",
    "rate_k3": "rate controlled by k3 alone",
    "rate_mean": "rate controlled by the mean alone",
    "rate_update": "rate controlled after every update (rsl_rl's rule)",
    "lookahead": "Lookahead, share ¼ at 1e-3 and .03 at 1e-2",
    "ema": "EMA of the policy, .8 a batch",
    "stop": "stopped at a target KL (k3)",
    "calm": "warm-up, gradients clipped at .2",
    "none": "nothing held",
}
"""Arms of gate 0 in the order of the page."""
OBJECTIVES = ("troll", "dppo", "ppo_clip", "reinforce")


def short(value: float) -> str:
    """`.578`, and `1.000` for what does not fit that."""
    return f"{value:.3f}".removeprefix("0")


def numbers(values: Iterable[float]) -> str:
    """Several of them, with blanks between."""
    return " ".join(map(short, values)) or "–"


def rate_text(rate: float | str) -> str:
    """`3e-4`, or `auto`."""
    return rate if isinstance(rate, str) else f"{rate:.0e}".replace("e-0", "e-")


def two_digits(value: float) -> str:
    """Two significant digits."""
    return f"{float(f'{value:.2g}'):g}".removeprefix("0")


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


def kl(runs: Sequence[Row], name: str) -> str:
    """A statistic of the deployed network's KL, in the mean over steps and runs."""
    return two_digits(fmean(certificate(line, name) for run in runs for line in steps_of(run)))


def gate0(runs: Sequence[Row], schedule: str) -> str:
    """Every arm at every rate: held-out areas, final success and how far the network went."""
    found = group((run for run in runs if "held" in run and run["schedule"] == schedule), "arm", "rate")
    lines, before = [], ""
    for arm, name in ARMS.items():
        for rate in sorted(rate for of, rate in found if of == arm):
            some = found[arm, rate]
            areas, ends = [area(run) for run in some], [final(run) for run in some]
            cells = [
                numbers(areas),
                short(fmean(areas)),
                short(fmean(ends)),
                short(fmean(final(run, "greedy") for run in some)),
            ]
            shown = "" if name == before else name
            lines.append([shown, rate_text(rate), str(len(some)), *cells, kl(some, "mean"), kl(some, "p999")])
            before = name
    return markdown(("arm", "rate", "n", "area of each", "area", "final", "greedy", "KL mean", "p99.9"), lines)


def reuse(runs: Sequence[Row]) -> str:
    """Held-out success after 5 and 10 steps of rollouts by passes, unheld at each rate and held."""
    some = [run for run in runs if "passes" in run and run["steps"] == 10]
    lines = []
    for (objective, passes, how), found in sorted(
        group(some, "objective", "passes", "reuse").items(),
        key=lambda item: (OBJECTIVES.index(str(item[0][0])), int(str(item[0][1])), str(item[0][2])),
    ):
        for (rate, arm), members in sorted(group(found, "rate", "arm").items(), key=str):
            held = "no" if arm == "off" else two_digits(members[0]["bound"] or 0.02)
            cells = [str(objective), f"{passes} at most" if how else str(passes), rate_text(rate), held, str(len(members))]
            cells += [numbers(dict(held_out(run)).get(step, 0.0) for run in members) for step in (5.0, 10.0)]
            cells += [short(fmean(final(run, "greedy") for run in members)), kl(members, "mean"), kl(members, "p999")]
            lines.append(cells)
    head = ("objective", "passes", "rate", "held at", "n", "after 5 steps", "after 10", "greedy", "KL mean", "p99.9")
    return markdown(head, lines)


def sweep_rows(runs: Iterable[Row]) -> list[SweepRow]:
    """Runs over rates as `corral compare` judges them: an objective, held or not, is a contestant."""
    rows = []
    for run in runs:
        points = held_out(run)
        name = run["objective"] + ("" if run["arm"] == "off" else ", held")
        below = any(value < points[0][1] for _, value in points)
        setting = {"learning_rate": run["rate"]}
        rows.append(SweepRow(name, setting, run["seed"], final(run), area(run), run["dead"], fell_below_start=below))
    return rows


def over_rates(runs: Iterable[Row]) -> list[Row]:
    """The runs of the plan over rates."""
    return [run for run in runs if run.get("passes") == 1 and run["steps"] == 15 and isinstance(run["rate"], float)]


def rates(runs: Sequence[Row]) -> str:
    """Final success, and area below it, over rates; unheld and held."""
    found = group(over_rates(runs), "objective", "arm", "rate")
    tried = sorted({run["rate"] for run in over_rates(runs)})
    lines = []
    for objective in OBJECTIVES:
        for arm, held in (("off", ""), ("on 0.02", ", held")):
            if not any((objective, arm, rate) in found for rate in tried):
                continue
            for what, read in (("final", final), ("area", area)):
                cells = [numbers(map(read, found.get((objective, arm, rate), []))) for rate in tried]
                lines.append([f"{objective}{held}" if what == "final" else "", what, *cells])
    return markdown(("", "", *map(rate_text, tried)), lines)


def usable(runs: Sequence[Row]) -> str:
    """The usable range of every objective, unheld and held."""
    ranges = usable_range(sweep_rows(over_rates(runs)))
    order = {name: place for place, name in enumerate(f"{name}{held}" for name in OBJECTIVES for held in ("", ", held"))}
    lines = [
        f"- {found.sentence}; by the best of all: {found.text(found.overall)}"
        for found in sorted(ranges, key=lambda x: order[x.contestant])
    ]
    return "\n".join(lines) + "\n"


BLOCKS: dict[str, Callable[[Sequence[Row]], str]] = {
    "gate0": lambda runs: gate0(runs, "linear"),
    "gate0constant": lambda runs: gate0(runs, "constant"),
    "reuse": reuse,
    "rates": rates,
    "usable": usable,
}


def write(text: str, runs: Sequence[Row]) -> str:
    """The page with its blocks written anew."""
    return BLOCK.sub(lambda found: f"<!-- study: {found[1]} -->\n{BLOCKS[found[1]](runs)}<!-- /study -->", text)


def main() -> None:
    """Command line."""
    runs = [*finished([RESULTS]).values()]
    text = write(PAGE.read_text(), runs)
    write_whole(PAGE, lambda beside: beside.write_text(text))
    draw(runs, over_rates(runs), PAGE.with_name("deployed-study.svg"))


if __name__ == "__main__":
    main()
