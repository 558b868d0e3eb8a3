"""Weights of the policy term: a sampler correction, an importance ratio or an entropy mask leave the regression alone."""

import torch

from corral import ObjectiveOutput


def test_golden_weights_multiply_the_policy_term_alone():
    # loss = policy + regression = (−2 + 1, −4 + 3); weights ½ and 0: (−1 + 1, 0 + 3).
    out = ObjectiveOutput(torch.tensor([[-1.0, -1.0]]), {}, regression=torch.tensor([[1.0, 3.0]]))
    assert out.weigh(torch.tensor([[0.5, 0.0]])).tolist() == [[0.0, 3.0]]


def test_without_a_regression_the_whole_loss_is_the_policy_term():
    out = ObjectiveOutput(torch.tensor([[-2.0, 4.0]]), {})
    assert out.weigh(torch.tensor([[0.5, 0.0]])).tolist() == [[-1.0, 0.0]]


def test_a_weight_of_zero_silences_a_loss_that_is_not_finite():
    out = ObjectiveOutput(torch.tensor([[torch.inf, 1.0]]), {}, regression=torch.tensor([[0.5, 0.5]]))
    assert out.weigh(torch.tensor([[0.0, 1.0]])).tolist() == [[0.5, 1.0]]
