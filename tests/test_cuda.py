"""The same numbers on a GPU as on the CPU: supports, projections, every objective, the head."""

import pytest
import torch
from torch import Tensor

import corral
from corral.head import lm_head
from corral.support import rank_top_k
from policy_objectives import POLICY_OBJECTIVES
from tolerance import assert_close

pytestmark = pytest.mark.gpu


def policies(device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Logits of an old and a new policy [4 9 500], drawn on the CPU, and sampled tokens."""
    draw = torch.Generator().manual_seed(0)
    old = torch.randn(4, 9, 500, generator=draw) * 2
    new = old + 0.7 * torch.randn(4, 9, 500, generator=draw)
    return old.to(device), new.to(device), torch.randint(500, (4, 9), generator=draw).to(device)


def loss_and_gradient(name: str, device: str) -> tuple[Tensor, Tensor]:
    logits_old, logits_new, tokens = policies(device)
    logits_new.requires_grad_()
    old = corral.top_k_support(logits_old.log_softmax(-1), tokens, 16)
    new = corral.gather_support(logits_new.log_softmax(-1), old.ids)
    mask = torch.arange(9, device=device) < torch.tensor([9, 4, 1, 7], device=device)[:, None]
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0], device=device)
    logp = old.logp[..., 0]
    out = corral.make_objective(name)(corral.TokenBatch(new.logp[..., 0], logp, advantages, mask, new, old, logp - 0.1))
    out.loss.sum().backward()
    assert logits_new.grad is not None
    return out.loss.detach().cpu(), logits_new.grad.cpu()


@pytest.mark.supports("objective: {name}", door="import corral")
@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
def test_objectives_agree_with_the_cpu(name: str) -> None:
    loss, gradient = loss_and_gradient(name, "cuda")
    expected_loss, expected_gradient = loss_and_gradient(name, "cpu")
    assert_close(loss, expected_loss)
    assert_close(gradient, expected_gradient)


def test_ties_are_ranked_by_id() -> None:
    logp = torch.randint(4, (64, 3000), generator=torch.Generator().manual_seed(1)).float()
    assert torch.equal(rank_top_k(logp.cuda(), 40).cpu(), rank_top_k(logp, 40))


def test_a_support_survives_the_trip_to_the_cpu_and_back() -> None:
    logits, _, tokens = policies("cuda")
    dist = corral.top_k_support(logits.log_softmax(-1), tokens, 16, mass=0.9)
    packed = dist.pack()
    assert packed.ids.device.type == "cpu"
    back = packed.unpack("cuda")
    assert torch.equal(back.ids, dist.ids)
    assert torch.equal(back.logp, dist.logp)
    assert torch.equal(back.rest, dist.rest)


def test_projection_under_autocast_stays_in_float32() -> None:
    old, new, _ = policies("cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        out = corral.project_categorical_kl(new, old, 0.05)
    assert out.logp.dtype == torch.float32
    assert bool(out.converged.all())
    assert_close(out.kl_after[out.active], torch.full_like(out.kl_after[out.active], 0.05))


def test_the_head_multiplies_half_precision_with_float32_results() -> None:
    draw = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(300, 64, generator=draw).bfloat16(), torch.randn(20_000, 64, generator=draw).bfloat16()
    tokens = torch.randint(20_000, (300,), generator=draw)
    out = lm_head(hidden.cuda(), weight.cuda(), tokens.cuda(), top_k=32, entropy=True)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)
    assert_close(out.logp.cpu(), exact.gather(-1, tokens[:, None])[:, 0], torch.float32, atol=1e-4)
    assert out.dist is not None
    assert out.entropy is not None
    assert_close(out.entropy.cpu(), -(exact.exp() * exact).sum(-1), torch.float32, atol=1e-4)
    expected = corral.gather_support(exact, out.dist.ids.cpu())
    assert_close(out.dist.rest.cpu(), expected.rest, torch.float32, atol=1e-4)
