"""The choice of an implementation: what is asked for, what is possible, what is said."""

import logging

import pytest
import torch

from corral.head import dispatch
from interpreted import DEVICE

HIDDEN, WEIGHT = torch.zeros(3, 8, device=DEVICE), torch.zeros(600, 8, device=DEVICE)


@pytest.fixture(autouse=True)
def say_again() -> None:
    dispatch._log_choice.cache_clear()


def test_what_is_asked_for_is_what_runs():
    assert dispatch.choose("lm_head", "torch", HIDDEN, WEIGHT) == "torch"
    assert dispatch.choose("lm_head", "triton", HIDDEN, WEIGHT) == "triton"
    assert dispatch.choose("lm_head", "triton", HIDDEN, WEIGHT, top_k=3, given=1022) == "triton"
    with pytest.raises(ValueError, match="lm_head: `impl` is 'auto', 'torch' or 'triton'; got 'cuda'"):
        dispatch.choose("lm_head", "cuda", HIDDEN, WEIGHT)


OBSTACLES = {
    "must share a dtype of at most 32 bits; they are float64 and float64": (HIDDEN.double(), WEIGHT.double(), None),
    "they are float16 and float32": (HIDDEN.half(), WEIGHT, None),
    "on multiples of 16 bytes": (HIDDEN[:, :7], WEIGHT[:, :7].contiguous(), None),
    "must lie one behind the other": (HIDDEN, torch.zeros(8, 600, device=DEVICE).T, None),
    "hidden states must begin on a multiple of 16 bytes": (torch.zeros(25, device=DEVICE)[1:].view(3, 8), WEIGHT, None),
    "top_k = 40 is more than a vocabulary of 600 has tiles of 128": (HIDDEN, WEIGHT, 40),
    "a support of 1026 tokens was given, and one of more than 1025 does not fit": (HIDDEN, WEIGHT, None, 1026),
    "the union of 1023 tokens given and top_k = 3 may be more than 1025 tokens": (HIDDEN, WEIGHT, 3, 1023),
}


@pytest.mark.parametrize(("says", "inputs"), OBSTACLES.items(), ids=OBSTACLES)
def test_what_triton_cannot_do_is_refused_politely(says, inputs):
    with pytest.raises(ValueError, match="impl='triton' cannot run here, because") as error:
        dispatch.choose("lm_head", "triton", *inputs)
    assert says in str(error.value)
    assert dispatch.choose("lm_head", "auto", *inputs) == "torch"


def test_without_triton_torch_runs(monkeypatch):
    monkeypatch.setattr(dispatch, "has_triton", lambda: False)
    assert dispatch.obstacle(HIDDEN, WEIGHT, None) == "Triton is not installed"


def test_auto_says_once_what_it_took(caplog):
    with caplog.at_level(logging.INFO, logger="corral"):
        for _ in range(3):
            dispatch.choose("lm_head", "auto", HIDDEN, WEIGHT)
    said = [record.message for record in caplog.records]
    if DEVICE == "cpu":  # the interpreter is for tests: nothing takes it by itself
        expected = "lm_head runs on the torch path, because Triton kernels run on a GPU and the hidden states are on 'cpu'."
    else:
        expected = "lm_head runs on Triton kernels."
    assert said == [expected]
