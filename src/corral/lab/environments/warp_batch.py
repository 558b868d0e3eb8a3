"""Simulation of many copies on a GPU in float32 by MuJoCo Warp, with the interface of MuJoCo's own batch."""

from collections.abc import Callable
from functools import partial
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from corral.robot.tracking import Array
from corral.validate import pip_install

try:
    import mujoco_warp
    import warp
except ImportError as error:
    raise ImportError(f"corral.lab.environments.warp_batch needs MuJoCo Warp: {pip_install('warp')}.") from error

warp.config.log_level = warp.LOG_WARNING  # or it names every kernel that it compiles, some hundred
_WRITTEN = ("time", "qpos", "qvel", "ctrl", "mocap_pos", "mocap_quat", "qacc_warmstart")
"""MjData fields that tasks and resets write. Before a call they are uploaded if they differ from the values on the device."""
_KEPT = frozenset({"ctrl", "mocap_pos", "mocap_quat", "qacc_warmstart"})
"""MjData fields that are not downloaded after a simulation call, because tasks do not read their changes.
Only the last of these fields changes, and no task reads it."""
_CONTACTS, _ROWS = 32, 128
"""Largest numbers of contacts and of constraint rows per simulated copy.
Random pushes of the box needed at most 9 and 29."""
_LARGEST = 1e10
"""Largest valid position or velocity in a simulation, as in MuJoCo itself."""
_FULL = mujoco_warp.OverflowType.ALL & ~(mujoco_warp.OverflowType.ITERATIONS | mujoco_warp.OverflowType.LS_ITERATIONS)
"""Overflow flags of MuJoCo Warp that raise an error.
The limit of solver iterations is not one of them, since MuJoCo has it too."""


class WarpBatch:
    """Subset of the interface of `mujoco.batch.Batch` that corral's tasks use, simulated by MuJoCo Warp.

    Fields are arrays on the host, in float64, as tasks read and write them; the state stays on the device between calls. All
    substeps of a call are one CUDA graph. On the device "cpu", which is slow and for tests, they are launched one by one.
    """

    def __init__(self, model: mujoco.MjModel, copies: int, device: str | None = None) -> None:
        self.model, self.copies, self.device = model, copies, warp.get_device(device)
        with warp.ScopedDevice(self.device):
            self._model = mujoco_warp.put_model(model)
            self._data = mujoco_warp.make_data(model, copies, nconmax=_CONTACTS, njmax=_ROWS)
        self._model.opt.warn_overflow = 0  # an error instead, below
        self._template, self._calls = mujoco.MjData(model), dict[int, Callable[[], None]]()
        self._host: dict[str, Array] = {}
        self._sent: dict[str, Array] = {}
        for name in _WRITTEN:
            self.bind(name)

    def bind(self, name: str) -> Array:
        """Return the MjData field of this name for all copies of the simulation, as an array [E …]."""
        if name not in self._host:
            shape = (self.copies, *np.shape(getattr(self._template, name)))
            self._host[name], self._sent[name] = np.zeros(shape), np.zeros(shape)
            self._download(name)
        return self._host[name]

    def __getattr__(self, name: str) -> Array:
        """Return a field given its name in MjData, as an attribute like those of MuJoCo's batch."""
        if name.startswith("_"):
            raise AttributeError(name)
        return self.bind(name)

    def step(self, ids: NDArray[np.integer] | None = None, nstep: int = 1, stage: int | None = None) -> None:
        """Advance all copies by `nstep` substeps and compute all derived fields. `ids` and `stage` are ignored.

        Diverged copies are reset to time 0, as in MuJoCo's batch.
        """
        self._call(nstep)
        state = np.concatenate([self.qpos, self.qvel], -1)
        self.time[~(np.abs(state) < _LARGEST).all(-1)] = 0.0

    def forward(self, rows: NDArray[np.integer] | None = None) -> None:
        """Compute all derived fields of every copy. Unchanged copies get equal results."""
        self._call(0)

    def reset(self, rows: NDArray[np.integer] | slice = slice(None), stage: int | None = None) -> None:
        """Reset the simulated copies `rows` to time 0, at rest in the model's initial pose.

        The next call of the simulator computes derived fields.
        """
        self._download("qacc_warmstart")
        self.qpos[rows] = self.model.qpos0
        for name in ("time", "qvel", "ctrl", "qacc_warmstart"):
            self._host[name][rows] = 0.0

    def _call(self, substeps: int) -> None:
        """Upload changed fields to the device, simulate, and download fields that may have changed."""
        if substeps not in self._calls:
            self._calls[substeps] = self._prepare(substeps)
        for name in _WRITTEN:
            if not np.array_equal(self._host[name], self._sent[name]):
                self._field(name).assign(self._host[name].astype(np.float32))
                self._sent[name][:] = self._host[name]
        self._calls[substeps]()
        for name in self._host.keys() - _KEPT:
            self._download(name)
        if full := int(np.bitwise_or.reduce(self._data.overflow.numpy())) & _FULL:
            raise RuntimeError(
                f"MuJoCo Warp had no room for all contacts of a copy: {mujoco_warp.OverflowType(full)!r}. corral allots "
                f"{_CONTACTS} contacts and {_ROWS} constraint rows each; use simulator=mujoco, which has no such limit."
            )

    def _prepare(self, substeps: int) -> Callable[[], None]:
        """Prepare a simulation of `substeps` substeps as a function. On a GPU, it is captured as a CUDA graph."""

        def launch() -> None:
            with warp.ScopedDevice(self.device):  # or kernels go to the GPU of a machine that has one, wherever the data are
                for _ in range(substeps):
                    mujoco_warp.step(self._model, self._data)
                mujoco_warp.forward(self._model, self._data)

        if not self.device.is_cuda:
            return launch
        before = {name: self._field(name).numpy() for name in _WRITTEN}
        launch()  # compiles the kernels, which a capture cannot, and moves the state on
        for name, value in before.items():
            self._field(name).assign(value)
        with warp.ScopedCapture(self.device) as capture:
            launch()
        return partial(warp.capture_launch, capture.graph)

    def _field(self, name: str) -> Any:
        """Return Warp's array of a field, given the field's name in MjData."""
        return getattr(self._data, name)

    def _download(self, name: str) -> None:
        """Copy a field from the device to the host."""
        self._host[name][:] = self._field(name).numpy().reshape(self._host[name].shape)
        self._sent[name][:] = self._host[name]


class WarpSimulator:
    """Factory of MuJoCo Warp batches, cached by the number of copies because building a CUDA graph takes seconds."""

    def __init__(self, device: str | None = None) -> None:
        if device is None and not warp.is_cuda_available():
            raise ValueError("simulator='warp' simulates on a GPU, and Warp finds none. Use 'mujoco', also to resume a run.")
        self.device, self._batches = device, dict[int, WarpBatch]()

    def __call__(self, model: mujoco.MjModel, copies: int, threads: int) -> WarpBatch:
        """Return a simulation batch in its initial state. `threads` is ignored, as it concerns only CPUs."""
        if copies not in self._batches:
            self._batches[copies] = WarpBatch(model, copies, self.device)
        batch = self._batches[copies]
        batch.reset()
        return batch
