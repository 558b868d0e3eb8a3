"""verl on a CPU, for tests: it has no such platform, but loads one named in VERL_USE_EXTERNAL_MODULES.

Its engines run on gloo there.
"""

import os
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry


def _nothing(*args: Any, **kwargs: Any) -> int:
    return 0


_IGNORED = (
    "max_memory_allocated max_memory_reserved memory_allocated memory_reserved empty_cache ipc_collect synchronize set_device "
    "reset_peak_memory_stats manual_seed manual_seed_all device_count"
)
_DEVICE = SimpleNamespace(
    **dict.fromkeys(_IGNORED.split(), _nothing),
    is_available=lambda: False, current_device=lambda: torch.device("cpu"), mem_get_info=lambda *_: (1 << 30, 1 << 30),
    get_device_name=lambda *_: "cpu", get_rng_state=torch.get_rng_state, set_rng_state=torch.set_rng_state,
)  # fmt: skip


@PlatformRegistry.register(platform="cpu")
class PlatformCPU(PlatformBase):
    """Everything that verl asks of a device, answered for a CPU."""

    device_name = vendor_name = "cpu"
    device_module = _DEVICE

    def is_available(self) -> bool:
        return True

    def is_platform_available(self, use_smi_check: bool = False) -> bool:
        return os.environ.get("VERL_PLATFORM") == "cpu"

    def current_device(self) -> Any:
        return torch.device("cpu")

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        # verl asks just before it sets up "cpu:gloo,DEVICE:BACKEND", where torch takes a device once; it keeps what is there.
        if "WORLD_SIZE" in os.environ and not torch.distributed.is_initialized():
            torch.distributed.init_process_group("gloo", init_method=os.environ.get("DIST_INIT_METHOD"))
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    def nvtx_range(self, msg: str) -> Any:
        return nullcontext()

    def ray_resource_name(self) -> str:
        return "CPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False

    set_device = synchronize = manual_seed = manual_seed_all = _nothing
    set_allocator_settings = empty_cache = profiler_start = profiler_stop = cudart = _nothing
