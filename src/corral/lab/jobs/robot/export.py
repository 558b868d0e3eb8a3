"""Export of a trained robot policy to a file that needs only NumPy, with a check of its motions against joint limits."""

import io
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from corral.lab.jobs.robot import exported
from corral.lab.jobs.robot.exported import FORMAT
from corral.lab.jobs.robot.prepare import STATE, restored
from corral.lab.jobs.robot.settings import EPISODIC
from corral.lab.run.files import write_whole
from corral.robot.learner import Learner
from corral.robot.policy import ACTIVATIONS
from corral.robot.prodmp import ProDMP
from corral.robot.tracking import Array
from corral.validate import RunError, run_errors

_Bound = float | Sequence[float]
"""Limit of a joint quantity: one number for all joints, or one number per joint."""


@dataclass(frozen=True, kw_only=True)
class JointLimits:
    """Limits of joint positions, velocities and accelerations. They are infinite by default."""

    position: tuple[_Bound, _Bound] = (-np.inf, np.inf)
    """Smallest and largest joint position, in rad or m."""
    velocity: _Bound = np.inf
    """Largest absolute joint velocity, in rad/s or m/s."""
    acceleration: _Bound = np.inf
    """Largest absolute joint acceleration, in rad/s² or m/s²."""

    def array(self, dof: int) -> Array:
        """Return the smallest and largest position, velocity and acceleration of each joint as an array [3 2 D]."""
        pairs = [self.position, *((-np.asarray(x), x) for x in (self.velocity, self.acceleration))]
        try:
            out = np.array([[np.broadcast_to(np.asarray(x, float), dof) for x in pair] for pair in pairs])
        except ValueError:
            raise ValueError(f"JointLimits: each is one number, or one for each of {dof} joints; got {self}.") from None
        if not (out[:, 0] < out[:, 1]).all():
            raise ValueError(
                f"JointLimits: the least must lie below the largest, velocities and accelerations above 0; got {self}."
            )
        return out


def export_policy(
    learner: Learner, path: str | Path, *, contexts: Array | None = None, limits: JointLimits | None = None, refuse: bool = True
) -> list[str]:
    """Write a policy's mean plan as a function of the context to `path`.npz, with a Python loader `path`.py beside it.

    Nothing is written if a plan for one of `contexts` leaves the limits, unless `refuse` is False. The file carries the
    limits either way, and its loader refuses every plan beyond them.

    Args:
        contexts: first observations to check [E O]; needed with `limits`. `plant.start(held_out_seeds(n))` draws some.
        limits: none are checked without them.
    Returns:
        Violations of the limits, in words.
    """
    path = Path(path)
    loader, program = path.with_suffix(".py"), Path(exported.__file__).read_bytes()
    if path.suffix != ".npz" or not path.with_suffix("").name.isidentifier():
        raise ValueError(f"export_policy: `path` ends in .npz, with a name that Python can import; got {str(path)!r}.")
    count = 0 if contexts is None else len(contexts)
    if contexts is not None and learner.plant.elapsed_is_added:
        contexts = contexts[..., :-1]
    if limits is not None and not count:
        raise ValueError("export_policy: limits are checked over contexts; pass some, as plant.start(seeds) returns them.")
    if loader.exists() and loader.read_bytes().splitlines()[:1] != program.splitlines()[:1]:
        raise ValueError(f"export_policy: {loader} is there already and is no loader of a policy. Choose another name.")
    content = io.BytesIO(_archive(learner, (limits or JointLimits()).array(learner.prodmp.dof)))
    found = exported.load(content).violations(contexts) if limits is not None else []
    if found and refuse:
        raise ValueError(
            f"export_policy: plans for {count} contexts leave the limits: {'; '.join(found)}. Train with a penalty, "
            f"widen the limits, or pass refuse=False to write a file whose loader refuses such plans one by one."
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(loader, lambda beside: beside.write_bytes(program))
    write_whole(path, lambda beside: beside.write_bytes(content.getvalue()))
    return found


def export_run(run: Path, path: Path, *, checkpoint: str = "latest") -> int:
    """Export a checkpoint of a run as .npz or .pt2, without joint limits, and return the checkpoint's step."""
    with restored(run, checkpoint) as (settings, agent, chosen, _):
        if settings.algorithm not in EPISODIC:
            raise RunError(
                f"{run} was trained with {settings.algorithm}, which has no plans to export. Its policy is in "
                f"checkpoints/checkpoint-…/{STATE}."
            )
        with run_errors():
            export_program(agent, path) if path.suffix == ".pt2" else export_policy(agent, path)
    return chosen.step


class _Program(nn.Module):
    """Torch module that plans positions, velocities and accelerations [3 E T D] from contexts [E O], as the .npz loader."""

    def __init__(self, policy: exported.ExportedPolicy) -> None:
        super().__init__()
        self.about, self.joints = policy.about, policy.limits.shape[-1]
        for name, value in (("basis", policy.basis), ("start", policy.start)):
            self.register_buffer(name, torch.from_numpy(value))
        for index, pair in enumerate(policy.layers):
            self.register_buffer(f"weight_{index}", torch.from_numpy(pair[0]))
            self.register_buffer(f"bias_{index}", torch.from_numpy(pair[1]))

    def forward(self, context: Tensor) -> Tensor:
        layer = context
        for index in range(self.about["layers"]):
            layer = ACTIVATIONS[self.about["activation"]]()(layer) if index else layer
            layer = nn.functional.linear(layer, self.get_buffer(f"weight_{index}"), self.get_buffer(f"bias_{index}"))
        state = torch.stack([context[:, slice(*self.about[key])] for key in ("joints", "velocities")], -1)
        plan = torch.einsum("ktm,edm->ketd", self.get_buffer("basis"), layer.unflatten(-1, (self.joints, -1)))
        return plan + torch.einsum("kts,eds->ketd", self.get_buffer("start"), state)


def export_program(learner: Learner, path: str | Path) -> None:
    """Write a policy's mean plans as a float64 program for `torch.export.load(path).module()(contexts)`.

    Contexts are [E O], E ≥ 1, and plans positions, velocities and accelerations [3 E T D]. No joint limits are checked.
    """
    path = Path(path)
    policy = exported.load(io.BytesIO(_archive(learner, JointLimits().array(learner.prodmp.dof))))
    contexts = torch.zeros(2, policy.layers[0][0].shape[1], dtype=torch.float64)
    program = torch.export.export(_Program(policy), (contexts,), dynamic_shapes={"context": {0: torch.export.Dim.DYNAMIC}})
    torch.export.save(program, content := io.BytesIO())
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, lambda beside: beside.write_bytes(content.getvalue()))


def _archive(learner: Learner, limits: Array) -> bytes:
    """Build the content of the .npz file in float64: policy network, trajectory as linear maps, and joint limits."""
    if learner.planner.count > 1:
        raise ValueError(
            f"export_policy: a file holds one plan per episode, and this policy plans anew every {learner.planner.every} "
            f"steps. Train it without `replan_every`."
        )
    prodmp, tracking, policy = learner.prodmp, learner.plant.tracking, learner.policy
    layers = [[_array(layer.weight), _array(layer.bias)] for layer in policy.mean if isinstance(layer, nn.Linear)]
    if policy.normalised:  # (c − m) / s is a matter of the first layer
        (weight, bias), mean = layers[0], _array(policy.context_mean)
        weight = weight / _array(policy.context_std)
        layers[0] = [weight, bias - weight @ mean]
    if learner.plant.elapsed_is_added:  # 0 in every context, and not among what the environment itself observes
        layers[0][0] = layers[0][0][:, :-1]
    about = {
        "format": FORMAT,
        "algorithm": learner.name,
        "iteration": learner.iteration,
        "activation": learner.config.activation,
        "layers": len(layers),
        "joints": tracking.joints,
        "velocities": tracking.velocities,
        "prodmp": asdict(prodmp),
        "tracking": asdict(tracking),
    }
    basis, start = tables(prodmp, learner.planner.times)
    arrays: dict[str, Any] = {"times": _array(learner.planner.times), "basis": _array(basis), "start": _array(start)}
    arrays["limits"] = limits
    for index, (weight, bias) in enumerate(layers):
        arrays |= {f"weight_{index}": weight, f"bias_{index}": bias}
    content = io.BytesIO()  # given a name, NumPy would add its own ending
    told = np.array(json.dumps(about, default=lambda x: np.asarray(x).tolist()))  # gains may be arrays
    np.savez(content, about=told, **arrays)
    return content.getvalue()


def tables(prodmp: ProDMP, times: Tensor) -> tuple[Tensor, Tensor]:
    """Compute linear maps from parameters [3 T M] and start state [3 T 2] to positions, velocities and accelerations.

    Acceleration is the derivative of the velocity's columns, each of which depends on its own time alone.
    """
    times = times.detach().double().requires_grad_()
    design = prodmp.design(times)
    velocity = torch.cat([design.velocity, design.start[:, 1]], -1)
    slopes = [torch.autograd.grad(column.sum(), times, retain_graph=True)[0] for column in velocity.unbind(-1)]
    acceleration = torch.stack(slopes, -1)
    basis = torch.stack([design.position, design.velocity, acceleration[:, : prodmp.columns]])
    return basis.detach(), torch.stack([*design.start.unbind(1), acceleration[:, prodmp.columns :]]).detach()


def _array(x: Tensor) -> Array:
    return x.detach().cpu().double().numpy()
