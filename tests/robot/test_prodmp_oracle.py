"""Against mp_pytorch, which tabulates the same plan with the trapezoid rule: what differs is its step, squared."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from corral.robot import ProDMP

MPFactory = pytest.importorskip("mp_pytorch.mp", reason="the oracle, mp_pytorch, is not installed").MPFactory

SETTINGS = [
    ProDMP(7, 8, 2.0, alpha=10.0, weights_scale=0.3, goal_scale=0.3, auto_scale=True),  # box pushing
    ProDMP(4, 8, 5.0, alpha=10.0, bandwidth=5.0, weights_scale=0.1, goal_scale=0.1, auto_scale=True, relative_goal=True),
    ProDMP(3, 3, 0.8, alpha=10.0, auto_scale=True),  # hopper jump
    ProDMP(7, 3, 0.75, delay=0.3, weights_scale=0.7, goal_scale=0.1, auto_scale=True, relative_goal=True),  # table tennis
    ProDMP(2, 1, 1.0),
    ProDMP(2, 2, 1.0, bandwidth=2.0),
    ProDMP(2, 25, 1.0),
]


def theirs(prodmp: ProDMP, steps: int) -> Any:
    """mp_pytorch's ProDMP with τ/steps between its table's entries."""
    logging.disable(logging.WARNING)  # it warns of a scaled goal that is not relative, as box pushing has it
    arguments = {
        "num_basis": prodmp.basis, "basis_bandwidth_factor": prodmp.bandwidth, "num_basis_outside": 0, "dt": prodmp.tau / steps,
        "alpha": prodmp.alpha, "alpha_phase": prodmp.alpha_phase, "weights_scale": prodmp.weights_scale,
        "goal_scale": prodmp.goal_scale, "auto_scale_basis": prodmp.auto_scale, "relative_goal": prodmp.relative_goal,
    }  # fmt: skip
    made = MPFactory.init_mp(
        mp_type="prodmp", mp_args=arguments, num_dof=prodmp.dof, tau=prodmp.tau, delay=prodmp.delay, dtype=torch.float64
    )
    logging.disable(logging.NOTSET)
    return made


def relative_error(a: Tensor, b: Tensor) -> float:
    return ((a - b).abs().max() / b.abs().max()).item()


def errors(prodmp: ProDMP, steps: int, begin: float) -> list[float]:
    """Relative errors of mp_pytorch's positions, velocities and covariance, at times and a start on its grid."""
    torch.manual_seed(0)
    params, factor = torch.randn(3, prodmp.parameters).double(), torch.randn(prodmp.parameters, prodmp.parameters).double()
    factor = torch.linalg.cholesky(factor @ factor.mT)
    state = torch.randn(2, 3, prodmp.dof).double()
    begin = prodmp.delay + begin * prodmp.tau
    times = begin + prodmp.tau * torch.arange(0, 21).double() / 20
    oracle = theirs(prodmp, steps)
    start = {"init_time": torch.full((3,), begin).double(), "init_pos": state[0], "init_vel": state[1]}
    oracle.update_inputs(times.expand(3, -1), params, factor.expand(3, -1, -1), **start)
    positions, velocities = prodmp.trajectory(times, params, *state, begin)
    cov = prodmp.covariance(times, factor @ factor.mT, begin)
    return [
        relative_error(oracle.get_traj_pos(), positions),
        relative_error(oracle.get_traj_vel(), velocities),
        relative_error(oracle.get_traj_pos_cov(reg=0.0)[0], cov),
    ]


@pytest.mark.parametrize("begin", [0.0, 0.5])
@pytest.mark.parametrize("prodmp", SETTINGS, ids=str)
def test_mp_pytorch_comes_closer_as_its_step_shrinks(prodmp, begin):
    # Trapezoids are of second order: a quarter of the step leaves a sixteenth of the difference. Peaks, by which columns are
    # scaled, are read off its grid, of second order too, but not as regularly.
    coarse, fine = errors(prodmp, 100, begin), errors(prodmp, 400, begin)
    for a, b in zip(coarse, fine, strict=True):
        assert a < 2e-2
        assert b < a / 6
        assert b < 1e-3
