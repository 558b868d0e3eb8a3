"""TCE from scratch: an arm learns to pass through one point and stop at another, paid at those two moments only.

A policy chooses one smooth trajectory per episode. Each update asks, for every piece of every trajectory, how likely its two
ends were and what the piece earned, and moves the policy inside a trust region.

    python examples/tce_in_150_lines.py
"""

import time

import torch
from torch import Tensor, nn

import corral
from corral import robot

JOINTS, STEPS, DT = 3, 50, 0.04  # an arm of three links of 1 m, episodes of two seconds
EPISODES, ROUNDS, EPOCHS = 64, 60, 20  # per batch; batches; updates of the policy per batch
MEAN_BOUND, COV_BOUND = 0.1, 0.01  # KL that the mean and the covariance may move per batch


class Arms:
    """Many arms at once: double integrators under a PD controller, which follows the desired joints."""

    def __init__(self, count: int) -> None:
        self.q = torch.tensor([torch.pi / 2, 0.0, 0.0]) + 0.1 * (torch.rand(count, JOINTS) - 0.5)  # straight up, nearly
        radius, angle = 1.0 + 1.5 * torch.rand(count, 2), torch.pi / 2 * (torch.rand(count, 2) + torch.tensor([0.0, 1.0]))
        # The via-point lies to the right of the base, the goal to the left [E 2 2].
        self.points = radius[..., None] * torch.stack([angle.cos(), angle.sin()], -1)
        self.v, self.step_count = torch.zeros_like(self.q), 0

    def observe(self) -> Tensor:
        """Joints, their velocities, both points and the time [E 11]: all that the reward depends on."""
        elapsed = torch.full((len(self.q), 1), self.step_count / STEPS)
        return torch.cat([self.q, self.v, self.points.flatten(1), elapsed], -1)

    def distance(self) -> Tensor:
        """From the tip to the via-point in the first half, to the goal in the second [E]."""
        heading = self.q.cumsum(-1)
        tip = torch.stack([heading.cos(), heading.sin()], -1).sum(-2)
        return (tip - self.points[:, int(self.step_count > STEPS // 2)]).norm(dim=-1)

    def step(self, desired: Tensor, desired_v: Tensor) -> Tensor:
        """One step towards the desired joints; rewards [E] are −distance at half-time and at the end, less effort."""
        acceleration = (150 * (desired - self.q) + 25 * (desired_v - self.v)).clamp(-60, 60)
        self.v = self.v + DT * acceleration
        self.q = self.q + DT * self.v
        self.step_count += 1
        paid = self.step_count in (STEPS // 2, STEPS)
        return -self.distance() * paid - 1e-5 * acceleration.square().sum(-1)


def network(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    layers = nn.Sequential(nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))
    nn.init.orthogonal_(layers[-1].weight, gain)
    nn.init.zeros_(layers[-1].bias)
    return layers


class Policy(nn.Module):
    """Context → a Gaussian over trajectory parameters: the mean depends on the context, the covariance is one for all."""

    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.mean = network(11, parameters, 0.01)
        self.diagonal = nn.Parameter(torch.full((parameters,), -1.05))  # softplus(−1.05) = 0.3
        self.lower = nn.Parameter(torch.zeros(parameters, parameters))

    def forward(self, context: Tensor) -> tuple[Tensor, Tensor]:
        return self.mean(context), self.lower.tril(-1) + torch.diag(nn.functional.softplus(self.diagonal) + 1e-4)


def play(prodmp: robot.ProDMP, policy: Policy, noise: float) -> tuple[Tensor, Tensor, Tensor]:
    """Episodes of plans drawn from the policy (of its mean plans without noise): observations, rewards, parameters."""
    arms = Arms(EPISODES)
    states, rewards = [arms.observe()], []
    mean, chol = policy(states[0])
    params = mean + noise * torch.randn_like(mean) @ chol.T
    times = DT * torch.arange(1, STEPS + 1).double()
    y, v = prodmp.trajectory(times, params, arms.q, arms.v)
    for t in range(STEPS):
        rewards.append(arms.step(y[:, t], v[:, t]))
        states.append(arms.observe())
    return torch.stack(states[:-1], 1), torch.stack(rewards, 1), params


def improve(prodmp: robot.ProDMP, policy: Policy, critic: nn.Module, optimizers, batch: tuple[Tensor, Tensor, Tensor]):
    """The updates of one batch; returns the projected policy of the last."""
    states, rewards, params = batch
    context = states[:, 0]
    with torch.no_grad():
        old_mean, old_chol = policy(context)
        values = critic(states).squeeze(-1)

        # Cut the episodes into pieces, from a random first step on: what did each earn, and how likely were its two ends?
        pairs = robot.draw_pairs(STEPS, 10)
        advantages, live = robot.segment_advantages(rewards, values, pairs)
        advantages = robot.normalise_advantages(advantages, live)
        rows = prodmp.design(DT * torch.arange(1, STEPS + 1).double()).position[pairs].float()
        jitter = robot.segment_jitter(rows, old_chol)
        log_old = robot.segment_log_prob(rows, params, old_mean, old_chol, jitter)
        targets = robot.critic_targets(rewards, values)

    for _ in range(EPOCHS):  # the critic: V(s) towards λ-returns
        loss = (critic(states).squeeze(-1) - targets).square().mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()

    for _ in range(EPOCHS):  # the policy: better pieces more likely, inside the trust region
        mean, chol = policy(context)
        inside = corral.project_gaussian_kl(mean, chol, old_mean, old_chol, mean_bound=MEAN_BOUND, cov_bound=COV_BOUND)
        ratio = (robot.segment_log_prob(rows, params, inside.mean, inside.chol, jitter) - log_old).exp()
        # The network itself is drawn into the region, since it is what the next episodes are drawn from.
        apart = corral.gaussian_kl(mean, chol, inside.mean.detach(), inside.chol.detach()).total.mean()
        loss = apart - (ratio * advantages).mean()
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
    return inside


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    prodmp = robot.ProDMP(JOINTS, 4, STEPS * DT, alpha=10.0, auto_scale=True, relative_goal=True)
    policy, critic = Policy(prodmp.parameters), network(11, 1, 1.0)
    optimizers = [torch.optim.Adam(net.parameters(), lr=3e-3) for net in (policy, critic)]
    print(f"{JOINTS} joints, {prodmp.parameters} parameters per trajectory; {ROUNDS} batches of {EPISODES} episodes.\n")
    print(f"{'episodes':>8} {'exploring':>10} {'mean plan':>10} {'off by':>8} {'KL':>7}")
    began = time.perf_counter()
    for number in range(1, ROUNDS + 1):
        with torch.no_grad():
            batch = play(prodmp, policy, noise=1.0)
        inside = improve(prodmp, policy, critic, optimizers, batch)
        if number == 1 or number % 10 == 0:
            with torch.no_grad():
                rewards = play(prodmp, policy, noise=0.0)[1]
            off = -rewards[:, [STEPS // 2 - 1, STEPS - 1]].mean()
            kl = (inside.after_mean.mean() + inside.after_cov).item()
            explored, planned = (x.sum(-1).mean() for x in (batch[1], rewards))
            print(f"{number * EPISODES:>8} {explored:>10.3f} {planned:>10.3f} {off:>6.2f} m {kl:>7.4f}")
    print(f"\nReturns, mean distance from the two points, KL to the old policy at the end of a batch (at most {MEAN_BOUND} + "
          f"{COV_BOUND}). {time.perf_counter() - began:.0f} s.")  # fmt: skip


if __name__ == "__main__":
    main()
