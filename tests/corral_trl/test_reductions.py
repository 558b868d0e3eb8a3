"""Objectives of whole sequences through the trainer, against the gradient of their papers' formulas on all logits."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import dense_logp, gradients, loss_and_gradient, make_trainer, measured, nudge, rollouts
from torch import Tensor

from corral import categorical_kl, project_categorical_kl

CLIP, BOUND = 0.1, 0.01


def mean(values: Tensor, mask: Tensor) -> Tensor:
    """Over the tokens of each sequence: [B T] → [B]."""
    return (values * mask).sum(-1) / mask.sum(-1)


def sampled(logp: Tensor, tokens: Tensor) -> Tensor:
    return logp.gather(-1, tokens[..., None]).squeeze(-1)


def gspo(new: Tensor, old: Tensor, tokens: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """1/G Σ_i min(s_i A_i, clip(s_i) A_i), to be maximised."""
    s = mean(sampled(new, tokens) - sampled(old, tokens), mask).exp()
    return -torch.minimum(s * advantages, s.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()


def gmpo(new: Tensor, old: Tensor, tokens: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """1/G Σ_i A_i (Π_t clipped ρ_t)^(1/|o_i|), to be maximised."""
    sign = advantages.sign()[:, None]
    log_rho = sampled(new, tokens) - sampled(old, tokens)
    clipped = sign * torch.minimum(sign * log_rho, sign * log_rho.clamp(-CLIP, CLIP))
    return -(mean(clipped, mask).exp() * advantages).mean()


def troll(new: Tensor, old: Tensor, tokens: Tensor, mask: Tensor, advantages: Tensor) -> Tensor:
    """1/G Σ_i (s̃_i A_i − 1/|o_i| Σ_t KL(π_t‖sg[π̃_t])), s̃ the projected policy's length-normalised ratio, to be maximised."""
    projection = project_categorical_kl(new, old, BOUND)
    s = mean(sampled(projection.logp, tokens) - sampled(old, tokens), mask).exp()
    pull = torch.where(projection.active, categorical_kl(new, projection.logp.detach()), 0.0)
    return (mean(pull, mask) - s * advantages).mean()


PAPERS: dict[str, tuple[dict[str, Any], Callable[..., Tensor]]] = {
    "gspo": ({"clip_low": CLIP, "clip_high": CLIP}, gspo),
    "gmpo": ({"clip": CLIP}, gmpo),
    "troll": ({"level": "sequence", "bound": BOUND}, troll),
}


def cosine(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    x, y = (torch.cat([side[name].flatten().double() for name in sorted(side)]) for side in (a, b))
    return float(x @ y / (x.norm() * y.norm()))


@pytest.mark.parametrize("objective", PAPERS)
def test_the_gradient_is_the_paper_s(tmp_path: Path, objective: str) -> None:
    config, formula = PAPERS[objective]
    # The whole vocabulary is the support, so that nothing is merged into a tail.
    given = {"objective_config": config, "support_size": 64, "support_mass": 1.0, "max_completion_length": 12}
    trainer = make_trainer(tmp_path, objective, loss_type="auto", **given)
    inputs, old = rollouts(trainer)[1], copy.deepcopy(trainer.model)
    nudge(trainer.model, 0.05)
    mask, temperature = inputs["completion_mask"].float(), trainer.args.temperature
    assert len(mask.sum(-1).unique()) > 1, "with equal lengths every reduction is the same"
    with torch.no_grad():
        logp_old = dense_logp(old, inputs, temperature)
    logp_new = dense_logp(trainer.model, inputs, temperature)
    paper = formula(logp_new, logp_old, inputs["completion_ids"], mask, inputs["advantages"])
    paper.backward()
    expected = gradients(trainer.model)
    assert max(float(g.abs().max()) for g in expected.values()) > 1e-3
    loss, gradient = loss_and_gradient(trainer, inputs)
    torch.testing.assert_close(loss, paper.detach(), atol=1e-5, rtol=1e-5)
    for name, g in expected.items():
        torch.testing.assert_close(gradient[name], g, atol=1e-5, rtol=1e-4, msg=lambda text, name=name: f"{name}: {text}")
    assert 0 < measured(trainer)["tr/active_frac"][0] < 1, "some must be clipped or projected, and some not"
    trainer.loss_type = "dapo"
    assert cosine(loss_and_gradient(trainer, inputs)[1], expected) < 0.99, "a token mean must differ, or nothing was told apart"
