"""NeMo-RL's own GRPO with TROLL: no copy of its script or of its loop. Run it in a checkout of NeMo-RL.

uv run python nemo_rl_troll.py examples/run_grpo.py --config examples/configs/grpo_math_1B.yaml
"""

import runpy
import sys
from typing import Any

from nemo_rl.algorithms import grpo

from corral.engines.nemo_rl import CorralLoss, keep_support

setup = grpo.setup


def setup_with_region(*args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """NeMo-RL's `setup`, with corral's loss in the place of its own, and the old policy's top 64 found before each update."""
    policy, *others = setup(*args, **kwargs)
    (place,) = (i for i, part in enumerate(others) if hasattr(part, "loss_type"))
    others[place] = CorralLoss("troll", bound=0.05)
    keep_support(policy, k=64)
    return policy, *others


if __name__ == "__main__":
    grpo.setup = setup_with_region
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
