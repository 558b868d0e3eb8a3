"""Thin adapters against what each engine passes them, stood in for by modules that hold the names they look up."""

import sys
from dataclasses import dataclass
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import corral
from corral.engine import nemo_rl, prime_rl, skyrl, slime, tinker
from corral.engine.adapter import EngineObjective, dist_from_top, sampled_token_names, scales_with_advantages
from tolerance import assert_close

LENGTHS = (3, 5)


@dataclass(frozen=True)
class LossInputs:
    """prime-rl's."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None = None


@dataclass(frozen=True)
class LossOutputs:
    """prime-rl's."""

    loss: Tensor
    metrics: dict[str, Tensor]


def rows(draw: int = 0) -> list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
    """For each sequence log-probs of the new, the old and the sampling policy, advantages, and a mask."""
    generator = torch.Generator().manual_seed(draw)
    found = []
    for length in LENGTHS:
        old = -0.1 - 2 * torch.rand(length, generator=generator)
        new = (old + 0.5 * torch.randn(length, generator=generator)).clamp(max=-1e-2)
        rollout = (old + 0.1 * torch.randn(length, generator=generator)).clamp(max=-1e-2)
        mask = torch.ones(length, dtype=torch.bool)
        mask[0] = length == LENGTHS[0]
        found.append((new, old, rollout, torch.randn(length, generator=generator), mask))
    return found


def alone(objective: str, anchor: str, **settings: Any) -> list[tuple[Tensor, Tensor]]:
    """Loss and gradient of each sequence [T], by corral without an engine; a sequence is a batch."""
    found = []
    for new, old, rollout, advantages, mask in rows():
        new = new.clone().requires_grad_()
        batch = corral.TokenBatch(
            new[None], (rollout if anchor == "rollout" else old)[None], advantages[None], mask[None], logp_rollout=rollout[None]
        )
        loss = corral.make_objective(objective, **settings)(batch).loss[0]
        found.append((loss.detach(), torch.autograd.grad(loss.sum(), new)[0]))
    return found


def padded(index: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence([row[index] for row in rows()], batch_first=True)


TOKENWISE = [name for name in sampled_token_names() if corral.make_objective(name).config.tokenwise]


# prime-rl


@pytest.mark.parametrize("name", sampled_token_names())
def test_prime_rl_has_the_sum_over_a_sequences_tokens(name: str) -> None:
    for (new, _, rollout, advantages, mask), (loss, gradient) in zip(rows(), alone(name, "rollout"), strict=True):
        new = new.clone().requires_grad_()
        out = prime_rl.rl_loss(LossInputs(new, rollout, None, advantages, mask), objective=name, anchor="rollout")
        assert isinstance(out, LossOutputs)
        assert_close(out.loss.detach(), loss.sum())
        assert_close(torch.autograd.grad(out.loss, new)[0], gradient)
        assert out.metrics["tr/active_frac"].ndim == 0


def test_prime_rls_weights_and_anchor() -> None:
    new, _, rollout, advantages, mask = rows()[1]
    weights = torch.tensor([0.0, 2.0, 0.5, 1.0, 1.0])
    out = prime_rl.rl_loss(LossInputs(new, rollout, None, advantages, mask, weights), objective="reinforce", anchor="rollout")
    assert_close(out.loss, (alone("reinforce", "rollout")[1][0] * weights).sum())
    with pytest.raises(ValueError, match=r"ppo_clip is anchored on the old policy.*pass anchor='rollout' if the sampler's"):
        prime_rl.rl_loss(LossInputs(new, rollout, None, advantages, mask), objective="ppo_clip")
    with pytest.raises(ValueError, match="troll with these settings reads whole distributions"):
        prime_rl.rl_loss(LossInputs(new, rollout, None, advantages, mask), objective="troll", anchor="rollout")


# SkyRL


def skyrl_config(**asked: Any) -> Any:
    none = {"tis_ratio_type": None, "sequence_mask_metric": None, "outlier_token_is_threshold_low": None, "geo_mask_high": 1.01}
    return SimpleNamespace(off_policy_correction=SimpleNamespace(**(none | asked)))


@pytest.mark.parametrize("name", TOKENWISE)
def test_skyrl_has_the_sum_over_tokens_of_scaled_advantages(name: str) -> None:
    wanted = EngineObjective.of("SkyRL", name, {})
    if not scales_with_advantages(wanted):
        with pytest.raises(ValueError, match=f"{name}'s loss is no multiple of them"):
            skyrl.make_policy_loss(name)
        return
    new, mask = padded(0).requires_grad_(), padded(4)
    scale = 1 / mask.sum()
    loss, metrics = skyrl.make_policy_loss(name)(new, padded(1), padded(3) * scale, skyrl_config(), mask.float(), padded(2))
    expected = alone(name, wanted.anchor)
    assert_close(loss.detach(), sum(x.sum() for x, _ in expected) * scale, atol=1e-5)
    gradient = torch.autograd.grad(loss, new)[0]
    for found, (_, own), length in zip(gradient, expected, LENGTHS, strict=True):
        assert_close(found[:length], own * scale, atol=1e-5)
    assert metrics["clip_ratio"] == metrics["tr/active_frac"]


def test_most_objectives_scale_with_their_advantages_and_those_with_a_penalty_do_not() -> None:
    scaling = {name for name in sampled_token_names() if scales_with_advantages(EngineObjective.of("engine", name, {}))}
    assert {"ppo_clip", "dppo", "cispo", "sapo", "spo", "drpo", "gspo", "reinforce"} <= scaling
    assert "kl_cov" not in scaling


def test_a_penalty_beside_scaled_advantages_is_refused() -> None:
    with pytest.raises(ValueError, match=r"kl_cov's loss is no multiple of them"):
        skyrl.make_policy_loss("kl_cov")


def test_skyrl_without_a_samplers_log_probs_or_with_corrections_is_refused() -> None:
    loss = skyrl.make_policy_loss("dppo")
    with pytest.raises(ValueError, match=r"dppo is anchored on the sampler's log-probs, which is not there"):
        loss(padded(0), padded(1), padded(3), skyrl_config(), padded(4).float())
    with pytest.raises(ValueError, match=r"off_policy_correction\.tis_ratio_type is set"):
        loss(padded(0), padded(1), padded(3), skyrl_config(tis_ratio_type="token"), padded(4).float(), padded(2))
    with pytest.raises(ValueError, match=r"off_policy_correction\.outlier_token_is_threshold_low is set"):
        loss(padded(0), padded(1), padded(3), skyrl_config(outlier_token_is_threshold_low=1e-4), padded(4).float(), padded(2))


def test_skyrls_registry_gets_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: dict[str, Any] = {}
    module: Any = ModuleType(skyrl.REGISTRY)
    module.PolicyLossRegistry = SimpleNamespace(register=taken.__setitem__)
    monkeypatch.setitem(sys.modules, skyrl.REGISTRY, module)
    assert skyrl.register("dppo", bound=0.1) == "corral_dppo"
    assert callable(taken["corral_dppo"])


# slime


@pytest.fixture
def slime_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(slime.LOSS)
    module.get_log_probs_and_entropy = lambda logits, **_: (None, {"log_probs": list(logits[0].split(LENGTHS))})
    module.get_rollout_top_p_logprob_kwargs = lambda args, batch: {}
    monkeypatch.setitem(sys.modules, slime.LOSS, module)


def slime_batch() -> dict[str, Any]:
    return {
        "log_probs": [row[1] for row in rows()], "rollout_log_probs": [row[2] for row in rows()],
        "advantages": [row[3] for row in rows()], "loss_masks": [row[4].int() for row in rows()],
        "response_lengths": list(LENGTHS), "total_lengths": [7, 9], "unconcat_tokens": [],
    }  # fmt: skip


def slime_args(objective: str, **more: Any) -> Any:
    return SimpleNamespace(**{"corral_objective": objective, "calculate_per_token_loss": False, "entropy_coef": 0.0, **more})


def sum_of_sample_mean(x: Tensor) -> Tensor:
    masks = [row[4].float() for row in rows()]
    return sum((part * mask).sum() / mask.sum() for part, mask in zip(x.split(LENGTHS), masks, strict=True))  # type: ignore[return-value]


@pytest.mark.usefixtures("slime_module")
@pytest.mark.parametrize("name", [*TOKENWISE, "gspo"])
def test_slime_reduces_by_its_own_function(name: str) -> None:
    logits = torch.cat([row[0] for row in rows()])[None].requires_grad_()
    loss, log = slime.policy_loss_function(slime_args(name), slime_batch(), logits, sum_of_sample_mean)
    anchor = EngineObjective.of("slime", name, {}).anchor
    expected = alone(name, anchor)
    assert_close(loss.detach(), sum_of_sample_mean(torch.cat([x for x, _ in expected])), atol=1e-5)
    own = torch.cat([gradient / mask.sum() for (_, gradient), (*_, mask) in zip(expected, rows(), strict=True)])
    assert_close(torch.autograd.grad(loss, logits)[0][0], own, atol=1e-5)
    assert 0 <= log["tr/active_frac"] <= 2  # slime divides by the two samples


@pytest.mark.usefixtures("slime_module")
@pytest.mark.parametrize(
    ("args", "match"),
    [
        (slime_args("dppo", use_kl_loss=True), "use_kl_loss is a term of slime's own loss"),
        (slime_args("troll"), "reads whole distributions"),
        (SimpleNamespace(), "set corral_objective"),
    ],
)
def test_what_slime_cannot_run_is_refused(args: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        slime.policy_loss_function(args, slime_batch(), torch.zeros(1, 8), sum_of_sample_mean)


@pytest.mark.usefixtures("slime_module")
def test_slime_without_a_samplers_log_probs_or_with_split_sequences_is_refused() -> None:
    logits = torch.full((1, 8), -1.0)
    with pytest.raises(ValueError, match="anchored on the sampler's log-probs, which is not there"):
        slime.policy_loss_function(slime_args("dppo"), slime_batch() | {"rollout_log_probs": None}, logits, sum_of_sample_mean)
    with pytest.raises(ValueError, match="context parallelism has split them"):
        slime.policy_loss_function(slime_args("gspo"), slime_batch() | {"response_lengths": [3, 6]}, logits, sum_of_sample_mean)


# On a support: Tinker and NeMo-RL


def policies() -> tuple[Tensor, Tensor, Tensor]:
    """Sampled tokens [2 5], and log-probs of both policies [2 5 V]; the tokens are not always among the likeliest."""
    draw = torch.Generator().manual_seed(1)
    old = (2 * torch.randn(2, 5, 12, generator=draw)).log_softmax(-1)
    new = (old + 0.5 * torch.randn(2, 5, 12, generator=draw)).log_softmax(-1)
    return torch.randint(12, (2, 5), generator=draw), new, old


def on_support(objective: str, new: Tensor, old: corral.SparseDist, how: str, **settings: Any) -> Tensor:
    dist = corral.gather_support(new, old.ids)
    mask = torch.ones(2, 5, dtype=torch.bool)
    batch = corral.TokenBatch(dist.logp[..., 0], old.logp[..., 0], torch.linspace(-1, 1, 10).view(2, 5), mask, dist, old)
    return corral.reduce_loss(corral.make_objective(objective, **settings)(batch).loss, mask, how)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "settings"), [("troll", {"bound": 0.01}), ("dppo", {"estimator": "topk", "bound": 0.05})])
def test_tinker_has_the_gradient_of_the_support(name: str, settings: dict[str, Any]) -> None:
    tokens, new, old = policies()
    support = corral.top_k_support(old, tokens, 4)
    expected_new = new.clone().requires_grad_()
    expected = on_support(name, expected_new, support, "token-mean", **settings)
    data, logprobs = [], []
    mine = new.clone().requires_grad_()
    for index in range(2):
        top = old[index].topk(4, -1)
        sampled = old[index].gather(-1, tokens[index][:, None])[:, 0]
        fields = tinker.support_targets(tokens[index], top.indices, top.values, sampled)
        fields |= {"advantages": torch.linspace(-1, 1, 10).view(2, 5)[index], "mask": torch.ones(5)}
        logprobs.append(mine[index].gather(-1, fields["target_tokens"]))
        data.append(SimpleNamespace(loss_fn_inputs={key: SimpleNamespace(to_torch=lambda x=x: x) for key, x in fields.items()}))
    loss, metrics = tinker.make_loss(name, **settings)(data, logprobs)
    assert_close(loss.detach(), expected.detach(), atol=1e-5)
    gradients = [torch.autograd.grad(value, x)[0] for value, x in ((loss, mine), (expected, expected_new))]
    # With respect to logits: the tail's part of the gradient goes through the softmax.
    through = [g - x.detach().exp() * g.sum(-1, keepdim=True) for g, x in zip(gradients, (mine, expected_new), strict=True)]
    assert_close(through[0], through[1], atol=1e-5)
    assert metrics["tr/active_frac"] > 0


def test_tinker_on_sampled_tokens_and_without_a_support() -> None:
    data, logprobs = [], []
    for new, _, rollout, advantages, mask in rows():
        fields = {"target_tokens": torch.zeros(len(new), dtype=torch.int64), "logprobs": rollout, "advantages": advantages}
        fields["mask"] = mask.float()
        logprobs.append(new.clone().requires_grad_())
        data.append(SimpleNamespace(loss_fn_inputs={key: SimpleNamespace(to_torch=lambda x=x: x) for key, x in fields.items()}))
    loss, _ = tinker.make_loss("dppo", bound=0.05)(data, logprobs)
    expected = alone("dppo", "rollout", bound=0.05)
    count = sum(int(row[4].sum()) for row in rows())
    assert_close(loss.detach(), sum(x.sum() for x, _ in expected) / count)
    for x, (_, gradient) in zip(torch.autograd.grad(loss, logprobs), expected, strict=True):
        assert_close(x, gradient / count)
    with pytest.raises(ValueError, match=r"Make `target_tokens` \[N K\]"):
        tinker.make_loss("troll")(data, logprobs)


class LossType(Enum):
    """NeMo-RL's."""

    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(Enum):
    """NeMo-RL's, of which these two are used."""

    LOGPROB = "logprob"
    DISTILLATION = "distillation"


@pytest.fixture
def nemo_module(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType(nemo_rl.INTERFACES)
    module.LossType, module.LossInputType = LossType, LossInputType
    monkeypatch.setitem(sys.modules, nemo_rl.INTERFACES, module)


def nemo_batch(tokens: Tensor, old: Tensor) -> dict[str, Tensor]:
    """Five predicted tokens behind one prompt token, as NeMo-RL has them: [B 6]."""
    first = torch.zeros(2, 1)
    sampled = old.gather(-1, tokens[..., None])[..., 0]
    return {
        "input_ids": torch.cat([first.long(), tokens], 1), "token_mask": torch.cat([first, torch.ones(2, 5)], 1),
        "sample_mask": torch.ones(2), "advantages": torch.cat([first, torch.linspace(-1, 1, 10).view(2, 5)], 1),
        "prev_logprobs": torch.cat([first, sampled], 1), "generation_logprobs": torch.cat([first, sampled - 0.01], 1),
    }  # fmt: skip


@pytest.mark.usefixtures("nemo_module")
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize(("name", "settings"), [("troll", {"bound": 0.01}), ("dppo", {"estimator": "topk", "bound": 0.05})])
def test_nemo_rl_with_the_old_policy_as_its_own_teacher(name: str, settings: dict[str, Any], reduction: Any) -> None:
    tokens, new, old = policies()
    data: dict[str, Any] = nemo_batch(tokens, old)
    logits = torch.cat([old + 3.0, torch.zeros(2, 1, 12)], 1)  # any constant: logits have no normaliser
    top = logits.topk(4, -1)
    coarse = nemo_rl.add_old_support(data, {"topk_logits": top.values, "topk_indices": top.indices})
    support = corral.top_k_support(old, tokens, 4)
    outside = ~(old.topk(4, -1).indices == tokens[..., None]).any(-1)
    assert coarse == pytest.approx(outside.float().mean().item())
    assert 0 < coarse < 1
    ids = torch.where((torch.arange(5) > 0) & outside[..., None], -1, support.ids)
    coarsened = corral.gather_support(old, ids)

    loss_fn = nemo_rl.CorralLoss(name, reduction=reduction, **settings)
    assert loss_fn.input_type is LossInputType.DISTILLATION
    mine, theirs = (new.clone().requires_grad_() for _ in range(2))
    student = mine.gather(-1, data["teacher_topk_indices"][:, :-1])  # as NeMo-RL gathers them, of the whole softmax
    total = {"global_valid_seqs": torch.tensor(2.0), "global_valid_toks": torch.tensor(10.0)}
    loss, metrics = loss_fn(data, **total, student_topk_logprobs=student, teacher_topk_logprobs=None, H_all=None)
    expected = on_support(name, theirs, coarsened, reduction, **settings)
    assert_close(loss.detach(), expected.detach(), atol=1e-5)
    gradients = [torch.autograd.grad(value, x)[0] for value, x in ((loss, mine), (expected, theirs))]
    through = [g - new.exp() * g.sum(-1, keepdim=True) for g in gradients]
    assert_close(through[0], through[1], atol=1e-5)
    assert metrics["tr/mismatch"] > 0


@pytest.mark.usefixtures("nemo_module")
@pytest.mark.parametrize("name", ["dppo", "ppo_clip", "spo"])
def test_nemo_rl_on_sampled_tokens(name: str) -> None:
    tokens, new, old = policies()
    data = nemo_batch(tokens, old)
    loss_fn = nemo_rl.CorralLoss(name)
    assert (loss_fn.input_type, loss_fn.loss_type) == (LossInputType.LOGPROB, LossType.TOKEN_LEVEL)
    logp = new.gather(-1, tokens[..., None])[..., 0].clone().requires_grad_()
    loss, _ = loss_fn(data, torch.tensor(4.0), torch.tensor(20.0), next_token_logprobs=logp)
    anchor = data["generation_logprobs" if name == "dppo" else "prev_logprobs"][:, 1:]
    batch = corral.TokenBatch(logp, anchor, data["advantages"][:, 1:], torch.ones(2, 5, dtype=torch.bool))
    assert_close(loss.detach(), corral.make_objective(name)(batch).loss.sum().detach() / 20)


@pytest.mark.usefixtures("nemo_module")
def test_nemo_rl_without_a_support_is_refused() -> None:
    tokens, new, old = policies()
    with pytest.raises(ValueError, match=r"Call add_old_support before policy\.train"):
        nemo_rl.CorralLoss("troll")(nemo_batch(tokens, old), torch.ones(()), torch.ones(()), student_topk_logprobs=new[..., :4])


def test_a_tail_of_one_minus_the_rest_has_a_floor() -> None:
    dist = dist_from_top(torch.tensor([[3, 1, -1]]), torch.tensor([[0.75, 0.25, 0.9]]).log())
    assert_close(dist.rest, torch.tensor([1e-8]).log())
    assert dist.logp[0, 2] == -torch.inf
    dist = dist_from_top(torch.tensor([[3, 1]]), torch.tensor([[0.5, 0.25]]).log())
    assert_close(dist.rest, torch.tensor([0.25]).log())
