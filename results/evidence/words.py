"""Tables of docs/results/llm.md on pretrained models, on what it costs, on blocked tokens and on routing."""

from collections.abc import Sequence
from itertools import product

from corral.lab.report.statistics import difference
from results.evidence.cells import Cell, arm_name, compare, word_cell
from results.evidence.tables import HEAD, cells_of, table
from results.packed import FOLDER, Row, read
from results.pages import interval_text, markdown, rate_text, two_digits
from results.plans import BEST, HOT, TUNED, WORD_SEEDS
from results.runs import area, final, where
from results.spec import CODED


def raw(name: str) -> list[Row]:
    """Raw rows that are no runs."""
    return read(FOLDER / f"evidence/{name}.parquet")


def automatic(base: str) -> Cell:
    """Clipping at "auto" on a pretrained model's fresh seeds."""
    others = {"base": base, "schedule": "constant"}
    return word_cell(base, "ppo_clip", 1, "auto", seeds=WORD_SEEDS[base], others=others)


def best_clip(base: str) -> Cell:
    """Clipping with one pass at its best rate on the same seeds."""
    return word_cell(base, "ppo_clip", 1, BEST[base]["ppo_clip", 1], seeds=WORD_SEEDS[base])


def confirmed(runs: Sequence[Row], base: str) -> str:
    """Each arm at its best rate and clipping at "auto" on fresh seeds, with points over clipping."""
    arms = {f"{objective}, {8 * passes} updates, {rate_text(rate)}": word_cell(base, objective, passes, rate,
            seeds=WORD_SEEDS[base]) for (objective, passes), rate in BEST[base].items()}  # fmt: skip
    arms['ppo_clip, 8 updates, "auto"'] = automatic(base)
    clip, lines = best_clip(base), list[list[str]]()
    for name, cell in arms.items():
        if found := list(cell.runs(runs).values()):
            over = ["–" if cell == clip else interval_text(compare(cell, clip, runs, read)) for read in (area, final)]
            lines.append([*cells_of(name, found)[:-1], *over])
    return markdown((*HEAD[:-1], "mean success, points over clipping", "at the end"), lines)


def code(runs: Sequence[Row]) -> str:
    """Programs by objective and rate, then points of TROLL over clipping at each rate, and each at its best."""
    rates, arms = (1e-4, TUNED, HOT), (("troll", ""), ("ppo_clip", ""))
    cells = {(rate, arm): Cell(arm=arm, rate=rate, recipe=CODED, steps=10) for rate, arm in product(rates, arms)}
    shown = table([(f"{arm_name(arm)}, {rate_text(rate)}", cell) for (rate, arm), cell in cells.items()], runs)
    pairs = [(f"at {rate_text(rate)}", [cells[rate, arm] for arm in arms]) for rate in rates]
    best = [Cell(arm=arm, rate=rates, best=True, recipe=CODED, steps=10) for arm in arms]
    pairs.append(("each at the rate that is best for it on the other seeds", best))
    told = "; ".join(f"{at} {interval_text(compare(ours, theirs, runs))}" for at, (ours, theirs) in pairs)
    return f"{shown}\nPoints of TROLL over clipping, paired by seed: {told}.\n"


def blocked() -> str:
    """Share of tokens that each rule blocks, by rate and old probability, beside the total variation over the vocabulary."""
    lines, rules = [], ["clip .2", "TV 0.2"]
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
            cells.append(interval_text(difference(shares, hundred)) if shares and some != clip else "–")
        taken = [row["step"] for row in some]
        lines.append([f"{model}, {device}", name, str(len(some)), *cells, f"{min(taken):.2f} – {max(taken):.2f}"])
    return markdown(("", "objective", "rounds", "step, %", "updates, %", "memory, %", "seconds a step"), lines)
