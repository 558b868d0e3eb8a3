"""Packed forward passes: the sequences of a padded batch are joined into a single row without padding."""

import functools
import inspect
import logging
import math
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import MethodType, SimpleNamespace
from typing import Any

import psutil
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

logger = logging.getLogger(__name__)

try:
    from torch.nn.attention.varlen import varlen_attn

    _KERNEL = set(inspect.signature(varlen_attn).parameters)
except ImportError:  # torch before 2.10
    _KERNEL = set()

_PREFIX = "corral_packed_"
"""Name prefix of the attention functions that this module registers in transformers."""

packed_mask = SimpleNamespace(active=False)
"""Switch that makes transformers build no attention mask while it is active, because packed rows use `cu_seqlens` instead."""


@dataclass(frozen=True, eq=False)
class PackedRow:
    """Layout of a packed row: the index of each token in the padded batch, and the boundaries of the sequences in the row."""

    places: Int[Tensor, " N"]
    """Index of each token in the flattened padded batch [B L], ascending."""
    positions: Int[Tensor, " N"]
    """Position of each token in its sequence, from 0."""
    borders: Int[Tensor, " S"]
    """Boundaries of the sequences in a packed row, as attention kernels read them (`cu_seqlens`, int32).
    They are the index of each sequence's first token, then the number of tokens."""
    longest: int

    @classmethod
    def of(cls, mask: Bool[Tensor, "B L"]) -> "PackedRow":
        """Compute the layout of a packed row from a batch's attention mask."""
        lengths = mask.sum(-1)
        count, longest = torch.stack([lengths.sum(), lengths.max()]).tolist()  # one wait for the device
        places = mask.flatten().byte().argsort(descending=True, stable=True)[:count]
        positions = (mask.cumsum(-1) - 1).flatten()[places]
        return cls(places, positions, nn.functional.pad(lengths.cumsum(0), (1, 0)).int(), longest)

    def pack(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Pack the arguments of TRL's model call into one row. The first token of each sequence gets no label."""
        ids, labels = (inputs[name].flatten()[self.places] for name in ("input_ids", "labels"))
        borders = {"cu_seq_lens_q": self.borders, "cu_seq_lens_k": self.borders}
        return inputs | borders | {
            "input_ids": ids[None], "attention_mask": None, "position_ids": self.positions[None],
            "labels": labels.masked_fill(self.positions == 0, -100)[None],
            "max_length_q": self.longest, "max_length_k": self.longest,
        }  # fmt: skip

    def unpack(self, values: Float[Tensor, "1 N"], shape: torch.Size) -> Float[Tensor, "B L"]:
        """Put a packed row's results for labels back into the shape of the padded batch, 0 at labels that are not scored."""
        row, column = self.places[1:] // (shape[1] + 1), self.places[1:] % (shape[1] + 1)
        # A label in the first column of the batch predicts nothing: it has the value 0, which is added anywhere.
        target = (row * shape[1] + column - 1).clamp(min=0)
        return values.new_zeros(shape.numel()).index_add(0, target, values[0]).view(shape)


def why_padded(model: PreTrainedModel) -> str | None:
    """Return the reason why a model's batches must stay padded, as a phrase for a message, or None if they can be packed."""
    kind, own = type(model).__name__, model.config._attn_implementation
    if model.config.get_text_config() is not model.config:
        return f"{kind} reads more than text"
    if model._is_stateful:
        return f"{kind} has layers with a state that would run on from one sequence into the next"
    if not (model._supports_attention_backend and model._supports_flash_attn) or not getattr(model.config, "is_causal", True):
        return f"the attention of {kind} cannot be given the borders of sequences"
    if not (own in ("sdpa", "eager") or own.startswith(_PREFIX) or "flash_attention" in own):
        return f"attn_implementation={own!r} cannot be given the borders of sequences"
    return None


def can_pack(model: PreTrainedModel, why: str | None, *, verify: bool) -> bool:
    """Prepare a model for packed rows and return True, or log the reason why its batches stay padded and return False.

    Its attention function is replaced by one that reads the borders of sequences where it is given them, and is the same
    function elsewhere. With `verify`, hidden states of two short sequences are compared with those of the padded batch.
    `why` is a reason found elsewhere.
    """
    before, why = model.config._attn_implementation, why or why_padded(model)
    if why is None:
        if before in ("sdpa", "eager"):
            model.config._attn_implementation = _PREFIX + before
        if verify and not _agrees(model):
            why = f"packed and padded hidden states of {type(model).__name__} differ"
            model.config._attn_implementation = before
    if why is not None:
        logger.warning("Batches are padded, not packed: %s. Updates take longer where lengths differ.", why)
    return why is None


@torch.no_grad()
def _agrees(model: PreTrainedModel) -> bool:
    """True if packed sequences do not attend to each other: the model's hidden states match those of the padded batch."""
    size, device, training = model.config.vocab_size, model.device, model.training
    ids = torch.arange(10, device=device).view(2, 5) % size
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, 0] = False
    row = PackedRow.of(mask)
    packed = row.pack({"input_ids": ids, "labels": ids})
    del packed["labels"]
    joined = {"input_ids": packed["input_ids"], "attention_mask": None, "position_ids": torch.arange(9, device=device)[None]}
    half = torch.float16 if model.dtype == torch.float32 and not torch.cuda.is_bf16_supported() else torch.bfloat16
    model.eval()
    try:
        # Kernels for packed rows are of half precision.
        with torch.autocast("cuda", half) if device.type == "cuda" else nullcontext():
            padded, joint = (
                model.base_model(**inputs, use_cache=False).last_hidden_state.float()
                for inputs in ({"input_ids": ids, "attention_mask": mask.long()}, joined)
            )
            packed_mask.active = True
            found = model.base_model(**packed, use_cache=False).last_hidden_state.float()
    finally:
        packed_mask.active = False
        model.train(training)
    expected = padded.flatten(0, 1)[row.places]
    return float((found[0] - expected).norm()) < 0.2 * float((joint[0] - expected).norm())


def compile_layers(model: PreTrainedModel) -> None:
    """Compile the decoder layers for packed rows of any length. Padded batches and generation are not compiled.

    All layers of a class share what is compiled. A failure to compile is one line of the log, and the layers run as they are.
    """
    kinds = {type(layer) for layer in model.modules() if type(layer).__name__ in (model._no_split_modules or ())}
    for kind in kinds:
        forward = _compiled_forward(kind.forward)
        for layer in model.modules():
            if type(layer) is kind:
                layer.forward = MethodType(forward, layer)


def _compiled_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Compile the forward function of a layer for packed rows. If compiling fails, the layer runs uncompiled."""
    compiled, works, timed = torch.compile(forward, dynamic=True), True, set[bool]()

    @functools.wraps(forward)
    def run(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        nonlocal works
        if not works or kwargs.get("cu_seq_lens_q") is None:
            return forward(layer, *args, **kwargs)
        start, trains = time.perf_counter(), torch.is_grad_enabled()
        try:
            found = compiled(layer, *args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # a compiler of kernels may fail in any way
            works = False
            logger.warning("Layers are not compiled, because that failed: %s.", str(error).strip().split("\n")[0][:200])
            return forward(layer, *args, **kwargs)
        if trains not in timed:
            timed.add(trains)
            what = "updates, whose backward pass follows" if trains else "passes without a gradient"
            logger.info("Compiling %s for %s took %.1f s.", type(layer).__name__, what, time.perf_counter() - start)
        return found

    return run


def _attend(
    whole: Callable[..., Any] | None, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    dropout: float = 0.0, scaling: float | None = None, sliding_window: int | None = None,
    cu_seq_lens_q: Tensor | None = None, max_length_q: int | None = None, **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Attention function for transformers that also takes packed rows.

    `whole` is the function for padded batches; None is the model's own eager function.
    """
    function = whole or vars(sys.modules[type(module).__module__])["eager_attention_forward"]
    settings = {"dropout": dropout, "scaling": scaling, "sliding_window": sliding_window} | kwargs
    if cu_seq_lens_q is None or max_length_q is None:
        found: tuple[Tensor, Tensor | None] = function(module, query, key, value, attention_mask, **settings)
        return found
    if whole is not None and not dropout and _fits_kernel(query, value):
        return _by_kernel(query, key, value, scaling, sliding_window, cu_seq_lens_q, max_length_q), None
    return _by_padding(function, module, (query, key, value), settings, cu_seq_lens_q, max_length_q), None


def _compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a matrix product of this tensor is computed, which autocast may change."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _fits_kernel(query: Tensor, value: Tensor) -> bool:
    """True if torch's variable-length attention supports these tensors, which depends on device, precision and head size."""
    half = _compute_dtype(query) in (torch.float16, torch.bfloat16)
    size = query.shape[-1]
    return query.is_cuda and "window_size" in _KERNEL and half and size == value.shape[-1] and size <= 256 and size % 8 == 0


def _by_kernel(
    query: Float[Tensor, "1 Q N D"], key: Float[Tensor, "1 P N D"], value: Float[Tensor, "1 P N D"],
    scaling: float | None, window: int | None, borders: Int[Tensor, " S"], longest: int,
) -> Float[Tensor, "1 N Q D"]:  # fmt: skip
    """Compute attention within each packed sequence with the kernel `torch.nn.attention.varlen`."""
    dtype = _compute_dtype(query)
    query, key, value = (x[0].transpose(0, 1).to(dtype) for x in (query, key, value))
    how: dict[str, Any] = {"scale": scaling, "window_size": (-1 if window is None else window - 1, 0)}
    if "enable_gqa" in _KERNEL:
        how["enable_gqa"] = query.shape[1] != key.shape[1]
    else:  # torch before 2.12
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    found = varlen_attn(query, key, value, borders, borders, longest, longest, **how)
    assert isinstance(found, Tensor)  # without `return_aux`
    return found[None]


# A compiled layer would be compiled anew for every number of sequences.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _by_padding(
    function: Callable[..., Any], module: Any, heads: tuple[Tensor, ...], settings: dict[str, Any],
    borders: Int[Tensor, " S"], longest: int,
) -> Float[Tensor, "1 N Q D"]:  # fmt: skip
    """Compute attention within each packed sequence by padding queries, keys and values for this operation alone.

    A token attends to nothing behind it, so that padding on the right takes no mask.
    """
    count, sequences = heads[0].shape[2], len(borders) - 1
    row = torch.repeat_interleave(torch.arange(sequences, device=borders.device), borders.diff(), output_size=count)
    places = torch.arange(count, device=borders.device) + (row * longest - borders[row])
    query, key, value = (
        x.new_zeros(sequences * longest, x.shape[1], x.shape[3])
        .index_copy(0, places, x[0].transpose(0, 1))
        .view(sequences, longest, x.shape[1], x.shape[3])
        .transpose(1, 2)
        for x in heads
    )
    window, mask = settings["sliding_window"], None
    if function is not sdpa_attention_forward or (window is not None and window < longest):
        step = torch.arange(longest, device=borders.device)
        mask = step[:, None] >= step
        if window is not None:
            mask &= step[:, None] < step + window
        if function is not sdpa_attention_forward:
            mask = torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
        mask = mask[None, None]
    found: Tensor = function(module, query, key, value, mask, **settings)[0]
    return found.flatten(0, 1).index_select(0, places)[None]


def _mask(own: str, *args: Any, **kwargs: Any) -> Any:
    """Mask function for transformers: returns None for a packed row, otherwise the mask of the attention function `own`."""
    return None if packed_mask.active else ALL_MASK_ATTENTION_FUNCTIONS[own](*args, **kwargs)


for _name, _whole in (("sdpa", sdpa_attention_forward), ("eager", None)):
    AttentionInterface.register(_PREFIX + _name, functools.partial(_attend, _whole))
    AttentionMaskInterface.register(_PREFIX + _name, functools.partial(_mask, _name))


SHARE = 0.7
"""Share of the free memory that activations of forward passes may use."""
LEAST = 4096
"""Number of tokens per pass that a GPU needs for fast matrix products.
With fewer tokens, layers are checkpointed to make room for larger passes."""


def fit_tokens(room: float, kept: float, layer: float, layers: int, *, longest: int, needed: int) -> tuple[int, bool]:
    """Compute how many tokens of a pass fit into memory, and whether this number needs gradient checkpointing.

        tokens = room / kept, or with checkpointing room / (kept / layers + layers · layer)

    It is a power of two, so that small changes of the free memory change no rounding, or the longest sequence if that is
    longer.

    Args:
        room: bytes for what passes keep.
        kept: bytes that a token keeps without checkpointing.
        layer: bytes of a token's hidden state, which checkpointing keeps for each of the `layers`.
        longest: tokens of the longest sequence.
        needed: tokens below which layers are checkpointed.
    """
    checkpoints = room / kept < needed
    tokens = room / (kept / layers + layers * layer if checkpoints else kept)
    return max(longest, 2 ** int(math.log2(max(tokens, 1)))), checkpoints


def bytes_per_token(call: Callable[[int], Any], tokens: int = 128) -> float:
    """Measure how many bytes per token a forward pass keeps for its backward pass, with two calls of different length.

    Args:
        call: function that makes a forward pass of the given number of tokens and returns its results.
    """
    kept = []
    for count in (tokens, 2 * tokens):  # weights in half precision are kept too, whatever the number of tokens
        storages: dict[int, int] = {}

        def keep(x: Tensor, storages: dict[int, int] = storages) -> Tensor:
            storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
            results = call(count)
        kept.append(sum(storages.values()))
        del results  # until here no storage is used again
    return (kept[1] - kept[0]) / tokens


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device in bytes, including unused memory that torch has reserved on a GPU."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


ORDER = "corral_order"
"""Key in TRL's rollout buffer for each sequence's position in the order of packing."""


def in_order(batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put the sequences of TRL's shuffled buffer back into the order in which they were packed."""
    order = torch.cat([batch[ORDER] for batch in batches]).argsort()
    size = len(batches[0][ORDER])
    found = [dict(batch) for batch in batches]
    for name, value in batches[0].items():
        if isinstance(value, Tensor) and value.ndim:
            parts = torch.cat([batch[name] for batch in batches])[order].split(size)
        elif isinstance(value, list):
            rows = [row for batch in batches for row in batch[name]]
            parts = [[rows[i] for i in part] for part in order.split(size)]
        else:
            continue
        for batch, part in zip(found, parts, strict=True):
            batch[name] = part
    for batch in found:
        del batch[ORDER]
    return found


def cut(lengths: list[int], most: int | None) -> list[slice]:
    """Group consecutive sequences into pieces of at most `most` tokens each. A longer sequence is a piece of its own."""
    starts, tokens = [0], 0
    for i, length in enumerate(lengths):
        if most is not None and i > starts[-1] and tokens + length > most:
            starts.append(i)
            tokens = 0
        tokens += length
    return [slice(a, b) for a, b in zip(starts, [*starts[1:], len(lengths)], strict=True)]


def halve(pieces: list[slice], count: int) -> list[slice]:
    """Halve the pieces of a micro-batch that have the most sequences, until there are `count` pieces."""
    pieces = list(pieces)
    while len(pieces) < count:
        i = max(range(len(pieces)), key=lambda i: pieces[i].stop - pieces[i].start)
        begin, end = pieces[i].start, pieces[i].stop
        pieces[i : i + 1] = [slice(begin, (begin + end) // 2), slice((begin + end) // 2, end)]
    return pieces
