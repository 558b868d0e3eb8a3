"""Draw docs/tce.svg: the columns of a ProDMP, trajectories drawn from a Gaussian over its parameters, and their correlation.

python scripts/tce_figure.py        (needs matplotlib)
"""

from pathlib import Path

import matplotlib
import torch

from corral.lab.run.files import write_whole
from corral.robot import ProDMP

matplotlib.use("svg")
import matplotlib.pyplot as plt

TARGET = Path(__file__).parents[1] / "docs" / "tce.svg"
STEPS, START, PAIR = 100, 0.4, (35, 55)
BLUE, GREY, RED = "#2563eb", "#9ca3af", "#dc2626"


def main() -> None:
    torch.manual_seed(3)
    plt.rcParams.update(
        {"font.size": 9, "svg.hashsalt": "corral", "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False}
    )
    prodmp = ProDMP(1, 8, 2.0, alpha=10.0, weights_scale=0.3, goal_scale=0.3, auto_scale=True)
    times = prodmp.tau * torch.arange(1, STEPS + 1).double() / STEPS
    rows = prodmp.design(times).position / torch.tensor([0.3] * 9, dtype=torch.float64)
    mean = torch.linspace(1.5, -0.5, 9).double()
    cov = prodmp.covariance(times, torch.eye(9).double())
    state = torch.tensor([START]).double(), torch.zeros(1).double()
    centre = prodmp.trajectory(times, mean, *state)[0][:, 0]
    drawn = prodmp.trajectory(times, mean + torch.randn(12, 9).double(), *state)[0][..., 0]
    std = cov.diag().sqrt()

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(11, 3.1), layout="constrained")
    left.plot(times, rows[:, :-1], color=BLUE, linewidth=1)
    left.plot(times, rows[:, -1], color=RED, linewidth=1.5)
    left.set(title="columns: 8 weights (blue), the goal (red)", xlabel="time [s]", xlim=(0, 2))

    middle.fill_between(times, centre - 2 * std, centre + 2 * std, color=BLUE, alpha=0.12, linewidth=0)
    middle.plot(times, drawn.T, color=GREY, linewidth=0.8)
    middle.plot(times, drawn[0], color=BLUE, linewidth=1.6)
    middle.plot(times[list(PAIR)], drawn[0, list(PAIR)], "o-", color=RED, linewidth=1, markersize=5)
    middle.set(title="one draw per episode, one pair of points", xlabel="time [s]", ylabel="position", xlim=(0, 2))

    image = right.imshow(
        cov / std / std[:, None], origin="lower", extent=(0, 2, 0, 2), vmin=-1, vmax=1, cmap="RdBu_r", interpolation="none"
    )
    right.set(title="correlation between two times", xlabel="time [s]", ylabel="time [s]")
    figure.colorbar(image, ax=right, shrink=0.9)
    write_whole(TARGET, lambda beside: figure.savefig(beside, format="svg", metadata={"Date": None}))


if __name__ == "__main__":
    main()
