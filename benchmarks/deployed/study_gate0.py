"""Gate 0 on the page: every arm that holds the network, at rates far too large, against the one that ships."""

from collections.abc import Mapping, Sequence
from statistics import fmean

from study_table import Row, area, final
from study_text import by_seed, group, half_width, kl, markdown, rate_text, short, signed, with_interval, with_start

STEPS = 10
SHIPS = "auto_mean"
"""The arm that the trainer has."""
ARMS = {
    "tuned": "nothing held",
    "auto_mean": "**controlled by the mean, retracted by the mean at 2 δ**",
    "auto": "controlled by the mean, retracted by p99.9",
    "auto_redo": "controlled, batches redone below a share of ½",
    "redo": "redone, not controlled",
    "mean": "retracted by the mean alone",
    "p999": "retracted by p99.9 alone",
    "cvar": "retracted by CVaR alone",
    "k3": "retracted by the sampled k3 alone",
    "accept": "retracted by the mean, accepted on a held-out quarter",
    "rate_first": "rate controlled by k3, first batch redone, no retraction",
    "rate_k3": "rate controlled by k3 alone",
    "rate_mean": "rate controlled by the mean alone",
    "rate_update": "rate controlled after every update (rsl_rl's rule)",
    "lookahead": "Lookahead, share ¼ at 1e-3 and .03 at 1e-2",
    "ema": "EMA of the policy, .8 a batch",
    "stop": "stopped at a target KL (k3)",
    "calm": "warm-up, gradients clipped at .2",
    "none": "nothing held",
}
"""Arms in the order of the page."""
HEAD = ("arm", "rate", "n", "area", "less the bold arm's", "final", "greedy", "KL mean", "p99.9")


def gate0(runs: Sequence[Row], schedule: str) -> str:
    """Every arm at every rate: area, its paired difference from what ships, final success, how far the network goes."""
    some = [run for run in runs if "held" in run and (run["schedule"], run["steps"]) == (schedule, STEPS)]
    return with_start(markdown(HEAD, gate0_lines([run for run in some if run["objective"] == "ppo_clip"])))


def gate0_words(runs: Sequence[Row], schedule: str) -> str:
    """The same on SmolLM2."""
    some = [run for run in runs if "held" in run and (run.get("recipe"), run["schedule"]) == ("evidence-b", schedule)]
    return markdown(HEAD, gate0_lines(some, ARMS | {"lookahead": "Lookahead, share .03"}))


def gate0_lines(runs: Sequence[Row], names: Mapping[str, str] = ARMS) -> list[list[str]]:
    """The table's lines: arms in the order of their names, each at its rates."""
    found = group(runs, "arm", "rate")
    ships = [cell for (arm, _), cell in found.items() if arm == SHIPS]
    only = ships[0] if len(ships) == 1 else []  # at one rate alone, it is what every other is compared with
    lines, before = [], ""
    for arm, name in names.items():
        for rate in sorted(rate for of, rate in found if of == arm):
            some = found[arm, rate]
            cells = [with_interval([area(run) for run in some]), behind(some, found.get((SHIPS, rate), only))]
            cells += [short(fmean(final(run) for run in some)), short(fmean(final(run, "greedy") for run in some))]
            shown = "" if name == before else name
            lines.append([shown, rate_text(rate), str(len(some)), *cells, kl(some, "mean"), kl(some, "p999")])
            before = name
    return lines


def behind(ours: Sequence[Row], ships: Sequence[Row]) -> str:
    """The paired difference of area from the arm that ships at the same rate, with its 95 % interval; a dash without any."""
    mine, theirs = by_seed(ours, area), by_seed(ships, area)
    gaps = [mine[seed] - theirs[seed] for seed in mine if seed in theirs]
    if not gaps or ours == ships:
        return "–"
    return signed(fmean(gaps)) + (f" ± {short(half_width(gaps))}" if len(gaps) > 1 else "")
