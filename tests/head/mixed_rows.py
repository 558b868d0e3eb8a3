"""Peaked rows beside flat ones: their loss and gradients from full logits in float64, and fused."""

import math
from typing import Any

import torch
from torch import Tensor

import corral
from corral import SparseDist, TokenBatch, policy_loss_from_hidden
from corral.head.policy_loss import PolicyLoss
from interpreted import DEVICE
from tolerance import assert_close

F64 = torch.float64
VOCABULARY, WIDTH, SLOTS = 90, 8, 5


class Problem:
    """Two completions of a policy that has moved since: some rows sure of their token, others of nothing; padding holds NaN."""

    def __init__(self, rows: str = "pff.pf", *, support: bool = True, lies: str = "", biased: bool = False, cap: bool = False):
        """A letter per token: (p)eaked, (f)lat, or (.) masked. At the rows in `lies` the old policy's rest is not so."""
        draw = torch.Generator().manual_seed(5)
        count = len(rows)
        self.spec: dict[str, Any] = {"temperature": 0.9, "scale": 1.1, "softcap": 40.0} if cap else {"temperature": 0.9}
        self.hidden = torch.randn(count, WIDTH, generator=draw, dtype=F64)
        self.weight = 2 * torch.randn(VOCABULARY, WIDTH, generator=draw, dtype=F64)
        self.bias = torch.randn(VOCABULARY, generator=draw, dtype=F64) if biased else None
        peaked = torch.tensor([x == "p" for x in rows])
        self.hidden = torch.where(peaked[:, None], 12 * self.hidden, 0.3 * self.hidden)
        logp = self.logp(self.hidden)
        self.tokens = torch.where(peaked, logp.topk(2).indices[:, 1], torch.randint(VOCABULARY, (count,), generator=draw))
        old = corral.top_k_support(logp, self.tokens, SLOTS)
        rest = old.rest.clone()
        for row in map(int, lies):
            rest[row] = -40.0 if rows[row] == "f" else -0.5
        self.hidden = self.hidden + 0.02 * torch.randn(count, WIDTH, generator=draw, dtype=F64)
        shape = (2, count // 2) if count % 2 == 0 else (1, count)
        self.mask = torch.tensor([x != "." for x in rows]).view(shape)
        logp_old = torch.where(self.mask, old.logp[:, 0].view(shape), math.nan)
        dist = SparseDist(old.ids.view(*shape, -1), old.logp.view(*shape, -1), rest.view(shape))
        advantages = torch.randn(shape, generator=draw, dtype=F64)
        self.weights = torch.rand(shape, generator=draw, dtype=F64) + 0.1
        self.batch = TokenBatch(logp_old, logp_old, advantages, self.mask, None, dist if support else None, logp_old)

    def logp(self, hidden: Tensor) -> Tensor:
        z = self.spec.get("scale", 1.0) * (hidden @ self.weight.T + (0.0 if self.bias is None else self.bias))
        cap = self.spec.get("softcap")
        z = z if cap is None else cap * torch.tanh(z / cap)
        return (z / self.spec["temperature"]).log_softmax(-1)

    def leaves(self, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> list[Tensor]:
        found = [self.hidden.view(*self.mask.shape, WIDTH), self.weight] + ([] if self.bias is None else [self.bias])
        return [x.to(device, dtype).requires_grad_() for x in found]

    def on(self, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> tuple[TokenBatch, Tensor, Tensor]:
        """Batch, tokens and weights."""
        b, old = self.batch, self.batch.dist_old
        dist = None if old is None else SparseDist(old.ids.to(device), old.logp.to(device, dtype), old.rest.to(device, dtype))
        logp_old, advantages = b.logp_old.to(device, dtype), b.advantages.to(device, dtype)
        batch = TokenBatch(logp_old, logp_old, advantages, b.mask.to(device), None, dist, logp_old)
        return batch, self.tokens.view(b.mask.shape).to(device), self.weights.to(device, dtype)

    def exact(
        self, objective: Any, policy_weights: Tensor | None = None, *, on_policy: bool = False
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Loss per token, Σ w (c · policy + regression) and its gradients in float64, from full logits."""
        leaves, (b, tokens, weights) = self.leaves(F64, "cpu"), self.on(F64, "cpu")
        bias = 0.0 if self.bias is None else leaves[2]
        z = self.spec.get("scale", 1.0) * (leaves[0] @ leaves[1].T + bias)
        cap = self.spec.get("softcap")
        logp = ((z if cap is None else cap * torch.tanh(z / cap)) / self.spec["temperature"]).log_softmax(-1)
        new = None if b.dist_old is None else corral.gather_support(logp, b.dist_old.ids)
        own = logp.gather(-1, tokens[..., None])[..., 0]
        anchor = own.detach() if on_policy else b.logp_old
        out = objective(TokenBatch(own, anchor, b.advantages, b.mask, new, b.dist_old, b.logp_rollout))
        regression = 0.0 if out.regression is None else out.regression
        policy = (out.loss - regression) * (1.0 if policy_weights is None else policy_weights.cpu().to(F64))
        total = torch.where(b.mask, weights * (policy + regression), 0.0).sum()
        return torch.where(b.mask, out.loss, 0.0).detach(), total.detach(), list(torch.autograd.grad(total, leaves))


def assert_gradients(got: Any, wanted: list[Tensor], error: float = 1e-4) -> None:
    for actual, expected in zip(got, wanted, strict=True):
        assert (actual.cpu().to(F64) - expected).norm() < error * expected.norm()


def run_fused(problem: Problem, objective: Any, *, leaves: list[Tensor] | None = None, **options: Any) -> PolicyLoss:
    """The fused Triton path."""
    leaves, (batch, tokens, weights) = leaves or problem.leaves(), problem.on()
    given = {"bias": leaves[2] if len(leaves) > 2 else None, "weights": weights, "impl": "triton", **problem.spec, **options}
    return policy_loss_from_hidden(leaves[0], leaves[1], tokens, batch, objective, **given)


def check_fused(problem: Problem, objective: Any, **options: Any) -> tuple[PolicyLoss, list[Tensor]]:
    """Its loss and gradients, which are those of float64."""
    leaves = problem.leaves()
    out = run_fused(problem, objective, leaves=leaves, **options)
    got = list(torch.autograd.grad(out.loss, leaves))
    known = {name: options[name] for name in ("policy_weights", "on_policy") if name in options}
    loss, total, wanted = problem.exact(objective, **known)
    assert_close(out.per_token, loss, atol=2e-5)
    assert_close(out.loss, total, atol=2e-5 * int(problem.mask.sum()))
    assert_gradients(got, wanted)
    assert got[0][~problem.mask.to(DEVICE)].count_nonzero() == 0
    return out, got
