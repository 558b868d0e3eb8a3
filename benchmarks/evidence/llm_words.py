"""Tables of docs/results/llm.md on pretrained models, on what it costs, on blocked tokens and on routing."""

import json
from collections.abc import Sequence
from itertools import product
from statistics import fmean

from evidence_plans import BEST, FRESH, GEMMA_RATES, HOT, REUSED, TUNED, WORD_ARMS
from evidence_rows import CODED, DEFAULTS, HERE, Cell, Row, arm_name, compare, final, word_cell
from llm_tables import HEAD, cells_of, difference_text, table
from study_page import markdown, rate_text, short, two_digits
from study_table import area

from corral.lab.report.statistics import difference, plain, signed

STARTS = HERE / "results/pretrained-starts.jsonl"
BLOCKED = HERE / "results/blocked.jsonl"
ROUTING = HERE / "results/routing.jsonl"
COSTS = HERE / "results/cost.jsonl"
ROUNDED = HERE / "rounded-sampler/words.jsonl"
"""Runs of SmolLM2 with every weight of the sampler rounded; most have been made again with the policy that is trained."""


def words(runs: Sequence[Row], base: str) -> str:
    """A pretrained model by objective, passes and rate; seconds of a run where several shared a card."""
    lines = []
    for (objective, passes), rate in product((*WORD_ARMS, ("ppo_clip", 4)), (*GEMMA_RATES, 1e-3)):
        if found := list(word_cell(base, objective, passes, rate).runs(runs).values()):
            name = f"{objective}, {8 * passes} updates, {rate_text(rate)}"
            lines.append([*cells_of(name, found), f"{fmean(run['seconds'] for run in found):.0f}"])
    return markdown((*HEAD, "seconds"), lines) if lines else "Not run yet.\n"


def confirmed(runs: Sequence[Row], base: str) -> str:
    """Each arm at its best rate and clipping at "auto" on fresh seeds; points of area and of final success over clipping."""
    cells = {
        f"{objective}, {8 * passes} updates, {rate_text(rate)}": word_cell(base, objective, passes, rate, seeds=FRESH[base])
        for (objective, passes), rate in BEST[base].items()
    }
    held = {"base": base, "schedule": "constant"}
    cells['ppo_clip, 8 updates, held, "auto"'] = word_cell(base, "ppo_clip", 1, "auto", seeds=FRESH[base], others=held)
    clip, lines = next(iter(cells.values())), []
    for name, cell in cells.items():
        if found := list(cell.runs(runs).values()):
            over = [compare(cell, clip, runs, read) for read in (area, final)]
            points = ["–" if cell is clip or one is None else difference_text(one) for one in over]
            lines.append([*cells_of(name, found)[:7], *points, "–" if over[0] is None else str(over[0].seeds)])
    return markdown((*HEAD[:7], "area, points over clipping", "final", "pairs"), lines) if lines else "Not run yet.\n"


def made_again(runs: Sequence[Row]) -> str:
    """By how much areas change where rollouts are drawn in the precision of training, and what objectives then differ by."""
    if not ROUNDED.is_file():
        return "Not made again yet.\n"
    keys = {run["key"]: run for run in runs}
    before = [{**DEFAULTS, **json.loads(line)} for line in ROUNDED.read_text().splitlines()]
    before = [run for run in before if run["key"] in keys]
    now = [keys[run["key"]] for run in before]
    moved = [100 * (area(run) - area(was)) for run, was in zip(now, before, strict=True)]
    told = []
    for arm in ("troll", "dppo"):
        ours, theirs = (word_cell("smollm2", name, 1, 3e-5) for name in (arm, "ppo_clip"))
        since, then = (compare(ours, theirs, some) for some in (now, before))
        if since is not None and then is not None:
            told.append(f"{arm} − ppo_clip is {difference_text(since)}, where it was {difference_text(then)}")
    spread = f"by {signed(fmean(moved))} points in the mean ({plain(min(moved))} … {plain(max(moved))})"
    return f"{len(moved)} runs were made again with it: areas differ {spread}. At 3e-5 {'; '.join(told)}.\n"


def code(runs: Sequence[Row]) -> str:
    """Programs by objective and rate, then TROLL against clipping at each rate, and each at its best."""
    rates, arms = (1e-4, TUNED, HOT), (("troll", ""), ("ppo_clip", ""))
    cells = {(rate, arm): Cell(arm=arm, rate=rate, recipe=CODED, steps=10) for rate, arm in product(rates, arms)}
    if not any(cell.runs(runs) for cell in cells.values()):
        return "Not run yet.\n"
    shown = table([(f"{arm_name(arm)}, {rate_text(rate)}", cell) for (rate, arm), cell in cells.items()], runs)
    pairs = [(f"at {rate_text(rate)}", [cells[rate, arm] for arm in arms]) for rate in rates]
    best = [Cell(arm=arm, rate=rates, best=True, recipe=CODED, steps=10) for arm in arms]
    told = []
    for where, (ours, theirs) in [*pairs, ("each at the rate that is best for it on the other seeds", best)]:
        found = compare(ours, theirs, runs)
        told += [] if found is None else [f"{where} {difference_text(found)}"]
    first = {run["seed"]: run["lines"][0] for cell in cells.values() for run in cell.runs(runs).values()}
    begin = ", ".join(f"{short(line['success'])} ({short(line['greedy'])})" for _, line in sorted(first.items()))
    points = f"TROLL over clipping, points of area paired by seed: {'; '.join(told)}."
    return f"{shown}\nThe starts have {begin}, greedy in brackets. {points}\n"


def pretrained_starts(_: Sequence[Row]) -> str:
    """What the starts can do on held-out problems, as the model comes and after its warm-up, greedy and by temperature."""
    if not STARTS.is_file():
        return "Not made yet.\n"
    rows = [json.loads(line) for line in STARTS.read_text().splitlines()]
    kinds, lines = list(rows[0]["after"]), []
    for row in rows:
        rounds = row["rounds"]
        if rounds and row["seed"] == 1:
            lines.append([f"{row['model']} as it comes", "–", *(short(row["before"][kind]) for kind in kinds)])
        name = f"{row['model']}, start {row['seed']}" if rounds else f"{row['model']} as it comes"
        lines.append([name, str(len(rounds)) if rounds else "–", *(short(row["after"][kind]) for kind in kinds)])
    return markdown(("", "rounds", *(kind if kind == "greedy" else f"T = {kind}" for kind in kinds)), lines)


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


def routing(_: Sequence[Row]) -> str:
    """How often a sampler in lower precision uses other experts than the trainer, and |log-prob gaps| with and without that."""
    if not ROUTING.is_file():
        return "Not measured yet.\n"
    lines = []
    for row in map(json.loads, ROUTING.read_text().splitlines()):
        shares = [f"{100 * row[key]:.1f} %" if key in row else "–" for key in ("flipped_places", "flipped_tokens")]
        parts = [row[key] for key in ("all", "flipped", "same")]
        gaps = [" / ".join(map(two_digits, part.values())) if part else "–" for part in parts]
        lines.append([row["model"], row["precision"], f"{row['tokens']:,}", *shares, *gaps])
    shown = ("tokens × layers rerouted", "tokens rerouted", "gap: mean / p99.9 / max", "rerouted", "not rerouted")
    return markdown(("model", "sampler", "tokens", *shown), lines)


def costs(_: Sequence[Row]) -> str:
    """Seconds and memory over clipping's of the same round, in per cent, with intervals over rounds."""
    if not COSTS.is_file():
        return "Not measured yet.\n"
    rows = [json.loads(line) for line in COSTS.read_text().splitlines()]
    lines = []
    for about in dict.fromkeys((row["device"], row["model"]) for row in rows):
        mine = [row for row in rows if (row["device"], row["model"]) == about]
        clip = {row["round"]: row for row in mine if row["name"] == "ppo_clip"}
        for name in dict.fromkeys(row["name"] for row in mine):
            some = [row for row in mine if row["name"] == name]
            cells = [f"{about[1]}, {about[0]}", name, str(len(some))]
            for key in ("step", "updates", "mib"):
                shares = {str(row["round"]): 100 * row[key] / base for row in some if (base := clip[row["round"]][key])}
                found = difference(shares, dict.fromkeys(shares, 100.0)) if shares and name != "ppo_clip" else None
                cells.append(difference_text(found) if found else "–")
            taken = sorted(row["step"] for row in some)
            lines.append([*cells, f"{taken[0]:.2f} – {taken[-1]:.2f}"])
    return markdown(("", "objective", "rounds", "step, %", "updates, %", "memory, %", "seconds a step"), lines)


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
