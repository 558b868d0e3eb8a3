"""Desired joint states → actions."""

import numpy as np
import pytest

from corral.robot.tracking import Tracking

OBSERVATION = np.array([9.0, 0.5, -1.0, 0.1, 0.2, 9.0])  # joints at 1:3, velocities at 3:5
PLAN = np.array([1.0, 0.0]), np.array([0.0, 1.0])


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("torque", [(2 * 0.5 + 3 * -0.1) / 2, (2 * 1.0 + 3 * 0.8) / 2]),
        ("velocity", [(0.0 + 2 * 0.5) / 2, (1.0 + 2 * 1.0) / 2]),
        ("position", [0.5, 0.0]),
    ],
)
def test_golden_commands(command: str, expected: list[float]) -> None:
    tracking = Tracking(joints=(1, 3), velocities=(3, 5), command=command, p=2.0, d=3.0, scale=2.0)  # type: ignore[arg-type]
    np.testing.assert_allclose(tracking.action(*PLAN, OBSERVATION), expected, rtol=1e-15)


def test_gains_may_differ_by_joint_and_batches_broadcast() -> None:
    tracking = Tracking(joints=(1, 3), velocities=(3, 5), p=(1.0, 0.0), d=(0.0, 1.0))
    batch = tracking.action(np.stack([PLAN[0]] * 4), np.stack([PLAN[1]] * 4), np.stack([OBSERVATION] * 4))
    np.testing.assert_allclose(batch, [[0.5, 0.8]] * 4)


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"command": "force"}, "one of torque, velocity, position; got 'force'"),
        ({"velocities": (3, 6)}, "ranges of the same length"),
        ({"velocities": (-1, 1)}, "`velocities` is a range"),
        ({"joints": (3, 3), "velocities": (3, 3)}, "`joints` is a range .*; got .3, 3."),
        ({"p": (1.0, 2.0, 3.0)}, "`p` is one finite number, or one for each of 2 joints"),
        ({"d": float("nan")}, "`d` is one finite number"),
        ({"scale": (1.0, 0.0)}, "`scale` is what an action of 1 stands for, and not 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Tracking(**{"joints": (1, 3), "velocities": (3, 5)} | settings)
