"""SmolLM2 on word problems on the page: gate 0, and the trainer as it ships, whose rows are the evidence's."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from study_gate0 import ARMS, HEAD, gate0_lines
from study_rates import not_worse
from study_table import Row, area, final, finished, is_below_start
from study_text import (
    RESULTS,
    best_temperature,
    by_seed,
    group,
    kl,
    markdown,
    rate_text,
    short,
    signed,
    two_digits,
    with_interval,
)

RECIPE = "evidence-b"
EVIDENCE = RESULTS.parents[1] / "evidence/results"
STARTS = EVIDENCE / "word-starts.jsonl"
NAMES = ARMS | {"lookahead": "Lookahead, share .03"}
MISSING = "Not run yet.\n"


def gate0_words(runs: Sequence[Row], schedule: str) -> str:
    """Every arm on SmolLM2 at a rate far too large, and nothing held at rates that suit it."""
    some = [run for run in runs if "held" in run and (run.get("recipe"), run["schedule"]) == (RECIPE, schedule)]
    return markdown(HEAD, gate0_lines(some, NAMES)) + word_starts() if some else MISSING


def word_starts(file: Path = STARTS) -> str:
    """What the starts can do before any reinforcement, in the mean."""
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    cards = [line["after"] for line in lines if line["model"] == "smollm2"]
    if not cards:
        return ""
    found = {0.0 if key == "greedy" else float(key): fmean(card[key] for card in cards) for key in cards[0]}
    best = best_temperature(found)
    at = "greedy" if best == 0 else two_digits(best)
    tuned = f"{short(found[best])} at the best temperature ({at})"
    return f"\nStarts ({len(cards)}): success {short(found[1.0])} at temperature 1, {short(found[0.0])} greedy, {tuned}.\n"


def held_words(runs: Sequence[Row]) -> str:
    """The trainer as it ships, on SmolLM2: by rate, schedule and bound, one pass."""
    lines = []
    for (objective, arm, schedule, rate), some in _shipped(runs).items():
        fallen = sum(run["dead"] or is_below_start(run) for run in some)
        cells = [with_interval([read(run) for run in some]) for read in (area, final)]
        cells += [short(fmean(final(run, "greedy") for run in some)), f"{fallen} of {len(some)}", kl(some, "mean")]
        held = "no" if arm == "off" else str(arm).removeprefix("on 0")
        lines.append([str(objective), rate_text(rate), str(schedule), held, str(len(some)), *cells])
    head = ("objective", "rate", "schedule", "held at", "n", "area", "final", "greedy", "fell below the start", "KL mean")
    return markdown(head, lines) + word_starts() if lines else MISSING


def words_not_inferior(runs: Sequence[Row]) -> str:
    """ "auto" less the best rate with nothing held, one-sided, for each objective."""
    found, texts = _shipped(runs), []
    for objective in ("troll", "ppo_clip"):
        ours = found.get((objective, "on 0.03", "constant", "auto"), [])
        tuned = {rate: some for (name, arm, _, rate), some in found.items() if (name, arm) == (objective, "off")}
        if not ours or not tuned:
            continue
        best = max(tuned, key=lambda rate: fmean(map(area, tuned[rate])))
        one, end = (not_worse(by_seed(ours, read), by_seed(tuned[best], read)) for read in (area, final))
        verdict = "not inferior" if one.p is not None and one.p < 0.05 else "may be inferior"
        texts.append(
            f'- {objective}, `"auto"` held at .03, less {rate_text(best)} unheld ({one.runs}): area {signed(one.mean)}, '
            f"at least {signed(one.low)}; final {signed(end.mean)}, at least {signed(end.low)}: {verdict}.\n"
        )
    return "".join(texts) or MISSING


def _shipped(runs: Sequence[Row]) -> dict[tuple[object, ...], list[Row]]:
    """Clipping and TROLL with one pass over each batch; unheld first, by rate."""
    some = [run for run in runs if run.get("recipe") == RECIPE and run.get("passes") == 1 and not run.get("variant")]
    some = [run for run in some if run["objective"] in ("troll", "ppo_clip") and run.get("base", "smollm2") == "smollm2"]
    found = group(some, "objective", "arm", "schedule", "rate")
    return {key: found[key] for key in sorted(found, key=_place)}


def _place(key: tuple[object, ...]) -> tuple[bool, bool, float]:
    """TROLL before clipping, unheld before held, by rate; "auto" last."""
    objective, arm, _, rate = key
    return objective != "troll", arm != "off", math.inf if rate == "auto" else float(str(rate))


def read_evidence() -> list[Row]:
    """Finished runs of the evidence."""
    return [*finished([EVIDENCE]).values()]
