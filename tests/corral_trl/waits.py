"""Where the host would have to wait for a GPU, found on the CPU: whatever needs a number, or as many rows as there are.

    with Waits() as waits:
        loss.backward()
    waits.places            # {"trainer.py: _compute_loss": 1, …}

What Triton's interpreter does in the place of a kernel does not count.
"""

import sys
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import interpreter

from corral.head.rows import AsyncCopy

OF_A_NUMBER = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_dim", "bincount"}
BY_A_MASK = {"index", "index_put", "index_put_", "_index_put_impl_"}
"""Which wait where an index is a mask: its True places have to be counted."""
OURS = ("/corral/", "/trl/")


class Waits(TorchDispatchMode):
    """Counts them by the file and the function of corral's or TRL's that is nearest."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._patched: list[tuple[Any, str, Any]] = []
        self._inside = 0
        """How many calls deep in one that has been counted, or that does not count."""

    def __enter__(self) -> "Waits":
        self._patch(Tensor, "tolist")
        self._patch(AsyncCopy, "wait")
        self._patch(interpreter.GridExecutor, "__call__", counts=False)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for owner, name, original in self._patched:
            setattr(owner, name, original)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in BY_A_MASK and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
        if name in OF_A_NUMBER or by_mask:
            self._count()
        return func(*args, **(kwargs or {}))

    def _patch(self, owner: Any, name: str, *, counts: bool = True) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            if counts:
                self._count()
            self._inside += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._inside -= 1

        self._patched.append((owner, name, original))
        setattr(owner, name, watched)

    def _count(self) -> None:
        if self._inside:
            return
        frame = sys._getframe(1)
        while frame is not None and not any(part in frame.f_code.co_filename for part in OURS):
            frame = frame.f_back
        place = f"{frame.f_code.co_filename.rpartition('/')[2]}: {frame.f_code.co_name}" if frame is not None else "elsewhere"
        self.places[place] += 1
