"""Nearest match of misspelt names, and refusal of unknown settings."""

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

ALSO_CALLED = {
    "ppo": "ppo_clip", "grpo": "ppo_clip", "dapo": "clip_higher", "dpo": "dppo", "epsilon": "bound", "delta": "bound",
}  # fmt: skip
"""What papers and other libraries call something that has another name here; its nearest match in letters is none."""


def nearest(name: object, known: Iterable[str]) -> str:
    """The end of a message on an unknown name: the nearest match, and all known names."""
    known = sorted(known)
    typed = str(name).lower().replace("-", "_")
    meant = ALSO_CALLED.get(typed)
    # Recipes have hyphens of their own, so the name is also tried as it was typed.
    close = [meant] if meant in known else get_close_matches(typed, known, n=1) or get_close_matches(str(name), known, n=1)
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
