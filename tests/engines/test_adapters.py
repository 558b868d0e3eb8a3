"""Thin adapters: reductions, metrics and refusals of each; test_parity.py has their losses and gradients.

Engines are stood in for by modules that hold the names that an adapter looks up.
"""

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from doors import (
    HOW,
    Batch,
    LossInputs,
    LossInputType,
    LossOutputs,
    LossType,
    MetricNormalizer,
    make_batch,
    module_named,
    nemo_interfaces,
    nemo_rl_call,
    rllm_context,
    skyrl_config,
    token_batch,
)
from torch import Tensor

import corral
from corral.engines import nemo_rl, prime_rl, rllm, skyrl, slime, tinker
from corral.engines.adapter import EngineObjective, dist_from_top, sampled_token_names, scales_with_advantages
from corral.tensors import metric_kind
from tolerance import assert_close

# prime-rl


def prime_inputs(weights: Tensor | None = None) -> LossInputs:
    row = make_batch().rows()[1]
    new, rollout = (row.sampled(policy)[0].detach() for policy in (row.new, row.rollout))
    return LossInputs(new, rollout, None, row.credit[0], row.mask[0], weights)


def test_prime_rls_sum_weights_and_metrics() -> None:
    # reinforce: −ρ Â for every token that counts; the first of the six does not.
    given, weights = prime_inputs(), torch.tensor([7.0, 0.0, 2.0, 0.5, 1.0, 1.0])
    losses = -(given.trainer_logprobs - given.inference_logprobs).exp() * given.advantages * given.loss_mask
    out = prime_rl.rl_loss(given, objective="reinforce", anchor="rollout")
    assert isinstance(out, LossOutputs)
    assert_close(out.loss, losses.sum())
    assert out.metrics["tr/active_frac"].ndim == 0
    out = prime_rl.rl_loss(prime_inputs(weights), objective="reinforce", anchor="rollout")
    assert_close(out.loss, (losses * weights).sum())


def test_prime_rls_ipo_is_dppo_with_a_symmetric_mask() -> None:
    # IPO, prime-rl's default: a token counts while |p − q| ≤ .3, whatever the sign of its advantage. Its weight is ρ = p/q, at
    # most 10⁴. Here |p − q| = .25, .35, .35, .2, .1; the fourth has ρ = 2 · 10⁶; the last is not the completion's.
    p, q = torch.tensor([0.5, 0.6, 0.15, 0.2, 0.4]), torch.tensor([0.25, 0.25, 0.5, 1e-7, 0.3])
    advantages, mask = torch.tensor([1.0, 1.0, 2.0, -1.0, 1.0]), torch.tensor([True, True, True, True, False])
    expected = -torch.tensor([2.0, 0.0, 0.0, -1e4, 0.0])  # −ρ Â

    def gradient(**settings: Any) -> Tensor:
        logp = p.log().requires_grad_()
        given = LossInputs(logp, q.log(), None, advantages, mask)
        return torch.autograd.grad(prime_rl.rl_loss(given, objective="dppo", bound=0.3, **settings).loss, logp)[0]

    assert_close(gradient(mask="symmetric", ratio_cap=1e4), expected)
    # DPPO's own mask keeps the third token: its advantage draws it back towards the sampler. ρ Â = .3 · 2.
    assert_close(gradient(ratio_cap=1e4), expected - torch.tensor([0.0, 0.0, 0.6, 0.0, 0.0]))


def test_prime_rl_has_no_old_policy_and_no_support() -> None:
    with pytest.raises(ValueError, match=r"ppo_clip is anchored on the old policy.*pass anchor='rollout' if the sampler's"):
        prime_rl.rl_loss(prime_inputs(), objective="ppo_clip")
    with pytest.raises(ValueError, match="troll with these settings reads whole distributions"):
        prime_rl.rl_loss(prime_inputs(), objective="troll", anchor="rollout")


# SkyRL


def skyrl_fields(batch: Batch) -> list[Tensor]:
    """Log-probs of the new and the old policy, and advantages."""
    return [batch.sampled(batch.new), batch.sampled(batch.old), batch.credit]


def test_a_mean_over_sequences_can_be_written_into_the_advantages_of_most_objectives() -> None:
    # SkyRL divides each sequence's advantages by its length. bapo and clip_cov weigh sequences against each other by their
    # advantages, kl_cov has a penalty that knows none.
    scaling = {name for name in sampled_token_names() if scales_with_advantages(EngineObjective.of("engine", name, {}))}
    assert set(sampled_token_names()) - scaling == {"bapo", "clip_cov", "kl_cov"}


@pytest.mark.parametrize("objective", ["bapo", "clip_cov", "kl_cov"])
def test_what_scaled_advantages_would_change_is_refused(objective: str) -> None:
    with pytest.raises(ValueError, match=rf"{objective}'s loss is no multiple of them"):
        skyrl.make_policy_loss(objective)


def test_skyrl_without_a_samplers_log_probs_or_with_corrections_is_refused() -> None:
    batch = make_batch()
    loss, fields, mask, rollout = (
        skyrl.make_policy_loss("dppo"),
        skyrl_fields(batch),
        batch.mask.float(),
        batch.sampled(batch.rollout),
    )
    _, metrics = loss(*fields, skyrl_config(), mask, rollout)
    assert metrics["clip_ratio"] == metrics["tr/active_frac"]
    with pytest.raises(ValueError, match=r"dppo is anchored on the sampler's log-probs, which is not there"):
        loss(*fields, skyrl_config(), mask)
    new, _, advantages = fields  # where SkyRL skips the old policy's pass
    with pytest.raises(ValueError, match=r"ppo_clip is anchored on the old policy.*not there.*anchor='rollout' if"):
        skyrl.make_policy_loss("ppo_clip")(new, None, advantages, skyrl_config(), mask, rollout)
    with pytest.raises(ValueError, match=r"which is not there\. Choose another objective\.$"):
        skyrl.make_policy_loss("ppo_clip")(new, None, advantages, skyrl_config(), mask)
    with pytest.raises(ValueError, match=r"off_policy_correction\.tis_ratio_type is set"):
        loss(*fields, skyrl_config(tis_ratio_type="token"), mask, rollout)
    with pytest.raises(ValueError, match=r"off_policy_correction\.outlier_token_is_threshold_low is set"):
        loss(*fields, skyrl_config(outlier_token_is_threshold_low=1e-4), mask, rollout)


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
    module.get_log_probs_and_entropy = lambda logits, **_: (None, {"log_probs": list(logits[0].split([3, 5]))})
    module.get_rollout_top_p_logprob_kwargs = lambda args, batch: {}
    monkeypatch.setitem(sys.modules, slime.LOSS, module)


def slime_batch(**other: Any) -> dict[str, Any]:
    ones = [torch.ones(3), torch.ones(5)]
    found = {
        "log_probs": [-x for x in ones], "rollout_log_probs": [-x for x in ones], "advantages": ones,
        "loss_masks": [x.int() for x in ones], "response_lengths": [3, 5], "total_lengths": [7, 9], "unconcat_tokens": [],
    }  # fmt: skip
    return found | other


def slime_args(objective: str, **more: Any) -> Any:
    return SimpleNamespace(**{"corral_objective": objective, "calculate_per_token_loss": False, "entropy_coef": 0.0, **more})


@pytest.mark.usefixtures("slime_module")
@pytest.mark.parametrize(
    ("args", "other", "match"),
    [
        (slime_args("dppo", use_kl_loss=True), {}, "use_kl_loss is a term of slime's own loss"),
        (slime_args("troll"), {}, "reads whole distributions"),
        (SimpleNamespace(), {}, "set corral_objective"),
        (slime_args("dppo"), {"rollout_log_probs": None}, "anchored on the sampler's log-probs, which is not there"),
        (slime_args("gspo"), {"response_lengths": [3, 6]}, "context parallelism has split them"),
        (slime_args("ppo_clip", use_rollout_logprobs=True), {"log_probs": None}, r"old policy.*not there.*anchor='rollout'"),
    ],
)
def test_what_slime_cannot_run_is_refused(args: Any, other: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        slime.policy_loss_function(args, slime_batch(**other), torch.full((1, 8), -1.0), torch.sum)


@pytest.mark.usefixtures("slime_module")
@pytest.mark.parametrize(
    ("args", "other"),
    [
        (slime_args("ppo_clip"), {"log_probs": None}),  # the only update of a batch: the new policy is the old one
        (slime_args("ppo_clip", use_rollout_logprobs=True), {}),  # get_mismatch_metrics has it recomputed all the same
        (slime_args("ppo_clip", use_rollout_logprobs=True, corral_anchor="rollout"), {"log_probs": None}),
    ],
)
def test_slime_has_an_old_policy_wherever_that_is_the_new_one_or_was_recomputed(args: Any, other: dict[str, Any]) -> None:
    _, log = slime.policy_loss_function(args, slime_batch(**other), torch.full((1, 8), -1.0), torch.mean)
    assert log["tr/ratio_max"] == 1


def test_slimes_adapter_in_miles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    # miles takes the same argument and has the loss in other modules; slime itself is not installed there.
    monkeypatch.setitem(sys.modules, "slime", None)
    with pytest.raises(ValueError, match=r"slime\.backends\.megatron_utils\.loss cannot be imported.*has none for miles"):
        slime.policy_loss_function(slime_args("dppo"), slime_batch(), torch.full((1, 8), -1.0), torch.sum)


@pytest.mark.usefixtures("slime_module")
def test_slimes_metrics_are_reduced_as_its_loss_is() -> None:
    _, log = slime.policy_loss_function(slime_args("dppo"), slime_batch(), torch.full((1, 8), -1.0), lambda x: 2 * x[0])
    assert log["tr/ratio_max"] == 2  # ρ = 1 everywhere, and slime divides by the two samples


# rLLM


def test_rllms_registry_gets_every_objective_with_the_reduction_that_it_must_have(monkeypatch: pytest.MonkeyPatch) -> None:
    record = json.loads((Path(__file__).parent / "signatures" / "rllm.json").read_text())["signatures"]
    taken: dict[str, tuple[Any, str | None]] = {}

    def register_loss(name: str, *, agg_mode: str | None = None) -> Any:
        assert agg_mode in (None, *record["LOSS_AGG_MODES"])
        return lambda function: taken.__setitem__(name, (function, agg_mode))

    module: Any = ModuleType("rllm")
    module.register_loss = register_loss
    monkeypatch.setitem(sys.modules, "rllm", module)
    monkeypatch.delitem(sys.modules, "corral.engines.rllm_plugin", raising=False)
    from corral.engines.rllm_plugin import LOSSES  # as rLLM's loss_plugins do

    assert list(taken) == LOSSES == [f"corral_{name}" for name in corral.objective_names()]
    assert {name for name, (_, mode) in taken.items() if mode == HOW} == {"corral_gspo", "corral_gmpo"}
    monkeypatch.delitem(sys.modules, "corral.engines.rllm_plugin")


@pytest.mark.parametrize(
    ("objective", "params", "match"),
    [
        ("troll", {}, "reads whole distributions"),
        ("distill", {}, "reads a third policy"),
        ("dppo", {"delta": 0.2}, "no setting `delta`"),
        ("dppo", {"kl_beta": 0.01}, "kl_beta is a term of rLLM's own losses"),
        ("dppo", {"anchor": "proximal"}, "`anchor` is one of auto, old, rollout; got 'proximal'"),
    ],
)
def test_what_rllm_cannot_run_is_refused(objective: str, params: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        rllm.make_loss(objective)(rllm_context(make_batch(), params, one=False))


@pytest.mark.parametrize(("objective", "pinned"), [("gspo", HOW), ("ppo_clip", None)])
def test_a_sequences_value_is_averaged_over_sequences_whatever_rllm_is_set_to(objective: str, pinned: str | None) -> None:
    modes: list[str | None] = []
    context = rllm_context(make_batch(), {}, one=False)
    context.aggregate = lambda per_token, mask, mode=None: modes.append(mode) or per_token.sum()
    rllm.make_loss(objective)(context)
    assert modes == [pinned]


def test_rllms_anchor_is_the_one_that_was_meant() -> None:
    batch = make_batch()
    without = SimpleNamespace(**{**vars(rllm_context(batch, {}, one=False)), "logp_rollout": None})
    with pytest.raises(ValueError, match=r"dppo is anchored on the sampler's log-probs, which is not there"):
        rllm.make_loss("dppo")(without)
    rllm.make_loss("ppo_clip")(without)
    # bypass_mode: the sampler's log-probs stand where the old policy's would.
    bypassed = rllm_context(batch, {}, one=False, bypass=True)
    with pytest.raises(ValueError, match=r"ppo_clip is anchored on the old policy.*pass anchor='rollout' if the sampler's"):
        rllm.make_loss("ppo_clip")(bypassed)
    on_purpose = rllm_context(batch, {"anchor": "rollout"}, one=False, bypass=True)
    loss, _ = rllm.make_loss("ppo_clip")(on_purpose)
    assert torch.isfinite(loss)
    # A few tokens may agree by chance, those that are certain under both above all.
    short = rllm_context(batch.rows()[0], {}, one=True, bypass=True)
    rllm.make_loss("ppo_clip")(short)


def test_rllms_own_clip_is_told_to_be_unread(caplog: pytest.LogCaptureFixture) -> None:
    rllm.make_loss("ppo_clip")(rllm_context(make_batch(), {}, one=False))
    assert caplog.records == []
    rllm.make_loss("ppo_clip")(rllm_context(make_batch(), {"eps_clip_high": 0.28}, one=False))
    assert "eps_clip_high is not read. Settings of ppo_clip go into rllm.algorithm.loss_params" in caplog.text


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
    batch = corral.TokenBatch.on_support(dist, old, torch.linspace(-1, 1, 10).view(2, 5), mask)
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


def test_tinker_without_a_support_is_refused() -> None:
    fields = {"target_tokens": torch.zeros(2, dtype=torch.int64), "logprobs": -torch.ones(2), "advantages": torch.ones(2)}
    inputs = {key: SimpleNamespace(to_torch=lambda x=x: x) for key, x in {**fields, "mask": torch.ones(2)}.items()}
    with pytest.raises(ValueError, match=r"Make `target_tokens` \[N K\]"):
        tinker.make_loss("troll")([SimpleNamespace(loss_fn_inputs=inputs)], [-torch.ones(2)])


@pytest.fixture
def nemo_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, nemo_rl.INTERFACES, nemo_interfaces())


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
def test_nemo_rl_without_a_support_is_refused() -> None:
    tokens, new, old = policies()
    with pytest.raises(ValueError, match=r"Call keep_support\(policy\) before grpo_train"):
        nemo_rl.CorralLoss("troll")(nemo_batch(tokens, old), torch.ones(()), torch.ones(()), student_topk_logprobs=new[..., :4])


class NemoPolicy:
    """NeMo-RL's policy, as far as its loop calls it around an update."""

    def __init__(self, logits: Tensor) -> None:
        self.logits, self.calls, self.modes = logits, list[tuple[Any, ...]](), list[str]()

    def prepare_for_lp_inference(self) -> None:
        self.modes.append("inference")

    def prepare_for_training(self) -> None:
        self.modes.append("training")

    def get_topk_logits(self, data: Any, k: int, micro_batch_size: int | None = None, timer: Any = None) -> dict[str, Tensor]:
        top = self.logits.topk(k, -1)
        return {"topk_logits": top.values, "topk_indices": top.indices}

    def train(
        self, data: Any, loss_fn: Any, eval_mode: bool = False, *, gbs: Any = None, mbs: Any = None, timer: Any = None
    ) -> dict[str, Any]:
        self.calls.append((nemo_rl.OLD_LOGP in data, eval_mode, gbs, timer))
        return {"loss": 0.0}


@pytest.mark.usefixtures("nemo_module")
def test_nemo_rls_own_loop_finds_the_old_policy_before_a_batchs_first_update() -> None:
    tokens, _, old = policies()
    policy = NemoPolicy(torch.cat([old + 3.0, torch.zeros(2, 1, 12)], 1))
    nemo_rl.keep_support(policy, k=4)
    data = nemo_batch(tokens, old)
    assert policy.train(data, nemo_rl.CorralLoss("dppo"), timer="timer") == {"loss": 0.0}
    assert policy.modes == [], "sampled tokens need no support"
    for _ in range(2):  # the second update of the same batch keeps the support of the first
        policy.train(data, nemo_rl.CorralLoss("troll"), gbs=8)
    assert policy.modes == ["inference", "training"]
    assert policy.calls == [(False, False, None, "timer"), (True, False, 8, None), (True, False, 8, None)]
    with pytest.raises(ValueError, match="an evaluation has no old policy"):
        policy.train(nemo_batch(tokens, old), nemo_rl.CorralLoss("troll"), eval_mode=True)


@pytest.mark.usefixtures("nemo_module")
def test_nemo_rls_zeros_in_the_place_of_old_log_probs_are_refused() -> None:
    # force_on_policy_ratio=true: NeMo-RL skips the old pass and fills prev_logprobs with 0.
    tokens, new, old = policies()
    data = nemo_batch(tokens, old)
    data["prev_logprobs"] = torch.zeros(2, 6)
    logp = new.gather(-1, tokens[..., None])[..., 0]
    total = (torch.tensor(2.0), torch.tensor(10.0))
    with pytest.raises(ValueError, match=r"every prev_logprob is 0, as loss_fn\.force_on_policy_ratio=true makes them"):
        nemo_rl.CorralLoss("ppo_clip")(data, *total, next_token_logprobs=logp)
    nemo_rl.CorralLoss("dppo")(data, *total, next_token_logprobs=logp)  # reads the sampler's
    nemo_rl.CorralLoss("ppo_clip")(data, *total, next_token_logprobs=torch.zeros(2, 5))  # a policy that is certain
    with pytest.raises(ValueError, match="force_on_policy_ratio"):
        nemo_rl.add_old_support(data, {"topk_logits": old[..., :4], "topk_indices": torch.arange(4).expand(2, 5, 4)})


NEMO_RLS_MEANS = ("lr", "wd", "reward", "filtered_reward", "global_valid_seqs", "global_valid_toks", "mean_prompt_length")
NEMO_RLS_EXTREMES = ("probs_ratio_min", "probs_ratio_max", "probs_ratio_clamped_min", "probs_ratio_clamped_max")


def nemo_rl_step(loss_fn: Any, rows: list[slice], batch: Batch, *, updates: int, totals_later: bool) -> dict[str, float]:
    """The metrics that NeMo-RL logs of a step: over micro-batches of `rows`, in `updates` updates on the same tokens.

    Every metric is summed, except those on two lists of NeMo-RL's own. Where its totals come later, each call gets totals of 1
    and NeMo-RL divides afterwards: by what the loss says of a metric, otherwise by the total of the gradient.
    """
    data, given = nemo_rl_call(batch, support=loss_fn.input_type is LossInputType.DISTILLATION)
    seqs, toks = torch.tensor(float(len(batch.mask))), batch.mask.sum().float()
    one = torch.tensor(1.0)
    divisor = {MetricNormalizer.TOKENS: toks, MetricNormalizer.SEQUENCES: seqs, MetricNormalizer.NONE: one}
    gradients = toks if loss_fn.loss_type is LossType.TOKEN_LEVEL else seqs
    logged: dict[str, list[float]] = {}
    for _ in range(updates):
        for part in rows:
            fields = {name: x[part] for name, x in data.items()}
            totals = (one, one) if totals_later else (seqs, toks)
            _, metrics = loss_fn(fields, *totals, **{name: x[part] for name, x in given.items()})
            for name, value in metrics.items():
                later = divisor.get(loss_fn.metric_normalizations.get(name), gradients) if totals_later else one
                scale = 1.0 if "_min" in name or "_max" in name else 1 / updates / float(later)
                logged.setdefault(name, []).append(scale * value)
    assert not set(logged) & {*NEMO_RLS_MEANS, *NEMO_RLS_EXTREMES}
    return {name: sum(values) for name, values in logged.items()}


@pytest.mark.parametrize(("updates", "totals_later"), [(1, False), (3, False), (1, True)])
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean"])
@pytest.mark.parametrize(("name", "settings"), [("ppo_clip", {}), ("dppo", {"bound": 0.1}), ("troll", {"bound": 0.02})])
def test_nemo_rls_sums_over_micro_batches_are_the_means_of_the_batch(
    name: str, settings: dict[str, Any], reduction: Any, totals_later: bool, updates: int
) -> None:
    # 4, 5 and 5 tokens: micro-batches of 4 and of 10.
    batch, rows = make_batch(), [slice(0, 1), slice(1, 3)]
    with module_named(nemo_rl.INTERFACES, nemo_interfaces(MetricNormalizer=MetricNormalizer)):
        loss_fn = nemo_rl.CorralLoss(name, reduction=reduction, **settings)
    found = nemo_rl_step(loss_fn, rows, batch, updates=updates, totals_later=totals_later)

    made = EngineObjective.of("alone", name, settings, support=True)
    out = made.objective(token_batch(made.objective, batch, made.anchor))
    means = {name: value for name, value in out.metrics.items() if metric_kind(name) == "mean" and name != "tr/dual"}
    assert {"tr/active_frac", "tr/kl_before", "tr/mismatch"} <= means.keys()
    assert 0 < means["tr/active_frac"] < 1
    for key, value in means.items():
        assert found[key] == pytest.approx(float(value), abs=1e-6), key
    expected = corral.reduce_loss(out.loss, batch.mask, reduction)
    assert found["loss"] == pytest.approx(float(expected.detach()), abs=1e-6)
    assert found["num_valid_samples"] == pytest.approx(3)
    counts = {"tr/unconverged"} & out.metrics.keys()
    assert set(found) == {*means, *counts, "loss", "num_valid_samples"}, "a sum of maxima is no maximum"


@pytest.mark.usefixtures("nemo_module")
def test_nemo_rl_counts_what_the_projection_did_not_solve(monkeypatch: pytest.MonkeyPatch) -> None:
    # One token of each of two micro-batches: 2, although the two have 4 of 14 tokens and 10.
    loss_fn = nemo_rl.CorralLoss("ppo_clip")
    monkeypatch.setattr(
        EngineObjective, "token_loss", lambda self, batch: (batch.logp_new, {"tr/unconverged": batch.mask.any().sum()})
    )
    found = nemo_rl_step(loss_fn, [slice(0, 1), slice(1, 3)], make_batch(), updates=1, totals_later=False)
    assert found["tr/unconverged"] == 2


def test_a_tail_of_one_minus_the_rest_has_a_floor() -> None:
    dist = dist_from_top(torch.tensor([[3, 1, -1]]), torch.tensor([[0.75, 0.25, 0.9]], dtype=torch.float64).log())
    assert_close(dist.rest, torch.tensor([1e-8], dtype=torch.float64).log())
    assert dist.logp[0, 2] == -torch.inf
    dist = dist_from_top(torch.tensor([[3, 1]]), torch.tensor([[0.5, 0.25]]).log())
    assert_close(dist.rest, torch.tensor([0.25]).log())
