"""Contexts → plans → episodes: one plan per episode, or a new plan every few steps from the current state."""

from typing import Literal, NamedTuple, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.robot.episode import Episodes, Plant
from corral.robot.policy import GaussianPolicy
from corral.robot.prodmp import ProDMP
from corral.robot.tracking import Array

PlanStart = Literal["desired", "state"]


class Plans(NamedTuple):
    """Trajectory parameters drawn for a batch, with the Gaussian that drew them: the old policy of this batch's updates.

    One row for each of the E plans that were begun: the first plans of all episodes, then the second ones, …
    """

    params: Float[Tensor, "E W"]
    mean: Float[Tensor, "E W"]
    chol: Float[Tensor, "*c W W"]
    """A factor common to all plans, or a factor for each plan."""
    sizes: tuple[int, ...]
    """Number of first plans, of second plans, …"""

    def to(self, device: str) -> "Plans":
        """The plans on another device."""
        return Plans(self.params.to(device), self.mean.to(device), self.chol.to(device), self.sizes)


def split_plans(sizes: tuple[int, ...], params: Tensor, mean: Tensor, chol: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Parameters, means and factors of the first plans, of the second plans, …"""
    factors = chol.split(sizes) if chol.ndim == 3 else [chol] * len(sizes)
    return list(zip(params.split(sizes), mean.split(sizes), factors, strict=True))


class Planner:
    """Planner that draws plans from a policy and follows them.

        w_k ~ N(μ(s_t), Σ)   at t = k R,   followed for R steps from (y_b, v_b) at time t Δt on

    All plans of an episode are on one clock: a plan made anew from the desired state with the same parameters is the plan it
    replaces.

    Args:
        dt: Δt in seconds.
        every: R, a divisor of the episode's steps; all of them without it.
        start: (y_b, v_b) is the desired state of the plan before, which makes what is followed smooth, or the joints' own.
    """

    def __init__(
        self,
        plant: Plant,
        prodmp: ProDMP,
        dt: float,
        policy: GaussianPolicy,
        *,
        every: int | None = None,
        start: PlanStart = "desired",
        dtype: torch.dtype = torch.float64,
    ) -> None:
        self.plant, self.prodmp, self.policy, self.dtype = plant, prodmp, policy, dtype
        self.every, self.start = plant.steps if every is None else every, start
        self.count, odd = divmod(plant.steps, self.every)
        if odd or not self.count:
            raise ValueError(f"planner: `replan_every` must divide the {plant.steps} steps of an episode; got {every}.")
        if self.count > 1 and self.every * dt < prodmp.delay:
            raise ValueError(
                f"planner: `replan_every` is at least the trajectory's delay of {prodmp.delay:g} s, in which it rests; got "
                f"{every} steps of {dt:g} s."
            )
        self.times = dt * torch.arange(1, plant.steps + 1, dtype=torch.float64)
        self.starts = [dt * self.every * index for index in range(self.count)]
        pieces = zip(self.times.split(self.every), self.starts, strict=True)
        self.positions = [prodmp.design(times, begin).position for times, begin in pieces]
        """Derivative ∂y/∂params [R M] of the first plan, the second, …"""

    def noise(self, count: int, seed: int) -> Float[Tensor, "E P W"]:
        """Standard normal numbers for `count` episodes."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn((count, self.count * self.prodmp.parameters), generator=generator, dtype=self.dtype)
        return drawn.unflatten(1, (self.count, -1))

    @torch.no_grad()
    def play(
        self, seeds: list[int], noise: Float[Tensor, "E P W"] | None, *, learned_from: bool = False
    ) -> tuple[Episodes, Plans]:
        """Play episodes of the plans μ(s) + L · noise, or of the mean plans without noise.

        They are played in several rounds where there are fewer environments than seeds.
        """
        episodes, drawn = list[Episodes](), list[list[Tensor]]()
        for rows in self.plant.rounds(len(seeds)):
            context, hand = self.plant.start(seeds[rows]), _Round(self, None if noise is None else noise[rows])
            episodes.append(self.plant.follow_anew(context, hand.plan, self.every, learned_from=learned_from))
            # If all episodes end early, the last plans are never drawn: copies stand in for them, and `begun` drops the copies.
            plans = hand.drawn + hand.drawn[-1:] * (self.count - len(hand.drawn))
            drawn.append([torch.stack(part) for part in zip(*plans, strict=True)])  # [P E …]
        played, (params, mean, chol) = Episodes.cat(episodes), zip(*drawn, strict=True)
        begun = self.begun(played)
        factor = torch.cat(chol, 1)[begun] if chol[0].ndim == 4 else chol[0][0]
        sizes = tuple(begun.sum(-1).tolist())
        return played, Plans(torch.cat(params, 1)[begun], torch.cat(mean, 1)[begun], factor, sizes)

    def begun(self, episodes: Episodes) -> Bool[Tensor, "P E"]:
        """True for plans that began: an episode was still running when its first plan, its second plan, … was due."""
        return episodes.mask[:, :: self.every].T

    def contexts(self, episodes: Episodes) -> Float[Tensor, "N O"]:
        """Observations from which the policy planned, with rows as in `Plans`."""
        return episodes.observations[:, : -1 : self.every].transpose(0, 1)[self.begun(episodes)]

    def cut(self, episodes: Episodes, values: Tensor) -> Tensor:
        """Values of every step [E T …] split by plan [N R …], with rows as in `Plans`."""
        return values.unflatten(1, (self.count, self.every)).transpose(0, 1)[self.begun(episodes)]


class _Round:
    """Plans of episodes that are played at the same time, made during the episodes."""

    def __init__(self, planner: Planner, noise: Tensor | None) -> None:
        self.planner, self.noise, self.drawn = planner, noise, list[tuple[Tensor, Tensor, Tensor]]()
        self.reached: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def plan(self, observation: Array) -> tuple[Array, Array]:
        """The next plans [E R D] in these states [E O]. The policy runs on its own device, and all else on the CPU."""
        planner, index = self.planner, len(self.drawn)
        mean, chol = (x.cpu() for x in planner.policy(torch.from_numpy(observation).to(planner.policy.log_diagonal)))
        params = mean
        if self.noise is not None:
            noise = self.noise[:, index]
            params = mean + ((chol @ noise[..., None])[..., 0] if chol.ndim == 3 else noise @ chol.mT)
        if self.reached is None or planner.start == "state":
            position, velocity = (torch.from_numpy(x).to(planner.dtype) for x in planner.plant.tracking.state(observation))
        else:
            position, velocity = self.reached
        times = planner.times.split(planner.every)[index]
        positions, velocities = planner.prodmp.trajectory(times, params, position, velocity, planner.starts[index])
        self.drawn.append((params, mean, chol))
        self.reached = positions[:, -1], velocities[:, -1]
        return cast(tuple[Array, Array], (positions.double().numpy(), velocities.double().numpy()))
