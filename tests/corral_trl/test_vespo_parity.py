"""VESPO's weight and loss are those of TRL's own `loss_type="vespo"`."""

import pytest
import torch
from trl import GRPOTrainer

from corral import TokenBatch, make_objective
from tolerance import assert_close

OTHERS = {"k_positive": 1.5, "lambda_positive": 0.7, "k_negative": 2.5, "lambda_negative": 4.0}


@pytest.mark.skipif(not hasattr(GRPOTrainer, "get_gamma_weights"), reason="this TRL has no vespo")
@pytest.mark.parametrize(
    "settings", [{}, {"k_positive": 1.5, "lambda_positive": 0.7, "k_negative": 2.5, "lambda_negative": 4.0}]
)
def test_loss_and_gradient_are_trls(settings: dict[str, float]) -> None:
    draw = torch.Generator().manual_seed(3)
    old = -3 * torch.rand(6, 7, generator=draw)
    new = (old + 0.3 * torch.randn(6, 7, generator=draw)).clamp(max=0).requires_grad_()
    mask = torch.arange(7) < torch.tensor([7, 5, 1, 7, 3, 6])[:, None]
    advantages = torch.tensor([1.0, -0.5, 2.0, 0.0, -2.0, 0.3])
    names = {"k_positive": "k_pos", "lambda_positive": "lambda_pos", "k_negative": "k_neg", "lambda_negative": "lambda_neg"}
    weight = GRPOTrainer.get_gamma_weights(
        advantages[:, None], new - old, mask, None, **{names[key]: value for key, value in settings.items()}
    )
    theirs = torch.where(mask, -weight * advantages[:, None] * new, 0.0)
    ours = make_objective("vespo", **settings)(TokenBatch(new, old, advantages, mask)).loss
    assert weight.min() < 0.5 < 1 < weight.max()
    assert_close(ours, theirs)
    assert_close(*(torch.autograd.grad(loss.sum(), new, retain_graph=True)[0] for loss in (ours, theirs)))
