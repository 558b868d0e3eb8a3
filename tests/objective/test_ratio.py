"""Ratios are exact up to e²⁰ and cut off there; a certain token is far from any other policy, and finitely so."""

import math

import pytest
import torch
from batches import inputs, loss_and_grad

from corral import TokenBatch, make_objective
from corral.objective.ratio import sampled_kl, sequence_log_ratio


@pytest.mark.parametrize(("log_rho", "weight"), [(15.0, 15.0), (20.0, 20.0), (21.0, 20.0), (45.0, 20.0)])
def test_golden_ratios_are_cut_off_at_e_to_the_20(log_rho, weight):
    old = torch.tensor([[-50.0]], dtype=torch.float64)
    new = (old + log_rho).requires_grad_()
    batch = TokenBatch(new, old, torch.ones(1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.bool))
    loss, grad = loss_and_grad(make_objective("reinforce"), batch)
    assert loss.item() == pytest.approx(-math.exp(weight), rel=1e-12)
    assert grad.item() == pytest.approx(-math.exp(weight) if log_rho <= 20 else 0.0, rel=1e-12)  # beyond it nothing flows


def test_golden_a_sequence_s_mean_is_cut_off_and_its_tokens_are_not():
    # (50 + 10) / 2 = 30, cut off at 20; (10 + 50 − 54) / 3 = 2 holds a token beyond it.
    log_rho = torch.tensor([[50.0, 10.0, 0.0], [10.0, 50.0, -54.0]], dtype=torch.float64)
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert sequence_log_ratio(log_rho, mask).tolist() == [[20.0] * 3, [2.0] * 3]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_any_other_token_keeps_1e_8_of_a_certain_policy(dtype):
    # KL(old‖new) with old = e⁻¹ and new = 1, read as e^−1e-8:  e⁻¹ (1e-8 − 1) + (1 − e⁻¹) log((1 − e⁻¹) / 1e-8).
    p = math.exp(-1)
    expected = p * (1e-8 - 1) + (1 - p) * math.log((1 - p) / 1e-8)
    batch = inputs([1.0], [p], [1.0], dtype=dtype)
    assert sampled_kl(batch).item() == pytest.approx(expected, rel=1e-6)
    assert sampled_kl(inputs([1.0], [1.0], [1.0], dtype=dtype)).item() == 0.0


def test_golden_padding_is_no_largest_ratio():
    # ρ = ½ and ¼; at padding it would be 1.
    batch = inputs([0.4, 0.2, 0.9], [0.8, 0.8, 0.1], [1.0] * 3, [True, True, False])
    metrics = make_objective("reinforce")(batch).metrics
    assert metrics["tr/ratio_max"].item() == pytest.approx(0.5, rel=1e-12)
