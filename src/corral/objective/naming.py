"""Names and settings that people type: near matches for the misspelt, a sentence for the unknown."""

import dataclasses
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any


def nearest(name: object, known: Iterable[str]) -> str:
    """What to say after "there is no such name": the nearest match, and everything there is."""
    known = sorted(known)
    close = get_close_matches(str(name), known, n=1)
    guess = f" Did you mean {close[0]!r}?" if close else ""
    return f"{guess} There are: {', '.join(known) or 'none'}."


def build_config(owner: str, config_cls: type, settings: Mapping[str, Any]) -> Any:
    """`config_cls(**settings)`, with a clear refusal of settings it does not have."""
    known = [field.name for field in dataclasses.fields(config_cls)]
    for key in settings:
        if key not in known:
            raise ValueError(f"{owner}: there is no setting `{key}`.{nearest(key, known)}")
    return config_cls(**settings)
