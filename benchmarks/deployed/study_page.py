"""Write what benchmarks/deployed/results holds into docs/deployed.md, as tables and figures. Trains nothing.

A block between `<!-- study: NAME -->` and `<!-- /study -->` is written anew; whatever else the page says stays.

    python benchmarks/deployed/study_page.py
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

from plans import FRESH
from spec import START
from study_confirm import auto_against_tuned, collapses, compared, confirmed
from study_figure import draw, draw_idea
from study_table import Row, area, certificate, final, finished, held_out, is_below_start, steps_of

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
CONFIRMED = (
    "setting",
    "n",
    "area over the run",
    "final, 4,096 problems",
    "greedy",
    "steps to .60 (runs that get there)",
    "KL mean",
)
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
    found = group((run for run in runs if "held" in run and (run["schedule"], run["steps"]) == (schedule, 20)), "arm", "rate")
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


def tuning(runs: Iterable[Row]) -> list[Row]:
    """Ten steps with fixed passes on the seeds that settings were chosen by; a bound that was not given is .02."""
    some = [run for run in runs if "passes" in run and run["steps"] == 10 and run["seed"] not in FRESH and not run.get("reuse")]
    return [run | {"bound": run["bound"] or 0.02} for run in some if run["schedule"] == "linear"]


def reuse(runs: Sequence[Row]) -> str:
    """Held-out success after 5 and 10 steps of rollouts by passes, unheld at the demo's rate and held at .02."""
    found = group(tuning(runs), "objective", "passes", "rate", "bound")
    lines = []
    for objective, passes, (rate, held) in product(OBJECTIVES, (1, 2, 4, 8), ((2e-4, "inf"), ("auto", 0.02))):
        if not (some := found.get((objective, passes, rate, held))):
            continue
        cells = [objective, str(passes), rate_text(rate), "no" if held == "inf" else two_digits(float(held)), str(len(some))]
        cells += [numbers(dict(held_out(run)).get(step, 0.0) for run in some) for step in (5.0, 10.0)]
        cells += [short(fmean(final(run, "greedy") for run in some)), kl(some, "mean"), kl(some, "p999")]
        lines.append(cells)
    head = ("objective", "passes", "rate", "held at", "n", "after 5 steps", "after 10", "greedy", "KL mean", "p99.9")
    return markdown(head, lines)


def tuned(runs: Sequence[Row]) -> str:
    """Area over ten steps, each seed's, by rate and passes with nothing held."""
    found = group((run for run in tuning(runs) if run["arm"] == "off"), "objective", "rate", "passes")
    rows = [(name, rate) for name in OBJECTIVES for rate in sorted({key[1] for key in found if key[0] == name}, key=float)]
    cells = [[numbers(map(area, found.get((*row, passes), []))) for passes in (1, 2, 4, 8)] for row in rows]
    lines = [[name, rate_text(rate), *line] for (name, rate), line in zip(rows, cells, strict=True)]
    return markdown(("objective", "rate", *(f"{count} {'pass' if count == 1 else 'passes'}" for count in (1, 2, 4, 8))), lines)


def bounds(runs: Sequence[Row]) -> str:
    """Held-out success after ten steps at "auto", by bound, and unheld at the demo's rate."""
    unheld = group((run for run in tuning(runs) if (run["rate"], run["arm"]) == (2e-4, "off")), "objective", "passes")
    auto = [run for run in tuning(runs) if run["rate"] == "auto"]
    held, tried = group(auto, "objective", "passes", "bound"), sorted({run["bound"] for run in auto})
    lines = []
    for objective, passes in product(OBJECTIVES, (1, 4, 8)):
        cells = [held.get((objective, passes, bound), []) for bound in tried]
        if any(cells):
            some = unheld.get((objective, passes), [])
            lines.append([objective, str(passes), *(numbers(map(final, runs)) for runs in (some, *cells))])
    return markdown(("objective", "passes", "2e-4, not held", *(f"held at {two_digits(bound)}" for bound in tried)), lines)


def sweep_rows(runs: Iterable[Row]) -> list[SweepRow]:
    """Runs over rates as `corral compare` judges them: an objective, held or not, is a contestant."""
    rows = []
    for run in runs:
        name = run["objective"] + ("" if run["arm"] == "off" else ", held")
        setting = {"learning_rate": run["rate"]}
        rows.append(
            SweepRow(name, setting, run["seed"], final(run), area(run), run["dead"], fell_below_start=is_below_start(run))
        )
    return rows


def over_rates(runs: Iterable[Row]) -> list[Row]:
    """The runs of the plan over rates."""
    some = [run for run in runs if run.get("passes") == 1 and run["steps"] == 15 and run["seed"] not in FRESH]
    return [run for run in some if isinstance(run["rate"], float)]


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
    "tuned": tuned,
    "bounds": bounds,
    "rates": rates,
    "usable": usable,
    "confirmed": lambda runs: markdown(CONFIRMED, confirmed(runs)),
    "compared": compared,
    "auto": auto_against_tuned,
    "collapses": collapses,
}


def write(text: str, runs: Sequence[Row]) -> str:
    """The page with its blocks written anew."""
    return BLOCK.sub(lambda found: f"<!-- study: {found[1]} -->\n{BLOCKS[found[1]](runs)}<!-- /study -->", text)


def read() -> list[Row]:
    """All finished runs of the demo's own model and task."""
    return [run for run in finished([RESULTS]).values() if run.get("start", START) == START]


def main() -> None:
    """Command line."""
    runs = read()
    text = write(PAGE.read_text(), runs)
    write_whole(PAGE, lambda beside: beside.write_text(text))
    draw(runs, over_rates(runs), PAGE.with_name("deployed-study.svg"))
    draw_idea(runs, PAGE.with_name("deployed-idea.svg"))


if __name__ == "__main__":
    main()
