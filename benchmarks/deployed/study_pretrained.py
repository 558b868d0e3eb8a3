"""A pretrained model on the study's page: SmolLM2 held, at rates that nobody tuned, beside its best rates unheld."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from study_gate0 import behind
from study_table import Row, area, final, finished, is_below_start
from study_text import RESULTS, group, kl, markdown, rate_text, short, two_digits, with_interval

EVIDENCE = Path(__file__).parents[1] / "evidence/results"
ROUNDED = EVIDENCE / "rounded-sampler"
"""Unheld runs with the sampler that the held ones have, in place of later ones with another."""
HEAD = (
    "objective", "passes", "held at", "rate", "n", "area", "less the best unheld rate's", "final", "greedy", "KL mean", "p99.9",
    "below its start",
)  # fmt: skip


def read_pretrained() -> list[Row]:
    """Runs of SmolLM2 with the trainer as it ships, of both studies."""
    runs = finished([RESULTS, EVIDENCE, ROUNDED]).values()
    return [run for run in runs if run.get("base") == "smollm2" and "held" not in run]


def pretrained(_: Sequence[Row]) -> str:
    """Every objective and number of passes: at its best unheld rate, then held; paired with the first by seed."""
    return pretrained_table(read_pretrained())


def pretrained_table(runs: Sequence[Row]) -> str:
    """Rows for arms that have held runs; a rate is the best by its mean area over the seeds that all rates share."""
    lines = []
    for (objective, passes), members in group(runs, "objective", "passes").items():
        unheld = {rate: some for (rate,), some in group([run for run in members if run["arm"] == "off"], "rate").items()}
        held = group([run for run in members if run["arm"] != "off"], "bound", "rate", "schedule")
        if not (held and unheld):
            continue
        best = max(unheld, key=lambda rate: fmean(map(area, unheld[rate])))
        worst = {rate: some for rate, some in unheld.items() if rate == 1e-3}  # as far off as the held runs' rates are
        arms = [("no", best, unheld[best]), *(("no", rate, some) for rate, some in worst.items())]
        for (bound, rate, schedule), some in sorted(held.items(), key=lambda item: str(item[0][1])):
            arms.append((f"{two_digits(float(str(bound)))}{', constant' if schedule == 'constant' else ''}", rate, some))
        for how, rate, some in arms:
            cells = [str(objective), str(passes), how, rate_text(rate), str(len(some))]  # type: ignore[arg-type]  # `group` has objects
            cells += [with_interval([area(run) for run in some]), behind(some, unheld[best]), short(fmean(map(final, some)))]
            cells += [short(fmean(final(run, "greedy") for run in some)), kl(some, "mean"), kl(some, "p999")]
            lines.append([*cells, f"{sum(map(is_below_start, some))} of {len(some)}"])
    return markdown(HEAD, lines) if lines else "Not run yet.\n"
