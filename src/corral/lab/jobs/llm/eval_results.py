"""Results of `corral eval`: rewards of completions, pass@k with confidence intervals, result files, and the printed table."""

import math
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from statistics import NormalDist
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rich import box
from rich.table import Column, Table
from scipy.special import stdtrit

from corral.lab.run.files import LockedFolder, disk_errors, read_settings, require_regular, write_json, write_whole
from corral.lab.run.interval import LEVEL, Estimate, wilson
from corral.lab.run.view import RunView
from corral.validate import RunError

RIGHT = 1.0 - 1e-6
"""Smallest reward with which a completion counts as correct. Rewards lie in [0, 1]."""


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased pass@k: the probability that at least one of k samples is correct, given that `right` of `samples` are.

        pass@k = 1 − C(n−c, k) / C(n, k)          n samples, c right

    This is the share of the k-subsets of the samples that hold a right one. The plug-in 1 − (1 − c/n)^k is biased downwards.

    Args:
        samples: n ≥ 1.
        right: c in 0..n.
        k: how many may be tried, 1..n.
    Returns:
        A probability, exact up to its rounding: binomials are whole numbers here.
    Ref:
        Chen et al. 2021, arXiv:2107.03374, equation 1. Invariant: its mean over Binomial(n, p) is 1 − (1−p)^k.
    """
    if not 1 <= k <= samples or not 0 <= right <= samples:
        raise ValueError(f"pass_at_k: needs 1 ≤ k ≤ samples and 0 ≤ right ≤ samples; got {samples=}, {right=}, {k=}.")
    subsets = math.comb(samples, k)
    return (subsets - math.comb(samples - right, k)) / subsets


def ladder(samples: int) -> list[int]:
    """Values of k for which pass@k is reported: 1, 2, 4, … and the number of samples."""
    powers = [2**exponent for exponent in range(samples.bit_length()) if 2**exponent <= samples]
    return powers if powers[-1] == samples else [*powers, samples]


def estimate(values: Sequence[float], *, draws: float = 1.0, level: float = LEVEL) -> Estimate:
    """Mean of one value per problem, with Wilson's confidence interval for the effective number of trials.

        n_eff = max(N, (z/t)² · min(m (1−m) / (v / N), N · draws))      N problems; m, v: mean and variance of their values

    Samples of one problem share its difficulty and are no independent trials; problems are. A problem counts as no more than
    its `draws` independent looks, and as at least one trial: values in 0..1 vary no more than 0 and 1 do. v is itself guessed
    from N problems, so trials shrink by (z/t)², normal over Student's quantile with N−1 degrees of freedom. With one 0-or-1
    value per problem this is Wilson's own interval.

    Args:
        values: one per problem, in 0..1: a success, a mean reward, a pass@k.
        draws: independent looks behind each value: 1 for greedy, n for the mean of n samples, n/k for pass@k from n samples.
        level: probability that the interval holds the mean over all problems like these.
    Ref:
        Korn and Graubard 1998 and Dean and Pagano 2015, for clustered surveys. Invariant: greedy intervals are plain Wilson.
    """
    if not values:
        raise ValueError("estimate: there are no problems to take a mean over.")
    if not all(0 <= value <= 1 for value in values):
        raise ValueError(f"estimate: values are in 0..1; got {next(v for v in values if not 0 <= v <= 1)}.")
    count = len(values)
    mean = min(1.0, math.fsum(values) / count)
    trials = float(count)
    if count > 1 and mean * (1 - mean) >= 1e-12:  # else always or never right: nothing says how alike a problem's samples are
        variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
        looks = min(count * draws, count * mean * (1 - mean) / variance if variance else math.inf)
        upper = 0.5 + level / 2
        trials = max(trials, looks * (NormalDist().inv_cdf(upper) / float(stdtrit(count - 1, upper))) ** 2)
    return Estimate(mean, *wilson(mean, trials, level))


def difference(first: Sequence[float], second: Sequence[float], level: float = LEVEL) -> Estimate:
    """Mean paired difference `second` − `first` over the problems common to both, with its confidence interval.

        d' = Σd / (N+2),   v' = (Σd² + 1) / (N+2) − d'²,   interval d' ± z √(v' / (N+2))

    Pairing takes the problems' difficulty out, so that it sees differences that two separate intervals would hide. One pair
    more for each side (half a one in each of the four cells of a 2×2 table) keeps the width above 0 where no problem differs.

    Args:
        first, second: one value per problem in 0..1, in the same order.
    Ref:
        Agresti and Min 2005, for matched proportions; Miller 2024, arXiv:2411.00640, on pairing.
    """
    if len(first) != len(second) or not first:
        raise ValueError(f"difference: needs the same problems twice; got {len(first)} and {len(second)} values.")
    gaps = [b - a for a, b in zip(first, second, strict=True)]
    total, count = math.fsum(gaps), len(gaps) + 2
    middle = total / count
    variance = (math.fsum(gap**2 for gap in gaps) + 1) / count - middle**2
    half = NormalDist().inv_cdf(0.5 + level / 2) * math.sqrt(variance / count)
    return Estimate(total / len(gaps), max(-1.0, middle - half), min(1.0, middle + half))


def sampled_estimates(rewards: Sequence[Sequence[float]]) -> dict[str, Estimate]:
    """Estimate avg@n and pass@k from n rewards per problem, for every k in `ladder(n)`."""
    samples = len(rewards[0])
    rights = [sum(reward >= RIGHT for reward in row) for row in rewards]
    found = {}
    for k in ladder(samples):
        found[f"pass@{k}"] = estimate([pass_at_k(samples, right, k) for right in rights], draws=samples / k)
    means = [min(1.0, math.fsum(row) / samples) for row in rewards]
    return {"pass@1": found.pop("pass@1"), f"avg@{samples}": estimate(means, draws=samples), **found}


Row = dict[str, Any]

_TYPES = {"reward": pa.float64(), "prompt": pa.string(), "completion": pa.string(), "greedy": pa.bool_(), "ended": pa.bool_()}
_COLUMNS = ("problem", "sample", "greedy", "prompt", "completion", "reward", "tokens", "ended")
_ROWS = pa.schema([(name, _TYPES.get(name, pa.int64())) for name in _COLUMNS])


class EvalFolder(LockedFolder):
    """Folder with the files of one evaluation. Every batch is saved immediately, so that the evaluation is resumable."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result, self.completions = path / "eval.json", path / "completions.parquet"
        self.plan, self.parts = path / "plan.json", path / "parts"

    def read_result(self, plan: dict[str, Any]) -> dict[str, Any] | None:
        """Read the result of a finished evaluation, or return None if the evaluation is not finished.

        Raises RunError if the folder has another plan or other files.
        """
        for path in (self.result, self.plan):
            if path.is_file():
                content = read_settings(path, "an evaluation")
                old = content["settings"]
                if other := [key for key in plan if old.get(key) != plan[key]]:
                    texts = (", ".join(f"{key} {one.get(key)}" for key in other) for one in (old, plan))
                    was, now = (text if len(text) <= 160 else text[:159] + "…" for text in texts)
                    raise RunError(
                        f"{self.path} holds another evaluation: {', '.join(other)} differ ({was} there, {now} now). Choose "
                        f"another --out, or remove that folder."
                    )
                return content if path == self.result else None
        if not self.path.exists():
            return None
        if self.path.is_dir() and {entry.name for entry in self.path.iterdir()} <= {".lock", "parts"}:
            return None  # empty, or it ended before the plan was written
        raise RunError(f"{self.path} is there already and is no evaluation: choose another --out.")

    def open(self, content: dict[str, Any]) -> None:
        """Lock the evaluation's folder, and write the evaluation's settings to plan.json."""
        with disk_errors(self.path):
            self.parts.mkdir(parents=True, exist_ok=True)
            self.hold(self.path)
        if not self.plan.exists():
            write_json(self.plan, content)

    def part(self, index: int) -> list[Row] | None:
        """Read the stored completions of one batch. Returns None if the batch's file is missing or damaged."""
        path = self.parts / f"{index:06}.parquet"
        try:
            return pq.read_table(path.absolute(), schema=_ROWS).to_pylist() if path.is_file() else None
        except pa.ArrowInvalid:
            return None

    def add(self, index: int, rows: list[Row]) -> None:
        """Write the completions of one batch to a file."""
        _write_rows(self.parts / f"{index:06}.parquet", rows)

    def finish(self, rows: list[Row], result: dict[str, Any]) -> None:
        """Finish an evaluation: write all completions to one file and the result to another, and delete the per-batch files."""
        _write_rows(self.completions, rows)
        write_json(self.result, result)
        shutil.rmtree(self.parts, ignore_errors=True)
        self.plan.unlink(missing_ok=True)


def _write_rows(path: Path, rows: list[Row]) -> None:
    write_whole(path, partial(pq.write_table, pa.Table.from_pylist(rows, schema=_ROWS)))


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Compute the estimates and token counts of an evaluation from its completions."""
    greedy, sampled = _rewards_by_problem(rows)
    estimates = {"greedy": estimate([float(reward >= RIGHT) for reward in greedy]), **sampled_estimates(sampled)}
    if any(0 < reward < RIGHT for reward in greedy):
        estimates["greedy reward"] = estimate(greedy)
    lengths = [row["tokens"] for row in rows]
    return {
        "problems": len(greedy),
        "samples": len(sampled[0]),
        "level": LEVEL,
        "estimates": {name: asdict(found) for name, found in estimates.items()},
        "tokens": {
            "mean": sum(lengths) / len(lengths),
            "longest": max(lengths),
            "cut": sum(not row["ended"] for row in rows) / len(rows),
        },
    }


def _rewards_by_problem(rows: Sequence[Row]) -> tuple[list[float], list[list[float]]]:
    """Rewards grouped by problem: the greedy completion's reward, and the samples' rewards in order."""
    ordered = sorted(rows, key=itemgetter("problem", "sample"))
    greedy = [row["reward"] for row in ordered if row["greedy"]]
    sampled = groupby((row for row in ordered if not row["greedy"]), itemgetter("problem"))
    return greedy, [[row["reward"] for row in samples] for _, samples in sampled]


def read_evaluation(path: Path) -> tuple[str | None, tuple[list[float], list[list[float]]]]:
    """Read the hash of an evaluation's problems, and the rewards of the evaluation's completions."""
    problems = read_settings(path / "eval.json", "an evaluation")["settings"].get("problems_sha256")
    rows = path / "completions.parquet"
    try:
        require_regular(rows)
        return problems, _rewards_by_problem(pq.read_table(rows.absolute(), schema=_ROWS).to_pylist())
    except (OSError, ValueError, pa.ArrowException) as error:
        raise RunError(f"{rows} cannot be read: {str(error).splitlines()[0]}") from error


def compare(first: Path, second: Path) -> dict[str, Estimate]:
    """Compare two evaluations problem by problem. Both must have used the same problems."""
    problems, found = zip(*map(read_evaluation, (first, second)), strict=True)
    if len(set(problems)) != 1:
        raise RunError(f"{first} and {second} asked different problems: give both the same --task, --problems and --seed.")
    greedy = [[float(reward >= RIGHT) for reward in rewards] for rewards, _ in found]
    rights = [[sum(reward >= RIGHT for reward in row) / len(row) for row in sampled] for _, sampled in found]
    means = [[min(1.0, math.fsum(row) / len(row)) for row in sampled] for _, sampled in found]
    pairs = (("greedy", greedy), ("pass@1", rights), ("avg", means))
    return {name: difference(before, after) for name, (before, after) in pairs}


def show(view: RunView, result: Mapping[str, Any], where: Path) -> None:
    """Print the results and their folder: as a table, or as one sentence with --quiet."""
    estimates, tokens, plan = result["estimates"], result["tokens"], result["settings"]
    last = f"{result['problems']:,} problems of {plan['task']['name']}; {tokens['mean']:.0f} tokens a completion"
    last += f", {tokens['cut']:.1%} cut off at {plan['max_tokens']}" if tokens["cut"] else ""
    last += f". Results and completions are in {where}"
    if view.quiet:
        best = [(name, estimates[name]) for name in ("greedy", "pass@1")]
        view.print("; ".join([", ".join(f"{n} {x['value']:.3f} ({x['low']:.3f}–{x['high']:.3f})" for n, x in best), last]))
        return
    columns = "", Column("value", justify="right"), f"{result['level']:.0%} interval"
    rows = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, found in estimates.items():
        rows.add_row(name, f"{found['value']:.3f}", f"{found['low']:.3f} – {found['high']:.3f}")
    view.console.print(rows)
    view.print(last)


def comparison(found: Mapping[str, Estimate]) -> Table:
    """Table of the differences between two evaluations, with confidence intervals. Intervals that exclude 0 are marked."""
    columns = "", Column("difference", justify="right"), f"{LEVEL:.0%} interval", ""
    rows = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for name, one in found.items():
        assert one.low is not None  # differences have both
        assert one.high is not None
        clear = "" if one.low <= 0 <= one.high else "leaves 0 out"
        rows.add_row(name, f"{one.value:+.3f}", f"{one.low:+.3f} … {one.high:+.3f}", clear)
    return rows
