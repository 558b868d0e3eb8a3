"""Variables under which verl runs on a CPU; nothing here imports it."""

ENVIRONMENT = {
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform", "VERL_PLATFORM": "cpu", "VERL_ENGINE_DEVICE": "cuda", "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    "TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip
"""The platform of cpu_platform.py, and the engine classes that are registered for GPUs."""
