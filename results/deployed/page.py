"""docs/results/deployed.md's tables and README's sentences on its figure, from the rows of results."""

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

from results import front
from results.deployed import arms, confirm, figures, rates
from results.deployed.rates import OBJECTIVES
from results.packed import FOLDER, Row
from results.packed import read as read_rows
from results.pages import DOCS, README, Texts, fill, interval_text, markdown, numbers, rate_text, two_digits
from results.plans import BEST, TUNING
from results.runs import (
    DEPLOYED,
    final,
    finished,
    greedy,
    group,
    is_demo,
    kl,
    mean,
    where,
    with_start,
)
from results.spec import START

PAGE = DOCS / "results/deployed.md"
NAMES = {"troll": "TROLL", "ppo_clip": "clipping"}


def advice(runs: Sequence[Row]) -> str:
    """What to use in which situation, and the difference in mean success that supports it."""
    chosen, known = confirm.verdicts(runs), "embedded, sharpening"
    lines = [
        ["several passes over each batch", 'TROLL, four passes, `"auto"`', "over tuned clipping", *chosen[0][1:], known],
        ["", 'DPPO, eight passes, `"auto"`', "over tuned clipping", *chosen[1][1:], known],
        ["", 'TROLL, four passes, tuned or `"auto"`', 'of `"auto"` over tuned', *chosen[3][1:], known],
    ]
    for name, gap, _, seeds, p in rates.verdicts(runs):
        objective, *how = name.partition(" −")[0].split(", ")
        if how == ['`"auto"`', "constant"]:
            use = f'{NAMES[objective]} at `"auto"`'
            lines.append(["one pass, rate not known", use, "over the tuned rate", gap, seeds.split()[0], p, known])
    gap = arms.behind("smollm2", "troll", BEST["smollm2"]["troll", 1])
    row = ['TROLL on SmolLM2: a tuned rate, not `"auto"`', 'of `"auto"` over tuned', interval_text(gap), str(gap.seeds), "–"]
    lines.append(["", *row, "SmolLM2, learning"])
    head = ("situation", "use", "difference", "points (95 %)", "seeds", "p (Holm)", "model, and what improves")
    return markdown(head, lines)


def tuning(runs: Iterable[Row], **wanted: object) -> list[Row]:
    """Ten steps with fixed passes on the seeds that settings were chosen by; a bound that was not given is .02."""
    some = where(runs, **wanted, steps=10, seed=TUNING, reuse=None)
    return [{"bound": 0.02, **run} for run in some if "passes" in run]


def reuse(runs: Sequence[Row]) -> str:
    """Held-out success after ten steps by passes: at the demo's rate without a bound, and from 1e-3 with a bound of .02."""
    found, lines = group(tuning(runs), "objective", "passes", "rate", "bound"), []
    for objective, passes in product(OBJECTIVES, (1, 2, 4, 8)):
        sides = [found.get((objective, passes, *how)) for how in ((2e-4, math.inf), ("auto", 0.02))]
        cells = [cell for side in sides if side for cell in (numbers(map(final, side)), mean(side, greedy), kl(side, "mean"))]
        lines += [[objective, str(passes), *cells]] if all(sides) else []
    return with_start(markdown(("objective", "passes", "no bound", "greedy", "KL", "bound .02", "greedy", "KL"), lines))


def bounds(runs: Sequence[Row]) -> str:
    """Held-out success after ten steps at "auto" with a constant schedule, by bound, beside the best rate without one."""
    held = group(tuning(runs, rate="auto"), "objective", "passes", "bound")
    unheld = group(tuning(runs, arm="off"), "objective", "passes", "rate")
    tried, lines = sorted({bound for *_, bound in held}), []
    for about in product(OBJECTIVES, (1, 4)):
        cells = [held.get((*about, bound), []) for bound in tried]
        if any(cells):
            others = {rate: cell for (*at, rate), cell in unheld.items() if tuple(at) == about}
            rate = max(others, key=lambda rate: fmean(map(final, others[rate])), default=None)
            left = numbers(map(final, others.get(rate, [])))
            left = f"{rate_text(rate)}: {left}" if rate else left
            lines.append([about[0], str(about[1]), left, *(numbers(map(final, cell)) for cell in cells)])
    head = ("objective", "passes", "no bound, at the best rate", *(f"bound {two_digits(bound)}" for bound in tried))
    return with_start(markdown(head, lines))


def blocks(runs: Sequence[Row]) -> dict[str, Callable[[], str]]:
    """Name → text of every block."""
    here = [run for run in runs if is_demo(run)]
    return {
        "advice": partial(advice, here),
        "reuse": partial(reuse, where(here, schedule="linear")),
        "bounds": partial(bounds, where(here, schedule="constant")),
        "usable": partial(rates.usable, here),
        "confirmed": partial(confirm.confirmed_table, here),
        "compared": partial(confirm.compared, here),
        "many": partial(confirm.confirmed_table, here, confirm.MANY_NAMES),
        "manycompared": partial(confirm.compared, here, confirm.MANY_COMPARED),
        "confirmedrates": partial(rates.confirmed_rates, here),
        "notinferior": partial(rates.not_inferior, here),
        "elsewhere": partial(confirm.elsewhere, runs),
        "collapses": partial(confirm.collapses, runs),
        "mechanisms": partial(arms.mechanisms, where(runs, start=START)),
        "pretrained": partial(arms.pretrained, "smollm2"),
        "pretrainedgemma": partial(arms.pretrained, "gemma"),
        "autostart": lambda: arms.first_batches(read_rows(FOLDER / "deployed/auto-start.parquet")),
        **front.blocks(*confirm.places_above(runs)),
    }


def pages(read: Callable[[Path], str]) -> Texts:
    """The page and README as the raw rows have them."""
    return fill(read, (PAGE, README), "study", blocks(finished(DEPLOYED)))


def draw(folder: Path = DOCS) -> None:
    """Write the figures."""
    runs = finished(DEPLOYED)
    here = [run for run in runs if is_demo(run)]
    figures.draw_study(here, folder / "deployed-study.svg")
    figures.draw_idea(here, folder / "deployed-idea.svg")
    front.draw(finished(front.ROWS), folder / "headline.svg")
