"""Settings of `--smoke`, which runs any robot recipe in seconds: two steps, and as few episodes and updates as possible."""

from collections.abc import Mapping, Sequence
from typing import Any

_EPISODIC = {"policy_epochs": 2, "critic_epochs": 2}
_PPO = {"epochs": 1, "minibatches": 4}

TRAINING: dict[str, Any] = {
    "iterations": 2,
    "eval_every": 1,
    "eval_size": 4,
    "checkpoint_every": 1,
    "workers": 1,
    "learner": {"episodes": 4},
    "tce": _EPISODIC,
    "bbrl": _EPISODIC,
    "top_erl": {**_EPISODIC, "warm_up": 4, "batch": 4},
    "sb3-ppo": _PPO,
    "sb3-ppo-gsde": _PPO,
    "sb3-ppo-pink": _PPO,
    "sb3-trpl": _PPO,
}
"""Settings that `--smoke` changes in a robot recipe. Environment, trajectory, bounds and networks stay unchanged."""

EPISODES = 4
"""Number of episodes that `corral eval --smoke` plays with a robot."""


def smoke_layers(layers: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add the settings of `--smoke` on top of `layers`, the settings of a recipe and a file."""
    return [TRAINING]
