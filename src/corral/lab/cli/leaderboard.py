"""Command `corral leaderboard`: compare an objective of your own with others in one setting of the leaderboard.
The compared objectives are printed by rank."""

import argparse
from pathlib import Path
from typing import Any

from corral.lab.cli import compare, say
from corral.validate import RunError

_EPILOG = """
corral leaderboard --objective mine.py:loss
corral leaderboard --objective mine.py:loss --passes 1 --lag 4 --against ppo_clip,dppo,troll
corral leaderboard --against ppo_clip,troll                    a cell of the table as it is

Every contestant has 14 runs of the demo's model: three learning rates with two seeds, then the best of them with eight
fresh seeds. If any contestant is best at an end of the grid, a rate is added there for all. Further flags are those of
`corral compare`: --jobs 8, --dry-run, --seeds 4. Ctrl-C stops; `corral compare --resume DIR` goes on.
"""

_RATES = {1: "2e-4,4e-4,8e-4", 4: "1e-4,2e-4,4e-4"}
"""Learning rates that the leaderboard tries, keyed by the number of passes over each batch."""
_FIRST = 601
"""First random seed of the leaderboard. Learning rates are chosen on this seed and the next."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `corral leaderboard` to the parser. All other flags are passed on to `corral compare`."""
    parser.epilog = _EPILOG
    parser.add_argument(
        "--objective", metavar="FILE:FUNCTION", action="append", default=[], help="an objective of your own; repeatable"
    )
    parser.add_argument("--against", metavar="A,B", default="ppo_clip,troll", help="whom to rank it with (ppo_clip,troll)")
    parser.add_argument("--passes", type=int, choices=_RATES, default=4, help="passes over each batch of rollouts (4)")
    parser.add_argument("--lag", metavar="K", type=int, default=0, help="age of the rollouts in batches (0)")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the comparison; by default a new one under runs/")


def run(arguments: argparse.Namespace, rest: list[str]) -> int:
    """Run one cell of the leaderboard as a comparison, and print the ranks. Returns the comparison's exit status."""
    from corral.lab.run.folder import default_name

    out = arguments.out or default_name("leaderboard")
    names = [*filter(None, arguments.against.split(",")), *arguments.objective]
    words = ["--recipe=leaderboard", f"--objectives={','.join(names)}", f"--out={out}", f"--num-iterations={arguments.passes}"]
    words += [f"--rollout-lag={arguments.lag}", f"--sweep=learning_rate={_RATES[arguments.passes]}"]
    words += [] if any(word.partition("=")[0] == "--seed" for word in rest) else [f"--seed={_FIRST}"]
    words += rest
    parser = argparse.ArgumentParser(prog="corral leaderboard", allow_abbrev=False)
    compare.add_arguments(parser)
    parser.set_defaults(words=["compare", *words])
    given, settings = parser.parse_known_args(words)
    if given.resume is not None:
        raise RunError(f"a cell goes on as the comparison that it is: corral compare --resume {given.resume}")
    status = compare.run(given, settings)
    if status == 0 and not given.dry_run:
        say("", *ranks(out))
    return status


def ranks(path: Path) -> list[str]:
    """Rank a comparison's methods by mean success over the run, with differences from the method named first.

    Differences are means over paired seeds with Student's 95 % interval; the mean over the run has a bootstrap interval.
    """
    from corral.lab.compare.view import align_columns
    from corral.lab.report.content import make_report
    from corral.lab.report.read import read_comparison, read_runs
    from corral.lab.report.statistics import signed

    saved = read_comparison(path)
    report = make_report(read_runs([path]), [saved])
    found = [row for row in report.tables["results"] if row["area"] is not None]
    first, measure = saved.contestants[0], report.measure
    pairs: dict[tuple[str, str], tuple[int, dict[str, Any]]] = {}
    for pair in report.tables["comparisons"]:
        if pair["measure"] == "area":
            pairs |= {(pair["ours"], pair["theirs"]): (1, pair), (pair["theirs"], pair["ours"]): (-1, pair)}
    rows = [["rank", "objective", "setting", f"mean {measure.name} over the run", f"less {first}"]]
    for rank, row in enumerate(sorted(found, key=lambda row: -row["area"]), 1):
        gap = ""
        if (row["objective"], first) in pairs:
            sign, pair = pairs[row["objective"], first]
            bounds = sorted(sign * pair[end] for end in ("low", "high") if pair[end] is not None)
            value, *ends = signed(sign * pair["difference"], *bounds)
            gap = f"{value} [{'…'.join(ends)}] {pair['unit']}" if ends else f"{value} {pair['unit']}"
        estimate = measure.estimate(row["area"], row["area_low"], row["area_high"])
        rows.append([str(rank), row["objective"], row["setting"], estimate, gap])
    return align_columns(rows)
