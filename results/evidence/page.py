"""docs/results/llm.md and README's verdicts: tables, claims and figures of what the runs of both studies hold."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from corral.lab.report.statistics import ENOUGH, plain
from corral.lab.report.statistics import signed as signed_points
from results.evidence import figures, tables, words
from results.evidence.cells import read_automatic, read_runs
from results.evidence.claims import CLAIMS, Verdict, judge
from results.packed import Row
from results.pages import DOCS, README, Texts, fill, markdown
from results.plans import HOT, TUNED

PAGE = DOCS / "results/llm.md"
FRONT = ("troll-reuse", "troll-hot", "troll-tuned", "words-dppo", "words-troll", "gemma-troll", "gemma-dppo")
"""Claims that README tells."""
FIGURES = {
    "map": "Area under held-out success by learning rate, a line per objective",
    "words": "SmolLM2: area under held-out success by learning rate, a line per objective and passes; held at auto beside them",
    "words-gemma": "Gemma: the same",
    "reuse": "Four passes: area under held-out success by learning rate, a line per objective",
    "ablations": "Differences to TROLL as it is, with intervals",
}


def count(runs: Sequence[Row], found: Sequence[Verdict]) -> str:
    """Number of runs, and of claims with enough seeds for a verdict."""
    return (
        f"{len(runs)} runs in all; {sum(one.can_tell for one in found)} of {len(CLAIMS)} claims have the {ENOUGH} fresh seeds "
        "that a verdict needs.\n"
    )


def verdicts(found: Sequence[Verdict]) -> str:
    """Claims that have the seeds for a verdict in one table, and which have not."""
    lines = []
    for one in found:
        if one.found is not None and one.can_tell:
            mean = one.found.mean
            interval = "–" if mean.low is None or mean.high is None else f"{plain(mean.low)} … {plain(mean.high)}"
            lines.append([one.claim.says, signed_points(mean.value), interval, str(one.found.seeds), f"**{one.word}**"])
    shown = markdown(("claim", "points", "95 %", "seeds", "verdict"), lines) if lines else ""
    untested = "; ".join(one.claim.says for one in found if not one.can_tell)
    return shown if not untested else f"{shown}\nNamed before any run, and not tested yet: {untested}.\n"


def front(found: Sequence[Verdict]) -> str:
    """Claims for README."""
    lines = []
    for one in found:
        if one.claim.name in FRONT and one.found is not None and one.found.mean.low is not None:
            mean, said = one.found.mean, one.claim.says.replace(" beats ", " − ")
            interval = f"{signed_points(mean.value)} ({plain(mean.low)} … {plain(mean.high)})"
            lines.append([said, interval, str(one.found.seeds), "yes" if one.holds else "no"])
    return markdown(("difference", "points (95 %)", "seeds", "significant after Holm's correction"), lines)


def blocks(runs: Sequence[Row], automatic: Sequence[Row]) -> dict[str, Callable[[], str]]:
    """Name → text of every block; `verdict-NAME` is the sentence of a claim."""
    found, all_runs = judge(runs), [*runs, *automatic]
    of_runs: dict[str, Callable[[Sequence[Row]], str]] = {
        "by-rate": tables.by_rate,
        "tuned": partial(tables.map_at, rate=(TUNED, 3e-4)),
        "hot": partial(tables.map_at, rate=HOT),
        "floor": tables.floor,
        "reused": tables.reused,
        "ablations": tables.ablations,
        "mismatch": tables.mismatch,
        "stability": tables.stability,
        "bounds": tables.bounds,
        "rare": tables.rare,
        "moe": tables.experts,
        "published": tables.published,
        "estimators": tables.estimators,
        "starts": tables.starts,
        "words": partial(words.words, base="smollm2"),
        "words-gemma": partial(words.words, base="gemma"),
        "words-books": partial(words.words, base="books"),
        "words-gsm8k": partial(words.words, base="gsm8k"),
        "made-again": words.made_again,
        "code": words.code,
        "seconds": words.seconds,
        "verdicts": lambda _: verdicts(found),
        "front": lambda _: front(found),
        "count": lambda _: count(runs, found),
        "confirmed": lambda _: words.confirmed(all_runs, "smollm2"),
        "confirmed-gemma": lambda _: words.confirmed(all_runs, "gemma"),
    }
    return {
        **{name: partial(text, runs) for name, text in of_runs.items()},
        **{name: partial("![{}](llm-{}.svg)\n".format, said, name.removeprefix("figure-")) for name, said in
           ((f"figure-{name}", said) for name, said in FIGURES.items())},
        **{f"verdict-{one.claim.name}": partial("{}\n".format, one.sentence) for one in found},
        "routing": words.routing, "blocked": words.blocked, "costs": words.costs, "pretrained-starts": words.pretrained_starts,
    }  # fmt: skip


def pages(read: Callable[[Path], str]) -> Texts:
    """The page and README as the raw rows have them."""
    return fill(read, (PAGE, README), "evidence", blocks(read_runs(), read_automatic()))


def draw(folder: Path = PAGE.parent) -> None:
    """Write the figures."""
    figures.draw([*read_runs(), *read_automatic()], folder)
