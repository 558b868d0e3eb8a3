"""Nearest match of misspelt names, and refusal of unknown settings."""

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

ALSO_CALLED = {
    "ppo": ["ppo_clip"], "grpo": ["ppo_clip"], "dapo": ["clip_higher"], "dpo": ["dppo"], "epsilon": ["bound", "clip_low"],
    "delta": ["bound"], "epsilon_low": ["clip_low"], "epsilon_high": ["clip_high"], "lr": ["learning_rate"],
    "rate": ["learning_rate"], "batch_size": ["per_device_train_batch_size"], "max_tokens": ["max_completion_length"],
}  # fmt: skip
"""What papers and other libraries call something that has another name here, the likeliest first; letters would not tell."""


def suggest(name: object, known: Iterable[str]) -> str:
    """The nearest match alone, where there are hundreds of names."""
    return nearest(name, known).split(" There are:")[0]


def pip_install(extra: str) -> str:
    """The command that installs an extra of corral: from the package index, and in a checkout of the source."""
    return f"pip install 'corral[{extra}]', or in a checkout pip install -e '.[{extra}]'"


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a message on an unknown name: the nearest match, and all known names."""
    known = sorted(known)
    typed = str(name).lower().replace("-", "_")
    meant = [other for other in ALSO_CALLED.get(typed, ()) if other in known][:1]
    # Recipes have hyphens of their own, so the name is also tried as it was typed.
    close = meant or get_close_matches(typed, known, n=1) or get_close_matches(str(name), known, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return f"{guess} There are: {', '.join(known) or 'none'}."


def build_config(owner: str, config_cls: type, settings: Mapping[str, Any]) -> Any:
    """`config_cls(**settings)`, with a clear refusal of settings it does not have."""
    check_keys(owner, config_cls, settings)
    return config_cls(**settings)


def check_keys(owner: str, config_cls: type, settings: Iterable[str]) -> None:
    """Refuse settings that a dataclass does not have."""
    known = [field.name for field in dataclasses.fields(config_cls) if field.init]
    for key in settings:
        if key not in known:
            raise ValueError(f"{owner}: there is no setting `{key}`.{nearest(key, known)}")
