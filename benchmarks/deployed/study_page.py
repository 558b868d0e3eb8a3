"""Write what benchmarks/deployed/results holds into docs/deployed.md, as tables and figures. Trains nothing.

A block between `<!-- study: NAME -->` and `<!-- /study -->` is written anew; whatever else the page says stays.

    python benchmarks/deployed/study_page.py
"""

import re
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

from plans import FRESH
from study_confirm import MANY_COMPARED, MANY_NAMES, collapses, compared, confirmed_table, elsewhere
from study_figure import draw, draw_idea
from study_gate0 import gate0, gate0_words
from study_pretrained import pretrained
from study_rates import confirmed_rates, not_inferior, rates, usable, usable_against_unheld, usable_bounds
from study_start_over import start_over
from study_table import Row, area, final, finished, held_out, is_demo, steps_of
from study_text import OBJECTIVES, RESULTS, group, kl, markdown, numbers, rate_text, short, two_digits, with_start

from corral.lab.run.files import write_whole

PAGE = Path(__file__).parents[2] / "docs/deployed.md"
TRIALS = (1e-4, 2e-4, 4e-4)
"""Rates that were tried with several passes."""
BLOCK = re.compile(r"<!-- study: (\w+) -->\n.*?<!-- /study -->", re.DOTALL)


def tuning(runs: Iterable[Row], schedule: str = "linear") -> list[Row]:
    """Ten steps with fixed passes on the seeds that settings were chosen by; a bound that was not given is .02."""
    some = [run for run in runs if "passes" in run and run["steps"] == 10 and run["seed"] not in FRESH and not run.get("reuse")]
    return [run | {"bound": run["bound"] or 0.02} for run in some if run["schedule"] == schedule]


def reuse(runs: Sequence[Row]) -> str:
    """Held-out success after 5 and 10 steps of rollouts by passes, unheld at the demo's rate and held at .02."""
    found = group(tuning(runs), "objective", "passes", "rate", "bound")
    found |= {
        (name, "auto", rate, "auto"): some for (name, rate), some in group(_with_auto_passes(runs), "objective", "rate").items()
    }
    lines = []
    fixed = product((1, 2, 4, 8), ((2e-4, "inf"), ("auto", 0.02)))
    arms = [(passes, rate, held) for passes, (rate, held) in fixed] + [("auto", rate, "auto") for rate in (2e-4, "auto")]
    for objective, (passes, rate, held) in product(OBJECTIVES, arms):
        if not (some := found.get((objective, passes, rate, held))):
            continue
        made = f"{passes}" if passes != "auto" else f"auto: {_passes_made(some):.1f}"
        cells = [objective, made, rate_text(rate), "no" if held == "inf" else ".02", str(len(some))]
        cells += [numbers(dict(held_out(run)).get(step, 0.0) for run in some) for step in (5.0, 10.0)]
        cells += [short(fmean(final(run, "greedy") for run in some)), kl(some, "mean"), kl(some, "p999")]
        lines.append(cells)
    head = ("objective", "passes", "rate", "held at", "n", "after 5 steps", "after 10", "greedy", "KL mean", "p99.9")
    return with_start(markdown(head, lines))


def _with_auto_passes(runs: Iterable[Row]) -> list[Row]:
    """Runs of ten steps with `reuse="auto"` at .02."""
    return [run for run in runs if run.get("reuse") == "auto" and run["steps"] == 10]


def _passes_made(runs: Sequence[Row]) -> float:
    """Over a batch, in the mean."""
    return fmean(line["tr/passes"] for run in runs for line in steps_of(run))


def tuned(runs: Sequence[Row]) -> str:
    """Area over ten steps, each seed's, by rate and passes with nothing held."""
    found = group((run for run in tuning(runs) if run["arm"] == "off" and run["rate"] in TRIALS), "objective", "rate", "passes")
    rows = [(name, rate) for name in OBJECTIVES for rate in sorted({key[1] for key in found if key[0] == name}, key=float)]
    cells = [[numbers(map(area, found.get((*row, passes), []))) for passes in (1, 2, 4, 8)] for row in rows]
    lines = [[name, rate_text(rate), *line] for (name, rate), line in zip(rows, cells, strict=True)]
    return with_start(
        markdown(("objective", "rate", *(f"{count} {'pass' if count == 1 else 'passes'}" for count in (1, 2, 4, 8))), lines)
    )


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
    head = ("objective", "passes", "2e-4, not held", *(f"held at {two_digits(bound)}" for bound in tried))
    return with_start(markdown(head, lines))


def bounds_constant(runs: Sequence[Row]) -> str:
    """The same with a constant schedule, beside the best unheld rate that was tried with it."""
    some = tuning(runs, "constant")
    held = group((run for run in some if run["rate"] == "auto"), "objective", "passes", "bound")
    unheld = group((run for run in some if run["arm"] == "off"), "objective", "passes", "rate")
    tried, lines = sorted(float(str(bound)) for bound in {key[2] for key in held}), []
    for objective, passes in product(OBJECTIVES, (1, 4, 8)):
        cells = [held.get((objective, passes, bound), []) for bound in tried]
        if not any(cells):
            continue
        others = {rate: cell for (name, often, rate), cell in unheld.items() if (name, often) == (objective, passes)}
        best = max(others, key=lambda rate: fmean(map(final, others[rate])), default=None)
        left = "–" if best is None else f"{rate_text(float(str(best)))}: {numbers(map(final, others[best]))}"
        lines.append([objective, str(passes), left, *(numbers(map(final, cell)) for cell in cells)])
    head = ("objective", "passes", "not held, at its best rate", *(f"held at {two_digits(bound)}" for bound in tried))
    return with_start(markdown(head, lines))


BLOCKS: dict[str, Callable[[Sequence[Row]], str]] = {
    "gate0": lambda runs: gate0(runs, "linear"),
    "gate0constant": lambda runs: gate0(runs, "constant"),
    "reuse": reuse,
    "tuned": tuned,
    "bounds": bounds,
    "boundsconstant": bounds_constant,
    "rates": lambda runs: rates(runs, "linear"),
    "ratesconstant": lambda runs: rates(runs, "constant"),
    "usable": lambda runs: usable(runs, "linear"),
    "usableconstant": lambda runs: usable(runs, "constant"),
    "usableagainstunheld": usable_against_unheld,
    "usablebounds": lambda runs: usable_bounds(runs, "linear"),
    "usableboundsconstant": lambda runs: usable_bounds(runs, "constant"),
    "confirmed": confirmed_table,
    "compared": compared,
    "many": lambda runs: confirmed_table(runs, MANY_NAMES),
    "manycompared": lambda runs: compared(runs, MANY_COMPARED),
    "confirmedrates": confirmed_rates,
    "notinferior": not_inferior,
}
"""Of runs of the demo's own model and task."""
EVERYWHERE: dict[str, Callable[[Sequence[Row]], str]] = {
    "elsewhere": elsewhere,
    "collapses": collapses,
    "gate0words": lambda runs: gate0_words(runs, "linear"),
    "gate0wordsconstant": lambda runs: gate0_words(runs, "constant"),
    "pretrained": lambda runs: pretrained(runs, "smollm2"),
    "pretrainedgemma": lambda runs: pretrained(runs, "gemma"),
    "startover": start_over,
}
"""Of all runs."""


def write(text: str, runs: Sequence[Row]) -> str:
    """The page with its blocks written anew."""
    here = [run for run in runs if is_demo(run)]

    def block(found: re.Match[str]) -> str:
        name = found[1]
        body = EVERYWHERE[name](runs) if name in EVERYWHERE else BLOCKS[name](here)
        return f"<!-- study: {name} -->\n{body}<!-- /study -->"

    return BLOCK.sub(block, text)


def read() -> list[Row]:
    """All finished runs."""
    return [*finished([RESULTS]).values()]


def main() -> None:
    """Command line."""
    runs = read()
    text = write(PAGE.read_text(), runs)
    write_whole(PAGE, lambda beside: beside.write_text(text))
    here = [run for run in runs if is_demo(run)]
    draw(here, PAGE.with_name("deployed-study.svg"))
    draw_idea(here, PAGE.with_name("deployed-idea.svg"))


if __name__ == "__main__":
    main()
