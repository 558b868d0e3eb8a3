"""Benchmark of TCE: one policy epoch, and one batch of trajectories.

An epoch is a projection, the likelihood of every segment, the loss with its regression term, and the backward pass, at box
pushing's size: 152 episodes × 24 segments × 63 parameters, one covariance for all. Against the equations as they are written,
pair by pair, and against the same without a loop but with the covariance copied to every pair. All three share one
projection, so that what differs is the likelihood. Gradients are compared before anything is timed.

Trajectories and their covariance against mp_pytorch (if installed), with its error: relative, at its worst entry, to ours,
which agrees with an integrator of the differential equation to 1e-11.

    python benchmarks/tce_update.py [--episodes 152] [--points 25] [--repeats 5] [--save]
"""

import importlib.util
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from rows import arguments, finish
from straightforward_tce import log_prob, log_prob_expanded
from timing import in_turns
from torch import Tensor

from corral import gaussian_kl, project_gaussian_kl
from corral.robot import ProDMP, draw_pairs, segment_jitter, segment_log_prob

BOX_PUSHING = ProDMP(7, 8, 2.0, alpha=10.0, weights_scale=0.3, goal_scale=0.3, auto_scale=True)
STEPS, MEAN_BOUND, COV_BOUND = 100, 0.05, 0.0005

LogProb = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


class Update:
    """A batch of episodes, and a policy that has left the trust region in mean and covariance."""

    def __init__(self, episodes: int, points: int) -> None:
        torch.manual_seed(0)
        size = BOX_PUSHING.parameters
        self.times = BOX_PUSHING.tau * torch.arange(1, STEPS + 1).double() / STEPS
        self.rows = BOX_PUSHING.design(self.times).position[draw_pairs(STEPS, points)]
        self.old_mean, noise, step = torch.randn(3, episodes, size).double()
        self.old_chol = (torch.eye(size) + 0.1 * torch.randn(size, size).tril(-1)).double()
        self.params = self.old_mean + noise @ self.old_chol.mT
        self.mean = (self.old_mean + 0.1 * step).requires_grad_()
        self.chol = (self.old_chol + 0.02 * torch.randn(size, size).double().tril()).requires_grad_()
        self.jitter = segment_jitter(self.rows, self.old_chol)
        self.logp_old = segment_log_prob(self.rows, self.params, self.old_mean, self.old_chol, self.jitter)
        self.advantages = torch.randn_like(self.logp_old)

    def epoch(self, likelihood: LogProb) -> tuple[Tensor, ...]:
        """−mean ρ A + KL(π‖π̃), and its gradients."""
        near = self.project()
        logp = likelihood(self.rows, self.params, near.mean, near.chol, self.jitter)
        away = gaussian_kl(self.mean, self.chol, near.mean.detach(), near.chol.detach())
        loss = -((logp - self.logp_old).exp() * self.advantages).mean() + away.total.mean()
        return loss.detach(), *torch.autograd.grad(loss, (self.mean, self.chol))

    def project(self) -> Any:
        return project_gaussian_kl(
            self.mean, self.chol, self.old_mean, self.old_chol, mean_bound=MEAN_BOUND, cov_bound=COV_BOUND
        )

    def project_backward(self) -> None:
        near = self.project()
        torch.autograd.grad(near.mean.sum() + near.chol.sum(), (self.mean, self.chol))

    def likelihood_backward(self) -> None:
        logp = segment_log_prob(self.rows, self.params, self.mean, self.chol, self.jitter)
        torch.autograd.grad(logp.sum(), (self.mean, self.chol))


def gap(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    """Largest difference, relative to the largest entry of its tensor."""
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in zip(actual, expected, strict=True))


def time_epochs(update: Update, repeats: int) -> list[dict[str, Any]]:
    ways: dict[str, LogProb] = {"corral": segment_log_prob, "pair by pair": log_prob, "copied to every pair": log_prob_expanded}
    reference = update.epoch(log_prob)
    gaps = {name: gap(update.epoch(way), reference) for name, way in ways.items()}
    near = update.project()
    assert bool(near.active_mean.all() & near.active_cov.all()), "the benchmark projects every row"
    times = in_turns({name: partial(update.epoch, way) for name, way in ways.items()}, repeats)
    rows = [
        {"part": "epoch", "way": name, "ms": ms, "times": ms / times["corral"], "gap": gaps[name]} for name, ms in times.items()
    ]
    parts = {"projection with gradient": update.project_backward, "likelihood with gradient": update.likelihood_backward}
    return rows + [{"part": name, "way": "corral", "ms": ms} for name, ms in in_turns(parts, 10 * repeats).items()]


def mp_pytorch(update: Update) -> tuple[Callable[[], tuple[Tensor, ...]], Callable[[], tuple[Tensor, ...]]]:
    """Functions for mp_pytorch's trajectories of the batch and covariance of one episode, in steps of 0.02 s."""
    from mp_pytorch.mp import MPFactory

    logging.disable(logging.WARNING)
    p, episodes = BOX_PUSHING, len(update.params)
    arguments = {
        "num_basis": p.basis, "basis_bandwidth_factor": p.bandwidth, "num_basis_outside": 0, "dt": p.tau / STEPS,
        "alpha": p.alpha, "alpha_phase": p.alpha_phase, "weights_scale": p.weights_scale, "goal_scale": p.goal_scale,
        "auto_scale_basis": p.auto_scale,
    }  # fmt: skip
    model = MPFactory.init_mp(mp_type="prodmp", mp_args=arguments, num_dof=p.dof, tau=p.tau, dtype=torch.float64)

    def start(count: int) -> tuple[Tensor, Tensor, Tensor]:
        return torch.zeros(count).double(), torch.zeros(count, p.dof).double(), torch.zeros(count, p.dof).double()

    def trajectory() -> tuple[Tensor, ...]:
        model.update_inputs(update.times.expand(episodes, -1), update.params, None, *start(episodes))
        return model.get_traj_pos(), model.get_traj_vel()

    def covariance() -> tuple[Tensor, ...]:
        model.update_inputs(update.times[None], update.params[:1], update.old_chol[None], *start(1))
        return (model.get_traj_pos_cov(reg=0.0)[0],)

    return trajectory, covariance


def time_trajectories(update: Update, repeats: int) -> list[dict[str, Any]]:
    rest = torch.zeros(len(update.params), BOX_PUSHING.dof).double()
    ours = {
        "trajectories": lambda: BOX_PUSHING.trajectory(update.times, update.params, rest, rest),
        "covariance": lambda: (BOX_PUSHING.covariance(update.times, update.old_chol @ update.old_chol.mT),),
    }
    rows = []
    for (part, run), theirs in zip(ours.items(), mp_pytorch(update), strict=True):
        ms, ms_theirs = in_turns({"ours": run, "theirs": theirs}, 5 * repeats).values()
        rows.append({"part": part, "way": "corral", "ms": ms})
        theirs_off = gap(theirs(), run())
        rows.append({"part": part, "way": "mp_pytorch", "ms": ms_theirs, "times": ms_theirs / ms, "gap": theirs_off})
    return rows


def main() -> None:
    args = arguments(__doc__, episodes=152, points=25, repeats=5).parse_args()
    update = Update(args.episodes, args.points)
    print(f"{args.episodes} episodes × {len(update.rows)} segments × {BOX_PUSHING.parameters} parameters, float64")
    rows = time_epochs(update, args.repeats)
    if importlib.util.find_spec("mp_pytorch"):
        rows += time_trajectories(update, args.repeats)
    finish("tce_update", rows, args.save)


if __name__ == "__main__":
    main()
