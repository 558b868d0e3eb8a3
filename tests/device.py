"""Where models and kernels are tested: on the GPU if there is one.

A process that shall see none is started with CUDA_VISIBLE_DEVICES="" and TRITON_INTERPRET=1 (`CPU_ONLY`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU_ONLY = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}


@contextmanager
def drawing_on_the_cpu() -> Iterator[None]:
    """Inside, tokens are drawn by the CPU's generator on every device: one seed, the same completions everywhere."""
    multinomial = torch.multinomial

    def drawn(p: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        return multinomial(p.cpu(), *args, **how).to(p.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "multinomial", drawn)
        yield
