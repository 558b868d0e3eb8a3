"""slime's `--save-debug-train-data` files: one rollout each, loaded as tensors and plain values alone."""

import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from corral.audit.dump.completion import LoggedCompletion, take_completion
from corral.audit.dump.record import DumpRecord
from corral.validate import RunError

_FIELDS = ("tokens", "response_lengths", "loss_masks", "advantages", "log_probs", "rollout_log_probs")


def read_slime(path: Path) -> Iterator[LoggedCompletion]:
    """Completions of one file, of the flat form (`samples`) or of the older one (`rollout_data`). No code of it is run."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
        reason = "it holds objects that only code of its own could make" if "Unsupported" in str(error) else "it is damaged"
        raise RunError(f"{path} cannot be loaded as tensors and plain values: {reason}.") from None
    record = DumpRecord(content, str(path))
    step = record.whole("rollout_id", 0) or 0
    for number, sample in enumerate(_samples(record)):
        yield _read_sample(DumpRecord(sample, f"{record.where}, sample {number}"), step)


def _samples(record: DumpRecord) -> list[Any]:
    """One mapping per completion."""
    samples = record.content.get("samples")
    if isinstance(samples, list):
        return samples
    data = record.content.get("rollout_data")
    if not isinstance(data, Mapping):
        raise record.error("is no file of --save-debug-train-data: it has neither `samples` nor `rollout_data`.")
    missing = [name for name in _FIELDS if not isinstance(data.get(name), list | tuple)]
    if missing:
        raise record.error(f"has no list `{missing[0]}` in `rollout_data`.")
    counts = {len(data[name]) for name in _FIELDS}
    if len(counts) > 1:
        raise record.error("has fields of different lengths in `rollout_data`.")
    return [dict(zip(_FIELDS, values, strict=True)) for values in zip(*(data[name] for name in _FIELDS), strict=True)]


def _read_sample(sample: DumpRecord, step: int) -> LoggedCompletion:
    """Tokens include the prompt; all other fields are those of the response."""
    plain = {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in sample.content.items()
        if name in (*_FIELDS, "rewards")
    }
    record = DumpRecord(plain, sample.where)
    length = record.whole("response_lengths")
    ids = record.ids("tokens")
    if length is None or not 0 <= length <= len(ids):
        raise record.error(f"`response_lengths` should be between 0 and {len(ids)}, the number of tokens.")
    return take_completion(
        step=step,
        tokens=ids[len(ids) - length :],
        mask=record.flags("loss_masks", length) if record.has("loss_masks") else np.ones(length, dtype=np.bool_),
        advantages=record.numbers("advantages", length),
        logp_old=record.log_probs("rollout_log_probs", length),
        logp_new=record.log_probs("log_probs", length),
        reward=record.number("rewards"),
    )
