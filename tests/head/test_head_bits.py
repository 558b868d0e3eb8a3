"""A token's log-prob is the same to the last bit whatever else is asked for and whatever other rows are in the call."""

import pytest
import torch

from corral import TokenBatch, make_objective, policy_loss_from_hidden
from corral.head import lm_head

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
FORMS = {"neither": {}, "top-k": {"top_k": 8, "mass": 0.99}, "ids": {"ids": True}, "union": {"top_k": 8, "ids": True}}


def problem(dtype: torch.dtype, rows: int = 300, vocabulary: int = 5000, width: int = 48):
    draw = torch.Generator().manual_seed(3)
    hidden = torch.randn(rows, width, generator=draw).to(dtype)
    weight = (torch.randn(vocabulary, width, generator=draw) * 0.4).to(dtype)
    tokens = torch.randint(vocabulary, (rows,), generator=draw)
    ids = torch.rand(rows, vocabulary, generator=draw).argsort(-1)[:, :6]
    ids = torch.where(ids == tokens[:, None], -1, ids)
    return hidden, weight, tokens, torch.cat([tokens[:, None], ids], -1)


def run(hidden, weight, tokens, ids, form, *, entropy=False, rows=slice(None)):
    options = {**form, "ids": ids[rows]} if "ids" in form else form
    return lm_head(hidden[rows], weight, tokens[rows], entropy=entropy, impl="torch", **options)


@pytest.mark.parametrize(
    ("dtype", "threads"),
    [
        *(pytest.param(dtype, 1, id=f"{name}-1") for name, dtype in DTYPES.items()),
        pytest.param(torch.float32, 2, id="float32-2"),
        *(pytest.param(DTYPES[name], 2, id=f"{name}-2", marks=pytest.mark.slow) for name in ("bfloat16", "float64")),
    ],
)
def test_log_probs_are_the_same_bits_for_every_request_and_every_number_of_rows(dtype, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        given = problem(dtype)
        whole = run(*given, FORMS["neither"]).logp
        for name, form in FORMS.items():
            for entropy in (False, True):
                for rows in (slice(None), slice(0, 1), slice(5, 8), slice(7, 40), slice(100, 297)):
                    assert torch.equal(run(*given, form, entropy=entropy, rows=rows).logp, whole[rows]), (name, entropy, rows)
    finally:
        torch.set_num_threads(before)


def test_a_support_is_the_same_bits_however_it_was_found():
    # The old pass finds it, the update is given it: at unchanged weights the two distributions are one.
    hidden, weight, tokens, _ = problem(torch.float32)
    found = lm_head(hidden, weight, tokens, top_k=16, mass=0.9, impl="torch").dist
    again = lm_head(hidden[20:90], weight, tokens[20:90], ids=found.ids[20:90], impl="torch").dist
    for field in ("ids", "logp", "rest", "rest_max"):
        assert torch.equal(getattr(found, field)[20:90], getattr(again, field)), field


def test_the_fused_loss_has_the_same_log_probs():
    hidden, weight, tokens, _ = problem(torch.float32)
    old = lm_head(hidden, weight, tokens, top_k=16, impl="torch")
    one = torch.ones(1, len(tokens))
    batch = TokenBatch(one, old.logp[None], one, one > 0, None, old.dist.map(lambda x: x[None]))
    given = hidden[None].requires_grad_(), weight, tokens[None], batch, make_objective("troll")
    new = policy_loss_from_hidden(*given, weights=one, impl="torch")
    assert torch.equal(new.logp[0], old.logp)
    for field in ("logp", "rest", "rest_max"):
        assert torch.equal(getattr(new.dist, field)[0], getattr(old.dist, field)), field
