"""The support holds the sampled token and the most likely others, and the rest is the exact mass of everything else."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck

from corral.objective import make_objective
from corral.support import condition_on_support, gather_support, rank_top_k, top_k_support
from corral.tensors import SparseDist, TokenBatch
from tolerance import assert_close

INF = math.inf


def log_probs(*p: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(p, dtype=torch.float64).log().to(dtype)


def total_mass(dist: SparseDist) -> Tensor:
    return dist.with_rest().exp().sum(-1)


# ---------------------------------------------------------------------------------------------------- ranking


def test_golden_ranking():
    # Largest first; the two 2s and the three 1s by lower id.
    logp = torch.tensor([1.0, 2.0, 1.0, 5.0, 2.0, 1.0])
    assert rank_top_k(logp, 6).tolist() == [3, 1, 4, 0, 2, 5]
    assert rank_top_k(logp, 4).tolist() == [3, 1, 4, 0]  # the fourth place is tied with ids 2 and 5
    assert rank_top_k(logp, 2).tolist() == [3, 1]  # the second place is tied with id 4
    assert rank_top_k(logp, 1).tolist() == [3]


def test_all_tied_rows_rank_by_id():
    for vocabulary in (1, 2, 33, 3000):
        k = (vocabulary + 1) // 2
        assert rank_top_k(torch.full((2, vocabulary), -1.5), k).tolist() == [list(range(k))] * 2


def test_a_tie_in_one_row_leaves_the_other_rows_as_they_are():
    # Only the middle row is tied at the second place.
    logp = torch.tensor([[1.0, 4.0, 3.0, 2.0], [1.0, 1.0, 4.0, 1.0], [4.0, 4.0, 1.0, 1.0]])
    assert rank_top_k(logp, 2).tolist() == [[1, 2], [2, 0], [0, 1]]


def test_impossible_tokens_rank_last_by_id():
    logp = torch.tensor([-INF, -1.0, -INF, -INF, -0.5])
    assert rank_top_k(logp, 4).tolist() == [4, 1, 0, 2]


@given(
    st.integers(1, 12).flatmap(
        lambda v: st.tuples(
            st.lists(st.lists(st.sampled_from([-INF, -3.0, -2.0, -0.0, 0.0]), min_size=v, max_size=v), min_size=1, max_size=4),
            st.integers(1, v),
        )
    )
)
def test_the_ranking_is_numpys_lexicographic_one(rows_and_k):
    rows, k = rows_and_k
    by_value_then_id = [np.lexsort((np.arange(len(row)), -np.array(row)))[:k].tolist() for row in rows]
    assert rank_top_k(torch.tensor(rows), k).tolist() == by_value_then_id


def test_a_large_vocabulary_with_many_ties_ranks_like_numpy():
    # Rounded to halves, 5000 draws share some 20 values: every k-th place is tied.
    logp = (torch.randn(3, 5000) * 2).round() / 2
    for k in (1, 64, 4999, 5000):
        expected = [np.lexsort((np.arange(5000), -row.numpy()))[:k].tolist() for row in logp]
        assert rank_top_k(logp, k).tolist() == expected


# ---------------------------------------------------------------------------------------------------- top_k_support, golden


def test_golden_support():
    # The ranking is 1 (.4), 3 (.3), 0 (.2), 2 (.1). Sampled 0 goes first, then the best two; .1 is left.
    dist = top_k_support(log_probs(0.2, 0.4, 0.1, 0.3), torch.tensor(0), k=2)
    assert dist.ids.tolist() == [0, 1, 3]
    assert_close(dist.logp, log_probs(0.2, 0.4, 0.3))
    assert_close(dist.rest, torch.tensor(0.1, dtype=torch.float64).log())


def test_golden_support_with_the_sampled_token_among_the_most_likely():
    # 3 is sampled and ranked second: it moves to the front, its own place closes, and the last slot is padding.
    dist = top_k_support(log_probs(0.2, 0.4, 0.1, 0.3), torch.tensor(3), k=2)
    assert dist.ids.tolist() == [3, 1, -1]
    assert_close(dist.logp, log_probs(0.3, 0.4, 0.0))
    assert_close(dist.rest, torch.tensor(0.3, dtype=torch.float64).log())  # .2 + .1


def test_golden_support_of_the_most_likely_token():
    dist = top_k_support(log_probs(0.2, 0.4, 0.1, 0.3), torch.tensor(1), k=3)
    assert dist.ids.tolist() == [1, 3, 0, -1]


def test_ties_go_to_the_lower_id():
    # 1, 3 and 4 share the first place, 0 and 2 the last; k = 2 cuts through the first tie, k = 4 through the second.
    logp = log_probs(0.125, 0.25, 0.125, 0.25, 0.25)
    assert top_k_support(logp, torch.tensor(2), k=2).ids.tolist() == [2, 1, 3]
    assert top_k_support(logp, torch.tensor(2), k=4).ids.tolist() == [2, 1, 3, 4, 0]
    assert top_k_support(logp, torch.tensor(3), k=4).ids.tolist() == [3, 1, 4, 0, -1]


def test_all_tokens_tied():
    # Uniform over 8: the sampled token, then 0, 1, 2; four tokens of ⅛ are left.
    dist = top_k_support(torch.full((8,), -math.log(8)), torch.tensor(5), k=3)
    assert dist.ids.tolist() == [5, 0, 1, 2]
    assert_close(dist.rest, torch.tensor(math.log(0.5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("mass", "kept"),
    [
        (0.1, [0]),  # one token already holds .5
        (0.5, [0]),
        (0.51, [0, 1]),
        (0.8, [0, 1]),  # .5 + .3 reaches .8, rounded or not
        (0.81, [0, 1, 2]),
        (0.99999, [0, 1, 2]),
        (1.0, [0, 1, 2]),
    ],
)
def test_the_fewest_tokens_that_reach_the_mass_are_kept(mass, kept, dtype):
    dist = top_k_support(log_probs(0.5, 0.3, 0.2, dtype=dtype), torch.tensor(0), k=3, mass=mass)
    assert dist.ids.tolist() == kept + [-1] * (4 - len(kept))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("mass", [1e-3, 1e-7, 1e-12, 1e-30])
def test_however_small_the_mass_one_most_likely_token_is_kept(mass, dtype):
    # No token at all holds 0 < mass, so the fewest that reach it are one.
    dist = top_k_support(log_probs(0.5, 0.3, 0.2, dtype=dtype), torch.tensor(2), k=3, mass=mass)
    assert dist.ids.tolist() == [2, 0, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_golden_the_published_mass(dtype):
    # 1 − 1.5e-5 is not yet 1 − 1e-5, and with the second token 1 − 5e-6 is: two are kept, and of the third nothing.
    logp = log_probs(1 - 1.5e-5, 1e-5, 5e-6, dtype=torch.float64).to(dtype)
    dist = top_k_support(logp, torch.tensor(0), k=3, mass=1 - 1e-5)
    assert dist.ids.tolist() == [0, 1, -1, -1]
    assert dist.rest.exp().item() == pytest.approx(5e-6, rel=1e-5)


def test_a_mass_that_is_reached_up_to_rounding_is_reached():
    # Ten tokens of 0.1, or what float32 makes of that: seven of them fall short of 0.7 by 4e-8, and are enough.
    logp = log_probs(*[0.1] * 10, dtype=torch.float32)
    held = logp.double().exp()[:7].sum().item()
    assert held < 0.7 or held - 0.7 < 1e-7
    for tokens in range(1, 10):
        ids = top_k_support(logp, torch.tensor(0), k=10, mass=tokens / 10).ids
        assert (ids >= 0).sum().item() == tokens


def test_k_and_mass_both_limit():
    # Ranked .4 .3 .2 .1: mass .85 asks for three tokens, k = 2 allows two; mass .65 asks for two, k = 3 allows three.
    logp = log_probs(0.1, 0.2, 0.3, 0.4)
    assert top_k_support(logp, torch.tensor(0), k=2, mass=0.85).ids.tolist() == [0, 3, 2]
    assert top_k_support(logp, torch.tensor(0), k=3, mass=0.65).ids.tolist() == [0, 3, 2, -1]


def test_mass_1_sets_no_threshold():
    # The first token holds all the mass float32 can see; the others are kept all the same.
    logp = torch.tensor([0.0, -40.0, -50.0, -60.0])
    assert top_k_support(logp, torch.tensor(0), k=3, mass=1.0).ids.tolist() == [0, 1, 2, -1]
    assert top_k_support(logp, torch.tensor(0), k=3, mass=0.999).ids.tolist() == [0, -1, -1, -1]


def test_the_whole_vocabulary():
    # k = V: every token, V + 1 slots, and nothing left.
    dist = top_k_support(log_probs(0.2, 0.4, 0.1, 0.3), torch.tensor(2), k=4)
    assert dist.ids.tolist() == [2, 1, 3, 0, -1]
    assert dist.rest == -INF
    assert_close(total_mass(dist), torch.tensor(1.0))


def test_a_vocabulary_of_one():
    dist = top_k_support(torch.zeros(2, 1), torch.tensor([0, 0]), k=1)
    assert dist.ids.tolist() == [[0, -1]] * 2
    assert dist.logp.tolist() == [[0.0, -INF]] * 2
    assert dist.rest.tolist() == [-INF] * 2


def test_masked_logits_fill_the_support_last_and_leave_no_rest():
    # A logit mask leaves two tokens alive. k = 4 takes both, then the lowest of the dead.
    logp = log_probs(0.0, 0.75, 0.0, 0.0, 0.25)
    dist = top_k_support(logp, torch.tensor(4), k=4)
    assert dist.ids.tolist() == [4, 1, 0, 2, -1]
    assert_close(dist.logp, log_probs(0.25, 0.75, 0.0, 0.0, 0.0))
    assert dist.rest == -INF


def test_a_masked_token_may_be_the_sampled_one():
    dist = top_k_support(log_probs(0.0, 0.75, 0.25), torch.tensor(0), k=1)
    assert dist.ids.tolist() == [0, 1]
    assert dist.logp[0] == -INF
    assert_close(dist.rest, torch.tensor(0.25, dtype=torch.float64).log())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_out_as_float32(dtype):
    # ½ and ¼ have logs that half precision rounds; what comes out is those rounded numbers, summed in float32.
    logp = log_probs(0.5, 0.25, 0.125, 0.125, dtype=dtype)
    dist = top_k_support(logp, torch.tensor(1), k=2, check=False)
    assert (dist.logp.dtype, dist.rest.dtype) == (torch.float32, torch.float32)
    assert dist.ids.tolist() == [1, 0, -1]
    assert dist.logp.tolist() == [logp[1].item(), logp[0].item(), -INF]
    assert_close(dist.rest, torch.tensor(2 * math.exp(logp[2].item())).log())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_does_not_blur_the_mass(dtype):
    # The first token holds .5 up to rounding, and half precision's own slack of .016 or .002 must not make that .5015.
    dist = top_k_support(log_probs(0.5, 0.3, 0.2, dtype=dtype), torch.tensor(0), k=3, mass=0.5015, check=False)
    assert dist.ids.tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_a_support_accepts_the_objective_accepts_too(dtype):
    # Wide rows lose their mass by rounding and are refused here; peaked rows keep it, and pass both checks.
    logits = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    tokens, accepted = logits.argmax(-1), []
    for scale in (1, 3, 30, 300):
        logp = (scale * logits).log_softmax(-1).to(dtype)
        try:
            old = top_k_support(logp, tokens, 4)
        except ValueError:  # tests/objective/test_bad_input.py has its sentence
            continue
        new = gather_support(logp, old.ids)
        mask = torch.ones(2, 3, dtype=torch.bool)
        batch = TokenBatch.on_support(new, old, torch.ones(2), mask)
        accepted.append(scale)
        assert make_objective("troll")(batch).loss.isfinite().all()
    assert 300 in accepted
    assert (1 in accepted) == (dtype != torch.bfloat16)


def test_int32_tokens_are_the_same_tokens():
    logp = torch.randn(4, 9).log_softmax(-1)
    tokens = torch.tensor([0, 8, 3, 3])
    wide, narrow = top_k_support(logp, tokens, k=4), top_k_support(logp, tokens.to(torch.int32), k=4)
    assert torch.equal(wide.ids, narrow.ids)
    assert wide.ids.dtype == narrow.ids.dtype == torch.int64


@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (2, 1, 2)])
def test_leading_axes_are_rows(shape):
    logp = torch.randn(*shape, 7).log_softmax(-1)
    tokens = torch.randint(0, 7, shape)
    dist = top_k_support(logp, tokens, k=3, mass=0.6)
    assert dist.ids.shape == (*shape, 4)
    assert dist.rest.shape == shape
    for index in np.ndindex(shape):
        row = top_k_support(logp[index], tokens[index], k=3, mass=0.6)
        assert torch.equal(dist.ids[index], row.ids)
        assert torch.equal(dist.logp[index], row.logp)
        assert torch.equal(dist.rest[index], row.rest)


def test_an_empty_batch_has_an_empty_support():
    dist = top_k_support(torch.zeros(0, 5), torch.zeros(0, dtype=torch.int64), k=2)
    assert dist.ids.shape == dist.logp.shape == (0, 3)
    assert dist.rest.shape == (0,)


# ---------------------------------------------------------------------------------------------------- top_k_support, oracle


@st.composite
def vocabularies(draw) -> tuple[list[int], int, int, Fraction]:
    """Small whole weights: many ties, some zeros, and a mass that often falls exactly on a partial sum."""
    weights = draw(st.lists(st.integers(0, 6), min_size=1, max_size=10).filter(any))
    token = draw(st.integers(0, len(weights) - 1))
    k = draw(st.integers(1, len(weights)))
    return weights, token, k, Fraction(draw(st.integers(1, 2 * sum(weights))), 2 * sum(weights))


def plain_support(weights: list[int], token: int, k: int, mass: Fraction) -> tuple[list[int], Fraction]:
    """The definition in exact arithmetic: rank, take until the mass is there, put the sampled token first."""
    ranking = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    taken, held = [], Fraction(0)
    for i in ranking[:k]:
        if held >= mass and mass < 1:
            break
        taken.append(i)
        held += Fraction(weights[i], sum(weights))
    ids = [token] + [i for i in taken if i != token]
    rest = Fraction(sum(w for i, w in enumerate(weights) if i not in ids), sum(weights))
    return ids + [-1] * (k + 1 - len(ids)), rest


@given(vocabularies())
def test_the_support_is_the_plain_one(case):
    weights, token, k, mass = case
    ids, rest = plain_support(weights, token, k, mass)
    p = [w / sum(weights) for w in weights]
    for dtype in (torch.float32, torch.float64):
        dist = top_k_support(log_probs(*p, dtype=dtype), torch.tensor(token), k, float(mass))
        assert dist.ids.tolist() == ids
        assert_close(dist.logp, log_probs(*(p[i] if i >= 0 else 0.0 for i in ids)))
        assert_close(dist.rest, torch.tensor(math.log(rest) if rest else -INF, dtype=torch.float64))


@given(vocabularies())
def test_support_and_rest_make_one(case):
    weights, token, k, mass = case
    logp = log_probs(*(w / sum(weights) for w in weights))
    assert_close(total_mass(top_k_support(logp, torch.tensor(token), k, float(mass))), torch.tensor(1.0))


@given(vocabularies(), st.randoms(use_true_random=False))
def test_another_policy_on_the_same_support_still_makes_one(case, random):
    weights, token, k, mass = case
    ids = top_k_support(log_probs(*(w / sum(weights) for w in weights)), torch.tensor(token), k, float(mass)).ids
    other = torch.tensor([random.uniform(-9, 9) for _ in weights], dtype=torch.float64).log_softmax(-1)
    dist = gather_support(other, ids)
    assert torch.equal(dist.ids, ids)
    assert_close(total_mass(dist), torch.tensor(1.0))


# ---------------------------------------------------------------------------------------------------- the rest


def test_golden_gather():
    # Ids 2 and 0 of .1 .2 .3 .4: the rest is .2 + .4 = .6.
    dist = gather_support(log_probs(0.1, 0.2, 0.3, 0.4), torch.tensor([2, 0]))
    assert dist.ids.tolist() == [2, 0]
    assert_close(dist.logp, log_probs(0.3, 0.1))
    assert_close(dist.rest, torch.tensor(0.6, dtype=torch.float64).log())


@pytest.mark.parametrize(
    ("ids", "rest"),
    [
        ([1, -1], 0.7),  # token 0 lies outside: .4 + .2 + .1
        ([1, -1, -1, -1], 0.7),
        ([0, -1], 0.6),  # token 0 lies inside: .3 + .2 + .1
        ([0, -1, -1, -1], 0.6),
        ([1, 0, -1], 0.3),
        ([3, 2, -1], 0.7),
        ([-1, -1], 1.0),  # nothing is kept
    ],
)
def test_padding_leaves_token_0_where_it_is(ids, rest):
    dist = gather_support(log_probs(0.4, 0.3, 0.2, 0.1), torch.tensor(ids))
    assert_close(dist.rest, torch.tensor(rest, dtype=torch.float64).log())
    assert dist.logp[torch.tensor(ids) < 0].tolist() == [-INF] * ids.count(-1)
    assert_close(total_mass(dist), torch.tensor(1.0))


def test_padding_sends_no_gradient_to_token_0():
    # The gradient of Σ logp over kept entries is 1 at each of them; the rest's is p/R outside: .4/.7, .2/.7, .1/.7.
    logp = log_probs(0.4, 0.3, 0.2, 0.1).requires_grad_()
    dist = gather_support(logp, torch.tensor([1, -1, -1]))
    (kept,) = torch.autograd.grad(dist.logp[0], logp, retain_graph=True)
    (padding,) = torch.autograd.grad(dist.logp[1:].exp().sum(), logp, retain_graph=True)
    (rest,) = torch.autograd.grad(dist.rest, logp)
    assert kept.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert padding.tolist() == [0.0] * 4
    assert_close(rest, torch.tensor([4 / 7, 0.0, 2 / 7, 1 / 7], dtype=torch.float64))


def test_the_rest_of_a_peaked_row_keeps_its_digits_in_float32():
    # One token holds all but 5e-11, spread over two others. 1 − Σp is exactly 0 in float32, and 5e-11 is the truth.
    logits = torch.tensor([[0.0, math.log(3e-11), math.log(2e-11)], [math.log(3e-11), 0.0, math.log(2e-11)]])
    logp = logits.log_softmax(-1)
    assert logp.dtype == torch.float32
    for dist in (
        gather_support(logp, torch.tensor([[0], [1]])),
        top_k_support(logp, torch.tensor([0, 1]), k=1),
        top_k_support(logp, torch.tensor([0, 1]), k=2, mass=1 - 1e-5),
    ):
        assert (1 - dist.logp.exp().sum(-1)).tolist() == [0.0, 0.0]
        assert_close(dist.rest.exp(), torch.tensor([5e-11, 5e-11]), rtol=1e-5, atol=0)


@given(st.integers(0, 2**20))
def test_the_rest_is_exact_however_peaked_the_row(seed):
    # Logits spread over ±60 reach masses of 1e-40; each rest is summed by `math` from the same float32 log-probs.
    logp = (torch.rand(12, generator=torch.Generator().manual_seed(seed)) * 120 - 60).log_softmax(-1)
    for k in (1, 4, 11):
        dist = top_k_support(logp, logp.argmax(), k)
        outside = [math.exp(x) for i, x in enumerate(logp.tolist()) if i not in dist.ids.tolist()]
        assert_close(dist.rest, torch.tensor(math.log(math.fsum(outside))), atol=0, rtol=1e-6)


def test_the_rest_is_minus_infinity_only_where_nothing_is_left():
    # Row 0 keeps everything; row 1 leaves a token of probability 0; row 2 leaves one of e^−200, far below float32's reach.
    half = math.log(0.5)
    logp = torch.tensor([[half, half, -30.0], [half, half, -INF], [half, half, -200.0]])
    dist = gather_support(logp, torch.tensor([[0, 1, 2], [0, 1, -1], [0, 1, -1]]))
    assert dist.rest.tolist() == [-INF, -INF, -200.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_where_nothing_is_left_the_gradient_is_0(dtype):
    # Row 0 keeps everything, row 1 leaves only a masked token, row 2 leaves one token: ∂rest/∂z = 1 − p there, −p elsewhere.
    logits = torch.tensor([[0.5, 0.25, 0.25], [0.5, 0.5, 0.0], [0.5, 0.25, 0.25]], dtype=dtype).log().requires_grad_()
    dist = gather_support(logits.log_softmax(-1), torch.tensor([[0, 1, 2], [0, 1, -1], [0, 1, -1]]))
    (gradient,) = torch.autograd.grad(dist.rest.sum(), logits)
    assert gradient[:2].tolist() == [[0.0] * 3] * 2
    assert_close(gradient[2], torch.tensor([-0.5, -0.25, 0.75]))


def test_the_gradient_of_every_field_is_the_dense_softmaxs():
    # Dense: log p_i has gradient [j = i] − p_j, and log R, R = Σ_outside p, has [j outside] p_j / R − p_j, at every logit j.
    logits = torch.randn(9, dtype=torch.float64).requires_grad_()
    ids = torch.tensor([4, 0, 7, -1, -1])
    p = logits.detach().softmax(-1)
    outside = torch.tensor([i not in (4, 0, 7) for i in range(9)])
    dist = gather_support(logits.log_softmax(-1), ids)
    for slot, i in enumerate((4, 0, 7)):
        (gradient,) = torch.autograd.grad(dist.logp[slot], logits, retain_graph=True)
        assert_close(gradient, torch.eye(9, dtype=torch.float64)[i] - p)
    (gradient,) = torch.autograd.grad(dist.rest, logits)
    assert_close(gradient, torch.where(outside, p / p[outside].sum(), 0.0) - p)
    assert (gradient != 0).all()


def test_the_gradient_of_a_function_of_support_and_rest_is_the_dense_one():
    # The same scalar twice: through SparseDist, and with the buckets summed by a 0/1 matrix over the dense softmax.
    logits = torch.randn(3, 8, dtype=torch.float64).requires_grad_()
    tokens = torch.tensor([0, 5, 7])
    dist = top_k_support(logits.log_softmax(-1), tokens, k=3)
    weights = torch.randn(3, 5, dtype=torch.float64)
    (sparse,) = torch.autograd.grad((weights * dist.with_rest().exp()).sum(), logits)

    buckets = torch.zeros(3, 5, 8, dtype=torch.float64)
    buckets[:, 4] = 1
    for row, ids in enumerate(dist.ids.tolist()):
        for slot, i in enumerate(ids):
            if i >= 0:
                buckets[row, slot, i], buckets[row, 4, i] = 1, 0
    dense_p = torch.einsum("rbv,rv->rb", buckets, logits.softmax(-1))
    (dense,) = torch.autograd.grad((weights * dense_p).sum(), logits)
    assert_close(sparse, dense)


def test_gather_support_gradcheck():
    # From the logits, so that both kept entries and rest reach everywhere; row 1 has padding and leaves token 0 outside.
    logits = torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    ids = torch.tensor([[3, 0, 5], [2, -1, -1]])

    def fields(z: Tensor) -> tuple[Tensor, Tensor]:
        dist = gather_support(z.log_softmax(-1), ids)
        return dist.logp.exp(), dist.rest

    assert gradcheck(fields, logits)


def test_top_k_support_gradcheck():
    # Logits far enough apart that the ranking does not change under gradcheck's steps.
    logits = torch.tensor([[0.3, -1.0, 2.0, 0.9, -0.4], [1.5, 0.2, -2.0, 0.0, 0.8]], dtype=torch.float64, requires_grad=True)
    tokens = torch.tensor([1, 0])
    assert gradcheck(lambda z: top_k_support(z.log_softmax(-1), tokens, k=2).with_rest().exp(), logits)
    assert gradcheck(lambda z: top_k_support(z.log_softmax(-1), tokens, k=2).rest, logits)


def test_a_support_of_its_own_tokens_gathers_to_itself():
    logp = torch.randn(6, 20).log_softmax(-1)
    dist = top_k_support(logp, torch.randint(0, 20, (6,)), k=5, mass=0.7)
    again = gather_support(logp, dist.ids)
    assert torch.equal(again.logp, dist.logp)
    assert torch.equal(again.rest, dist.rest)


def test_int32_ids_gather_the_same():
    logp = torch.randn(2, 6).log_softmax(-1)
    ids = torch.tensor([[5, 0, -1], [1, -1, -1]])
    wide, narrow = gather_support(logp, ids), gather_support(logp, ids.to(torch.int32))
    assert torch.equal(wide.logp, narrow.logp)
    assert torch.equal(wide.rest, narrow.rest)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gathers_to_float32(dtype):
    logp = log_probs(0.5, 0.25, 0.25, dtype=dtype)
    dist = gather_support(logp, torch.tensor([2]), check=False)
    assert (dist.logp.dtype, dist.rest.dtype) == (torch.float32, torch.float32)
    assert_close(dist.rest, torch.tensor([math.exp(x) for x in logp[:2].tolist()]).sum().log())


# ---------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("k", [0, -1, 6])
def test_k_outside_the_vocabulary_is_refused(k):
    with pytest.raises(ValueError, match=rf"top_k_support: `k` must lie in 1 … V = 5; got {k}\."):
        top_k_support(torch.zeros(2, 5), torch.tensor([0, 0]), k=k)


@pytest.mark.parametrize("mass", [0.0, -0.5, 1.5, math.nan, INF])
def test_a_mass_that_is_no_probability_is_refused(mass):
    with pytest.raises(ValueError, match=rf"`mass` is a probability in \(0, 1\], 1.0 for no threshold; got {mass}\."):
        top_k_support(torch.zeros(2, 5), torch.tensor([0, 0]), k=2, mass=mass)


@pytest.mark.parametrize("token", [-1, 5, 10_000])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_a_token_outside_the_vocabulary_is_refused(token, dtype):
    with pytest.raises(ValueError, match=rf"top_k_support: `tokens` must lie in 0 … 4 for a vocabulary of 5; got {token}\."):
        top_k_support(torch.zeros(3, 5), torch.tensor([0, token, 4], dtype=dtype), k=2)


@pytest.mark.parametrize("token", [-2, -100, 5])
def test_an_id_outside_the_vocabulary_is_refused(token):
    with pytest.raises(ValueError, match=rf"gather_support: `ids` must lie in -1 … 4 for a vocabulary of 5; got {token}\."):
        gather_support(torch.zeros(2, 5), torch.tensor([[0, 1], [token, -1]]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.bool])
def test_ids_of_another_dtype_are_refused(dtype, unchecked_shapes):
    with pytest.raises(ValueError, match=rf"top_k_support: `tokens` holds token ids, int64 or int32; got {dtype}\."):
        top_k_support(torch.zeros(2, 5), torch.ones(2, dtype=dtype), k=2)
    with pytest.raises(ValueError, match=rf"gather_support: `ids` holds token ids, int64 or int32; got {dtype}\."):
        gather_support(torch.zeros(2, 5), torch.ones(2, 3, dtype=dtype))


@pytest.mark.parametrize("shape", [[], [1], [4], [3, 1], [3, 5]])
def test_tokens_of_another_shape_are_refused(shape, unchecked_shapes):
    with pytest.raises(ValueError, match="top_k_support: one sampled token per row") as error:
        top_k_support(torch.zeros(3, 5), torch.zeros(shape, dtype=torch.int64), k=2)
    assert f"logp is [3, 5], so tokens must be [3]; got {shape}." in str(error.value)


@pytest.mark.parametrize("shape", [[2], [2, 4], [3, 2, 4]])
def test_ids_of_another_batch_are_refused(shape, unchecked_shapes):
    with pytest.raises(ValueError, match="gather_support") as error:
        gather_support(torch.zeros(3, 5), torch.zeros(shape, dtype=torch.int64))
    assert f"logp is [3, 5], so ids must be [3] + [K]; got {shape}." in str(error.value)


# -------------------------------------------------------------------------------------------------- condition_on_support


def test_golden_conditioned_policy():
    # Of ½, ¼, ⅛, ⅛ the first two are kept: they hold ¾, so that they become ⅔ and ⅓.
    dist = gather_support(log_probs(0.5, 0.25, 0.125, 0.125), torch.tensor([1, 0, -1]))
    kept = condition_on_support(dist)
    assert kept.ids.tolist() == [1, 0, -1]
    assert_close(kept.logp[:2].exp(), torch.tensor([1 / 3, 2 / 3], dtype=torch.float64))
    assert kept.logp[2] == kept.rest == kept.rest_max == -INF


def test_golden_ratio_of_what_was_sampled_from():
    # Old ½ ¼ | ¼, new ⅖ ⅖ | ⅕; kept are the first two. Token 0: (½) / (⅔) = ¾, and of whole policies 0.8.
    ids = torch.tensor([0, 1])
    old, new = (condition_on_support(gather_support(log_probs(*p), ids)) for p in ([0.5, 0.25, 0.25], [0.4, 0.4, 0.2]))
    assert_close((new.logp[0] - old.logp[0]).exp(), torch.tensor(0.75, dtype=torch.float64))


def test_a_row_without_tokens_stays_empty_and_has_no_gradient():
    logp = log_probs(0.5, 0.5).requires_grad_()
    kept = condition_on_support(gather_support(logp, torch.tensor([-1, -1])))
    assert kept.logp.tolist() == [-INF, -INF]
    torch.where(kept.ids >= 0, kept.logp, 0.0).sum().backward()
    assert logp.grad.tolist() == [0.0, 0.0]


@given(st.integers(2, 9), st.integers(0, 2**31), st.sampled_from([torch.float64, torch.float32, torch.bfloat16]))
def test_a_conditioned_policy_is_the_softmax_of_the_kept_logits(vocabulary, seed, dtype):
    draw = torch.Generator().manual_seed(seed)
    logits = (4 * torch.randn(3, vocabulary, generator=draw)).to(dtype).to(torch.promote_types(dtype, torch.float32))
    count = int(torch.randint(1, vocabulary + 1, (1,), generator=draw))
    ids = torch.rand(3, vocabulary, generator=draw).argsort(-1)[:, :count]
    kept = condition_on_support(gather_support(logits.log_softmax(-1), ids))
    assert_close(kept.logp, logits.gather(-1, ids).log_softmax(-1), atol=1e-5)
    assert_close(kept.logp.exp().sum(-1), torch.ones(3, dtype=kept.logp.dtype))
    again = condition_on_support(kept)  # twice is once
    assert_close(again.logp, kept.logp, atol=1e-5)
    shifted = condition_on_support(gather_support((logits + 3).log_softmax(-1), ids))
    assert_close(shifted.logp, kept.logp, atol=1e-4 if dtype != torch.float64 else 1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_ratio_at_unchanged_weights_is_exactly_one(dtype):
    logits = (4 * torch.randn(5, 50)).to(dtype).float()
    ids = torch.rand(5, 50).argsort(-1)[:, :7]
    old, new = (condition_on_support(gather_support(logits.log_softmax(-1), ids)) for _ in range(2))
    assert ((new.logp - old.logp).exp() == 1).all()


def test_the_gradient_of_a_conditioned_policy():
    ids = torch.tensor([[2, 0, -1], [1, 3, 4]])

    def conditioned(logits):
        dist = condition_on_support(gather_support(logits.log_softmax(-1), ids))
        return dist.logp[ids >= 0]

    torch.autograd.gradcheck(conditioned, torch.randn(2, 6, dtype=torch.float64, requires_grad=True))
