"""Shared set-up: float64 draws, one thread per worker, one hypothesis profile, no GPU needed."""

import functools
import gc
import importlib.metadata
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import jaxtyping
import pytest
import torch
from hypothesis import HealthCheck, settings

import typecheck  # noqa: F401 - its decorator is in place before corral is imported
from long import is_long, is_of_study

# Reproducible by default; HYPOTHESIS_PROFILE=explore draws new examples, and more of them; `make check` draws a few.
settings.register_profile(
    "corral", deadline=None, max_examples=60, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("few", settings.get_profile("corral"), max_examples=12)
settings.register_profile("explore", deadline=None, max_examples=1000, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "corral"))

importlib.metadata.metadata = functools.cache(importlib.metadata.metadata)  # accelerate reads peft's at every update

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels run on the CPU then; Triton reads it when it is first imported
    # A seed for devices that are not there is kept until they are, each time with the stack of whoever set it: milliseconds.
    torch.cuda.manual_seed_all = torch.xpu.manual_seed_all = torch.mtia.manual_seed_all = lambda seed: None

torch.set_num_threads(1)  # two workers that each take every core are far slower than one
os.environ.setdefault("OMP_NUM_THREADS", "1")  # and so for the processes that tests start
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")  # importing it would warn, and warnings are errors
gc.disable()  # until everything is imported: looking for garbage meanwhile costs a second in six, and finds none


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without long tests, and without those of the studies, their files are not even imported: TRL alone takes five seconds."""
    chosen = config.getoption("markexpr")
    left_out = ("not long" in chosen and is_long(collection_path)) or ("not results" in chosen and is_of_study(collection_path))
    return left_out or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_long(item.path):
            item.add_marker(pytest.mark.long)
        if is_of_study(item.path):
            item.add_marker(pytest.mark.results)
        if item.get_closest_marker("gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported stays: transformers collects garbage in every run, and would look through all of it each time."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> None:
    """Processes that a shell began in the background ignore Ctrl-C, which some tests send themselves."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers whatever ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def full_precision() -> Iterator[None]:
    """No test leaves TF32 behind, which would put float32 GEMMs of later tests off by 3e-4 on a GPU."""
    yield
    assert torch.get_float32_matmul_precision() == "highest", "torch.set_float32_matmul_precision was called and not undone"


@pytest.fixture
def unchecked_shapes() -> Iterator[None]:
    """Shape annotations are not enforced, as in production: for tests of our own errors, and of `torch.compile`."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
