"""Asynchronous copies, and ids validated behind the work that reads them: those outside the vocabulary are refused."""

import pytest
import torch

import corral
from corral.head.logits import LogitSpec
from corral.head.rows import AsyncCopy, HeadInput
from interpreted import DEVICE, small_tiles

from corral.head.triton import support as select  # isort: skip  # after `interpreted`
from corral.head.triton.support import queue_id_check  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton.*")

VOCABULARY, WIDTH = 40, 8


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    small_tiles(monkeypatch)


def test_numbers_arrive():
    numbers = torch.tensor([3, -1], device=DEVICE)
    assert AsyncCopy(numbers).wait() == [3, -1]
    assert AsyncCopy(numbers[0]).wait() == 3


# Just outside, and so far that whatever is read there would not be memory.
BAD = [VOCABULARY, 2**31 + 7, 10**15, -1, -(10**15)]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("support", ["own", "given", "none"])
def test_a_bad_token_is_refused(support, bad):
    hidden = torch.randn(3, WIDTH, device=DEVICE, requires_grad=True)
    weight = torch.randn(VOCABULARY, WIDTH, device=DEVICE)
    tokens = torch.tensor([0, bad, 5], device=DEVICE)
    options = {"own": {"top_k": 2 if DEVICE == "cpu" else 1}, "none": {}}
    options["given"] = {"ids": torch.tensor([[0, 1], [2, 3], [-1, -1]], device=DEVICE)}
    with pytest.raises(ValueError, match=rf"lm_head: `tokens` must lie in 0 … 39 .* got {bad}\. Were they"):
        corral.lm_head(hidden, weight, tokens, impl="triton", **options[support])


@pytest.mark.parametrize("bad", [*BAD[:3], -2, -(10**15)])
def test_a_bad_support_is_refused(bad):
    hidden, weight = torch.randn(2, WIDTH, device=DEVICE), torch.randn(VOCABULARY, WIDTH, device=DEVICE)
    ids = torch.tensor([[0, 1, -1], [7, 2, bad]], device=DEVICE)
    with pytest.raises(ValueError, match=rf"lm_head: `ids` must lie in -1 … 39 .* got {bad}\."):
        corral.lm_head(hidden, weight, torch.tensor([0, 7], device=DEVICE), ids=ids, impl="triton")


@pytest.mark.parametrize("slots", [2, 17, 40])
def test_a_token_twice_in_a_support_is_refused(slots):
    hidden, weight = torch.randn(3, WIDTH, device=DEVICE), torch.randn(VOCABULARY, WIDTH, device=DEVICE)
    tokens = torch.arange(3, device=DEVICE)
    ids = torch.stack([torch.randperm(VOCABULARY)[:slots] for _ in range(3)]).to(DEVICE)
    ids[1, 1:] = -1  # which may be there as often as it likes
    corral.lm_head(hidden, weight, tokens, ids=ids, impl="triton")
    ids[2, -1] = ids[2, 0]
    with pytest.raises(ValueError, match="lm_head: `ids` has a token twice in one row"):
        corral.lm_head(hidden, weight, tokens, ids=ids, impl="triton")


def test_kernels_are_given_no_bad_ids():
    tokens, ids = torch.tensor([3, 40], device=DEVICE), torch.tensor([[39, -7], [2**33 + 5, 0]], device=DEVICE)
    weight = torch.empty(VOCABULARY, WIDTH, device=DEVICE)
    part = HeadInput(weight[:2], weight, None, tokens, ids, LogitSpec())
    assert select._marks(part).tolist() == [[3, 39, -1], [-1, -1, 0]]


def test_nothing_is_asked_of_no_ids():
    none = torch.empty(0, dtype=torch.long, device=DEVICE)
    queue_id_check("here", none, none[:, None], VOCABULARY)()
    queue_id_check("here", torch.tensor([39], device=DEVICE), None, VOCABULARY)()


def test_the_torch_path_refuses_too():
    weight = torch.randn(VOCABULARY, WIDTH)
    with pytest.raises(ValueError, match=r"lm_head: `tokens` must lie in 0 … 39 .* got 40"):
        corral.lm_head(torch.randn(1, WIDTH), weight, torch.tensor([40]), impl="torch")
    with pytest.raises(ValueError, match=r"lm_head: `ids` must lie in -1 … 39 .* got -3"):
        corral.lm_head(torch.randn(1, WIDTH), weight, torch.tensor([4]), ids=torch.tensor([[4, -3]]), impl="torch")


def test_a_bad_token_among_equal_logits_is_refused():
    """Where too many tokens come into question, the torch path looks at every logit, and meets the bad token too."""
    hidden, weight = torch.zeros(2, WIDTH, device=DEVICE), torch.randn(200, WIDTH, device=DEVICE)
    with pytest.raises(ValueError, match=r"`tokens` must lie in 0 … 199 .* got 200"):
        corral.lm_head(hidden, weight, torch.tensor([4, 200], device=DEVICE), top_k=2, impl="triton")
