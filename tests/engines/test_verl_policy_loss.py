"""The verl door without verl: settings, what is refused before a GPU is taken, the policy loss that verl calls."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import corral
from corral.engines.verl.policy_loss import BatchExtras, add_extras, make_policy_loss
from corral.engines.verl.settings import (
    DEPLOYED_BOUND,
    DEPLOYED_STATISTIC,
    DEPLOYED_SYNC,
    MASS,
    TOP_K,
    VerlSettings,
    loss_modes,
)
from tolerance import assert_close


def aggregate(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, **info: Any) -> Tensor:
    """verl's token mean, with its global number of tokens."""
    assert loss_agg_mode in ("token-mean", "seq-mean-token-sum-norm")
    return (loss_mat * loss_mask).sum() / info["batch_num_tokens"] * info["dp_size"]


def config_of(loss_mode: str, **given: Any) -> Any:
    settings = VerlSettings(loss_mode=loss_mode, **{"bypass_mode": False, **given})
    return SimpleNamespace(policy_loss=settings, global_batch_info={"dp_size": 2, "batch_num_tokens": 8})


def tokens() -> dict[str, Tensor]:
    """ρ = 1.8, 1.8, .2, .2 at |Δp| = .4; the last is padding."""
    return {
        "old_log_prob": torch.tensor([[0.5] * 4]).log(),
        "log_prob": torch.tensor([[0.9, 0.9, 0.1, 0.1]]).log().requires_grad_(),
        "advantages": torch.tensor([[1.0, -1.0, -1.0, torch.nan]]), "response_mask": torch.tensor([[1, 1, 1, 0]]),
    }  # fmt: skip


def test_golden_loss_and_gradient() -> None:
    # Blocked, 1.8, blocked, padding: 1.8 / 8 tokens · 2 ranks = .45. The same for its gradient, dL/dlogp = ρ · 2/8.
    given = tokens()
    loss, metrics = make_policy_loss("corral_dppo", aggregate)(**given, config=config_of("corral_dppo", anchor="old"))
    assert_close(loss, torch.tensor(0.45))
    loss.backward()
    assert_close(given["log_prob"].grad, torch.tensor([[0.0, 0.45, 0.0, 0.0]]))
    assert metrics["tr/active_frac"] == pytest.approx(2 / 3)
    assert all(isinstance(value, float) for value in metrics.values())


def test_rollout_weights_multiply_the_policy_term() -> None:
    weights = torch.tensor([[1.0, 0.5, 1.0, torch.nan]])
    config = config_of("corral_dppo", anchor="old")
    loss, _ = make_policy_loss("corral_dppo", aggregate)(**tokens(), config=config, rollout_is_weights=weights)
    assert_close(loss, torch.tensor(0.225))


def test_what_verl_has_no_argument_for_is_read_from_the_batch_at_hand() -> None:
    logp = torch.tensor([[[0.5, 0.3, 0.2]]]).log()
    old = corral.top_k_support(logp, torch.tensor([[0]]), 2)
    given = {
        "old_log_prob": logp[..., 0],
        "log_prob": logp[..., 0],
        "advantages": torch.ones(1, 1),
        "response_mask": torch.ones(1, 1),
    }
    loss_fn, config = make_policy_loss("corral_troll", aggregate), config_of("corral_troll")
    with pytest.raises(
        ValueError, match=r"corral_troll reads a support.*model_type=corral_language_model.*trainer_mode=corral_sync"
    ):
        loss_fn(**given, config=config)
    loss, metrics = loss_fn(**given, config=add_extras(config, BatchExtras(old[0], old[0], logp[..., 0])))
    assert_close(loss, torch.tensor(-2 / 8))
    assert metrics["tr/mismatch"] == 0
    with pytest.raises(ValueError, match="reads a support"):  # it was of that batch alone
        loss_fn(**given, config=config)


@pytest.mark.parametrize("tokenwise", [True, False])
def test_packed_supports_have_the_loss_and_gradient_of_the_padded_batch(
    tokenwise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    mask = torch.tensor([[1, 1, 0, 1], [0, 1, 1, 0]])
    logits = torch.randn(2, 4, 9, dtype=torch.float64)
    tokens, weights = torch.randint(0, 9, (2, 4)), torch.rand(2, 4, dtype=torch.float64)
    old = corral.top_k_support(logits.log_softmax(-1), tokens, 3)
    moved = [(logits + torch.linspace(-2, 2, 9, dtype=torch.float64)).requires_grad_() for _ in range(2)]
    rows = [corral.gather_support(x.log_softmax(-1), old.ids) for x in moved]
    given = {"old_log_prob": old.logp[..., 0], "advantages": torch.randn(2, 4, dtype=torch.float64), "response_mask": mask}
    config = config_of("corral_troll", objective={"bound": 0.01, "regression": 0.5})
    wanted = config.policy_loss.resolve()
    expected, _ = wanted.token_loss(corral.TokenBatch.on_support(rows[0], old, given["advantages"], mask.bool()), weights)
    (expected.sum() / 4).backward()  # aggregate: over 8 tokens, times 2 ranks
    monkeypatch.setattr(type(wanted.objective.config), "tokenwise", tokenwise)
    config = add_extras(config, BatchExtras(rows[1][mask.bool()], old[mask.bool()]))
    loss, _ = make_policy_loss("corral_troll", aggregate)(
        **given, log_prob=rows[1].logp[..., 0], config=config, rollout_is_weights=weights
    )
    loss.backward()
    assert_close(loss, expected.sum() / 4)
    assert_close(moved[1].grad, moved[0].grad)
    assert (moved[0].grad[mask.bool()] != 0).any()


def test_a_deployed_bound_that_verls_own_trainer_would_not_hold_is_refused() -> None:
    loss_fn, config = make_policy_loss("corral_spo", aggregate), config_of("corral_spo", deployed_bound=0.02)
    given = tokens() | {"advantages": torch.ones(1, 4)}
    with pytest.raises(ValueError, match=r"deployed_bound is held by corral's trainers.*trainer_mode=corral_sync"):
        loss_fn(**given, config=config)
    loss_fn(**given, config=add_extras(config, BatchExtras()))  # as corral's trainers call it
    assert config.policy_loss.deployed_request(sync=True) == {
        DEPLOYED_BOUND: 0.02, DEPLOYED_STATISTIC: "mean", DEPLOYED_SYNC: True,
    }  # fmt: skip
    assert config_of("corral_spo").policy_loss.deployed_request(sync=True) == {}


def test_verls_own_settings_are_refused() -> None:
    loss_fn = make_policy_loss("corral_spo", aggregate)
    with pytest.raises(
        ValueError, match=r"corral_spo finds no settings.*_target_=corral\.engines\.verl\.config\.CorralPolicyLossConfig"
    ):
        loss_fn(**tokens(), config=SimpleNamespace(policy_loss=SimpleNamespace(loss_mode="corral_spo")))
    with pytest.raises(ValueError, match="settings are of corral_gspo, and verl calls corral_spo"):
        loss_fn(**tokens(), config=config_of("corral_gspo"))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"loss_mode": "corral_ppo"}, r"loss_mode is 'corral_ppo'\. It is one of .*corral_cispo"),
        ({"loss_mode": "corral_dppo"}, r"nothing says whose log-probs.*bypass_mode='\$\{algorithm"),
        ({"loss_mode": "corral_dppo", "bypass_mode": False}, "verl passes the old policy.*Set bypass_mode=true, or"),
        ({"loss_mode": "corral_spo", "bypass_mode": True}, "verl passes the sampler's.*Set bypass_mode=false, or"),
        ({"loss_mode": "corral_troll", "bypass_mode": True}, r"needs the support of the old policy.*bypass_mode=false"),
        ({"loss_mode": "corral_spo", "bypass_mode": False, "support_size": 0}, "`support_size` is a whole number ≥ 1"),
        ({"loss_mode": "corral_spo", "bypass_mode": False, "objective": {"deployed_bound": 1}}, "no setting `deployed_bound`"),
        ({"loss_mode": "corral_spo", "bypass_mode": False, "deployed_bound": 0.0}, "`deployed_bound` .*got 0.0"),
        ({"loss_mode": "corral_spo", "bypass_mode": False, "deployed_statistic": "median"}, "one of mean, p999, cvar, max"),
    ],
)  # fmt: skip
def test_settings_that_cannot_work_are_refused_at_start_up(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        VerlSettings(**given)


@pytest.mark.refuses("objective: distill", door="verl")
def test_a_teacher_has_no_loss_mode() -> None:
    with pytest.raises(ValueError, match=r"loss_mode is 'corral_distill'\. It is one of"):
        VerlSettings(loss_mode="corral_distill", bypass_mode=False)


@pytest.mark.parametrize("loss_mode", loss_modes())
def test_every_objective_has_settings_that_work(loss_mode: str) -> None:
    anchored_on_sampler = corral.make_objective(loss_mode.removeprefix("corral_")).config.anchor == "rollout"
    settings = VerlSettings(loss_mode=loss_mode, bypass_mode=anchored_on_sampler)
    assert settings.support_request() == ({TOP_K: 64, MASS: 1 - 1e-5} if loss_mode == "corral_troll" else {})


def _of_verl(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the door says of settings; a process's first batch is noticed too, as these two policies are far apart."""
    return [record.message for record in caplog.records if record.name != "corral.objective.check"]


def test_a_reduction_of_another_gradient_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    given = tokens() | {"advantages": torch.tensor([[1.0] * 4])}
    for _ in range(2):
        make_policy_loss("corral_gspo", aggregate)(**given, config=config_of("corral_gspo"))
    assert _of_verl(caplog) == [
        "corral for verl: loss_agg_mode: token-mean gives gspo another gradient than its own. Use seq-mean-token-mean."
    ]


def test_a_length_that_depends_on_the_split_is_told(caplog: pytest.LogCaptureFixture) -> None:
    config, loss_fn = config_of("corral_dppo", anchor="old"), make_policy_loss("corral_dppo", aggregate)
    config.global_batch_info["loss_scale_factor"] = 4096
    loss_fn(**tokens(), config=config, loss_agg_mode="seq-mean-token-sum-norm")
    assert _of_verl(caplog) == []
    config.global_batch_info["loss_scale_factor"] = None
    loss_fn(**tokens(), config=config, loss_agg_mode="seq-mean-token-sum-norm")
    assert "Set it to data.max_response_length" in caplog.text
