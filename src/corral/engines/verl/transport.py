"""A support on its way through verl: jagged tensors beside log-probs, from the old pass over the queue to the update."""

from typing import Any

import torch
from torch import Tensor

from corral.tensors import SparseDist

OLD, NEW = "corral_old", "corral_new"
"""Prefixes of the fields: the old policy's support, and the new policy on it."""
TOP_K, MASS = "corral_top_k", "corral_mass"
"""In a batch's extra_info, for the pass that is to keep a support."""
DEPLOYED_BOUND, DEPLOYED_STATISTIC = "corral_deployed_bound", "corral_deployed_statistic"
"""Keys of a batch's extra_info: the bound on the network's KL to the sampler's weights, and its statistic."""
DEPLOYED_SYNC = "corral_deployed_sync"
"""Key of a batch's extra_info: whether the sampler gets the weights after this batch's updates."""
_FIELDS = ("ids", "logp", "rest", "rest_max")


def write_dist(prefix: str, dist: SparseDist, offsets: Tensor) -> dict[str, Tensor]:
    """Packed rows [N K] and [N] as jagged fields [B j K] and [B j], 8 bytes for every slot; the new policy without ids."""
    names = _FIELDS if prefix == OLD else _FIELDS[1:]
    assert dist.rest_max is not None  # the head always knows it
    values = {"ids": dist.ids.to(torch.int32), "logp": dist.logp, "rest": dist.rest, "rest_max": dist.rest_max}
    return {f"{prefix}_{name}": torch.nested.nested_tensor_from_jagged(values[name], offsets) for name in names}


def read_dists(output: Any, data: Any, pad: Any) -> tuple[SparseDist, SparseDist] | None:
    """New and old policy on the old support, [B T K] of the response; None where the pass had none.

    Args:
        output: `model_output` of the update.
        data: the micro-batch.
        pad: (jagged field of whole sequences) → [B T …] of the response, shifted by one; verl's no_padding_2_padding.
    """
    if f"{OLD}_ids" not in data or f"{NEW}_logp" not in output:
        return None
    ids = pad(data[f"{OLD}_ids"]).long()
    old = SparseDist(ids, *(pad(data[f"{OLD}_{name}"]) for name in _FIELDS[1:]))
    return SparseDist(ids, *(pad(output[f"{NEW}_{name}"]) for name in _FIELDS[1:])), old


def local_rows(packed: Tensor, pad: int, rank: int, ranks: int, *, fill: float) -> Tensor:
    """This rank's share of packed rows [N …], after `pad` more at the end: as verl's Ulysses splits tokens."""
    if pad:
        packed = torch.cat([packed, packed.new_full((pad, *packed.shape[1:]), fill)])
    if len(packed) % ranks:
        raise ValueError(f"corral for verl: {len(packed)} packed tokens do not split over {ranks} sequence-parallel ranks.")
    return packed.tensor_split(ranks)[rank]
