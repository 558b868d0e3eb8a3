"""Every kernel compiles, for Ampere and for Hopper, on a machine without either."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import interpreted  # noqa: F401  (skips where there is no Triton)


@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_every_kernel_compiles(capability):
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_kernels.py")
    done = subprocess.run(
        [sys.executable, str(script), str(capability)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
