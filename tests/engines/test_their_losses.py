"""SkyRL's and OpenRLHF's own losses beside corral's, and where they differ: docs/engines.md. `make test-engines` brings both.

Their packages are installed without what they need to train. So only the modules that hold the losses are imported, past the
packages around them.
"""

import importlib
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import make_dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import corral
from corral.engines import skyrl
from corral.engines.checkup import run_checkup
from tolerance import assert_close

SIGNATURES = Path(__file__).parent / "signatures"


def past_its_init(package: str) -> None:
    """Make a package importable without running its __init__."""
    parent, _, name = package.rpartition(".")
    module = ModuleType(package)
    module.__path__ = [str(Path(importlib.import_module(parent).__path__[0], name))]
    sys.modules[package] = module


@pytest.fixture(scope="module")
def sky() -> Any:
    """SkyRL's module of policy losses."""
    if find_spec("skyrl") is None:
        pytest.skip("needs skyrl (make test-engines)")
    for game, config in (("search", "SearchEnvConfig"), ("sql", "Text2SQLEnvConfig")):
        module: Any = ModuleType(f"skyrl_gym.envs.{game}.env")
        setattr(module, config, make_dataclass(config, []))
        sys.modules[module.__name__] = module
    for package in ("skyrl.backends", "skyrl.backends.skyrl_train.utils", "skyrl.train"):
        past_its_init(package)
    return importlib.import_module(skyrl.REGISTRY)


@pytest.fixture(scope="module")
def policy_loss() -> Any:
    """OpenRLHF's PolicyLoss."""
    if find_spec("openrlhf") is None:
        pytest.skip("needs openrlhf (make test-engines)")
    sys.modules.setdefault("deepspeed", ModuleType("deepspeed"))
    past_its_init("openrlhf.models")
    return importlib.import_module("openrlhf.models.loss").PolicyLoss


class Tokens:
    """Log-probs of the new, the old and the sampling policy, advantages and a mask, all [B T]; what each loss makes of them."""

    def __init__(self) -> None:
        draw = torch.Generator().manual_seed(0)
        self.old = -3 * torch.rand(4, 200, generator=draw)
        self.rollout = (self.old + 0.1 * torch.randn(4, 200, generator=draw)).clamp(max=-1e-3)
        self.new = (self.old + 0.5 * torch.randn(4, 200, generator=draw)).clamp(max=-1e-3).requires_grad_()
        self.mask = torch.rand(4, 200, generator=draw) > 0.2
        self.advantages = torch.tensor([[1.0], [-0.7], [0.4], [-2.0]]).expand(4, 200).clone()

    def gradient(self, loss: Tensor) -> Tensor:
        found = torch.autograd.grad(loss, self.new)[0]
        assert found.abs().max() > 0
        return found

    def ours(self, objective: str, *, anchor: Tensor, **settings: Any) -> Tensor:
        """Gradient of the sum of corral's losses."""
        batch = corral.TokenBatch(self.new, anchor, self.advantages, self.mask)
        return self.gradient(corral.make_objective(objective, **settings)(batch).loss.sum())


# SkyRL


def skyrls(sky: Any, name: str, tokens: Tokens, change: Callable[[Any], None] = lambda config: None, **given: Any) -> Tensor:
    config = sky.AlgorithmConfig(loss_reduction="sequence_mean", policy_loss_type=name)
    change(config)
    arguments = {"loss_mask": tokens.mask.float(), "rollout_logprobs": tokens.rollout, **given}
    loss, _ = sky.PolicyLossRegistry.get(name)(tokens.new, tokens.old, tokens.advantages, config=config, **arguments)
    return tokens.gradient(loss)


def set_dppo(kind: str, low: float, high: float) -> Callable[[Any], None]:
    def change(config: Any) -> None:
        config.dppo.dppo_type, config.dppo.delta_low, config.dppo.delta_high = kind, low, high

    return change


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("binary_tv", {"bound_low": 0.1, "bound_high": 0.15}),
        ("binary_kl", {"divergence": "kl", "bound_low": 0.02, "bound_high": 0.05}),
    ],
)
def test_skyrls_dppo_has_corrals_gradient(sky: Any, kind: str, settings: dict[str, Any]) -> None:
    tokens = Tokens()
    expected = tokens.ours("dppo", anchor=tokens.rollout, **settings)
    found = skyrls(sky, "dppo", tokens, set_dppo(kind, settings["bound_low"], settings["bound_high"]))
    assert_close(found, expected, atol=1e-5)
    assert 0 < (found[tokens.mask] == 0).float().mean() < 1, "the region must act"


def test_skyrls_dppo_without_the_samplers_log_probs_takes_the_old_policys(sky: Any) -> None:
    # No word is said. corral refuses: test_adapters.py.
    tokens = Tokens()
    found = skyrls(sky, "dppo", tokens, rollout_logprobs=None)
    assert_close(found, tokens.ours("dppo", anchor=tokens.old, bound=0.2), atol=1e-5)
    assert not torch.allclose(found, tokens.ours("dppo", anchor=tokens.rollout, bound=0.2), atol=1e-3)


@pytest.mark.parametrize(
    ("theirs", "ours", "settings"),
    [
        ("regular", "ppo_clip", {}),
        ("dual_clip", "dual_clip", {}),
        ("gspo", "gspo", {"clip_low": 0.2, "clip_high": 0.2}),
        ("sapo", "sapo", {}),
        ("cispo", "cispo", {"cap_high": 5.0}),
    ],
)
def test_skyrls_other_losses_have_corrals_gradients(sky: Any, theirs: str, ours: str, settings: dict[str, Any]) -> None:
    tokens = Tokens()
    expected = tokens.ours(ours, anchor=tokens.old, **settings)
    assert_close(skyrls(sky, theirs, tokens), expected, atol=1e-5)


def test_skyrls_cispo_may_be_anchored_on_the_sampler(sky: Any) -> None:
    def change(config: Any) -> None:
        config.cispo.cispo_anchor = "rollout"

    tokens = Tokens()
    expected = tokens.ours("cispo", anchor=tokens.rollout, cap_high=5.0)
    assert_close(skyrls(sky, "cispo", tokens, change), expected, atol=1e-5)
    assert not torch.allclose(skyrls(sky, "cispo", tokens), expected, atol=1e-2)


def test_skyrls_own_registry_and_settings_take_corrals_loss(sky: Any) -> None:
    name = skyrl.register("dppo", bound=0.15)
    tokens = Tokens()
    found = skyrls(sky, name, tokens)
    assert_close(found, tokens.ours("dppo", anchor=tokens.rollout, bound=0.15), atol=1e-5)

    def change(config: Any) -> None:
        config.off_policy_correction.tis_ratio_type = "token"

    with pytest.raises(ValueError, match=r"off_policy_correction\.tis_ratio_type is set"):
        skyrls(sky, name, tokens, change)
    with pytest.raises(ValueError, match="already"):
        skyrl.register("dppo", bound=0.2)
    sky.PolicyLossRegistry.unregister(name)


def test_skyrls_signatures_are_those_that_were_committed(sky: Any) -> None:
    record = json.loads((SIGNATURES / "skyrl.json").read_text())["signatures"]
    assert list(inspect.signature(sky.ppo_policy_loss).parameters) == record[f"{skyrl.REGISTRY}:ppo_policy_loss"]
    corrections = sky.AlgorithmConfig().off_policy_correction
    assert list(vars(corrections)) == record["skyrl.train.config.config:OffPolicyCorrectionConfig"]


def test_doctor_finds_skyrls_registry(sky: Any) -> None:
    assert run_checkup("skyrl").trouble == []


# OpenRLHF


def openrlhfs(policy_loss: Any, tokens: Tokens, **settings: Any) -> Tensor:
    """Gradient of OpenRLHF's loss, as a sum over tokens, or over sequences."""
    loss, *_ = policy_loss(**settings)(
        tokens.new, tokens.old, tokens.advantages, tokens.mask.float(), tokens.rollout, batch_num_tokens=1.0,
        global_batch_size=1.0,
    )  # fmt: skip
    return tokens.gradient(loss)


@pytest.mark.parametrize(("given", "ours"), [({}, "ppo_clip"), ({"dual_clip": 3.0}, "dual_clip")])
def test_openrlhfs_clips_have_corrals_gradients(policy_loss: Any, given: dict[str, Any], ours: str) -> None:
    tokens = Tokens()
    assert_close(openrlhfs(policy_loss, tokens, **given), tokens.ours(ours, anchor=tokens.old), atol=1e-5)


def test_openrlhfs_gspo_has_corrals_gradient(policy_loss: Any) -> None:
    tokens = Tokens()
    batch = corral.TokenBatch(tokens.new, tokens.old, tokens.advantages, tokens.mask)
    loss = corral.make_objective("gspo", clip_low=0.03, clip_high=0.04)(batch).loss
    expected = tokens.gradient(4 * corral.reduce_loss(loss, tokens.mask, "seq-mean-token-mean"))
    found = openrlhfs(policy_loss, tokens, policy_loss_type="gspo", clip_eps_low=0.03, clip_eps_high=0.04)
    assert_close(found, expected, atol=1e-6)


GATES = {"tv": ("tv", 0.05), "binary_kl": ("kl", 0.01)}


@pytest.mark.parametrize("gating", GATES)
def test_openrlhfs_gate_is_symmetric_dppo_at_the_first_update_and_stays_there(policy_loss: Any, gating: str) -> None:
    # It compares the sampler with the old policy, not with the one that is trained: the same tokens are left out at every
    # update of a batch, however far the policy has moved since. DPPO compares with the policy at hand.
    divergence, bound = GATES[gating]
    settings = {
        "is_correction_level": "token", "is_correction_gating": gating, "is_correction_threshold": (-1.0, bound),
        "clip_eps_low": 1e9, "clip_eps_high": 1e9,
    }  # fmt: skip
    symmetric = {"divergence": divergence, "bound": bound, "mask": "symmetric"}
    first = Tokens()
    first.new = first.old.clone().requires_grad_()
    found = openrlhfs(policy_loss, first, **settings)
    assert_close(found, first.ours("dppo", anchor=first.rollout, **symmetric), atol=1e-5)
    later = Tokens()
    after = openrlhfs(policy_loss, later, **settings)
    assert ((after == 0) == (found == 0)).all(), "the same tokens, though the policy has moved"
    own = later.ours("dppo", anchor=later.rollout, **symmetric)
    assert ((own == 0) != (after == 0))[later.mask].float().mean() > 0.2


def test_openrlhfs_kl_gate_leaves_out_tokens_on_which_both_policies_agree(policy_loss: Any) -> None:
    # A single threshold makes the gate 0 ≤ KL ≤ δ, and in float32 the KL of two close policies is rounded below 0.
    tokens = Tokens()
    tokens.new = tokens.old.clone().requires_grad_()
    tokens.rollout = (tokens.old + 1e-3 * torch.randn(4, 200, generator=torch.Generator().manual_seed(1))).clamp(max=-1e-6)
    gate = {"is_correction_level": "token", "is_correction_gating": "binary_kl"}
    left_out = openrlhfs(policy_loss, tokens, **gate, is_correction_threshold=(0.0, 0.05))[tokens.mask] == 0
    assert left_out.float().mean() > 0.1
    assert corral.binary_kl(tokens.rollout, tokens.old)[tokens.mask].max() < 1e-3
    assert (openrlhfs(policy_loss, tokens, **gate, is_correction_threshold=(-1.0, 0.05))[tokens.mask] != 0).all()
