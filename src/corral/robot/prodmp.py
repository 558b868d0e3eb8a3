"""ProDMP movement primitives: smooth trajectories from any start state, linear in their parameters.
Velocities and covariances are computed too."""

import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, wraps
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from corral.numerics import at_least_float32, expm1_minus, without_autocast
from corral.validate import require

_Built = TypeVar("_Built")

_HORIZON = 6
"""Longest time after the delay for which a plan can be evaluated, in multiples of its time scale τ.
With the default phase the force has decayed to e^−18 by then."""

NODES = 10
"""Number of nodes of the Gauss–Legendre quadrature in each panel of a plan's force integral."""


def _constant(build: Callable[["ProDMP"], _Built]) -> "cached_property[_Built]":
    """Turn a method into a cached property that holds plain CPU tensors, whatever the autograd mode and default device."""

    @wraps(build)
    def plain(prodmp: "ProDMP") -> _Built:
        with torch.inference_mode(False), torch.no_grad(), torch.device("cpu"):
            return build(prodmp)

    return cached_property(plain)


@dataclass(frozen=True, eq=False)
class Design:
    """Linear map from trajectory parameters and start state to the desired positions and velocities of one joint.

    (y, v) = (position, velocity) @ params + start @ (y_b, v_b)
    """

    position: Float[Tensor, "*b T M"]
    """Derivative ∂y/∂params of one joint's positions by its n weights and its goal, at T times."""
    velocity: Float[Tensor, "*b T M"]
    """Derivative ∂v/∂params of one joint's velocities by its n weights and its goal, at T times."""
    start: Float[Tensor, "*b T 2 2"]
    """Derivative ∂(y, v)/∂(y_b, v_b) of position and velocity by position and velocity at the start."""

    def to(self, like: Tensor) -> "Design":
        """Move the linear map to the dtype and device of the tensor `like`."""
        return Design(self.position.to(like), self.velocity.to(like), self.start.to(like))


@dataclass(frozen=True)
class ProDMP:
    """Movement primitive (ProDMP): a critically damped spring towards a goal, with a learned force that fades over time.

        τ² y″ = α (α/4 (g − y) − τ y′) + x Σ_i w_i ψ_i(x)        x = e^{−α_x s},   s = max(0, (t − delay)/τ)

    From (y_b, v_b) at time t_b on, with a = α/2 and u = s − s_b, the solution is linear in state, weights and goal:

        y = ξ₁ y_b + ξ₂ τ v_b + Σ_i w_i (Φ_i(s) − ξ₁ Φ_i(s_b) − ξ₂ Φ_i′(s_b)) + g Φ_g(u)
        ξ₁ = (1 + a u) e^{−a u}        ξ₂ = u e^{−a u}        Φ_g(u) = 1 − ξ₁
        Φ_i(s) = ∫₀ˢ (s − z) e^{−a(s − z)} x(z) ψ_i(x(z)) dz

    ψ_i are normalised Gaussians in x, centred at equal steps of time over [delay, delay + τ]. Every exponential decays,
    so a late start loses no digits. Velocity is the exact derivative: 0 before the delay, where a plan rests at y_b.

    A frozen value: nothing depends on earlier calls. Φ is tabulated once at the ends of short panels, in float64, and
    integrated to rounding from there, so that results are differentiable in parameters, state and time.

    Ref:
        Li et al. 2023, arXiv:2210.01531. Invariant: a plan made anew from any state on its way is the same plan.
    """

    dof: int
    """Number D of joints of the robot."""
    basis: int
    """Number n of force weights per joint.
    Parameters are [w_1 … w_n, goal] of joint 1, then of joint 2, …"""
    tau: float
    """Time τ in seconds over which the centres of the basis functions are spread."""
    _: KW_ONLY
    alpha: float = 25.0
    """Stiffness α of the spring towards the goal. Without force, the motion decays as e^{−α s / 2}, with s = time / τ."""
    alpha_phase: float = 3.0
    """Rate α_x at which the learned force fades over time."""
    bandwidth: float = 3.0
    """Narrowness of the basis functions ψ_i: the precision in phase x is bandwidth / (distance to the next centre)²."""
    delay: float = 0.0
    """Time in seconds that the robot rests before the motion begins."""
    weights_scale: float = 1.0
    """Factor on the force weights: the weight in effect at a parameter of 1."""
    goal_scale: float = 1.0
    """Factor on the goal: the goal in effect at a parameter of 1."""
    auto_scale: bool = False
    """True to divide each parameter's effect by its largest value over time, so that all parameters have similar effects."""
    relative_goal: bool = False
    """True if goal parameters are offsets from the start position y_b, False if they are positions."""

    def __post_init__(self) -> None:
        require(self, "dof", "basis", at_least=1, integer=True)
        require(self, "tau", "alpha", "alpha_phase", "bandwidth", "weights_scale", "goal_scale", above=0, finite=True)
        require(self, "delay", at_least=0, finite=True, what="a number of seconds")

    @property
    def columns(self) -> int:
        """Number M of trajectory parameters per joint: n force weights and one goal."""
        return self.basis + 1

    @property
    def parameters(self) -> int:
        """Number W of parameters of a plan over all D joints: W = D (n + 1)."""
        return self.dof * self.columns

    @without_autocast
    def trajectory(
        self,
        times: Float[Tensor, "*t T"],
        params: Float[Tensor, "*p W"],
        position: Float[Tensor, "*q D"],
        velocity: Float[Tensor, "*r D"],
        start_time: float | Float[Tensor, "*s"] = 0.0,
    ) -> tuple[Float[Tensor, "*b T D"], Float[Tensor, "*b T D"]]:
        """Compute desired positions and velocities at given times from trajectory parameters. Leading axes broadcast.

        Args:
            times: seconds [T], or [*, T] where plans differ. Earlier than `start_time`, the curve that leads to its state.
            params: [*, W]; results have its dtype (float32 at least) and device.
            position, velocity: the state y_b, v_b at `start_time` [*, D]; at rest if that is before the delay.
            start_time: t_b, one for all plans or one per plan [*].
        Returns:
            Positions and velocities [*, T, D].
        """
        self._check("params", params, self.parameters)
        self._check("position", position, self.dof)
        self._check("velocity", velocity, self.dof)
        waits = torch.as_tensor(start_time, device=velocity.device) < self.delay
        if self.delay and bool((waits[..., None] & (velocity != 0)).any()):
            raise ValueError(
                f"ProDMP: a plan rests until its delay of {self.delay:g} s is over and cannot start earlier with a velocity; "
                f"got up to {velocity.abs().max().item():g}. Pass zeros, or a later start_time."
            )
        params = at_least_float32(params)
        design = self._design(times, start_time).to(params)
        weights = params.unflatten(-1, (self.dof, self.columns))
        # The state is two more parameters of each joint: one GEMM with [T, M + 2] for all plans and joints.
        state = torch.stack(torch.broadcast_tensors(position.to(params), velocity.to(params)), -1)
        batch = torch.broadcast_shapes(weights.shape[:-1], state.shape[:-1])
        inputs = torch.cat([weights.expand(*batch, -1), state.expand(*batch, -1)], -1)
        y, v = (
            torch.einsum("...tm,...dm->...td", torch.cat([columns, start], -1), inputs)
            for columns, start in zip((design.position, design.velocity), design.start.unbind(-2), strict=True)
        )
        return y, v

    @without_autocast
    def covariance(
        self, times: Float[Tensor, "*t T"], cov: Float[Tensor, "*c W W"], start_time: float | Float[Tensor, "*s"] = 0.0
    ) -> Float[Tensor, "*b DT DT"]:
        """Covariance of the desired positions if the parameters have covariance `cov` and the start state is exact.

            Cov = (I_D ⊗ H) Σ (I_D ⊗ H)ᵀ

        Args:
            times: seconds [T] or [*, T].
            cov: Σ [*, W, W].
            start_time: t_b, one for all plans or one per plan [*].
        Returns:
            [*, D·T, D·T], joint by joint: entry (d T + i, e T + j) belongs to joint d at time i and joint e at time j.
        """
        self._check("cov", cov, self.parameters)
        if cov.shape[-2:] != 2 * (self.parameters,):
            raise ValueError(f"ProDMP: `cov` is square, {self.parameters} × {self.parameters}; got {list(cov.shape)}.")
        cov = at_least_float32(cov)
        rows = self._design(times, start_time).to(cov).position
        blocks = cov.unflatten(-1, (self.dof, self.columns)).unflatten(-3, (self.dof, self.columns))
        return torch.einsum("...im,...dmen,...jn->...diej", rows, blocks, rows).flatten(-2).flatten(-3, -2)

    def absolute(self, params: Float[Tensor, "*p W"], position: Float[Tensor, "*p D"]) -> Float[Tensor, "*p W"]:
        """Convert goal parameters that are offsets to absolute positions, given the start position.
        Absolute goals stay unchanged.

        `replace(prodmp, relative_goal=False)` makes the same plans of them, and from any state on their way too.
        """
        if not self.relative_goal:
            return params
        weights = params.unflatten(-1, (self.dof, self.columns))
        goals = weights[..., -1] + position.to(params) / self._scale[-1].to(params)
        return torch.cat([weights[..., :-1], goals[..., None]], -1).flatten(-2)

    def design(self, times: Float[Tensor, "*t T"], start_time: float | Float[Tensor, "*s"] = 0.0) -> Design:
        """Compute the linear map from parameters and start state to positions and velocities, with the dtype of `times`.
        It is on the device of `times`."""
        return self._design(times, start_time).to(times)

    def _design(self, times: Tensor, start_time: float | Tensor) -> Design:
        """Compute the plan's linear map in float64 on the CPU, once for the whole batch. Gradients flow back to `times`."""
        if not times.is_floating_point() or not times.ndim:
            raise ValueError(f"ProDMP: `times` is [*, T] in seconds, floating point; got {list(times.shape)} {times.dtype}.")
        times = times.cpu().double()
        begin = torch.as_tensor(start_time, dtype=torch.float64, device="cpu")[..., None]
        s, s_b = (((t - self.delay) / self.tau).clamp(min=0) for t in (times, begin))
        for name, x in (("times", s), ("start_time", s_b)):
            if x.numel() and not bool((x <= _HORIZON * (1 + 1e-6)).all()):
                raise ValueError(
                    f"ProDMP: `{name}` must end by {_HORIZON} τ + delay = {_HORIZON * self.tau + self.delay:g} s; got "
                    f"{x.max().item() * self.tau + self.delay:g} s. Use a longer tau."
                )
        free = _free(s - s_b, self.alpha / 2)  # [* T 2 2]
        forced = self._response(s) - free @ self._response(s_b)  # [* T 2 n]
        goal = _goal(s - s_b, self.alpha / 2)  # [* T 2]
        columns = torch.cat([forced, goal[..., None]], -1) * self._scale
        start = torch.stack([free[..., 0] + goal if self.relative_goal else free[..., 0], self.tau * free[..., 1]], -1)
        rate = torch.stack([torch.ones_like(times), (times >= self.delay) / times.new_tensor(self.tau)], -1)[..., None]
        position, velocity = (columns * rate).unbind(-2)
        return Design(position, velocity, start * rate)

    def _response(self, s: Tensor) -> Tensor:
        """Compute the spring's response Φ to each basis force, and its derivative Φ′, at scaled times s, as [*, 2, n]."""
        width, table = self._table
        panel = (s.detach() / width).long().clamp(max=len(table) - 1)
        begin = panel.double() * width
        return _free(s - begin, self.alpha / 2) @ table[panel] + self._push(begin, s - begin)

    def _push(self, begin: Tensor, u: Tensor) -> Tensor:
        """Integrate the basis forces over part of a panel: ∫₀ᵘ (G, G′)(u − z) x ψ_i(x) dz [*, 2, n], added to Φ and Φ′."""
        (node, weight), (centre, precision) = self._rule, self._gaussians
        rest = u[..., None] * (1 - node)  # u − z
        green = _free(rest, self.alpha / 2)[..., 1]  # (G, G′) is the answer to a unit velocity
        x = torch.exp(-self.alpha_phase * (begin[..., None] + u[..., None] * node))[..., None]
        log_psi = -0.5 * precision * (x - centre) ** 2
        # Normalised by softmax: past the end all of many narrow ψ underflow, and 0/0 would follow. One alone is not normalised.
        force = x * (log_psi.softmax(-1) if self.basis > 1 else log_psi.exp())  # [* m n]
        return torch.einsum("...mk,...mi->...ki", green * (u[..., None] * weight)[..., None], force)

    @_constant
    def _rule(self) -> tuple[Tensor, Tensor]:
        """Compute the m nodes and weights of the Gauss–Legendre quadrature on [0, 1] by Golub and Welsch (1969)."""
        k = torch.arange(1, NODES, dtype=torch.float64)
        off = k / (4 * k * k - 1).sqrt()
        node, vector = torch.linalg.eigh(torch.diag(off, -1) + torch.diag(off, 1))
        return (node + 1) / 2, vector[0] ** 2

    @_constant
    def _gaussians(self) -> tuple[Tensor, Tensor]:
        """Compute the centres and precisions [n] of the Gaussian basis functions ψ in the phase x."""
        if self.basis == 1:
            centre, precision = torch.tensor([[math.exp(-0.5 * self.alpha_phase)], [self.bandwidth]], dtype=torch.float64)
            return centre, precision
        s = torch.arange(self.basis + 1, dtype=torch.float64) / (self.basis - 1)
        centre = torch.exp(-self.alpha_phase * s)
        gap = centre.diff()
        if self.basis == 2:
            gap[-1] *= 2
        return centre[:-1], self.bandwidth / gap**2

    @_constant
    def _table(self) -> tuple[float, Tensor]:
        """Compute the width of a quadrature panel, and the responses Φ, Φ′ at the start of each panel [P, 2, n].

        A quarter of the centres' distance, less for narrower ψ, resolves the force to rounding with ten nodes; half a time
        constant of spring and phase does the same for them.
        """
        finest = max(4 * self.basis * max(1.0, self.bandwidth / 3), self.alpha, 2 * self.alpha_phase)
        panels = math.ceil(_HORIZON * finest)
        width = _HORIZON / panels
        begin = torch.arange(panels, dtype=torch.float64) * width
        pushes = self._push(begin, torch.full_like(begin, width))
        carry = _free(torch.tensor(width, dtype=torch.float64), self.alpha / 2)
        states = [torch.zeros_like(pushes[0])]
        for push in pushes[:-1]:
            states.append(carry @ states[-1] + push)
        return width, torch.stack(states)

    @_constant
    def _scale(self) -> Tensor:
        """Compute the factor on each of a joint's M parameters, for its n force weights and its goal."""
        scale = torch.tensor([self.weights_scale] * self.basis + [self.goal_scale], dtype=torch.float64)
        if not self.auto_scale:
            return scale
        s = torch.linspace(0, _HORIZON, 1000 * _HORIZON + 1, dtype=torch.float64)
        peak = torch.cat([self._response(s)[:, 0], _goal(s, self.alpha / 2)[:, :1]], -1).amax(0)
        return scale / peak

    def _check(self, name: str, x: Tensor, size: int) -> None:
        if not x.is_floating_point() or x.shape[-1:] != (size,):
            raise ValueError(
                f"ProDMP: `{name}` has {size} entries on its last axis for {self.dof} joints and {self.basis} weights each, "
                f"floating point; got {list(x.shape)} {x.dtype}."
            )


def _free(u: Tensor, a: float) -> Tensor:
    """Compute the spring's motion without force after scaled time u, from unit position and from unit velocity: [*, 2, 2]."""
    decay = torch.exp(-a * u)
    rows = [torch.stack([1 + a * u, u], -1), torch.stack([-a * a * u, 1 - a * u], -1)]
    return torch.stack(rows, -2) * decay[..., None, None]


def _goal(u: Tensor, a: float) -> Tensor:
    """Compute the spring's response Φ_g = 1 − (1 + a u) e^{−a u} to the goal, and its derivative [*, 2].
    Both are accurate at small u too."""
    z = a * u
    return torch.stack([-z * torch.expm1(-z) - expm1_minus(-z), a * z * torch.exp(-z)], -1)
