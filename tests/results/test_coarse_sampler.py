"""A sampler in lower precision: its rounding against torch's own e4m3, and log-probs that are those of what it sampled from."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.jobs.llm.problems import Problems
from corral.lab.models.smoke import build_smoke
from corral.lab.tasks import make_task
from results.evidence.coarse_sampler import PRECISIONS, roll_out, to_fp8


def test_golden_rounding() -> None:
    # The largest entry is 448 of its row's unit, so the unit is 1: 3 bits after the leading one of 17 … 30 are steps of 2.
    row = torch.tensor([[448.0, 17.1, 18.9, -29.1, 0.0]])
    assert to_fp8(row).tolist() == [[448.0, 18.0, 18.0, -30.0, 0.0]]
    assert torch.equal(to_fp8(row[0]), row[0]), "a norm's scales stay"


@given(st.lists(st.floats(-448, 448, width=32), min_size=1, max_size=8))
def test_rounding_is_that_of_torch(values: list[float]) -> None:
    row = torch.tensor([[448.0, *values]])
    assert torch.equal(to_fp8(row), row.to(torch.float8_e4m3fn).float())


@pytest.mark.parametrize("precision", ["float32", "fp8"])
@pytest.mark.parametrize("support", [False, True])
def test_reported_log_probs_are_of_the_rounded_network(precision: str, support: bool) -> None:
    model, tokenizer = build_smoke()
    problems = Problems(task=make_task("countdown"), tokenizer=tokenizer, instruction="{problem}")
    trainer = SimpleNamespace(
        model=model, processing_class=tokenizer, max_completion_length=5, needs_support=support, anchor="rollout"
    )
    trainer.parts = SimpleNamespace(problems=problems)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    torch.manual_seed(0)
    out = roll_out([problems.prompt("3 7 12>22:")] * 3, trainer, precision)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items()), "weights are put back"
    for name, weight in model.named_parameters():
        weight.data = PRECISIONS[precision](before[name])
    for prompt, completion, logprobs in zip(out["prompt_ids"], out["completion_ids"], out["logprobs"], strict=True):
        ids = torch.tensor([[*prompt, *completion]])
        with torch.no_grad():
            logp = model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        own = logp[range(len(completion)), completion]
        if not support:
            torch.testing.assert_close(torch.tensor(logprobs), own, atol=1e-5, rtol=1e-5)
            continue
        for t, token in enumerate(completion):
            known = out["logprob_token_ids"][out["completion_ids"].index(completion)][t]
            assert len(set(known)) == len(known)
            assert logprobs[t][known.index(token)] == pytest.approx(float(own[t]), abs=1e-5)
