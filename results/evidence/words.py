"""Tables of docs/results/llm.md on pretrained models, on what it costs, on blocked tokens and on routing."""

from collections.abc import Sequence
from itertools import product
from statistics import fmean

from corral.lab.report.statistics import difference, plain
from corral.lab.report.statistics import signed as signed_points
from results.evidence.cells import Cell, arm_name, compare, difference_text, word_cell
from results.evidence.tables import HEAD, OFTEN, cells_of, table
from results.packed import FOLDER, Row, read
from results.pages import markdown, rate_text, short, two_digits
from results.plans import BEST, GEMMA_RATES, HOT, REUSED, TUNED, WORD_ARMS, WORD_SEEDS
from results.runs import DEFAULTS, area, final, where
from results.spec import CODED

ROUNDED = FOLDER / "evidence/rounded-sampler.parquet"
"""Runs of SmolLM2 with every weight of the sampler rounded; most have been made again with the policy that is trained."""


def raw(name: str) -> list[Row]:
    """Raw rows that are no runs."""
    return read(FOLDER / f"evidence/{name}.parquet")


def words(runs: Sequence[Row], base: str) -> str:
    """A pretrained model by objective, passes and rate; seconds of a run where several shared a card."""
    lines = []
    for (objective, passes), rate in product((*WORD_ARMS, ("ppo_clip", 4)), (*GEMMA_RATES, 1e-3)):
        if found := list(word_cell(base, objective, passes, rate).runs(runs).values()):
            name = f"{objective}, {8 * passes} updates, {rate_text(rate)}"
            lines.append([*cells_of(name, found), f"{fmean(run['seconds'] for run in found):.0f}"])
    return markdown((*HEAD, "seconds"), lines)


def confirmed(runs: Sequence[Row], base: str) -> str:
    """Each arm at its best rate and clipping at "auto" on fresh seeds; points of area and of final success over clipping."""
    cells = {
        f"{objective}, {8 * passes} updates, {rate_text(rate)}": word_cell(
            base, objective, passes, rate, seeds=WORD_SEEDS[base]
        )
        for (objective, passes), rate in BEST[base].items()
    }
    held = {"base": base, "schedule": "constant"}
    cells['ppo_clip, 8 updates, held, "auto"'] = word_cell(base, "ppo_clip", 1, "auto", seeds=WORD_SEEDS[base], others=held)
    clip, lines = next(iter(cells.values())), []
    for name, cell in cells.items():
        if found := list(cell.runs(runs).values()):
            over = [compare(cell, clip, runs, read) for read in (area, final)]
            points = ["–" if cell is clip or one is None else difference_text(one) for one in over]
            lines.append([*cells_of(name, found)[:7], *points, "–" if over[0] is None else str(over[0].seeds)])
    return markdown((*HEAD[:7], "area, points over clipping", "final", "pairs"), lines)


def made_again(runs: Sequence[Row]) -> str:
    """Change of areas when rollouts are drawn in the precision of training, and differences between objectives then."""
    keys = {run["key"]: run for run in runs}
    before = [DEFAULTS | run for run in read(ROUNDED) if run["key"] in keys]
    now = [keys[run["key"]] for run in before]
    moved = [100 * (area(run) - area(was)) for run, was in zip(now, before, strict=True)]
    told = []
    for arm in ("troll", "dppo"):
        ours, theirs = (word_cell("smollm2", name, 1, 3e-5) for name in (arm, "ppo_clip"))
        since, then = (compare(ours, theirs, some) for some in (now, before))
        if since is not None and then is not None:
            told.append(f"{arm} − ppo_clip is {difference_text(since)}, where it was {difference_text(then)}")
    spread = f"by {signed_points(fmean(moved))} points in the mean ({plain(min(moved))} … {plain(max(moved))})"
    return f"{len(moved)} runs were made again with it: areas differ {spread}. At 3e-5 {'; '.join(told)}.\n"


def code(runs: Sequence[Row]) -> str:
    """Programs by objective and rate, then TROLL against clipping at each rate, and each at its best."""
    rates, arms = (1e-4, TUNED, HOT), (("troll", ""), ("ppo_clip", ""))
    cells = {(rate, arm): Cell(arm=arm, rate=rate, recipe=CODED, steps=10) for rate, arm in product(rates, arms)}
    first = {run["seed"]: run["lines"][0] for cell in cells.values() for run in cell.runs(runs).values()}
    shown = table([(f"{arm_name(arm)}, {rate_text(rate)}", cell) for (rate, arm), cell in cells.items()], runs)
    pairs = [(f"at {rate_text(rate)}", [cells[rate, arm] for arm in arms]) for rate in rates]
    best = [Cell(arm=arm, rate=rates, best=True, recipe=CODED, steps=10) for arm in arms]
    pairs.append(("each at the rate that is best for it on the other seeds", best))
    found = [(at, compare(ours, theirs, runs)) for at, (ours, theirs) in pairs]
    told = "; ".join(f"{at} {difference_text(one)}" for at, one in found if one is not None)
    begin = ", ".join(f"{short(line['success'])} ({short(line['greedy'])})" for _, line in sorted(first.items()))
    points = f"TROLL over clipping, points of area paired by seed: {told}."
    return f"{shown}\nThe starts have {begin}, greedy in brackets. {points}\n"


def pretrained_starts() -> str:
    """Held-out success of the starts before and after the warm-up, greedy and by temperature."""
    lines, kinds = [], ("greedy", "1", "0.7", "0.4", "0.2")
    for row in raw("pretrained-starts"):
        comes, rounds = f"{row['model']} as it comes", len(row["rounds"])
        if rounds and row["seed"] == 1:
            lines.append([comes, "–", *(short(row["before"][kind]) for kind in kinds)])
        name = f"{row['model']}, start {row['seed']}" if rounds else comes
        lines.append([name, str(rounds or "–"), *(short(row["after"][kind]) for kind in kinds)])
    return markdown(("", "rounds", *(kind if kind == "greedy" else f"T = {kind}" for kind in kinds)), lines)


def blocked() -> str:
    """Share of tokens that each rule blocks, by rate and old probability, beside the total variation over the vocabulary."""
    lines, rules = [], ["clip .2", "TV 0.1", "TV 0.15", "TV 0.2"]
    for row in raw("blocked"):
        for bucket in row["buckets"]:
            shares = [f"{100 * bucket['blocked'][rule]:.1f} ({100 * bucket['near'][rule]:.1f})" for rule in rules]
            about = [rate_text(row["rate"]), bucket["bucket"], f"{bucket['tokens']:,}", two_digits(bucket["tv"])]
            lines.append([*about, f"{100 * bucket['far']:.1f}", *shares])
    return markdown(("rate", "old probability", "tokens", "mean TV", "TV above .2, %", *rules), lines)


def routing() -> str:
    """Share of tokens that a sampler in lower precision routes to other experts, and |log-prob gaps| with and without that."""
    lines = []
    for row in raw("routing"):
        shares = [f"{100 * row[key]:.1f} %" if key in row else "–" for key in ("flipped_places", "flipped_tokens")]
        parts = [row.get(key) for key in ("all", "flipped", "same")]
        gaps = [" / ".join(two_digits(part[key]) for key in ("mean", "p999", "max")) if part else "–" for part in parts]
        lines.append([row["model"], row["precision"], f"{row['tokens']:,}", *shares, *gaps])
    shown = ("tokens × layers rerouted", "tokens rerouted", "gap: mean / p99.9 / max", "rerouted", "not rerouted")
    return markdown(("model", "sampler", "tokens", *shown), lines)


def costs() -> str:
    """Seconds and memory over clipping's of the same round, in per cent, with intervals over rounds."""
    rows, lines = raw("cost"), []
    for device, model, name in dict.fromkeys((row["device"], row["model"], row["name"]) for row in rows):
        some, clip = (where(rows, device=device, model=model, name=one) for one in (name, "ppo_clip"))
        base, cells = {row["round"]: row for row in clip}, []
        for key in ("step", "updates", "mib"):
            shares = {str(row["round"]): 100 * row[key] / base[row["round"]][key] for row in some if base[row["round"]][key]}
            hundred = dict.fromkeys(shares, 100.0)
            cells.append(difference_text(difference(shares, hundred)) if shares and some != clip else "–")
        taken = [row["step"] for row in some]
        lines.append([f"{model}, {device}", name, str(len(some)), *cells, f"{min(taken):.2f} – {max(taken):.2f}"])
    return markdown(("", "objective", "rounds", "step, %", "updates, %", "memory, %", "seconds a step"), lines)


def seconds(runs: Sequence[Row]) -> str:
    """Seconds of whole runs with four passes that shared one GPU, over clipping's."""
    taken = {}
    for arm in REUSED:
        found = where(Cell(arm=arm, rate=TUNED, **OFTEN).runs(runs).values(), device="cuda", end_size=0)
        taken |= {arm_name(arm): [run["seconds"] for run in found]} if found else {}
    base, lines = fmean(taken["ppo_clip"]), []
    for name, some in taken.items():
        more = f"{100 * (fmean(some) / base - 1):+.0f} %".replace("-", "−")
        lines.append([name, str(len(some)), f"{fmean(some):.0f} s", more])
    return markdown(("", "runs", "a run", "over clipping"), lines)
