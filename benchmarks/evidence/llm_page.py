"""Write what the runs of both studies hold into docs/results/llm.md and README: tables, verdicts, figures. Trains nothing.

A block between `<!-- evidence: NAME -->` and `<!-- /evidence -->` is written anew; whatever else the page says stays.

    python benchmarks/evidence/llm_page.py
"""

import re
from collections.abc import Callable, Sequence

from evidence_plans import HOT, TUNED
from evidence_rows import HERE, Row, read_automatic, read_runs
from llm_claims import CLAIMS, judge
from llm_figures import draw, figures
from llm_tables import (
    ablations,
    bounds,
    by_rate,
    estimators,
    experts,
    floor,
    map_at,
    mismatch,
    published,
    rare,
    reused,
    stability,
    starts,
)
from llm_words import blocked, code, confirmed, costs, made_again, pretrained_starts, routing, seconds, words
from study_page import markdown

from corral.lab.report.statistics import ENOUGH, plain, signed
from corral.lab.run.files import write_whole

PAGE = HERE.parents[1] / "docs/results/llm.md"
README = HERE.parents[1] / "README.md"
FRONT = (
    *("troll-tuned", "troll-hot", "troll-reuse", "dppo-tuned", "dppo-hot", "dppo-reuse", "troll-dppo", "projection", "exact"),
    *("words-troll", "words-dppo", "words-reuse", "words-passes", "gemma-troll", "gemma-dppo", "gemma-reuse"),
)
"""Claims that README tells."""
BLOCK = re.compile(r"<!-- evidence: ([\w-]+) -->\n.*?<!-- /evidence -->", re.DOTALL)


def count(runs: Sequence[Row]) -> str:
    """How much there is to go by."""
    judged = [one for one in judge(runs).values() if one.found is not None and one.found.seeds >= ENOUGH]
    return (
        f"{len(runs)} runs in all; {len(judged)} of {len(CLAIMS)} claims have the {ENOUGH} fresh seeds that a verdict needs.\n"
    )


def verdicts(runs: Sequence[Row], names: Sequence[str] = ()) -> str:
    """Claims that have the seeds for a verdict in one table, all or those named; of all, also which have not."""
    lines, untested = [], []
    for name, one in judge(runs).items():
        if one.found is None or one.found.seeds < ENOUGH:
            untested.append(one.claim.says)
        elif not names or name in names:
            mean = one.found.mean
            interval = "–" if mean.low is None or mean.high is None else f"{plain(mean.low)} … {plain(mean.high)}"
            lines.append([one.claim.says, signed(mean.value), interval, str(one.found.seeds), f"**{one.word}**"])
    shown = markdown(("claim", "points", "95 %", "seeds", "verdict"), lines) if lines else ""
    return shown if names or not untested else f"{shown}\nNamed before any run, and not tested yet: {'; '.join(untested)}.\n"


def front(runs: Sequence[Row]) -> str:
    """Claims for README, and how many of all hold."""
    words = [one.word for one in judge(runs).values()]
    shown = f"{words.count('holds here')} of {len(words) - words.count('too few runs')}"
    return f"{verdicts(runs, FRONT)}\nOf all claims that were tested, {shown} hold.\n"


def _figure(name: str, words: str) -> Callable[[Sequence[Row]], str]:
    """An image, where there are runs to draw."""
    return lambda runs: f"![{words}](llm-{name}.svg)\n" if name in figures(runs) else ""


BLOCKS: dict[str, Callable[[Sequence[Row]], str]] = {
    "verdicts": verdicts,
    "front": front,
    "count": count,
    "by-rate": by_rate,
    "tuned": lambda runs: map_at(runs, (TUNED, 3e-4)),
    "hot": lambda runs: map_at(runs, HOT),
    "floor": floor,
    "reused": reused,
    "ablations": ablations,
    "mismatch": mismatch,
    "stability": stability,
    "bounds": bounds,
    "rare": rare,
    "routing": routing,
    "moe": experts,
    "published": published,
    "blocked": blocked,
    "estimators": estimators,
    "words": lambda runs: words(runs, "smollm2"),
    "made-again": made_again,
    "words-gemma": lambda runs: words(runs, "gemma"),
    "confirmed": lambda runs: confirmed([*runs, *read_automatic()], "smollm2"),
    "confirmed-gemma": lambda runs: confirmed([*runs, *read_automatic()], "gemma"),
    "words-books": lambda runs: words(runs, "books"),
    "words-gsm8k": lambda runs: words(runs, "gsm8k"),
    "pretrained-starts": pretrained_starts,
    "starts": starts,
    "code": code,
    "costs": costs,
    "seconds": seconds,
    "figure-map": _figure("map", "Area under held-out success by learning rate, a line per objective"),
    "figure-words": _figure(
        "words",
        "SmolLM2: area under held-out success by learning rate, a line per objective and passes; held at auto beside them",
    ),
    "figure-words-gemma": _figure("words-gemma", "Gemma: the same"),
    "figure-reuse": _figure("reuse", "Four passes: area under held-out success by learning rate, a line per objective"),
    "figure-ablations": _figure("ablations", "Differences to TROLL as it is, with intervals"),
}


def write(text: str, runs: Sequence[Row]) -> str:
    """The page with its blocks written anew; `verdict-NAME` is the sentence of a claim, if it has any run."""
    found = judge(runs)

    def block(name: str) -> str:
        if name.startswith("verdict-"):
            one = found[name.removeprefix("verdict-")]
            return "" if one.found is None else one.sentence + "\n"
        return BLOCKS[name](runs)

    return BLOCK.sub(lambda match: f"<!-- evidence: {match[1]} -->\n{block(match[1])}<!-- /evidence -->", text)


def main() -> None:
    """Command line."""
    runs = read_runs()
    for page in (PAGE, README):
        text = write(page.read_text(), runs)
        write_whole(page, lambda beside, text=text: beside.write_text(text))
    draw([*runs, *read_automatic()], PAGE.parent)


if __name__ == "__main__":
    main()
