"""Write what the runs of both studies hold into docs/results/llm.md: tables, verdicts and figures. Trains nothing.

A block between `<!-- evidence: NAME -->` and `<!-- /evidence -->` is written anew; whatever else the page says stays.

    python benchmarks/evidence/llm_page.py
"""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from statistics import fmean, median, stdev

from evidence_plans import ABLATIONS, ARMS, FAMILIES, HOT, REUSED, TUNED, WORD_ARMS, WORD_RATES
from evidence_rows import HERE, Cell, Row, arm_name, collapsed, compare, measures, most_collapses, read_runs, word_cell
from llm_claims import CLAIMS, TROLL, judge
from llm_figures import RATES, draw, figures
from study_page import markdown, rate_text, short, two_digits

from corral.report.statistics import ENOUGH, plain, signed
from corral.run.files import write_whole

PAGE = HERE.parents[1] / "docs/results/llm.md"
BLOCK = re.compile(r"<!-- evidence: ([\w-]+) -->\n.*?<!-- /evidence -->", re.DOTALL)
STARTS = HERE / "results/word-starts.jsonl"
BLOCKED = HERE / "results/blocked.jsonl"
COSTS = HERE / "results/cost.jsonl"
_HEAD = ("", "runs", "area", "final", "greedy", "KL mean", "p99.9", "max", "acted on", "collapsed")


def _cells(name: str, found: Sequence[Row]) -> list[str]:
    """A row of a table: means over seeds, and collapses."""
    mean = measures(found)
    success = [short(mean[key]) for key in ("area", "final", "greedy")]
    kl = [two_digits(mean[key]) for key in ("mean", "p999", "max")]
    gone = sum(map(collapsed, found))
    most = f"{gone} of {len(found)}, at most {100 * most_collapses(gone, len(found)):.0f} %"
    return [name, str(len(found)), *success, *kl, f"{100 * mean['acted']:.1f} %", most]


def _table(cells: Iterable[tuple[str, Cell]], runs: Sequence[Row]) -> str:
    """A row for every cell with runs, and the names of those without."""
    found = [(name, list(cell.runs(runs).values())) for name, cell in cells]
    missing = [name for name, members in found if not members]
    lines = [_cells(name, members) for name, members in found if members]
    absent = f"Not run yet: {'; '.join(missing)}.\n" if missing else ""
    return "\n".join(filter(None, [markdown(_HEAD, lines) if lines else "", absent]))


def _map(runs: Sequence[Row], rate: float | tuple[float, ...]) -> str:
    return _table([(arm_name(arm), Cell(arm=arm, rate=rate)) for arm in ARMS], runs)


def by_rate(runs: Sequence[Row]) -> str:
    """Area under the held-out curve of every contestant at every rate, with its spread and the number of seeds."""
    rates = [rate for rate in RATES if any(Cell(arm=arm, rate=rate).runs(runs) for arm in ARMS)]
    lines = []
    for arm in ARMS:
        if not any(Cell(arm=arm, rate=rate).runs(runs) for rate in rates):
            continue
        row = [arm_name(arm)]
        for rate in rates:
            areas = [measures([run])["area"] for run in Cell(arm=arm, rate=rate).runs(runs).values()]
            spread = f" ± {short(stdev(areas))}" if len(areas) > 1 else ""
            row.append(f"{short(fmean(areas))}{spread} ({len(areas)})" if areas else "–")
        lines.append(row)
    return markdown(("", *map(rate_text, rates)), lines) if lines else "Not run yet.\n"


def reused(runs: Sequence[Row]) -> str:
    """Passes over a batch at every rate there is; first the fresh seeds, which were measured more often."""
    cells = []
    for every, passes, arm, rate in product((2, 5), (1, 4, 8), REUSED, (1e-4, TUNED, 4e-4)):
        cell = Cell(arm=arm, rate=rate, passes=passes, steps=10, every=every)
        if cell.runs(runs):
            seeds = "fresh" if every == 2 else "tuning"
            cells.append((f"{arm_name(arm)}, {8 * passes} updates, {rate_text(rate)}, {seeds} seeds", cell))
    return _table(cells, runs)


def ablations(runs: Sequence[Row]) -> str:
    """TROLL with one thing changed, paired with TROLL as it is by seed, at both rates."""
    lines = []
    for variant in ABLATIONS:
        if not any(Cell(arm=("troll", variant), rate=rate).runs(runs) for rate in (TUNED, HOT)):
            continue
        row = [variant]
        for rate in (TUNED, HOT):
            cell = Cell(arm=("troll", variant), rate=rate)
            found = compare(cell, Cell(arm=TROLL, rate=rate), runs)
            if found is None:
                row += ["–", "–"]
                continue
            mean = found.mean
            interval = "" if mean.low is None or mean.high is None else f" [{plain(mean.low)} … {plain(mean.high)}]"
            row += [short(measures(list(cell.runs(runs).values()))["area"]), f"{signed(mean.value)}{interval} ({found.seeds})"]
        lines.append(row)
    head = ("changed", f"area, {rate_text(TUNED)}", "points over TROLL", f"area, {rate_text(HOT)}", "points over TROLL")
    return markdown(head, lines) if lines else f"Not run yet: {'; '.join(ABLATIONS)}.\n"


def mismatch(runs: Sequence[Row]) -> str:
    """Samplers in lower precision, by anchor."""
    cells = []
    for arm in (("dppo", ""), ("ppo_clip", ""), ("troll", ""), ("troll", "unprojected")):
        for sampler in ("fp8", "bf16"):
            for anchor in ("rollout", "old"):
                others = {"sampler": sampler, "anchor": anchor}
                cells.append((f"{arm_name(arm)}, {sampler}, `{anchor}`", Cell(arm=arm, others=others)))
    found = any(cell.runs(runs) for _, cell in cells)
    return _table(cells, runs) if found else "Not run yet.\n"


def blocked(_: Sequence[Row]) -> str:
    """Share of tokens that each rule blocks, by rate and old probability, beside the total variation over the vocabulary."""
    if not BLOCKED.is_file():
        return "Not measured yet.\n"
    lines, rules = [], list[str]()
    for row in map(json.loads, BLOCKED.read_text().splitlines()):
        for bucket in row["buckets"]:
            rules = list(bucket["blocked"])
            shares = [f"{100 * bucket['blocked'][rule]:.1f} ({100 * bucket['near'][rule]:.1f})" for rule in rules]
            about = [rate_text(row["rate"]), bucket["bucket"], f"{bucket['tokens']:,}", two_digits(bucket["tv"])]
            lines.append([*about, f"{100 * bucket['far']:.1f}", *shares])
    return markdown(("rate", "old probability", "tokens", "mean TV", "TV above .2, %", *rules), lines)


def estimators(runs: Sequence[Row]) -> str:
    """TROLL against clipping under each advantage, paired by seed."""
    lines = []
    for variant, rate in product(("", "no std", "rloo", "reinforce++"), (TUNED, HOT)):
        cells = [Cell(arm=(name, variant), rate=rate) for name in ("troll", "ppo_clip")]
        found = compare(*cells, runs) if variant or any(cell.runs(runs) for cell in cells) else None
        if found is not None:
            areas = [short(measures(list(cell.runs(runs).values()))["area"]) for cell in cells]
            lines.append([variant or "standardised", rate_text(rate), *areas, signed(found.mean.value), str(found.seeds)])
    return markdown(("advantage", "rate", "TROLL", "clipping", "points", "seeds"), lines) if lines else "Not run yet.\n"


def words(runs: Sequence[Row], base: str) -> str:
    """A pretrained model by objective, passes and rate; seconds of a run where several shared a card."""
    lines = []
    for (objective, passes), rate in product((*WORD_ARMS, ("ppo_clip", 4)), (3e-6, *WORD_RATES, 1e-3)):
        if found := list(word_cell(base, objective, passes, rate).runs(runs).values()):
            name = f"{objective}, {8 * passes} updates, {rate_text(rate)}"
            lines.append([*_cells(name, found), f"{fmean(run['seconds'] for run in found):.0f}"])
    return markdown((*_HEAD, "seconds"), lines) if lines else "Not run yet.\n"


def word_starts(_: Sequence[Row]) -> str:
    """What the starts can do on SVAMP, as the model comes and after its warm-up, greedy and by temperature."""
    if not STARTS.is_file():
        return "Not made yet.\n"
    rows = [json.loads(line) for line in STARTS.read_text().splitlines()]
    kinds, lines = list(rows[0]["after"]), []
    for name in dict.fromkeys(row["model"] for row in rows):
        mine = [row for row in rows if row["model"] == name]
        lines.append([f"{name} as it comes", "–", *(short(mine[0]["before"][kind]) for kind in kinds)])
        for row in sorted(mine, key=lambda row: row["seed"]):
            after = [short(row["after"][kind]) for kind in kinds]
            lines.append([f"{name}, start {row['seed']}", str(len(row["epochs"])), *after])
    return markdown(("", "epochs", *(kind if kind == "greedy" else f"T = {kind}" for kind in kinds)), lines)


def starts(runs: Sequence[Row]) -> str:
    """Other warm starts and families: TROLL against clipping, paired by seed."""
    lines = []
    for name in [*(f"llama-{seed}" for seed in (1, 2, 3)), *(f"{family}-1" for family in FAMILIES)]:
        others = {"model": f"runs/starts/{name}"}
        for rate in (TUNED, HOT):
            cells = [Cell(arm=arm, rate=rate, others=others) for arm in (("troll", ""), ("ppo_clip", ""))]
            found = compare(*cells, runs)
            if found is not None:
                areas = [short(measures(list(cell.runs(runs).values()))["area"]) for cell in cells]
                lines.append([name, rate_text(rate), *areas, signed(found.mean.value), str(found.seeds)])
    return markdown(("start", "rate", "TROLL", "clipping", "points", "seeds"), lines) if lines else "Not run yet.\n"


def floor(runs: Sequence[Row]) -> str:
    """With one update per batch every objective is the same algorithm: what is left is chance."""
    found = defaultdict(list)
    for run in runs:
        if run["updates"] == 1 and run["passes"] == 1 and run["steps"] == 15:
            found[run["rate"], run["seed"], run["device"]].append(measures([run])["area"])
    spreads = [100 * stdev(areas) for areas in found.values() if len(areas) > 1]
    if not spreads:
        return "One update per batch, where all objectives are one algorithm, has not been run yet.\n"
    count = sum(len(areas) for areas in found.values() if len(areas) > 1)
    told = f"differ by {plain(fmean(spreads))} points (sd)" if any(spreads) else "have the same measurements to the last digit"
    return (
        f"With one update per batch all objectives are one algorithm: {count} runs of them, equal in seed and rate, {told}.\n"
    )


def costs(_: Sequence[Row]) -> str:
    """Seconds and memory over clipping, measured in turns: medians, and how far rounds lie apart."""
    if not COSTS.is_file():
        return "Not measured yet.\n"
    rows = [json.loads(line) for line in COSTS.read_text().splitlines()]
    lines = []
    for about in dict.fromkeys((row["device"], row["model"]) for row in rows):
        mine = [row for row in rows if (row["device"], row["model"]) == about]
        clip = [row for row in mine if row["name"] == "ppo_clip"]
        for name in dict.fromkeys(row["name"] for row in mine):
            some = [row for row in mine if row["name"] == name]
            cells = [f"{about[1]}, {about[0]}", name, str(len(some))]
            for key in ("step", "updates", "mib"):
                base = median(row[key] for row in clip)
                cells.append(f"{100 * (median(row[key] for row in some) / base - 1):+.1f} %" if base else "–")
            taken = sorted(row["step"] for row in some)
            lines.append([*cells, f"{taken[0]:.2f} – {taken[-1]:.2f}"])
    return markdown(("", "objective", "runs", "step", "updates", "memory", "seconds a step"), lines)


def seconds(runs: Sequence[Row]) -> str:
    """Seconds of whole runs with four passes that shared one GPU, over clipping's."""
    taken = {}
    for arm in REUSED:
        found = Cell(arm=arm, rate=TUNED, passes=4, steps=10, every=2).runs(runs).items()
        if mine := [run["seconds"] for (*_, device), run in found if device == "cuda" and not run["end_size"]]:
            taken[arm_name(arm)] = mine
    if "ppo_clip" not in taken:
        return "Not measured yet.\n"
    base, lines = fmean(taken["ppo_clip"]), []
    for name, some in taken.items():
        more = f"{100 * (fmean(some) / base - 1):+.0f} %".replace("-", "−")
        lines.append([name, str(len(some)), f"{fmean(some):.0f} s", more])
    return markdown(("", "runs", "a run", "over clipping"), lines)


def count(runs: Sequence[Row]) -> str:
    """How much there is to go by."""
    judged = [one for one in judge(runs).values() if one.found is not None and one.found.seeds >= ENOUGH]
    return (
        f"{len(runs)} runs in all; {len(judged)} of {len(CLAIMS)} claims have the {ENOUGH} fresh seeds that a verdict needs.\n"
    )


def verdicts(runs: Sequence[Row]) -> str:
    """All claims in one table."""
    found = judge(runs)
    lines = []
    for claim in CLAIMS:
        one = found[claim.name]
        mean = None if one.found is None else one.found.mean
        ends = mean is not None and mean.low is not None and mean.high is not None
        interval = f"{plain(mean.low)} … {plain(mean.high)}" if ends and mean is not None else "–"
        points = "–" if mean is None else signed(mean.value)
        lines.append([claim.says, points, interval, "0" if one.found is None else str(one.found.seeds), f"**{one.word}**"])
    return markdown(("claim", "points", "95 %", "seeds", "verdict"), lines)


def _figure(name: str, words: str) -> Callable[[Sequence[Row]], str]:
    """An image, where there are runs to draw."""
    return lambda runs: (
        f"![{words}](llm-{name}.svg)\n" if name in figures(runs) else "No figure yet: too few settings were run.\n"
    )


BLOCKS: dict[str, Callable[[Sequence[Row]], str]] = {
    "verdicts": verdicts,
    "count": count,
    "by-rate": by_rate,
    "tuned": lambda runs: _map(runs, (TUNED, 3e-4)),
    "hot": lambda runs: _map(runs, HOT),
    "floor": floor,
    "reused": reused,
    "ablations": ablations,
    "mismatch": mismatch,
    "blocked": blocked,
    "estimators": estimators,
    "words": lambda runs: words(runs, "smollm2"),
    "words-gemma": lambda runs: words(runs, "gemma"),
    "word-starts": word_starts,
    "starts": starts,
    "costs": costs,
    "seconds": seconds,
    "figure-map": _figure("map", "Area under held-out success by learning rate, a line per objective"),
    "figure-words": _figure("words", "SmolLM2: area under success on SVAMP by learning rate, a line per objective and passes"),
    "figure-words-gemma": _figure("words-gemma", "Gemma: the same"),
    "figure-reuse": _figure("reuse", "Area under held-out success by passes over each batch, a line per objective"),
    "figure-ablations": _figure("ablations", "Differences to TROLL as it is, with intervals"),
}


def write(text: str, runs: Sequence[Row]) -> str:
    """The page with its blocks written anew; `verdict-NAME` is the sentence of a claim."""
    found = judge(runs)

    def block(name: str) -> str:
        if name.startswith("verdict-"):
            return found[name.removeprefix("verdict-")].sentence + "\n"
        return BLOCKS[name](runs)

    return BLOCK.sub(lambda match: f"<!-- evidence: {match[1]} -->\n{block(match[1])}<!-- /evidence -->", text)


def main() -> None:
    """Command line."""
    runs = read_runs()
    text = write(PAGE.read_text(), runs)
    write_whole(PAGE, lambda beside: beside.write_text(text))
    draw(runs, PAGE.parent)


if __name__ == "__main__":
    main()
