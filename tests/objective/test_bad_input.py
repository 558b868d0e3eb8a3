"""Everything that is refused, in one table: a ValueError that names who refuses it, what was got and what to do about it."""

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from functools import partial
from typing import NamedTuple

import pytest
import torch
from batches import inputs, random_batch
from torch import Tensor

import corral
from corral import (
    SparseDist,
    TokenBatch,
    categorical_kl,
    categorical_tv,
    gae,
    gather_support,
    group_advantages,
    improvement_bound,
    make_correction,
    make_objective,
    reduce_loss,
    top_k_support,
)
from corral.objective import OBJECTIVES
from corral.objective.correction import CORRECTIONS

NAN, INF = math.nan, math.inf
GOOD, _ = random_batch(2, 3, 6, 2)
"""Two sequences of 3 tokens, the first of each live, on 3 slots of a vocabulary of 6."""


class Refused(NamedTuple):
    owner: str
    says: tuple[str, ...]
    call: Callable[[], object]


def make(name: str, **settings: object) -> Callable[[TokenBatch], object]:
    return make_objective(name, **settings) if name in OBJECTIVES else make_correction(name, **settings)


def run(name: str, settings: dict[str, object], **changes: object) -> object:
    """What `name` makes of the good batch with these fields instead of its own."""
    return make(name, **settings)(replace(GOOD, **changes))


def batch(owner: str, *says: str, settings: dict[str, object] | None = None, **changes: object) -> Refused:
    return Refused(owner, says, partial(run, owner, settings or {}, **changes))


def call(function: Callable[..., object], *says: str, args: tuple[object, ...], **options: object) -> Refused:
    return Refused(function.__name__, says, partial(function, *args, **options))


def at_first(x: Tensor, value: float) -> Tensor:
    """`x` with another value at its first token."""
    x = x.detach().clone()
    x[(0,) * x.ndim] = value
    return x


def without_rest(dist: SparseDist) -> SparseDist:
    """The same policy at the first token with its rest's mass in slot 1."""
    logp = dist.logp.detach().clone()
    logp[0, 0, 1] = torch.logaddexp(logp[0, 0, 1], dist.rest[0, 0])
    return replace(dist, logp=logp, rest=at_first(dist.rest, -INF))


# ------------------------------------------------------------------------------------------------------------- batches

FIRST = "Got it at 1 of 6 tokens, first at [b t] = [0, 0]."


SHIFT = "Both follow the completion tokens; was the last token dropped twice? See docs/data-flow.md#shift."


def bad_shapes() -> Iterator[Refused]:
    for given in ({"logp_new": GOOD.logp_new}, GOOD.logp_new, None):
        says = f"takes one corral.TokenBatch, which holds everything it reads; got {type(given).__name__}"
        yield Refused("ppo_clip", (says,), partial(make_objective("ppo_clip"), given))
    yield batch("ppo_clip", "logp_new must be [B T] with at least one token; got [3]", logp_new=torch.zeros(3))
    for shape in ([0, 3], [2, 0], [0, 0]):
        x = torch.zeros(shape)
        says = f"logp_new must be [B T] with at least one token; got {shape}"
        yield batch("ppo_clip", says, logp_new=x, logp_old=x, advantages=x, mask=x.bool())
    for field in ("logp_old", "mask", "advantages", "logp_rollout"):
        forms = ("Credit is [2, 3], token by token, or [2], one for each completion.",) if field == "advantages" else ()
        for shape in ([2, 2], [2, 4], [3, 3], [2, 3, 1], [2, 1], [3], [6], [0], []):
            x = torch.zeros(shape, dtype=torch.bool if field == "mask" else torch.float64)
            yield batch("ppo_clip", f"{field} is {shape} but logp_new is [2, 3].", *forms, SHIFT, **{field: x})
        yield batch("ppo_clip", f"{field} must be a tensor; got list. Use torch.tensor", **{field: [0.0, 0.0]})
    yield batch("ppo_clip", "logp_old is [2] but logp_new is [2, 3]", logp_old=torch.zeros(2))  # only advantages may be [B]
    for field in ("dist_new", "dist_old"):
        dist = SparseDist(torch.zeros(2, 2, 3).long(), torch.zeros(2, 2, 3), torch.zeros(2, 2))
        yield batch("troll", f"{field} describes [2, 2] positions but logp_new is [2, 3]", "[B T K]", SHIFT, **{field: dist})
    more_slots = random_batch(2, 3, 6, 3)[0].dist_new
    yield batch("troll", "dist_new has 4 slots and dist_old 3", "gather the new policy at dist_old.ids", dist_new=more_slots)


def bad_dtypes() -> Iterator[Refused]:
    for field in ("logp_new", "logp_old", "advantages", "logp_rollout"):
        says = f"{field} must be floating point; got torch.int64. Convert it with .float()."
        yield batch("ppo_clip", says, **{field: torch.zeros(2, 3).long()})
    for dtype in (torch.int64, torch.uint8, torch.float32):
        says = f"mask must be bool, True where a token is trained on; got {dtype}. Use .bool()."
        yield batch("ppo_clip", says, mask=torch.ones(2, 3, dtype=dtype))
    dist = GOOD.dist_old
    says = "`ids` holds token ids, int64 or int32; got torch.float32"
    yield Refused("SparseDist", (says,), partial(replace, dist, ids=dist.ids.float()))
    for field in ("logp", "rest"):
        says = f"`{field}` holds log-probabilities and must be floating point; got torch.int64"
        yield Refused("SparseDist", (says,), partial(replace, dist, **{field: torch.zeros_like(getattr(dist, field)).long()}))


def bad_values() -> Iterator[Refused]:
    yield batch("ppo_clip", "mask has no unmasked token, so there is nothing to train on. Skip", mask=torch.zeros(2, 3).bool())
    for value in (NAN, INF, -INF):
        for field in ("logp_new", "logp_old", "logp_rollout"):
            says = f"{field} is not finite at an unmasked token. NaN comes from the model or the sampler"
            yield batch("ppo_clip", says, "use the same temperature", FIRST, **{field: at_first(getattr(GOOD, field), value)})
        says = "advantages are not finite at an unmasked token. Look at the rewards first."
        yield batch("ppo_clip", says, FIRST, advantages=at_first(torch.zeros(2, 3), value))
        yield batch("ppo_clip", says, advantages=at_first(torch.zeros(2), value))
    for field in ("dist_new", "dist_old"):
        dist = getattr(GOOD, field)
        for part in ("logp", "rest"):
            for value in (NAN, INF):
                poisoned = replace(dist, **{part: at_first(getattr(dist, part), value)})
                yield batch(
                    "troll", f"{field} holds NaN or +inf at an unmasked token", "model's logits", FIRST, **{field: poisoned}
                )
    for owner in ("ppo_clip", "troll", "tis"):
        for field in ("logp_new", "logp_old", "logp_rollout"):
            says = (
                f"{field} is above 0 at an unmasked token, and log-probabilities are not. Take log_softmax over the last axis"
            )
            changed = at_first(getattr(GOOD, field), 0.0011)
            yield batch(owner, says, "check=False", "Got 0.0011 at 1 of 6 tokens", "[b t] = [0, 0]", **{field: changed})
    for field in ("dist_new", "dist_old"):
        dist = getattr(GOOD, field)
        mass = dist.with_rest().exp().sum(-1)[0, 0].item() + 0.0011
        fuller = replace(dist, rest=at_first(dist.rest, math.log(dist.rest[0, 0].exp().item() + 0.0011)))
        says = (
            f"{field} is no distribution: at an unmasked token its support and tail do not sum to 1 ± 0.001. Take log_softmax"
        )
        yield batch("ppo_clip", says, "check=False", f"Got {mass:.6g} at 1 of 6 tokens", **{field: fuller})
        half = replace(fuller, logp=fuller.logp.bfloat16(), rest=(dist.rest.exp() + 0.08).log())
        yield batch("ppo_clip", f"{field} is no distribution", "do not sum to 1 ± 0.05.", **{field: half})
    ids = GOOD.dist_old.ids
    moved = replace(GOOD.dist_new, ids=at_first(ids, 5 - int(ids[0, 0, 0])))
    says = "dist_new and dist_old stand on different token ids. Both must stand on one support: gather the new policy at"
    yield batch("troll", says, FIRST, dist_new=moved)
    for gap in (2e-3, -2e-3, -5.0):
        says = "dist_old.logp[..., 0] and logp_old differ by more than 0.001 nats. Slot 0 must be the sampled token"
        yield batch("troll", says, "at the same position", "same temperature", logp_old=GOOD.logp_old + gap)
    impossible = without_rest(GOOD.dist_old)
    says = "the old policy rules out tokens that the new one allows, at 1 unmasked positions"
    yield batch("troll", says, "Use the same logit masks for both", dist_old=impossible)
    says = "`vocab_size` counts every token, and a support has"
    yield batch("troll", says, "got 1", settings={"tail": "fill", "vocab_size": 1})
    for divergence in ("tv", "kl"):
        settings = {"estimator": "full", "divergence": divergence}
        says = "estimator='full' needs a support with nothing left over, but up to"
        yield batch("dppo", says, "Build it with top_k_support(logp, tokens, k=V)", settings=settings)


def missing_fields() -> Iterator[Refused]:
    for field, supply in (("dist_old", "corral.top_k_support(logp"), ("dist_new", "corral.gather_support(logp, dist_old.ids)")):
        for name, settings in (("troll", {}), ("dppo", {"estimator": "topk"}), ("dppo", {"estimator": "full"})):
            yield batch(
                name, f"needs `{field}`, which this batch does not have. Pass", supply, settings=settings, **{field: None}
            )
    neither = {"dist_old": None, "dist_new": None}
    yield batch("troll", "needs `dist_old`", "corral.top_k_support(logp", **neither)  # the first that is to be made
    for name in CORRECTIONS:
        says = "needs `logp_rollout`, which this batch does not have. Pass the log-probs that the sampler reported"
        yield batch(name, says, logp_rollout=None)
        yield batch(name, "logp_rollout is not finite at an unmasked token", logp_rollout=torch.full((2, 3), NAN))
    rewards = replace(GOOD, advantages=torch.zeros(2, 3).double())
    yield call(improvement_bound, "R(y) is one reward per sequence, so `advantages` must be [B]; got [2, 3]", args=(rewards,))
    yield call(improvement_bound, "needs `dist_new`", args=(replace(GOOD, dist_new=None),))


# ------------------------------------------------------------------------------------------------------------ settings

NO_NUMBER = (NAN, "0.2", True, [0.2], torch.tensor(0.2))
NOT_GIVEN = (*NO_NUMBER, None)

BAD_SETTINGS: list[tuple[str, str, str, tuple[object, ...]]] = [
    ("reinforce", "ratio_cap", "`ratio_cap` is a weight and must be ≥ 0, or None", (-0.1, *NO_NUMBER)),
    *[
        (name, key, f"`{key}` is a distance from ratio 1 and must {limits}", (-0.1, -INF, *beyond, *NOT_GIVEN))
        for name in ("ppo_clip", "clip_higher", "dual_clip", "gspo", "aspo", "decoupled_ppo", "clip_cov")
        for key, limits, beyond in (("clip_low", "lie in [0, 1]", (1.01, 2, INF)), ("clip_high", "be ≥ 0", ()))
    ],
    *[
        (name, "dual_clip", "`dual_clip` is a ratio and must be > 1, or None", (1.0, 0.5, -3.0, *NO_NUMBER))
        for name in ("ppo_clip", "clip_higher", "dual_clip")
    ],
    ("cispo", "cap_low", "weights lie in [`cap_low`, `cap_high`] with 0 ≤ cap_low ≤ cap_high", (-0.1, 5.1, *NOT_GIVEN)),
    ("cispo", "cap_high", "weights lie in [`cap_low`, `cap_high`] with 0 ≤ cap_low ≤ cap_high", (-0.1, *NOT_GIVEN)),
    ("sapo", "tau_positive", "`tau_positive` is a temperature and must be finite and > 0", (0.0, -1.0, INF, *NOT_GIVEN)),
    ("sapo", "tau_negative", "`tau_negative` is a temperature and must be finite and > 0", (0.0, -1.0, INF, *NOT_GIVEN)),
    ("gmpo", "clip", "`clip` is a distance in log-ratio and must be ≥ 0", (-0.1, *NOT_GIVEN)),
    ("drpo", "bound", "`bound` is a divergence and must be > 0 (inf switches it off)", (0.0, -0.1, *NOT_GIVEN)),
    ("m2po", "bound", "`bound` is a mean of squared log-ratios and must be ≥ 0 (inf switches it off)", (-0.1, *NOT_GIVEN)),
    ("aspo", "cap", "`cap` is a weight and must be > 1", (1.0, -3.0, *NOT_GIVEN)),
    *[
        ("ripo", key, f"`{key}` is a squared distance and must be ≥ 0 (inf switches it off)", (-0.1, *NOT_GIVEN))
        for key in ("bound_low", "bound_high")
    ],
    ("topr", "cap", "`cap` is a weight and must be finite and ≥ 0", (-0.1, INF, *NOT_GIVEN)),
    *[
        ("vespo", f"{key}_{sign}", f"`{key}_{sign}` is an exponent and must be finite and ≥ 0", (-0.1, INF, *NOT_GIVEN))
        for key in ("k", "lambda")
        for sign in ("positive", "negative")
    ],
    ("bapo", "share", "`share` is a share and must lie in [0, 1)", (-0.1, 1.0, *NOT_GIVEN)),
    *[("bapo", key, f"`{key}` is a ratio and must lie in [0, 1]", (-0.1, 1.1, *NOT_GIVEN)) for key in ("low", "low_end")],
    *[("bapo", key, f"`{key}` is a ratio and must be finite and ≥ 1", (0.9, INF, *NOT_GIVEN)) for key in ("high", "high_end")],
    ("bapo", "low_end", "`low_end` is where `low` may rise to and must be ≥ 0.6", (0.5,)),
    ("bapo", "high_end", "`high_end` is where `high` may rise to and must be ≥ 1.2", (1.1,)),
    ("bapo", "dual_clip", "`dual_clip` is a ratio and must be > 1, or None", (1.0, *NO_NUMBER)),
    *[
        (name, "share", "`share` is a share of the tokens and must lie in (0, 1]", (0.0, 1.1, *NOT_GIVEN))
        for name in ("kl_cov", "clip_cov")
    ],
    ("kl_cov", "penalty", "`penalty` is a weight and must be finite and ≥ 0", (-0.1, INF, *NOT_GIVEN)),
    ("clip_cov", "cov_low", "covariances lie in (`cov_low`, `cov_high`) with 0 ≤ cov_low ≤ cov_high", (-0.1, 5.1, *NOT_GIVEN)),
    ("clip_cov", "cov_high", "covariances lie in (`cov_low`, `cov_high`) with 0 ≤ cov_low ≤ cov_high", (0.9, *NOT_GIVEN)),
    *[
        ("cppo", key, f"`{key}` is a divergence and must be ≥ 0 (inf switches it off)", (-0.1, *NOT_GIVEN))
        for key in ("bound", "budget")
    ],
    ("cppo", "estimator", "`estimator` is one of binary, topk", ("full", None, 20)),
    ("cppo", "weight_last", "`weight_last` is a weight and must lie in (0, 1]", (0.0, 1.1, *NOT_GIVEN)),
    ("spo", "epsilon", "`epsilon` is a distance from ratio 1 and must be > 0", (0.0, -0.1, *NOT_GIVEN)),
    *[
        ("dppo", key, f"`{key}` is a divergence and must be ≥ 0, or None (inf switches it off)", (-0.1, *NO_NUMBER))
        for key in ("bound", "bound_low", "bound_high")
    ],
    ("dppo", "ratio_cap", "`ratio_cap` is a weight and must be ≥ 0, or None", (-0.1, *NO_NUMBER)),
    ("dppo", "divergence", "`divergence` is one of tv, kl, ratio", ("js", None, 1, ["tv"])),
    ("dppo", "mask", "`mask` is one of outward, symmetric, predictive", ("both", None, True)),
    ("dppo", "estimator", "`estimator` is one of binary, topk, full", ("top_k", None, 20)),
    ("troll", "bound", "`bound` is a KL in nats and must be ≥ 0 (inf switches it off)", (-0.1, *NOT_GIVEN)),
    ("troll", "regression", "`regression` is a weight and must be finite and ≥ 0", (-0.1, INF, *NOT_GIVEN)),
    ("troll", "tail", "`tail` is one of bucket, fill", ("drop", None, 1)),
    ("troll", "level", "`level` is one of token, sequence", ("seq", None, 1)),
    ("troll", "gradient", "`gradient` is one of exact, constant_dual, unprojected", ("implicit", None, True)),
    ("troll", "project", "`project` is one of all, outward", ("inward", None, True)),
    ("troll", "vocab_size", "`vocab_size` is a number of tokens", (0, -5, 1.5, INF, *NO_NUMBER)),
    ("troll", "ratio_cap", "`ratio_cap` is a weight and must be ≥ 0, or None", (-0.1, *NO_NUMBER)),
    ("tis", "cap", "`cap` is the largest weight and must be > 0", (0.0, -1.0, *NOT_GIVEN)),
    ("seq_tis", "cap", "`cap` is the largest weight and must be > 0", (0.0, -1.0, *NOT_GIVEN)),
    ("icepop", "low", "keeps ratios in [`low`, `high`] with 0 ≤ low ≤ high", (-0.1, 5.1, *NOT_GIVEN)),
    ("icepop", "high", "keeps ratios in [`low`, `high`] with 0 ≤ low ≤ high", (-0.1, 0.4, *NOT_GIVEN)),
    ("trm", "bound", "`bound` is a divergence and must be ≥ 0 (inf switches it off)", (-0.1, *NOT_GIVEN)),
]
"""Settings of objectives and corrections: what is said of each, and impossible values."""

OWNER = {"seq_tis": "tis"}
"""Whose settings they are, where a name shares another's."""


def bad_settings() -> Iterator[Refused]:
    for name, key, says, values in BAD_SETTINGS:
        for value in values:
            yield Refused(OWNER.get(name, name), (says, "got", repr(value)), partial(make, name, **{key: value}))
    for name in (*OBJECTIVES, *CORRECTIONS):
        yield Refused(name, ("there is no setting `clip_ratio`.", "There are: "), partial(make, name, clip_ratio=0.2))
    for name in ("", "PPO", "dpo", None, 3):
        yield call(make_objective, f"there is no objective {name!r}.", "There are: aspo, ", args=(name,))
        yield call(make_correction, f"there is no correction {name!r}.", "There are: icepop, ", args=(name,))
    for estimator in ("topk", "full"):
        says = f"divergence='ratio' goes with estimator='binary'; got '{estimator}'"
        yield Refused("dppo", (says,), partial(make, "dppo", divergence="ratio", estimator=estimator))
    yield Refused(
        "troll", ("tail='fill' gives every dropped token 1e-12", "set `vocab_size`"), partial(make, "troll", tail="fill")
    )


# ----------------------------------------------------------------------------------------------------------- functions


def bad_supports() -> Iterator[Refused]:
    logp, tokens, ids = torch.zeros(2, 3, 6).log_softmax(-1), torch.zeros(2, 3).long(), torch.zeros(2, 3, 2).long()
    for k in (0, -1, 7, 2.5, "2", None):
        yield call(top_k_support, f"`k` must lie in 1 … V = 6; got {k!r}. k = V keeps", args=(logp, tokens, k))
    for mass in (0.0, -0.5, 1.5, NAN):
        yield call(top_k_support, "`mass` is a probability in (0, 1]", f"got {mass}", args=(logp, tokens, 2, mass))
    for bad in (logp.long(), torch.tensor(0.0)):
        says = f"`logp` holds log-probabilities [*, V]; got {bad.dtype} {list(bad.shape)}"
        yield call(top_k_support, says, args=(bad, tokens, 2))
        yield call(gather_support, says, args=(bad, ids))
    yield call(top_k_support, "so tokens must be [2, 3]; got [2]", args=(logp, tokens[:, 0], 2))
    yield call(top_k_support, "`tokens` holds token ids, int64 or int32; got torch.float32", args=(logp, tokens.float(), 2))
    yield call(gather_support, "so ids must be [2, 3] + [K]; got [2, 2]", args=(logp, ids[:, 0]))
    yield call(gather_support, "`ids` holds token ids, int64 or int32; got torch.bool", args=(logp, ids.bool()))
    for token in (-2, 6, 2**40):
        says = f"for a vocabulary of 6; got {token}. Were they made with another tokenizer?"
        yield call(top_k_support, "`tokens` must lie in 0 … 5", says, args=(logp, at_first(tokens, token), 2))
        yield call(gather_support, "`ids` must lie in -1 … 5", says, args=(logp, at_first(ids, token)))
    for repeated in ([0, 1, 0], [5, 5, -1]):
        says = "`ids` has a token twice in one row. A support is a set: keep one of them, −1 pads the row."
        yield call(gather_support, says, args=(logp, torch.tensor(repeated).expand(2, 3, 3)))
    logits = torch.arange(36.0).view(2, 3, 6)
    for given, mass in (
        (logp.exp(), 6 * math.exp(1 / 6)),  # probabilities
        (logits, sum(math.exp(x) for x in range(6))),  # raw logits
        (torch.zeros(2, 3, 6).log_softmax(1), 2.0),  # log_softmax over the wrong axis
        (logp + math.log(0.9989), 0.9989),  # too little by 0.0011
        ((logp + math.log(1.01)).bfloat16(), 1.01),  # half precision: an objective takes the float32 that comes out for 1.01
    ):
        says = f"`logp` holds no log-probabilities: a row sums to {mass:.3g}"
        tolerance = "not 1 ± 0.001, at 6 of 6 rows. Take log_softmax over the last axis"
        yield call(top_k_support, says[:-1], tolerance, "check=False", args=(given, tokens, 2))
        yield call(gather_support, says[:-1], tolerance, "check=False", args=(given, torch.tensor([0, 1]).expand(2, 3, 2)))
    yield call(
        top_k_support, "`tokens` must lie in 0 … 5", "got -1", "At padding put any token", args=(logp, at_first(tokens, -1), 2)
    )  # −1 is for ids


def bad_divergences() -> Iterator[Refused]:
    for divergence in (categorical_kl, categorical_tv):
        for p, q in (([2, 1], [2, 4]), ([4], [2, 1]), ([2, 3], [2, 4])):
            says = f"both policies need the same categories on the last axis; got {p} and {q}"
            yield call(divergence, says, args=(torch.zeros(p), torch.zeros(q)))


def no_tensors() -> Iterator[Refused]:
    """Each public function of the maths with an array or a list in the place of each tensor."""
    logp, mask, group, chol = torch.zeros(2, 3).log_softmax(-1), torch.ones(2, 3).bool(), torch.zeros(2).long(), torch.ones(2)
    two, four = {"logp_p": logp, "logp_q": logp}, {"mean_p": chol, "chol_p": chol, "mean_q": chol, "chol_q": chol}
    gaussians = {"mean": chol, "chol": chol, "old_mean": chol, "old_chol": chol}
    bounds = {"mean_bound": 1.0, "cov_bound": 1.0, "diagonal": True}
    given: list[tuple[Callable[..., object], dict[str, Tensor], dict[str, object]]] = [
        *((divergence, two, {}) for divergence in (categorical_kl, categorical_tv, corral.binary_kl, corral.binary_tv)),
        *((estimate, two, {}) for estimate in (corral.kl_k1, corral.kl_k2, corral.kl_k3)),
        *((distance, four, {"diagonal": True}) for distance in (corral.gaussian_kl, corral.gaussian_frobenius)),
        (corral.gaussian_wasserstein, four, {"diagonal": True}),
        (corral.gaussian_entropy, {"chol": chol}, {"diagonal": True}),
        (corral.project_categorical_kl, {"logp_new": logp, "logp_old": logp}, {"bound": 0.1}),
        (corral.project_gaussian_kl, gaussians, bounds),
        (corral.project_gaussian_wasserstein, gaussians, bounds),
        (corral.project_gaussian_frobenius, gaussians, bounds),
        (corral.project_entropy_floor, {"chol": chol, "old_chol": chol}, {"floor": 0.0, "cov_bound": 1.0, "diagonal": True}),
        (top_k_support, {"logp": logp, "tokens": group}, {"k": 1}),
        (gather_support, {"logp": logp, "ids": group[:, None]}, {}),
        (group_advantages, {"rewards": chol, "group": group}, {"how": "grpo"}),
        (gae, {"rewards": logp, "values": logp, "mask": mask}, {"gamma": 1, "lam": 1}),
        (reduce_loss, {"loss": logp, "mask": mask}, {"how": "token-mean"}),
        (corral.reduction_weights, {"mask": mask}, {"how": "token-mean"}),
        (corral.lm_head, {"hidden": logp, "tokens": group}, {"weight": logp}),
    ]
    for function, tensors, others in given:
        for name, tensor in tensors.items():
            for value, kind in ((tensor.numpy(), "numpy.ndarray"), (tensor.tolist(), "builtins.list")):
                says = f"`{name}` is a tensor; got {kind}. Convert it with torch.as_tensor(…)"
                yield call(function, says, args=(), **{**tensors, name: value, **others})


def bad_reductions() -> Iterator[Refused]:
    loss, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    for how in ("mean", "", None, ["token-mean"]):
        says = "`how` is one of token-mean, seq-mean-token-mean, seq-mean-token-sum, seq-mean-token-sum-norm"
        yield call(reduce_loss, says, f"got {how!r}", args=(loss, mask, how))
    for a, b in ((loss[:, :2], mask), (loss, mask[:1]), (loss[0], mask[0])):
        says = f"loss and mask are both [B T]; got {list(a.shape)} and {list(b.shape)}"
        yield call(reduce_loss, says, args=(a, b, "token-mean"))
    says = "mask must be bool, True where a token counts; got torch.float32. Use .bool()."
    yield call(reduce_loss, says, args=(loss, mask.float(), "token-mean"))
    for length in (None, 0.0, -4.0, NAN, "4", True):
        says = "'seq-mean-token-sum-norm' divides by a fixed `length` > 0, the same for every batch"
        yield call(reduce_loss, says, f"got {length!r}", args=(loss, mask, "seq-mean-token-sum-norm"), length=length)
    for total in (0, -1.0, NAN, torch.tensor(0)):
        says = f"the batch has no unmasked token to average over (total = {total})"
        yield call(reduce_loss, says, args=(loss, mask, "token-mean"), total=total)
    for how in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum"):
        says = "Skip it, or pass `total` where other micro-batches or ranks have some."
        yield call(reduce_loss, says, args=(loss, ~mask, how))


def bad_advantages() -> Iterator[Refused]:
    rewards, group = torch.zeros(4), torch.tensor([0, 0, 1, 1])
    for how in ("GRPO", "gae", None):
        says = f"`how` is one of grpo, dr_grpo, rloo, reinforce++; got {how!r}. For a critic, see corral.gae."
        yield call(group_advantages, says, args=(rewards, group, how))
    for a, b in ((rewards[:3], group), (rewards[None], group[None]), (rewards[:0], group[:0])):
        says = f"rewards and group are both [B] with B ≥ 1; got {list(a.shape)} and {list(b.shape)}"
        yield call(group_advantages, says, args=(a, b, "grpo"))
    for a, b in ((rewards.long(), group), (rewards, group.float())):
        says = f"rewards are floating point and group ids integers; got {a.dtype} and {b.dtype}. Convert them with .float()"
        yield call(group_advantages, says, args=(a, b, "grpo"))
    for value in (NAN, INF, -INF):
        says = f"rewards must be finite; got {value} for completion 0"
        yield call(group_advantages, says, args=(at_first(rewards, value), group, "grpo"))
    says = "rloo compares with the others of a group, and group 7 has one member"
    yield call(group_advantages, says, args=(rewards, torch.tensor([0, 0, 0, 7]), "rloo"))

    x, mask = torch.zeros(2, 3), torch.ones(2, 3).bool()
    for shapes in (
        ([2, 2], [2, 3], [2, 3]),
        ([2, 3], [3, 2], [2, 3]),
        ([2, 3], [2, 3], [2]),
        ([3], [3], [3]),
        ([2, 0], [2, 0], [2, 0]),
    ):
        a, b, c = (torch.zeros(shape) for shape in shapes)
        says = f"rewards, values and mask are all [B T]; got {shapes[0]}, {shapes[1]}, {shapes[2]}"
        yield call(gae, says, args=(a, b, c.bool(), 1.0, 1.0))
    yield call(
        gae, "mask must be bool, True where a token is trained on; got torch.float32", args=(x, x, mask.float(), 1.0, 1.0)
    )
    for value in (-0.1, 1.1, NAN, INF, "1", True, None):
        yield call(gae, f"`gamma` must lie in [0, 1]; got {value!r}", args=(x, x, mask, value, 1.0))
        yield call(gae, f"`lam` must lie in [0, 1]; got {value!r}", args=(x, x, mask, 1.0, value))
    for value in (NAN, INF):
        says = "rewards and values must be finite at unmasked tokens. Look at the reward function and the critic."
        yield call(gae, says, args=(at_first(x, value), x, mask, 1.0, 1.0))
        yield call(gae, says, args=(x, at_first(x, value), mask, 1.0, 1.0))


TABLE = [
    *bad_shapes(),
    *bad_dtypes(),
    *bad_values(),
    *missing_fields(),
    *bad_settings(),
    *bad_supports(),
    *bad_divergences(),
    *no_tensors(),
    *bad_reductions(),
    *bad_advantages(),
]


@pytest.mark.parametrize(("owner", "says", "call"), TABLE, ids=[f"{row.owner}: {' … '.join(row.says)}" for row in TABLE])
def test_what_is_wrong_is_refused_by_name_with_what_was_got_and_what_to_do(owner, says, call, unchecked_shapes):
    with pytest.raises(ValueError, match=f"^{owner}: ") as error:
        call()
    message = str(error.value)
    assert message.endswith((".", "?"))
    for part in says:
        assert part in message


@pytest.mark.parametrize(
    ("name", "key"), [(name, f.name) for name, (_, cls) in (OBJECTIVES | CORRECTIONS).items() for f in fields(cls)]
)
def test_every_setting_refuses_what_is_no_value_at_all(name, key, unchecked_shapes):
    with pytest.raises(ValueError, match=f"^{OWNER.get(name, name)}: .*`{key}`.*; got"):
        make(name, **{key: object()})


# ----------------------------------------------------------------------------------------- what looks wrong and is not


@pytest.mark.parametrize("gap", [5e-4, -5e-4])
def test_an_anchor_that_differs_by_rounding_is_accepted(gap):
    assert make_objective("troll")(replace(GOOD, logp_old=GOOD.logp_old + gap)).loss.isfinite().all()


@pytest.mark.parametrize(("name", "settings"), [("troll", {}), ("dppo", {"estimator": "topk"})])
def test_a_category_that_neither_policy_allows_is_accepted(name, settings):
    batch = replace(GOOD, dist_new=without_rest(GOOD.dist_new), dist_old=without_rest(GOOD.dist_old))
    assert make_objective(name, **settings)(batch).loss.isfinite().all()


def test_log_probs_that_rounding_explains_are_accepted():
    logp, tokens = torch.zeros(3, 6).log_softmax(-1), torch.zeros(3).long()
    for given in (logp + math.log(1.0009), at_first(logp[:1], NAN)):  # padding may be NaN
        assert top_k_support(given, tokens[: len(given)], 2).logp.shape == (len(given), 3)
        assert gather_support(given, tokens[: len(given), None]).logp.shape == (len(given), 1)
    for field in ("logp_new", "logp_old", "logp_rollout"):
        assert make_objective("ppo_clip")(replace(GOOD, **{field: at_first(getattr(GOOD, field), 9e-4)}, dist_old=None)).metrics


def test_padding_may_hold_anything():
    padding = ~GOOD.mask
    loud = {name: getattr(GOOD, name).masked_fill(padding, 9.0) for name in ("logp_new", "logp_old", "logp_rollout")}
    dists = {name: getattr(GOOD, name) for name in ("dist_new", "dist_old")}
    dists = {name: replace(dist, rest=dist.rest.masked_fill(padding, 9.0)) for name, dist in dists.items()}
    assert torch.equal(make_objective("troll")(replace(GOOD, **loud, **dists)).loss, make_objective("troll")(GOOD).loss)


def test_check_false_takes_log_probs_as_they_are():
    logits, tokens = torch.tensor([[1.0, 2.0, 3.0]]), torch.tensor([0])
    dist = top_k_support(logits, tokens, 1, check=False)
    assert dist.logp.tolist() == [[1.0, 3.0]]
    assert torch.equal(gather_support(logits, dist.ids, check=False).rest, dist.rest)
    above = TokenBatch(torch.tensor([[0.5]]), torch.tensor([[0.25]]), torch.ones(1), torch.ones(1, 1).bool())
    assert make_objective("reinforce", check=False)(above).loss.item() == pytest.approx(-math.exp(0.25))
    assert make_correction("tis", check=False, cap=9.0)(replace(above, logp_rollout=above.logp_old)).item() == 1.0
    assert improvement_bound(above, check=False).surrogate.isfinite()
    for bad in (replace(above, logp_old=torch.tensor([[NAN]])), replace(above, advantages=torch.tensor([INF]))):
        with pytest.raises(ValueError, match=r"reinforce: .* not finite"):
            make_objective("reinforce", check=False)(bad)


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in ("decoupled_ppo", "distill", "troll")])
def test_what_is_not_needed_may_be_missing(name):
    assert make_objective(name)(inputs([0.6], [0.5], [1.0])).loss.isfinite().all()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("reinforce", {"ratio_cap": 0}),
        ("ppo_clip", {"clip_low": 0, "clip_high": INF}),
        ("gspo", {"clip_low": 1, "clip_high": 0}),
        ("cispo", {"cap_low": 1, "cap_high": 1}),
        ("gmpo", {"clip": 0}),
        ("spo", {"epsilon": INF}),
        ("m2po", {"bound": 0}),
        ("drpo", {"bound": INF}),
        ("aspo", {"clip_low": 0, "clip_high": INF, "cap": INF}),
        ("ripo", {"bound_low": 0, "bound_high": INF}),
        ("topr", {"cap": 0}),
        ("vespo", {"k_positive": 0, "lambda_positive": 0, "k_negative": 9, "lambda_negative": 0}),
        ("bapo", {"share": 0, "low": 1, "low_end": 1, "high": 1, "high_end": 1}),
        ("kl_cov", {"share": 1, "penalty": 0}),
        ("clip_cov", {"share": 1, "cov_low": 0, "cov_high": INF}),
        ("cppo", {"bound": 0, "budget": INF, "weight_last": 1}),
        ("dppo", {"bound": INF, "bound_low": 0, "ratio_cap": 0}),
        ("troll", {"bound": INF, "regression": 0}),
        ("tis", {"cap": INF}),
        ("icepop", {"low": 0, "high": INF}),
        ("trm", {"bound": INF}),
    ],
)
def test_integers_and_the_ends_of_every_range_are_accepted(name, settings):
    out = make(name, **settings)(GOOD)
    assert (out if isinstance(out, Tensor) else out.loss).isfinite().all()
