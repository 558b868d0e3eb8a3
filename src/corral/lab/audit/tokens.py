"""Table of audited tokens, one row per token, built from logged completions or read from the folder of a stored audit."""

from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray

from corral.divergence import binary_kl, binary_tv
from corral.numerics import CERTAIN

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Names = NDArray[Any]
"""NumPy array of texts. Its type is open because run-time type checks cannot express the texts' length."""

VERDICTS = ("clipped", "dppo_binary", "dppo_topk", "troll")
"""Columns that mark the tokens on which a rule acts. `clipped` is the audited clipping, the only such column of a dump."""

COUNTED = ("step", "sequence", "position", "token")
"""Columns of integers in the table of tokens. `sequence` is the number of the completion within its step or the dump."""

MEASURED = (
    *("advantage", "logp_old", "logp_new", "logp_rollout", "entropy", "reward", "age"),
    *("kl", "tv", "support_tv", "support_kl_old_new", "troll_tv", "sequence_log_ratio"),
)
"""Columns of floats in the table of tokens, with NaN where nothing was logged.

`logp_rollout` is the sampler's log-prob, `reward` is set at a completion's first token, `age` counts steps between sampling
and training, and `kl` is KL(new‖old). `support_kl_old_new` is KL(old‖new) on the top-k tokens, which DPPO bounds with
divergence="kl". `troll_tv` is the TV by which TROLL's projection moves the policy. `sequence_log_ratio` is the mean of log
new/old over a completion whose tokens were all logged."""


def make_tokens(rows: pd.DataFrame) -> pd.DataFrame:
    """Build the table of audited tokens from their columns, and add the columns `log_ratio`, `anchor` and `outward`.

    `log_ratio` is log new/old, `anchor` the centre of DPPO (log π of the sampler if it was reported, otherwise of the old
    policy), and `outward` marks tokens that moved along their advantage. Where only log-probs were logged, `kl` and `tv` are
    those of the sampled token.
    """
    verdicts = [name for name in VERDICTS if name in rows]
    types = dict.fromkeys(COUNTED, np.int64) | dict.fromkeys(MEASURED, np.float64) | dict.fromkeys(verdicts, np.bool_)
    tokens = rows.reindex(columns=[*types]).astype(types)
    tokens["log_ratio"] = tokens["logp_new"] - tokens["logp_old"]
    tokens["anchor"] = tokens["logp_rollout"].fillna(tokens["logp_old"])
    tokens["outward"] = tokens["log_ratio"] * tokens["advantage"] > 0
    if tokens["kl"].isna().any():
        tokens["kl"] = sampled_kl(tokens["logp_new"], tokens["logp_old"])
        tokens["tv"] = sampled_tv(tokens["logp_new"], tokens["logp_old"])
    return tokens


def kinds(tokens: pd.DataFrame, ball: str, bound: float) -> Names:
    """Classify each token by what clipping does to it, and by its place in the `kl` or `tv` ball of radius `bound`.

    `false` (blocked inside the ball) and `missed` (passed outside it, pushed further out) are clipping's errors. `right`
    (blocked outside), `passed` (inside) and `back` (passed outside, on its way back) are not.
    """
    blocked, outside, outward = (tokens[name].to_numpy() for name in ("clipped", ball, "outward"))
    outside = outside > bound
    return np.select(
        [blocked & ~outside, blocked & outside, outside & outward, outside], ["false", "right", "missed", "back"], "passed"
    )


def sampled_kl(logp_p: Floats | pd.Series, logp_q: Floats | pd.Series) -> Floats:
    """Compute KL(p‖q) of the sampled token against all other tokens (two outcomes), from float64 log-probs."""
    p, q = (torch.tensor(np.asarray(x)).clamp(max=CERTAIN) for x in (logp_p, logp_q))
    return binary_kl(p, q).numpy()


def sampled_tv(logp_p: Floats | pd.Series, logp_q: Floats | pd.Series) -> Floats:
    """Compute the total variation |p − q| of the sampled token against all other tokens (two outcomes), from log-probs."""
    return binary_tv(torch.tensor(np.asarray(logp_p)), torch.tensor(np.asarray(logp_q))).numpy()
