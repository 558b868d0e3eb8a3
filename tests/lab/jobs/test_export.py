"""Exported policies: the same trajectories as torch's, without torch; limits are kept or said."""

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch

from corral.lab.environments import ENVIRONMENTS
from corral.lab.jobs.robot.export import JointLimits, export_policy, tables
from corral.lab.jobs.robot.exported import load
from corral.robot.bbrl import BBRL, BBRLConfig
from corral.robot.episode import Plant, held_out_seeds
from corral.robot.prodmp import ProDMP

NAME = "corral/ViaPointReacher-v0"


def agent(activation: str = "tanh", *, normalised: bool = False, **settings: object) -> BBRL:
    environment = ENVIRONMENTS[NAME]
    envs = gymnasium.make_vec(NAME, num_envs=6, vectorization_mode="vector_entry_point")
    prodmp = ProDMP(5, 3, 2.0, **{"alpha": 10.0, "auto_scale": True} | settings)
    config = BBRLConfig(episodes=6, hidden=(16, 8), activation=activation, normalise_contexts=normalised)
    learner = BBRL(Plant(envs, environment.tracking, environment.steps), prodmp, environment.dt, config)
    with torch.no_grad():
        for parameter in learner.policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return learner


@pytest.mark.parametrize(
    ("activation", "settings"),
    [("tanh", {}), ("relu", {"relative_goal": True, "weights_scale": 0.3}), ("leaky_relu", {"delay": 0.2, "goal_scale": 0.5})],
)
@pytest.mark.parametrize("normalised", [False, True])
def test_exported_trajectories_are_torch_s(
    activation: str, settings: dict[str, float], normalised: bool, tmp_path: Path
) -> None:
    learner = agent(activation, normalised=normalised, **settings)
    contexts = learner.plant.start(held_out_seeds(6))
    assert export_policy(learner, tmp_path / "policy.npz") == []
    plan = load(tmp_path / "policy.npz")
    y, v, _ = plan(contexts)
    with torch.no_grad():
        params = learner.policy(torch.from_numpy(contexts))[0]
        start = map(torch.from_numpy, learner.plant.tracking.state(contexts))
        expected = learner.prodmp.trajectory(learner.planner.times, params, *start)
    np.testing.assert_allclose(y, expected[0].numpy(), rtol=0, atol=1e-9)
    np.testing.assert_allclose(v, expected[1].numpy(), rtol=0, atol=1e-9)
    np.testing.assert_allclose(plan(contexts[2])[0], y[2], rtol=0, atol=1e-12)  # one context alone
    assert plan.about["prodmp"]["basis"] == 3
    assert plan.about["algorithm"] == "bbrl"


def test_acceleration_is_what_the_spring_says() -> None:
    # τ² y″ = α (α/4 (g − y) − τ y′) + x Σ w ψ(x): with weights 0 the force vanishes and the goal alone pulls.
    prodmp = ProDMP(1, 2, 2.0, alpha=10.0)
    times = torch.linspace(0.1, 1.9, 7, dtype=torch.float64)
    basis, start = tables(prodmp, times)
    params, state = torch.tensor([0.0, 0.0, 1.5], dtype=torch.float64), torch.tensor([0.4, -0.7], dtype=torch.float64)
    y, v, a = basis @ params + start @ state
    torch.testing.assert_close(a, 10 * (2.5 * (1.5 - y) - 2 * v) / 4, rtol=1e-10, atol=1e-10)
    # With weights, against central differences of the velocity.
    params = torch.tensor([30.0, -20.0, 1.5], dtype=torch.float64)
    ahead, behind = (tables(prodmp, times + shift) for shift in (1e-5, -1e-5))
    slope = (ahead[0][1] @ params + ahead[1][1] @ state - behind[0][1] @ params - behind[1][1] @ state) / 2e-5
    torch.testing.assert_close(basis[2] @ params + start[2] @ state, slope, rtol=1e-7, atol=1e-6)


def test_the_loader_beside_the_file_needs_numpy_alone(tmp_path: Path) -> None:
    learner = agent()
    contexts = learner.plant.start(held_out_seeds(6))
    export_policy(learner, tmp_path / "reach.npz")
    np.save(tmp_path / "contexts.npy", contexts)
    script = (
        "import sys\n"
        "for name in ('torch', 'corral', 'gymnasium', 'scipy'): sys.modules[name] = None\n"  # importing them raises
        "import numpy as np\n"
        "from reach import load\n"
        "np.save('plans.npy', load('reach.npz')(np.load('contexts.npy')))\n"
    )
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True, timeout=60)
    expected = load(tmp_path / "reach.npz")(contexts)
    np.testing.assert_allclose(np.load(tmp_path / "plans.npy"), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("limits", "kind"),
    [
        (JointLimits(position=(-0.5, 0.5)), "position"),
        (JointLimits(velocity=[9.0, 9.0, 0.01, 9.0, 9.0]), "velocity of joint 2"),
        (JointLimits(acceleration=0.01), "acceleration of joint 0"),
    ],
)
def test_limits_are_kept_or_said(limits: JointLimits, kind: str, tmp_path: Path) -> None:
    learner = agent()
    contexts = learner.plant.start(held_out_seeds(6))
    path = tmp_path / "policy.npz"
    with pytest.raises(ValueError, match=f"6 contexts leave the limits: .*{kind}"):
        export_policy(learner, path, contexts=contexts, limits=limits)
    assert not list(tmp_path.iterdir())
    found = export_policy(learner, path, contexts=contexts, limits=limits, refuse=False)
    assert any(kind in words for words in found)
    plan = load(path)
    assert plan.violations(contexts) == found
    with pytest.raises(ValueError, match="plan: beyond the limits"):
        plan(contexts)
    assert plan.unchecked(contexts).shape == (3, 6, 100, 5)


def test_wide_limits_let_all_plans_pass(tmp_path: Path) -> None:
    learner = agent()
    contexts = learner.plant.start(held_out_seeds(6))
    limits = JointLimits(position=(-100.0, [100.0] * 5), velocity=1e3, acceleration=1e4)
    assert export_policy(learner, tmp_path / "policy.npz", contexts=contexts, limits=limits) == []
    _, _, a = load(tmp_path / "policy.npz")(contexts)
    assert np.abs(a).max() < 1e4
    broken = contexts.copy()
    broken[0, 0] = np.nan
    with pytest.raises(ValueError, match="beyond the limits"):
        load(tmp_path / "policy.npz")(broken)


@pytest.mark.usefixtures("unchecked_shapes")
def test_gains_may_be_arrays(tmp_path: Path) -> None:
    learner = agent()
    learner.plant.tracking = replace(learner.plant.tracking, p=np.full(5, 10.0), d=np.float32(2.0))
    export_policy(learner, tmp_path / "reach.npz")
    about = load(tmp_path / "reach.npz").about["tracking"]
    assert (about["p"], about["d"]) == ([10.0] * 5, 2.0)


def test_a_program_of_the_same_name_is_left_alone(tmp_path: Path) -> None:
    learner, script = agent(), tmp_path / "reach.py"
    script.write_text("print('what trains the policy')\n")
    with pytest.raises(ValueError, match=r"reach\.py is there already and is no loader"):
        export_policy(learner, tmp_path / "reach.npz")
    assert [path.name for path in tmp_path.iterdir()] == ["reach.py"]
    assert script.read_text() == "print('what trains the policy')\n"
    script.unlink()
    for _ in range(2):  # an export may be made anew
        export_policy(learner, tmp_path / "reach.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["reach.npz", "reach.py"]


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    learner = agent()
    with pytest.raises(ValueError, match=r"ends in \.npz"):
        export_policy(learner, tmp_path / "my-policy.npz")
    with pytest.raises(ValueError, match="checked over contexts"):
        export_policy(learner, tmp_path / "policy.npz", limits=JointLimits(velocity=1.0))
    with pytest.raises(ValueError, match="one for each of 5 joints"):
        JointLimits(velocity=[1.0, 2.0]).array(5)
    with pytest.raises(ValueError, match="least must lie below"):
        JointLimits(position=(1.0, -1.0)).array(5)
    np.savez(tmp_path / "other.npz", x=np.zeros(3))
    with pytest.raises(ValueError, match="not a file of the form 'corral plan 1'; got None"):
        load(tmp_path / "other.npz")
    export_policy(learner, tmp_path / "policy.npz")
    with pytest.raises(ValueError, match="a context has 15 numbers"):
        load(tmp_path / "policy.npz")(np.zeros(14))


def test_the_page_s_examples_run_and_print_what_they_say(capsys: pytest.CaptureFixture[str]) -> None:
    page = "".join((Path(__file__).parents[3] / "docs" / name).read_text() for name in ("robot-learners.md", "tce.md"))
    # "no-run" alone, that is: the export goes on from the learner of the other page.
    blocks = re.findall(r"```python(?: no-run)?\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert len(blocks) == 3
    namespace: dict[str, object] = {}
    for code, printed in blocks:
        exec(code, namespace)
        assert capsys.readouterr().out == printed
