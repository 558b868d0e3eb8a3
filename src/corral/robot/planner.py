"""Planner that draws trajectory plans from the policy, for whole episodes or anew every few steps, and plays them."""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from corral.robot.episode import Episodes, Plant
from corral.robot.policy import GaussianPolicy
from corral.robot.prodmp import ProDMP
from corral.robot.tracking import Array
from corral.tensors import Tensors

PlanStart = Literal["desired", "state"]


@dataclass(frozen=True, eq=False)
class Plans(Tensors):
    """Trajectory parameters drawn for a batch, with the mean and Cholesky factor of the policy that drew them.

    One row for each of the N plans that began: the first plans of all episodes, then the second ones, … While a batch is
    played, N stands for two axes: [P E], plan and episode.
    """

    params: Float[Tensor, "*N W"]
    mean: Float[Tensor, "*N W"]
    chol: Float[Tensor, "*c W W"]
    """Cholesky factor of the policy's covariance: one for all plans [W W], or one per plan [… W W]."""
    sizes: tuple[int, ...]
    """Number of episodes in which the first plan began, in which the second plan began, and so on."""

    def split(self) -> "list[Plans]":
        """Split the batch by position in the episode: the first plans of all episodes, the second plans, and so on."""
        if len(self.sizes) == 1:
            return [self]
        factors = self.chol.split(self.sizes) if self.chol.ndim == 3 else [self.chol] * len(self.sizes)
        parts = zip(self.params.split(self.sizes), self.mean.split(self.sizes), factors, self.sizes, strict=True)
        return [Plans(params, mean, chol, (size,)) for params, mean, chol, size in parts]


class Planner:
    """Planner that draws plans from a policy, and plays episodes in which the robot follows them.

        w_k ~ N(μ(s_t), Σ)   at t = k R,   followed for R steps from (y_b, v_b) at time t Δt on

    All plans of an episode are on one clock: a plan made anew from the desired state with the same parameters is the plan it
    replaces.

    Args:
        dt: Δt in seconds.
        every: R, a divisor of the episode's steps; all of them without it, so that an episode has P = 1 plan.
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
        """Derivatives ∂y/∂params [R M] of desired positions, for the first plan of an episode, the second plan, and so on."""

    def noise(self, count: int, seed: int) -> Float[Tensor, "E P W"]:
        """Draw standard normal noise [E P W] for the P plans of each of `count` episodes."""
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.randn((count, self.count * self.prodmp.parameters), generator=generator, dtype=self.dtype)
        return drawn.unflatten(1, (self.count, -1))

    @torch.no_grad()
    def play(
        self, seeds: list[int], noise: Float[Tensor, "E P W"] | None, *, learned_from: bool = False
    ) -> tuple[Episodes, Plans]:
        """Play episodes with the plans μ(s) + L · noise, or with the mean plans if `noise` is None.

        They are played in several rounds where there are fewer environments than seeds.
        """
        size, width, shared = len(seeds), self.prodmp.parameters, self.policy.covariance is None
        params, mean = torch.zeros(2, self.count, size, width, dtype=self.dtype)
        chol = params.new_zeros((width, width) if shared else (self.count, size, width, width))
        played = []
        for rows in self.plant.rounds(size):
            drawn = Plans(params[:, rows], mean[:, rows], chol if shared else chol[:, rows], ())
            played.append(self._play_round(seeds[rows], None if noise is None else noise[rows], drawn, learned_from))
        episodes = Episodes.cat(played)
        begun = self.begun(episodes)
        sizes = tuple(begun.sum(-1).tolist())
        return episodes, Plans(params[begun], mean[begun], chol if shared else chol[begun], sizes)

    def _play_round(self, seeds: list[int], noise: Tensor | None, drawn: Plans, learned_from: bool) -> Episodes:
        """Play at most one episode per environment, and write the drawn plans into `drawn`."""
        context, index = self.plant.start(seeds, learned_from=learned_from), 0
        reached: tuple[Tensor, Tensor] | None = None

        def plan(observation: Array) -> tuple[Array, Array]:
            """Plan the next motion of each environment: observations [E O] to positions and velocities [E R D] of R steps.
            The policy runs on its own device, all else on the CPU."""
            nonlocal index, reached
            mean, chol = (x.cpu() for x in self.policy(torch.from_numpy(observation).to(self.policy.log_diagonal)))
            params = mean
            if noise is not None:
                own = noise[:, index]
                params = mean + ((chol @ own[..., None])[..., 0] if chol.ndim == 3 else own @ chol.mT)
            drawn.params[index], drawn.mean[index] = params, mean
            (drawn.chol if chol.ndim == 2 else drawn.chol[index]).copy_(chol)
            if reached is None or self.start == "state":
                position, velocity = self.plant.tracking.state(torch.from_numpy(observation))
                reached = position.to(self.dtype), velocity.to(self.dtype)
            times = self.times[index * self.every : (index + 1) * self.every]
            positions, velocities = self.prodmp.trajectory(times, params, *reached, self.starts[index])
            index, reached = index + 1, (positions[:, -1], velocities[:, -1])
            return cast(tuple[Array, Array], (positions.double().numpy(), velocities.double().numpy()))

        return self.plant.follow_anew(context, plan, self.every)

    def begun(self, episodes: Episodes) -> Bool[Tensor, "P E"]:
        """Return a mask [P E], True for plans that began because their episode was still running."""
        return episodes.mask[:, :: self.every].T

    def contexts(self, episodes: Episodes) -> Float[Tensor, "N O"]:
        """Collect the observation from which each plan was made, in the order of `Plans`."""
        return self.cut(episodes, episodes.observations[:, :-1])[:, 0].contiguous()

    def cut(self, episodes: Episodes, values: Tensor) -> Tensor:
        """Split per-step values [E T …] into one row per plan [N R …], in the order of `Plans`."""
        if self.count == 1:
            return values
        return values.unflatten(1, (self.count, self.every)).transpose(0, 1)[self.begun(episodes)]
