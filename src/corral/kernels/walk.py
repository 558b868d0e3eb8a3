"""How the streamed product walks through its tiles: as is usual, or as was measured to be best on this very GPU.

What was measured is kept in a file, and only `corral bench walk` measures: no first call takes longer than the others. A walk
changes how long a product takes and nothing else: every sum is made in the same order.
"""

import dataclasses
import functools
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class Walk:
    """Row blocks that go down one column of tiles together, sharing its weights; and steps that are loaded ahead."""

    group: int
    stages: int


CANDIDATES = [Walk(group, stages) for stages in (2, 3, 4) for group in (4, 8, 16, 32, 64)]


def usual_walk(width: int, stages: int, *, stored: bool) -> Walk:
    """Without a measurement: best on an H200. What is stored of the logits takes the memory of a step."""
    return Walk(16 if width >= 2048 else 32, min(stages, 3) if stored else stages)


def walk_of(hidden: Tensor, stages: int, *, stored: bool) -> Walk:
    """For rows [N, H] of this dtype on this device; `stages` is what its tile has memory for."""
    width = hidden.shape[-1]
    found = None
    if hidden.is_cuda:
        found = _remembered(cache_file()).get(_key(_gpu(hidden.device), hidden.dtype, width, stored=stored))
    return usual_walk(width, stages, stored=stored) if found is None else found


def remember(hidden: Tensor, walk: Walk, *, stored: bool) -> Path:
    """Keep a walk for products like this one; the file is written whole."""
    path = cache_file()
    walks = {**_remembered(path), _key(_gpu(hidden.device), hidden.dtype, hidden.shape[-1], stored=stored): walk}
    text = json.dumps({key: dataclasses.asdict(value) for key, value in sorted(walks.items())}, indent=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as partial:
        partial.write(text + "\n")
    os.replace(partial.name, path)
    _remembered.cache_clear()
    return path


def cache_file() -> Path:
    """Where measured walks are kept."""
    return _within(os.environ.get("XDG_CACHE_HOME"))


@functools.cache  # where the home is takes longer to find out than to start a kernel
def _within(caches: str | None) -> Path:
    return Path(caches or Path.home() / ".cache") / "corral" / "walks.json"


def _key(gpu: str, dtype: torch.dtype, width: int, *, stored: bool) -> str:
    return f"{gpu}, {str(dtype).removeprefix('torch.')}, width {width}{', stored' if stored else ''}"


@functools.cache
def _gpu(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@functools.cache
def _remembered(path: Path) -> dict[str, Walk]:
    """Read once in a process."""
    try:
        return {key: Walk(**value) for key, value in json.loads(path.read_text()).items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"corral: {path} is no list of walks ({error}). Delete it; `corral bench walk` makes it again."
        ) from error
