"""Loader for a robot policy exported as a single .npz file. It needs only NumPy, and is copied next to every export.

    from POLICY import load                       # POLICY.py and POLICY.npz lie side by side
    plan = load("POLICY.npz")
    y, v, a = plan(context)                       # joint positions, velocities and accelerations [T D] at plan.times [T]

A context is an observation at rest before an episode, [O] or [E O]; `plan.about` says what the file was made from.
A plan beyond the limits that the file carries is refused.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

FORMAT = "corral plan 1"
ACTIVATIONS: dict[str, Callable[[Any], Any]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
    "leaky_relu": lambda x: np.where(x > 0, x, 0.01 * x),
}
_ORDERS = ("position", "velocity", "acceleration")


@dataclass(frozen=True)
class ExportedPolicy:
    """Exported robot policy that maps a context to a trajectory, by a small network and two linear maps."""

    about: dict[str, Any]
    """Settings of the policy's trajectory and controller, and other metadata."""
    layers: list[tuple[Any, Any]]
    """Weights [out in] and biases [out] of each layer of the policy network."""
    times: Any
    """Times in seconds of the planned steps [T]."""
    basis: Any
    """Linear map [3 T M] from a joint's trajectory parameters to its positions, velocities and accelerations."""
    start: Any
    """Linear map [3 T 2] from a joint's initial position and velocity to its positions, velocities and accelerations."""
    limits: Any
    """Lower and upper limits on position, velocity and acceleration of each joint [3 2 D]; ±inf where there is no limit."""

    def parameters(self, context: Any) -> Any:
        """Compute trajectory parameters [* W], the output of the policy network for a context."""
        x = np.asarray(context, np.float64)
        if x.shape[-1:] != self.layers[0][0].shape[1:]:
            raise ValueError(f"plan: a context has {self.layers[0][0].shape[1]} numbers; got {x.shape}.")
        for weight, bias in self.layers[:-1]:
            x = ACTIVATIONS[self.about["activation"]](x @ weight.T + bias)
        return x @ self.layers[-1][0].T + self.layers[-1][1]

    def unchecked(self, context: Any) -> Any:
        """Plan positions, velocities and accelerations [3 * T D] for a context, without a check of the joint limits."""
        context = np.asarray(context, np.float64)
        state = [context[..., slice(*self.about[key])] for key in ("joints", "velocities")]
        params = self.parameters(context)
        params = params.reshape(*params.shape[:-1], self.limits.shape[-1], -1)  # joint by joint
        plan = np.einsum("ktm,...dm->k...td", self.basis, params)
        return plan + np.einsum("kts,...ds->k...td", self.start, np.stack(state, -1))

    def violations(self, context: Any) -> list[str]:
        """Return one sentence for each planned quantity that exceeds the joint limits, or an empty list."""
        plan, found = self.unchecked(context), []
        for order, name in enumerate(_ORDERS):
            worst = plan[order].reshape(-1, plan.shape[-1])
            for joint, (low, high) in enumerate(self.limits[order].T):
                least, most = worst[:, joint].min(), worst[:, joint].max()
                if not (low <= least and most <= high):  # NaN is a violation too
                    found.append(f"{name} of joint {joint}: {least:.4g} … {most:.4g}, allowed {low:.4g} … {high:.4g}")
        return found

    def __call__(self, context: Any) -> Any:
        """Plan positions, velocities and accelerations [3 * T D] for a context. Raises ValueError beyond the joint limits."""
        found = self.violations(context)
        if found:
            raise ValueError("plan: beyond the limits. " + "; ".join(found) + ".")
        return self.unchecked(context)


def load(path: Any) -> ExportedPolicy:
    """Read an exported policy from an .npz file."""
    with np.load(path, allow_pickle=False) as file:
        about = json.loads(str(file["about"])) if "about" in file else {}
        if about.get("format") != FORMAT:
            raise ValueError(f"{path} is not a file of the form {FORMAT!r}; got {about.get('format')!r}.")
        layers = [(file[f"weight_{i}"], file[f"bias_{i}"]) for i in range(about["layers"])]
        return ExportedPolicy(about, layers, *(file[key] for key in ("times", "basis", "start", "limits")))
