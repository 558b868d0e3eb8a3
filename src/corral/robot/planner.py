"""Contexts → plans → episodes: one plan per episode, or a new one every so many steps from the state reached by then."""

from collections.abc import Sequence
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
    """Trajectory parameters drawn for a batch, and the Gaussian they came from: the old policy of this batch's updates.

    One row for each of the E plans that were begun: the first plans of all episodes, then the second ones, …
    """

    params: Float[Tensor, "E W"]
    mean: Float[Tensor, "E W"]
    chol: Float[Tensor, "*c W W"]
    """One factor for all, or one for each plan."""
    sizes: tuple[int, ...]
    """How many first, second, … plans there are."""


def split_plans(sizes: tuple[int, ...], params: Tensor, mean: Tensor, chol: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Parameters, means and factors of the first plans, of the second, …; none of those that nobody began."""
    factors = chol.split(sizes) if chol.ndim == 3 else [chol] * len(sizes)
    return list(zip(params.split(sizes), mean.split(sizes), factors, strict=True))


class Planner:
    """Draws plans from a policy and follows them.

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
        """∂y/∂params [R M] of the first plan, the second, …"""

    def noise(self, count: int, seed: int) -> Float[Tensor, "E P W"]:
        """Standard normal numbers for `count` episodes."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn((count, self.count * self.prodmp.parameters), generator=generator, dtype=self.dtype)
        return drawn.unflatten(1, (self.count, -1))

    def no_noise(self, count: int) -> Float[Tensor, "E P W"]:
        """For episodes of the mean plans."""
        return torch.zeros((count, self.count, self.prodmp.parameters), dtype=self.dtype)

    @torch.no_grad()
    def play(self, seeds: list[int], noise: Float[Tensor, "E P W"], *, learned_from: bool = False) -> tuple[Episodes, Plans]:
        """Episodes of the plans μ(s) + L · noise, in several rounds where there are fewer environments than seeds."""
        rounds = []
        for rows in self.plant.rounds(len(seeds)):
            context, hand = self.plant.start(seeds[rows]), _Round(self, noise[rows])
            rounds.append((self.plant.follow_anew(context, hand.plan, self.every, learned_from=learned_from), hand.drawn))
        parts = [
            [_select(drawn[index], self.begun(episodes)[index]) for episodes, drawn in rounds if index < len(drawn)]
            for index in range(self.count)
        ]
        params, mean, chol = zip(*(one for plans in parts for one in plans), strict=True)
        sizes = tuple(sum(len(one[0]) for one in plans) for plans in parts)
        factor = torch.cat(chol) if chol[0].ndim == 3 else chol[0]
        return Episodes.cat([episodes for episodes, _ in rounds]), Plans(torch.cat(params), torch.cat(mean), factor, sizes)

    def trajectory(self, index: int, params: Tensor, position: Tensor, velocity: Tensor) -> tuple[Tensor, Tensor]:
        """Desired positions and velocities [E R D] of an episode's plan number `index`, from this state [E D] on."""
        times = self.times[index * self.every : (index + 1) * self.every]
        return self.prodmp.trajectory(times, params, position, velocity, self.starts[index])

    def joints(self, observation: Array) -> tuple[Tensor, Tensor]:
        """Positions and velocities [E D] of the joints in observations [E O]."""
        position, velocity = (torch.from_numpy(x).to(self.dtype) for x in self.plant.tracking.state(observation))
        return position, velocity

    def begun(self, episodes: Episodes) -> Bool[Tensor, "P E"]:
        """Whether an episode was still played when its first plan, its second, … was due."""
        return episodes.mask[:, :: self.every].T

    def contexts(self, episodes: Episodes) -> Float[Tensor, "N O"]:
        """What the policy saw, row by row as in `Plans`."""
        return episodes.observations[:, : -1 : self.every].transpose(0, 1)[self.begun(episodes)]

    def cut(self, episodes: Episodes, values: Tensor) -> Tensor:
        """Values of every step [E T …], plan by plan [N R …], row by row as in `Plans`."""
        return values.unflatten(1, (self.count, self.every)).transpose(0, 1)[self.begun(episodes)]


class _Round:
    """The plans of episodes that are played together, made as the episodes go on."""

    def __init__(self, planner: Planner, noise: Tensor) -> None:
        self.planner, self.noise, self.drawn = planner, noise, list[tuple[Tensor, Tensor, Tensor]]()
        self.reached: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def plan(self, observation: Array) -> tuple[Array, Array]:
        """The next plans [E R D] in these states [E O]. The policy answers where it is; all that follows is on the CPU."""
        planner, index = self.planner, len(self.drawn)
        noise = self.noise[:, index]
        mean, chol = (x.cpu() for x in planner.policy(torch.from_numpy(observation).to(planner.policy.log_diagonal)))
        params = mean + ((chol @ noise[..., None])[..., 0] if chol.ndim == 3 else noise @ chol.mT)
        state = planner.joints(observation) if self.reached is None or planner.start == "state" else self.reached
        positions, velocities = planner.trajectory(index, params, *state)
        self.drawn.append((params, mean, chol))
        self.reached = positions[:, -1], velocities[:, -1]
        return cast(tuple[Array, Array], (positions.double().numpy(), velocities.double().numpy()))


def _select(drawn: Sequence[Tensor], rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Parameters, means and factors of these rows; a factor that all share stays one."""
    params, mean, chol = drawn
    return params[rows], mean[rows], chol[rows] if chol.ndim == 3 else chol
