"""The union of both policies' supports in the trainer: old log-probs of tokens that only the new policy thinks likely."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from tiny_models import (
    VOCABULARY,
    Spy,
    dense_logp,
    make_trainer,
    measured,
    nudge,
    prompts,
    rollouts,
    tiny_model,
    without_fused_loss,
)

import corral.trl.trainer
from corral import gather_support
from corral.llm import CorralConfig
from corral.trl import scoring as policy_head
from corral.trl.api import FUSED
from tolerance import ROUNDING, assert_close

pytestmark = pytest.mark.skipif(not FUSED, reason="this TRL computes all logits")

CUT_OFF = {"support": "union", "support_size": 3, "support_mass": 0.9}
"""Three tokens of forty: most rows have more than a tenth of their mass outside."""

CASES: dict[str, dict[str, Any]] = {
    "troll": {"objective": "troll"},
    "dppo": {"objective": "dppo", "objective_config": {"estimator": "topk"}},
    "soft-capped, tied head": {"objective": "troll", "family": "gemma2"},
    "LoRA": {"objective": "troll", "lora": True},
    "bf16 weights": {"objective": "troll", "dtype": torch.bfloat16},
}


def moved(tmp: Path, case: dict[str, Any]) -> tuple[Any, Any, Any]:
    """(trainer, what its objective was given after the weights moved, the old policy at every token of it)."""
    case = dict(case)
    model = tiny_model(case.pop("family", "llama")).to(dtype := case.pop("dtype", torch.float32))
    adapter = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False) if case.pop("lora", False) else None
    trainer = make_trainer(tmp, model=model, trainer_kwargs={"peft_config": adapter}, **{**CUT_OFF, **case})
    spy = Spy.on(trainer)
    inputs = rollouts(trainer)[1]
    base = trainer.model if adapter is None else trainer.model.get_base_model()
    with torch.no_grad():
        old = dense_logp(base.float(), inputs, trainer.temperature)
        base.to(dtype)
    nudge(trainer.model, 0.6)
    trainer.compute_loss(trainer.model, inputs).backward()
    return trainer, spy.batches[-1], old


@pytest.mark.supports("anchor: the union with the new policy's support", door="TRL")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_old_policy_is_exact_on_the_union(tmp_path: Path, case: dict[str, Any]) -> None:
    _, batch, dense = moved(tmp_path, case)
    ids, mask = batch.dist_old.ids, batch.mask
    assert torch.equal(ids, batch.dist_new.ids)
    expected = gather_support(dense, ids)
    atol = 5e-2 if case.get("dtype") == torch.bfloat16 else 1e-5  # the network itself computes in bfloat16 there
    assert_close(batch.dist_old.logp[mask], expected.logp[mask], atol=atol)
    assert_close(batch.dist_old.rest.exp()[mask], expected.rest.exp()[mask], atol=atol)
    assert ((ids[mask] >= 0).sum(-1) > 4).any(), "the new policy must have brought a token"


@pytest.mark.parametrize("objective", ["troll", "gspo"])  # gspo is of sequences, and takes the other way each time
def test_the_head_takes_the_loss_on_the_union_itself(tmp_path: Path, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gradients, calls, inner = [], [], policy_head.policy_loss_from_hidden
    monkeypatch.setattr(policy_head, "policy_loss_from_hidden", lambda *args, **how: calls.append(how) or inner(*args, **how))
    for together in (True, False):
        trainer = make_trainer(tmp_path, objective, **CUT_OFF)
        if not together:
            without_fused_loss(trainer)
        inputs = rollouts(trainer)[1]
        nudge(trainer.model, 0.6)
        loss = trainer.compute_loss(trainer.model, inputs)
        loss.backward()
        gradients.append([loss.detach(), *(x.grad for x in trainer.model.parameters())])
    assert len(calls) == (1 if objective == "troll" else 0)
    for one, other in zip(*gradients, strict=True):
        assert_close(one, other, torch.float32, atol=ROUNDING)


def test_supports_that_held_their_mass_are_left_alone(tmp_path: Path) -> None:
    _, batch, dense = moved(tmp_path, {"objective": "troll", "support_mass": 0.3, "support_size": 20})
    own = (dense.exp().sort(-1, descending=True).values.cumsum(-1) < 0.3).sum(-1) + 1
    members = (batch.dist_old.ids >= 0).sum(-1)
    assert bool((members <= own + 1)[batch.mask].all())  # the sampled token besides
    total = torch.logsumexp(batch.dist_new.with_rest(), -1)[batch.mask]
    assert_close(total, torch.zeros_like(total), atol=1e-5)


def test_as_published_such_tokens_have_next_to_no_old_probability(tmp_path: Path) -> None:
    case = {"objective": "troll", "objective_config": {"tail": "fill", "vocab_size": VOCABULARY}}
    trainer, batch, _ = moved(tmp_path, case)
    ids = batch.dist_old.ids
    brought = (torch.arange(ids.shape[-1], device=ids.device) >= 4) & (ids >= 0) & batch.mask[..., None]
    assert brought.any()
    assert batch.dist_old.logp[brought].unique().tolist() == pytest.approx([math.log(1e-12)])
    assert trainer.old_policy.hidden is None, "nothing is kept for it"


def test_an_evaluation_in_between_leaves_the_old_policy_alone(tmp_path: Path) -> None:
    losses = []
    for evaluated in (False, True):
        trainer = make_trainer(tmp_path, "troll", per_device_eval_batch_size=4, **CUT_OFF)
        inputs = rollouts(trainer)[1]
        nudge(trainer.model, 0.6)
        if evaluated:
            trainer.evaluate(prompts(4))
            trainer.model.train()
        losses.append(trainer.compute_loss(trainer.model, inputs).item())
    assert losses[0] == losses[1]


def test_what_the_old_support_misses_is_reported_and_the_union_sees_it(tmp_path: Path) -> None:
    # A bias-free push: one token that is in no support gets the row of the likeliest, times two.
    found = {}
    for support in ("old", "union"):
        trainer = make_trainer(tmp_path, "troll", support=support, support_size=2, support_mass=1.0)
        inputs = rollouts(trainer)[0]
        with torch.no_grad():
            weight = trainer.model.lm_head.weight
            seldom = next(i for i in range(VOCABULARY) if not bool((inputs["corral_ids"] == i).any()))
            weight[seldom] = 1.5 * weight[inputs["corral_ids"].flatten().mode().values]
        trainer.compute_loss(trainer.model, inputs)
        found[support] = {name: values[-1] for name, values in measured(trainer).items()}
    assert found["old"]["tr/rest_max_ratio"] > 2
    assert found["union"]["tr/rest_max_ratio"] < found["old"]["tr/rest_max_ratio"]
    assert found["union"]["tr/kl_max"] > found["old"]["tr/kl_max"]


def test_a_trl_that_hands_over_no_hidden_states_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corral.trl.trainer, "FUSED", False)
    with pytest.raises(ValueError, match="needs the old hidden states"):
        make_trainer(tmp_path, "troll", **CUT_OFF)


@pytest.mark.usefixtures("unchecked_shapes")
def test_an_unknown_support_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="`support` is one of old, union"):
        CorralConfig(output_dir=str(tmp_path), support="new", use_cpu=True, bf16=False)
