"""What kernels ask of memory and devices, and the interpreter does not: layouts, sizes, and the device that is current."""

from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import corral
from corral import SparseDist, TokenBatch
from corral.head.batch_loss import batch_loss
from corral.head.dispatch import MAX_GIVEN
from interpreted import DEVICE, small_tiles
from tolerance import assert_close

from corral.head.triton import loss  # isort: skip  # after `interpreted`
from corral.head.triton import support as select  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

ROWS, VOCABULARY, WIDTH = 6, 90, 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


def apart(x: Tensor) -> Tensor:
    """The same numbers with others between them."""
    return torch.stack([x, x.flip(-1).roll(1)], -1)[..., 0]


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, tokens, and a support whose slot 0 they are."""
    hidden, weight = torch.randn(ROWS, WIDTH, device=DEVICE), torch.randn(VOCABULARY, WIDTH, device=DEVICE)
    ids = torch.rand(ROWS, VOCABULARY).argsort(-1)[:, :5].to(DEVICE)
    return hidden, weight, torch.randn(VOCABULARY, device=DEVICE), ids[:, 0].contiguous(), ids


@pytest.mark.parametrize("support", ["own", "given", "none"])
def test_a_head_of_strided_inputs(support):
    hidden, weight, bias, tokens, ids = problem()
    strided = apart(bias), apart(tokens), apart(ids)
    assert not any(x.is_contiguous() for x in strided)
    found = []
    for b, t, i in ((bias, tokens, ids), strided):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight)] + [b.detach().requires_grad_()]
        how = {"own": {"top_k": 1}, "given": {"ids": i}, "none": {}}[support]
        out = corral.lm_head(leaves[0], leaves[1], t, bias=leaves[2], impl="triton", **how)
        loss = out.logp.sum() if out.dist is None else (out.dist.logp[:, 0] + 0.5 * out.dist.rest).sum()
        found.append((out.logp, *torch.autograd.grad(loss, leaves)))
    for got, wanted in zip(found[1], found[0], strict=True):
        assert_close(got, wanted)


@pytest.mark.parametrize("exact", [True, False])
def test_a_loss_of_strided_inputs(exact):
    hidden, weight, bias, tokens, ids = problem()
    logp = (hidden @ weight.T + bias).log_softmax(-1)
    dist = corral.gather_support(logp, ids)
    objective, weights = corral.make_objective("troll"), torch.full((ROWS, 1), 0.3, device=DEVICE)
    found = []
    for b, t, i in ((bias, tokens, ids), (apart(bias), apart(tokens), apart(ids))):
        leaves = [(x + 0.2 * x.roll(1, 0)).requires_grad_() for x in (hidden[:, None], weight)] + [b.detach().requires_grad_()]
        old = SparseDist(i[:, None], dist.logp[:, None], dist.rest[:, None])
        mask = torch.ones(ROWS, 1, dtype=torch.bool, device=DEVICE)
        batch = TokenBatch(dist.logp[:, :1], dist.logp[:, :1], torch.ones(ROWS, device=DEVICE), mask, None, old)
        out = corral.policy_loss_from_hidden(
            leaves[0], leaves[1], t[:, None], batch, objective, bias=leaves[2], weights=weights, exact=exact, impl="triton"
        )  # fmt: skip
        found.append((out.per_token, *torch.autograd.grad(out.loss, leaves)))
    for got, wanted in zip(found[1], found[0], strict=True):
        assert_close(got, wanted)


def test_a_support_without_a_slot_is_refused():
    """There is nothing behind its pointers, not even for the sampled token."""
    hidden, weight, _, tokens, _ = problem()
    mask, none = torch.ones(1, ROWS, dtype=torch.bool, device=DEVICE), torch.empty(1, ROWS, 0, device=DEVICE)
    logp = torch.full((1, ROWS), -1.0, device=DEVICE)
    batch = TokenBatch(logp, logp, torch.ones(1, device=DEVICE), mask, None, SparseDist(none.long(), none, logp))
    with pytest.raises(ValueError, match=r"slot 0 of dist_old\.ids is not the sampled token at 6 of 6 unmasked"):
        corral.policy_loss_from_hidden(
            hidden[None], weight, tokens[None], batch, corral.make_objective("ppo_clip"), weights=logp, impl="triton"
        )


def test_lists_fit_shared_memory(monkeypatch):
    """Of equal logits all come into question: twice as many as are listed at first, or everything by the torch path."""
    assert select.MOST_LISTED * 8 <= 99 * 1024  # what the smallest GPUs have, and keys have 8 bytes
    listed, own_rows = [], select._own_rows
    monkeypatch.setattr(select, "_own_rows", lambda part, room, *more: listed.append(2 * room) or own_rows(part, room, *more))
    hidden, weight = torch.zeros(2, WIDTH, device=DEVICE), torch.randn(600, WIDTH, device=DEVICE)
    tokens = torch.tensor([4, 599], device=DEVICE)
    for most, rooms in ((64, [8, 64]), (16, [8, 16]), (8, [8])):
        monkeypatch.setattr(select, "MOST_LISTED", most)
        listed.clear()
        out = corral.lm_head(hidden, weight, tokens, top_k=2, impl="triton")
        assert listed == rooms
        assert out.dist.ids.tolist() == [[4, 0, 1], [599, 0, 1]]


def test_kernels_run_where_their_tensors_are(monkeypatch):
    """Triton launches on the current device: on another, pointers would lead nowhere."""
    entered = []

    @contextmanager
    def device_of(x):
        entered.append(x.device)
        yield

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    hidden, weight, _, tokens, ids = problem()
    dist = corral.lm_head(hidden, weight, tokens, ids=ids, impl="triton").dist
    mask = torch.ones(1, ROWS, dtype=torch.bool, device=DEVICE)
    new = SparseDist(*(x[None] for x in (dist.ids, dist.logp, dist.rest)))
    batch = TokenBatch.on_support(new, new, torch.ones(1, device=DEVICE), mask)
    batch_loss(corral.make_objective("troll"), batch, kernels=True)
    corral.policy_loss_from_hidden(
        hidden[None], weight, tokens[None], batch, corral.make_objective("troll"), weights=batch.logp_old, impl="triton"
    )
    assert entered == [hidden.device] * 3


def test_a_support_too_large_for_registers_takes_the_torch_path(monkeypatch):
    """Up to the whole vocabulary, as an objective of full distributions keeps it."""
    monkeypatch.setattr(loss, "row_losses", lambda *_: pytest.fail("in a kernel"))
    slots = MAX_GIVEN + 1
    logp = torch.randn(1, 2, slots, device=DEVICE).log_softmax(-1)
    dist = SparseDist(torch.arange(slots, device=DEVICE).expand(1, 2, -1), logp, torch.full((1, 2), -20.0, device=DEVICE))
    mask = torch.ones(1, 2, dtype=torch.bool, device=DEVICE)
    batch = TokenBatch(logp[..., 0], logp[..., 0], torch.ones(1, device=DEVICE), mask, dist, dist)
    assert_close(
        batch_loss(corral.make_objective("ppo_clip"), batch, kernels=True).loss, torch.full((1, 2), -1.0, device=DEVICE)
    )
    with pytest.raises(ValueError, match="a support of 1026 tokens was given, and one of more than 1025 does not fit"):
        corral.policy_loss_from_hidden(
            torch.zeros(1, 2, WIDTH, device=DEVICE), torch.zeros(2000, WIDTH, device=DEVICE), mask.long(), batch,
            corral.make_objective("ppo_clip"), weights=mask.float(), impl="triton",
        )  # fmt: skip
