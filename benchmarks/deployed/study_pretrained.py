"""Pretrained models on the study's page: SmolLM2 and Gemma held, at rates that nobody tuned, beside their best rates unheld."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from study_gate0 import behind
from study_table import Row, area, final, finished, is_below_start
from study_text import RESULTS, group, kl, markdown, rate_text, short, two_digits, with_interval

EVIDENCE = Path(__file__).parents[1] / "evidence/results"
FRESH = 406
"""Runs of seeds from here on confirm what those before them found, on the evidence's own page."""
HEAD = (
    "objective", "passes", "held at", "rate", "n", "area", "less the best unheld rate's", "final", "greedy", "KL mean", "p99.9",
    "below its start",
)  # fmt: skip


def pretrained(_: Sequence[Row], base: str) -> str:
    """Every objective and number of passes: at its best unheld rate, then held; paired with the first by seed."""
    runs = [run for run in finished([RESULTS, EVIDENCE]).values() if run.get("base") == base and "held" not in run]
    return pretrained_table([run for run in runs if run["seed"] < FRESH])


def pretrained_table(runs: Sequence[Row]) -> str:
    """Rows for arms that have held runs; the best of the rates that have the most seeds is that of the largest mean area."""
    lines = []
    for (objective, passes), members in group(runs, "objective", "passes").items():
        unheld = {rate: some for (rate,), some in group([run for run in members if run["arm"] == "off"], "rate").items()}
        held = group([run for run in members if run["arm"] != "off"], "bound", "rate", "schedule")
        if not (held and unheld):
            continue
        best = max(unheld, key=lambda rate: (len(unheld[rate]), fmean(map(area, unheld[rate]))))
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
