"""docs/results/deployed.md's tables and README's sentence on the headline, from results/deployed."""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

from results.deployed import arms, confirm, figures, rates
from results.deployed.rates import OBJECTIVES
from results.packed import FOLDER, Row
from results.packed import read as read_rows
from results.pages import DOCS, README, Texts, fill, markdown, numbers, rate_text, two_digits
from results.plans import TUNING
from results.runs import (
    DEPLOYED,
    area,
    final,
    finished,
    greedy,
    group,
    held_out,
    is_demo,
    kl,
    mean,
    steps_of,
    where,
    with_start,
)

PAGE = DOCS / "results/deployed.md"
TRIALS = (1e-4, 2e-4, 4e-4)
"""Rates that were tried with several passes."""


def tuning(runs: Iterable[Row], **wanted: object) -> list[Row]:
    """Ten steps with fixed passes on the seeds that settings were chosen by; a bound that was not given is .02."""
    some = where(runs, **{"schedule": "linear", **wanted}, steps=10, seed=TUNING, reuse=None)
    return [{"bound": 0.02, **run} for run in some if "passes" in run]


def reuse(runs: Sequence[Row]) -> str:
    """Held-out success after 5 and 10 steps of rollouts by passes, unheld at the demo's rate and held at .02."""
    found = group(tuning(runs), "objective", "passes", "rate", "bound")
    found |= {
        (name, "auto", *key): some
        for (name, *key), some in group(where(runs, reuse="auto", steps=10), "objective", "rate").items()
    }
    fixed = [(passes, *held) for passes, held in product((1, 2, 4, 8), ((2e-4, float("inf")), ("auto", 0.02)))]
    lines = []
    for objective, (passes, rate, *bound) in product(OBJECTIVES, [*fixed, ("auto", 2e-4), ("auto", "auto")]):
        if some := found.get((objective, passes, rate, *bound)):
            made = (
                f"auto: {fmean(line['tr/passes'] for run in some for line in steps_of(run)):.1f}" if not bound else str(passes)
            )
            cells = [objective, made, rate_text(rate), "no" if bound == [float("inf")] else ".02", str(len(some))]
            cells += [numbers(dict(held_out(run)).get(step, 0.0) for run in some) for step in (5.0, 10.0)]
            lines.append([*cells, mean(some, greedy), kl(some, "mean"), kl(some, "p999")])
    head = ("objective", "passes", "rate", "held at", "n", "after 5 steps", "after 10", "greedy", "KL mean", "p99.9")
    return with_start(markdown(head, lines))


def tuned(runs: Sequence[Row]) -> str:
    """Area over ten steps, each seed's, by rate and passes with nothing held."""
    found, passes = group(tuning(runs, arm="off", rate=TRIALS), "objective", "rate", "passes"), (1, 2, 4, 8)
    rows = [(name, rate) for name in OBJECTIVES for rate in sorted({key[1] for key in found if key[0] == name})]
    lines = [
        [name, rate_text(rate), *(numbers(map(area, found.get((name, rate, n), []))) for n in passes)] for name, rate in rows
    ]
    return with_start(markdown(("objective", "rate", *(f"{n} {'pass' if n == 1 else 'passes'}" for n in passes)), lines))


def bounds(runs: Sequence[Row], schedule: str) -> str:
    """Held-out success after ten steps at "auto", by bound, beside the demo's rate unheld, or the best one that was tried."""
    held = group(tuning(runs, schedule=schedule, rate="auto"), "objective", "passes", "bound")
    unheld = group(tuning(runs, schedule=schedule, arm="off"), "objective", "passes", "rate")
    tried, lines, best = sorted({bound for *_, bound in held}), [], schedule == "constant"
    for about in product(OBJECTIVES, (1, 4, 8)):
        cells = [held.get((*about, bound), []) for bound in tried]
        if any(cells):
            others = {rate: cell for (*at, rate), cell in unheld.items() if tuple(at) == about and (best or rate == 2e-4)}
            rate = max(others, key=lambda rate: fmean(map(final, others[rate])), default=None)
            left = numbers(map(final, others.get(rate, [])))
            left = f"{rate_text(rate)}: {left}" if best and rate else left
            lines.append([about[0], str(about[1]), left, *(numbers(map(final, cell)) for cell in cells)])
    beside = "not held, at its best rate" if best else "2e-4, not held"
    return with_start(markdown(("objective", "passes", beside, *(f"held at {two_digits(bound)}" for bound in tried)), lines))


def blocks(runs: Sequence[Row]) -> dict[str, Callable[[], str]]:
    """Name → text of every block."""
    here = [run for run in runs if is_demo(run)]
    found: dict[str, Callable[[], str]] = {
        "reuse": partial(reuse, here),
        "tuned": partial(tuned, here),
        "usableagainstunheld": partial(rates.usable_against_unheld, here),
        "confirmed": partial(confirm.confirmed_table, here),
        "compared": partial(confirm.compared, here),
        "many": partial(confirm.confirmed_table, here, confirm.MANY_NAMES),
        "manycompared": partial(confirm.compared, here, confirm.MANY_COMPARED),
        "confirmedrates": partial(rates.confirmed_rates, here),
        "notinferior": partial(rates.not_inferior, here),
        "elsewhere": partial(confirm.elsewhere, runs),
        "collapses": partial(confirm.collapses, runs),
        "pretrained": partial(arms.pretrained, "smollm2"),
        "pretrainedgemma": partial(arms.pretrained, "gemma"),
        "startover": arms.start_over,
        "autostart": lambda: arms.first_batches(read_rows(FOLDER / "deployed/auto-start.parquet")),
        "headline": partial(figures.sentence, runs),
    }
    for schedule, suffix in (("linear", ""), ("constant", "constant")):
        found |= {
            f"gate0{suffix}": partial(arms.gate0, here, schedule),
            f"gate0words{suffix}": partial(arms.gate0_words, runs, schedule),
            f"bounds{suffix}": partial(bounds, here, schedule),
            f"rates{suffix}": partial(rates.rates, here, schedule),
            f"usable{suffix}": partial(rates.usable, here, schedule),
            f"usablebounds{suffix}": partial(rates.usable_bounds, here, schedule),
        }
    return found


def pages(read: Callable[[Path], str]) -> Texts:
    """The page and README as the raw rows have them."""
    return fill(read, (PAGE, README), "study", blocks(finished(DEPLOYED)))


def draw(folder: Path = DOCS) -> None:
    """Write the figures."""
    runs = finished(DEPLOYED)
    here = [run for run in runs if is_demo(run)]
    figures.draw_study(here, folder / "deployed-study.svg")
    figures.draw_idea(here, folder / "deployed-idea.svg")
    figures.draw_headline(runs, folder / "headline.svg")
