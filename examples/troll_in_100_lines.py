"""Three trust regions on one small task, from scratch: PPO's clip, DPPO's mask, TROLL's projection.

A policy of 10,000 parameters learns to write a sequence backwards. Each batch of rollouts is used for sixteen updates at a
large learning rate, so that the new policy leaves the old one behind and the trust region has work to do.

    python examples/troll_in_100_lines.py
"""

import time

import torch
from torch import Tensor, nn

import corral

SYMBOLS, LENGTH, PROMPTS, GROUP = 24, 8, 64, 8  # vocabulary, tokens per sequence, prompts per batch, samples per prompt
ROUNDS, UPDATES, LEARNING_RATE = 40, 16, 1e-2
SUPPORT = 6  # tokens kept of the old policy at each position; the others are one bucket of exactly known mass

OBJECTIVES = {
    "ppo_clip": corral.make_objective("ppo_clip"),
    "dppo": corral.make_objective("dppo", divergence="kl", estimator="topk"),
    "troll": corral.make_objective("troll", bound=0.05),
}


class Policy(nn.Module):
    """Symbols of the prompt → one distribution over symbols per output position."""

    def __init__(self) -> None:
        super().__init__()
        self.symbol = nn.Embedding(SYMBOLS, 32)
        self.shift = nn.Parameter(torch.randn(LENGTH, LENGTH) / LENGTH)  # which input position each output looks at
        self.head = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, SYMBOLS))

    def forward(self, prompts: Tensor) -> Tensor:
        looked_at = torch.einsum("ts,bsd->btd", (4 * self.shift).softmax(-1), self.symbol(prompts))
        return self.head(looked_at).log_softmax(-1)


def train(name: str, objective, seed: int = 0) -> dict[str, float]:
    torch.manual_seed(seed)
    policy = Policy()
    optimizer = torch.optim.Adam(policy.parameters(), lr=LEARNING_RATE)
    history: list[dict[str, Tensor]] = []
    curve = []
    for _ in range(ROUNDS):
        # Prompts → rollouts: tokens, and the old policy on a sparse support.
        prompts = torch.randint(SYMBOLS, (PROMPTS, LENGTH)).repeat_interleave(GROUP, 0)
        with torch.no_grad():
            logp_old = policy(prompts)
            tokens = torch.distributions.Categorical(logits=logp_old).sample()
            old = corral.top_k_support(logp_old, tokens, SUPPORT)

        # Rewards → advantages: how many symbols are right, relative to the other samples of the same prompt.
        right = (tokens == prompts.flip(1)).float()
        group = torch.arange(PROMPTS).repeat_interleave(GROUP)
        advantages = corral.group_advantages(right.mean(-1), group, "dr_grpo")
        curve.append(right.mean().item())

        # The new policy on the same support → loss per token → one number → gradients.
        for rows in torch.randperm(len(tokens)).chunk(UPDATES):
            batch_old = corral.SparseDist(old.ids[rows], old.logp[rows], old.rest[rows])
            new = corral.gather_support(policy(prompts[rows]), batch_old.ids)
            mask = torch.ones_like(tokens[rows], dtype=torch.bool)
            batch = corral.TokenBatch(new.logp[..., 0], batch_old.logp[..., 0], advantages[rows], mask, new, batch_old)
            out = objective(batch)
            optimizer.zero_grad()
            corral.reduce_loss(out.loss, mask, "token-mean").backward()
            optimizer.step()
            history.append(out.metrics)

    def mean(key: str) -> float:
        return torch.stack([metrics[key] for metrics in history if key in metrics] or [torch.tensor(torch.nan)]).mean().item()

    return {
        "start": curve[0], "early": curve[10], "final": sum(curve[-5:]) / 5,
        "kl_before": mean("tr/kl_before"), "kl_after": mean("tr/kl_after"), "active": mean("tr/active_frac"),
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(min(2, torch.get_num_threads()))
    print(f"Reverse {LENGTH} symbols out of {SYMBOLS}; {ROUNDS} rounds of {PROMPTS * GROUP} samples, {UPDATES} updates each.\n")
    print(f"{'objective':<10} {'at start':>9} {'round 10':>9} {'at end':>9} {'KL before':>10} {'KL after':>9} {'acted on':>9}")
    began = time.perf_counter()
    for name, objective in OBJECTIVES.items():
        row = train(name, objective)
        after = f"{row['kl_after']:9.4f}" if name == "troll" else f"{'–':>9}"
        print(f"{name:<10} {row['start']:>9.1%} {row['early']:>9.1%} {row['final']:>9.1%} {row['kl_before']:>10.4f} {after} "
              f"{row['active']:>9.2%}")  # fmt: skip
    print(f"\nSuccess is the share of right symbols; acted on is the share of tokens that were clipped, masked or projected.\n"
          f"KL is nats per token, mean over all updates: the network's before projection, and the projected policy's.\n"
          f"One seed, one learning rate: a demonstration, not a comparison. {time.perf_counter() - began:.0f} s.")  # fmt: skip


if __name__ == "__main__":
    main()
