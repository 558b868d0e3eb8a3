"""docs/results/llm.md and README's verdicts: tables, claims and figures of what the runs of both studies hold."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from results.evidence import figures, tables, words
from results.evidence.cells import compare, read_automatic, read_runs
from results.evidence.claims import COMPARED, Verdict, judge
from results.packed import Row
from results.pages import DOCS, README, Texts, fill, interval_text, markdown

PAGE = DOCS / "results/llm.md"
FRONT = ("troll-reuse", "troll-hot", "troll-tuned", "words-dppo", "words-troll", "gemma-troll", "gemma-dppo")
"""Claims that README tells."""
QUESTIONS = {
    "map": ("troll-tuned", "dppo-tuned", "troll-hot", "dppo-hot", "region", "topk"),
    "passes": ("troll-reuse", "dppo-reuse", "troll-dppo"),
    "words": ("words-troll", "words-dppo", "words-reuse", "words-passes"),
    "gemma": ("gemma-troll", "gemma-dppo", "gemma-reuse"),
    "ablations": ("regression", "projection", "exact"),
    "rare": ("rare-reuse",),
    "anchor": ("anchor-dppo", "anchor-troll"),
}
"""Claims of each question of the page."""
FIGURES = {
    "map": "Mean held-out success by learning rate, a line per objective",
    "words": "SmolLM2: mean held-out success by learning rate, a line per objective and passes, and beside them at auto",
    "words-gemma": "Gemma: mean held-out success by learning rate, a line per objective and passes, and beside them at auto",
    "reuse": "Four passes: mean held-out success by learning rate, a line per objective",
    "ablations": "Differences from TROLL as it is, with intervals",
}


class Advice(NamedTuple):
    """A row of the page's first table."""

    situation: str
    use: str
    claim: str
    """The claim that supports it, or the base of a pretrained model for clipping at "auto" against its best rate."""
    model: str
    kind: str


SHARPENED = "sharpening"
ADVICE = (
    Advice("several passes over each batch", "`troll`", "troll-reuse", "embedded", SHARPENED),
    Advice("several passes over each batch", "`dppo`", "dppo-reuse", "embedded", SHARPENED),
    Advice("several passes, pretrained model", "one pass; points are of TROLL with four over clipping with one",
           "words-reuse", "SmolLM2", "learning"),
    Advice("a rate that may be too large", "`troll`", "troll-hot", "embedded", SHARPENED),
    Advice("a good rate, one pass", "`dppo`", "words-dppo", "SmolLM2", "learning"),
    Advice("a good rate, one pass", "`dppo` or clipping", "gemma-dppo", "Gemma", "learning, a little"),
    Advice("a good rate, one pass", "any objective", "troll-tuned", "embedded", SHARPENED),
    Advice("no rate at all", 'clipping at `"auto"`, instead of its best rate', "smollm2", "SmolLM2", "learning"),
    Advice("no rate at all", 'clipping at `"auto"`, instead of its best rate', "gemma", "Gemma", "learning, a little"),
)  # fmt: skip


def advice(runs: Sequence[Row], found: Mapping[str, Verdict]) -> str:
    """What to use in which situation, and the difference in mean held-out success that supports it."""
    lines = []
    for one in ADVICE:
        if one.claim in found:
            effect, seeds, p = found[one.claim].row[1:]
        else:
            automatic = words.automatic(one.claim)
            gap = compare(automatic, words.best_clip(one.claim), runs)
            effect, seeds, p = interval_text(gap), str(gap.seeds if gap else 0), "–"
        lines.append([one.situation, one.use, effect, seeds, p, one.model, one.kind])
    return markdown(("situation", "use", "points (95 %)", "seeds", "p (Holm)", "model", "learning or sharpening?"), lines)


def front(found: Sequence[Verdict]) -> str:
    """Claims for README."""
    rows = [[*one.row[:3], "yes" if one.is_significant else "no"] for one in found if one.claim.name in FRONT]
    return markdown((*COMPARED[:3], "significant after Holm's correction"), rows)


def blocks(runs: Sequence[Row], automatic: Sequence[Row]) -> dict[str, Callable[[], str]]:
    """Name → text of every block; `compared-NAME` has the claims of a question."""
    found, all_runs = judge(runs), [*runs, *automatic]
    by_name = {one.claim.name: one for one in found}
    of_runs: dict[str, Callable[[Sequence[Row]], str]] = {
        "by-rate": tables.by_rate,
        "hot": tables.hot,
        "floor": tables.floor,
        "reused": tables.reused,
        "ablations": tables.ablations,
        "stability": tables.stability,
        "bounds": tables.bounds,
        "rare": tables.rare,
        "published": tables.published,
        "estimators": tables.estimators,
        "starts": tables.starts,
        "code": words.code,
    }
    return {
        **{name: partial(text, runs) for name, text in of_runs.items()},
        **{f"figure-{name}": partial("![{}](llm-{}.svg)\n".format, said, name) for name, said in FIGURES.items()},
        **{f"compared-{question}": partial(markdown, COMPARED, [by_name[name].row for name in names])
           for question, names in QUESTIONS.items()},
        "advice": partial(advice, all_runs, by_name),
        "front": partial(front, found),
        "confirmed": partial(words.confirmed, all_runs, "smollm2"),
        "confirmed-gemma": partial(words.confirmed, all_runs, "gemma"),
        "routing": words.routing, "blocked": words.blocked, "costs": words.costs,
    }  # fmt: skip


def pages(read: Callable[[Path], str]) -> Texts:
    """The page and README as the raw rows have them."""
    return fill(read, (PAGE, README), "evidence", blocks(read_runs(), read_automatic()))


def draw(folder: Path = PAGE.parent) -> None:
    """Write the figures."""
    figures.draw([*read_runs(), *read_automatic()], folder)
