"""Replacement of a causal model's output layer by corral's LM head, which never stores all logits.

FSDP unshards a module's parameters for the time of its forward, and hangs its backward hooks on what that returns. So corral's
head runs inside the forward of the model's own, and everything that a gradient flows through is returned in one tensor.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from corral.head import HeadOutput, lm_head
from corral.head.dispatch import choose
from corral.head.logits import LogitSpec
from corral.head.policy_loss import TOLERANCE
from corral.head.torch.head_kl import HeadStates, head_kl_both_ways
from corral.tensors import PackedSparseDist, SparseDist

_LOGP, _ENTROPY, _REST, _REST_MAX, _SUPPORT = range(5)
"""Column indices of the tensor that the model's forward returns: log-prob, entropy, tail mass, and top-k log-probs.
`_REST` is the log tail mass and `_REST_MAX` the largest log-prob in the tail. Log-probs of the top-k tokens start at the
last index."""
OLD, NEW = "corral_old", "corral_new"
"""Prefixes of field names in a verl batch, for the old policy's top-k tokens and for the new policy on these tokens."""
ROWS, ENTRIES = ("counts", "rest", "rest_max"), ("ids", "logp")
"""Names of batch fields with one value per response token, and names of batch fields with one value per top-k token."""


class HeadWitness:
    """Measures the KL between a network's first pass and its later passes, from stored hidden states."""

    def __init__(self) -> None:
        self._old: HeadStates | None = None
        self.kl: Tensor | None = None
        """KL(new‖old) and KL(old‖new) at every position of the last forward pass [N 2]."""

    def see(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, spec: LogitSpec) -> None:
        """Store hidden states [N H] and LM head at the first call; later calls measure the KL from the stored network."""
        if self._old is None:
            copied_bias = None if bias is None else bias.detach().clone()
            self._old = HeadStates(hidden.detach().clone(), weight.detach().clone(), copied_bias)
            return
        self.kl = torch.stack(head_kl_both_ways(HeadStates(hidden, weight, bias), self._old, spec), -1)


@dataclass(frozen=True, eq=False)
class HeadCall:
    """Request to the LM head for one forward pass over N packed positions."""

    tokens: Tensor
    """Id of the token that follows each position [N], whose log-prob is computed."""
    temperature: float = 1.0
    top_k: int | None = None
    """Largest number of the policy's most likely tokens to return for each position; None returns no such tokens."""
    mass: float = 1.0
    ids: Tensor | None = None
    """Token ids at which to evaluate the policy at each position [N K]."""
    entropy: bool = False
    compare: bool = False
    """True to check once, at a few positions, that log-probs agree with the model's own logits."""
    witness: HeadWitness | None = None
    """Recorder of hidden states and LM head for a KL measurement; None records nothing."""


class SupportHead:
    """Replacement of a causal model's output layer by corral's LM head. `expect` sets what the next pass computes."""

    def __init__(self, model: Any) -> None:
        """Replace the forward methods of a model and of its output layer, which has to be linear.

        In models that see images, the text part has the output layer.
        """
        self.model: Any = model  # of transformers, whose methods nn.Module does not have
        self.linear: Any = self.model.get_output_embeddings()
        if model.base_model is model or not issubclass(type(self.linear), nn.Linear):
            raise ValueError(f"corral for verl: {type(model).__name__} has no linear head; got {type(self.linear).__name__}.")
        self._call: HeadCall | None = None
        self._ids: Tensor | None = None
        self._compared = False
        self._own_forward, self._own_linear = model.forward, self.linear.forward

        @functools.wraps(model.forward)  # verl reads its parameters
        def forward(*args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
            return self._forward(*args, **kwargs)

        self.model.forward, self.linear.forward = forward, self._score

    def expect(self, call: HeadCall) -> None:
        """Set what the LM head computes in the next forward pass."""
        self._call, self._ids = call, None

    def read(self, output: CausalLMOutputWithPast) -> HeadOutput:
        """Unpack the LM head's results from the model's output; all results but the token ids are differentiable."""
        assert output.logits is not None
        found = output.logits.squeeze(0)
        ids, self._ids = self._ids, None
        dist = None if ids is None else SparseDist(ids, found[:, _SUPPORT:], found[:, _REST], found[:, _REST_MAX].detach())
        return HeadOutput(found[:, _LOGP], found[:, _ENTROPY], dist)

    def _forward(self, *args: Any, **kwargs: Any) -> CausalLMOutputWithPast:
        """Run the base model, then corral's LM head on the packed positions."""
        call = self._call
        if call is None:
            raise RuntimeError("corral for verl: the model was called outside a scoring pass. Please report it.")
        given = [name for name, x in kwargs.items() if x is not None and name.startswith(("pixel_values", "image", "video"))]
        if given:
            raise ValueError(
                f"corral for verl: a support is kept of text alone, and this batch has {given[0]}. Leave images out of the "
                f"prompts, or use an objective on sampled tokens, without model_type."
            )
        attention = kwargs.get("attention_mask")
        hidden = self.model.base_model(*args, **kwargs).last_hidden_state
        head = self.model.get_output_embeddings()
        if head is not self.linear:
            raise ValueError(f"corral for verl: the head has become a {type(head).__name__}. Leave it out of LoRA.")
        found = head(hidden[attention.bool()] if attention is not None else hidden.flatten(0, 1))
        self._call = None
        if call.compare and not self._compared and not torch.is_grad_enabled():
            self._compared = True
            self._compare(call, found[:, _LOGP], kwargs)
        return CausalLMOutputWithPast(logits=found[None])

    def _score(self, hidden: Tensor) -> Tensor:
        """Run corral's LM head in place of the output layer, and return its results as columns [N 4 + K].

        `hidden` is [N H].
        """
        call = self._call
        if call is None:
            return self._own_linear(hidden)
        weight, bias = self.linear.weight, self.linear.bias
        if isinstance(weight, DTensor):
            raise ValueError("corral for verl: the head's weight is split over tensor-parallel ranks. Use FSDP alone.")
        device = hidden.device.type
        if torch.is_autocast_enabled(device):
            dtype = torch.get_autocast_dtype(device)
            hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        spec = logit_spec(self.model.config, call.temperature)
        if call.witness is not None:
            call.witness.see(hidden, weight, bias, spec)
        with torch.autocast(device, enabled=False):  # half precision goes in, and is for GEMMs alone
            head = lm_head(
                hidden, weight, call.tokens, bias=bias, top_k=None if call.top_k is None else min(call.top_k, len(weight)),
                mass=call.mass if call.top_k is not None else 1.0, ids=call.ids, entropy=call.entropy,
                impl=_one_implementation(hidden, weight, call), tolerance=TOLERANCE if torch.is_grad_enabled() else 0.0,
                **vars(spec),
            )  # fmt: skip
        none = torch.zeros_like(head.logp)
        columns = [head.logp, none if head.entropy is None else head.entropy]
        if head.dist is not None:
            self._ids = head.dist.ids
            columns += [head.dist.rest, none if head.dist.rest_max is None else head.dist.rest_max]
            columns += head.dist.logp.unbind(-1)
        return torch.stack(columns, -1)

    def _compare(self, call: HeadCall, logp: Tensor, kwargs: dict[str, Any]) -> None:
        """Raise ValueError if log-probs from the LM head disagree with the model's own logits at a few positions."""
        attention = kwargs.get("attention_mask")
        few = min(8, len(logp) if attention is None else int(attention[0].sum()))
        short = {name: _first(name, x, few) for name, x in kwargs.items()}
        own = (self._own_forward(**short).logits[0, :few].float() / call.temperature).log_softmax(-1)
        gap = (own.gather(-1, call.tokens[:few, None]).squeeze(-1) - logp[:few]).abs().median()
        if not gap <= 0.1:  # logits of large models are rounded to bfloat16
            raise ValueError(
                f"corral for verl: log-probs from the head differ by {float(gap):.3g} nats from those of "
                f"{type(self.model).__name__}'s own logits. It does something to them that is not known here; please report it."
            )


def _first(name: str, x: Any, few: int) -> Any:
    """Cut one argument of a model's forward to the first `few` positions of the first row."""
    if not isinstance(x, Tensor):
        return x
    if name.startswith("cu_seqlens"):  # where sequences begin, and where the last ends
        return x.clamp(max=few).unique_consecutive()
    # Position ids of models that see images have an axis in front, of coordinates.
    return x[..., :1, :few] if x.ndim == 2 or name == "position_ids" else x


def _one_implementation(hidden: Tensor, weight: Tensor, call: HeadCall) -> str:
    """Return the LM head's implementation for all passes: PyTorch if any pass lacks a kernel, since rounding would differ."""
    slots = call.top_k if call.ids is None else call.ids.shape[-1] - 1
    if slots is None or not hidden.is_cuda:
        return "auto"
    return choose("corral for verl", "auto", hidden, weight, min(slots, len(weight)))


def logit_spec(config: Any, temperature: float) -> LogitSpec:
    """Read the scales and the soft cap of the logits from a model's configuration, as in Gemma, Cohere and Granite."""
    found = config.get_text_config().to_dict()
    scale = float(found.get("logit_scale") or 1.0) / float(found.get("logits_scaling") or 1.0)
    return LogitSpec(scale, found.get("final_logit_softcapping"), temperature)


# ------------------------------------------------------------------------------------ a support on its way through verl

# Jagged tensors beside log-probs, from the old pass over the queue to the update: of response tokens alone, without padding.


def response_positions(data: Any) -> Tensor:
    """Return the packed positions [M] in a micro-batch whose next token belongs to a response, in the order of responses."""
    ends, starts = data["input_ids"].offsets()[1:], data["responses"].offsets()
    lengths = starts.diff()
    return torch.repeat_interleave(ends - lengths - 1 - starts[:-1], lengths) + torch.arange(
        int(starts[-1]), device=ends.device
    )


def write_support(dist: SparseDist, data: Any) -> dict[str, Tensor]:
    """Store the old policy's top-k distribution as jagged batch fields, at 8 bytes per top-k token.

    A position has 12 bytes more. Tokens that `response_mask` leaves out of training have an empty support.
    """
    rows, offsets = dist[response_positions(data)], data["responses"].offsets()
    trained = data["response_mask"].values().bool()
    packed = replace(rows, ids=torch.where(trained[:, None], rows.ids, -1)).pack(rows.ids.device)
    ends = nn.functional.pad(packed.counts.cumsum(0), (1, 0))[offsets]  # where each sequence's entries end
    places = dict.fromkeys(ROWS, offsets) | dict.fromkeys(ENTRIES, ends)
    return {f"{OLD}_{name}": torch.nested.nested_tensor_from_jagged(vars(packed)[name], x) for name, x in places.items()}


def read_support(data: Any, slots: int) -> SparseDist:
    """Read the old policy's top-k distribution at the response tokens of a micro-batch, as stored by `write_support`."""
    ids, logp, counts, rest, rest_max = (data[f"{OLD}_{name}"].values() for name in (*ENTRIES, *ROWS))
    return PackedSparseDist(ids, logp, rest, counts, slots, rest_max).unpack()


def write_new(dist: SparseDist, data: Any) -> dict[str, Tensor]:
    """Store the new policy's log-probs of the old policy's top-k tokens as jagged batch fields, differentiably."""
    rows, offsets = dist[response_positions(data)], data["responses"].offsets()
    assert rows.rest_max is not None  # the head always computes it
    values = {"logp": rows.logp, "rest": rows.rest, "rest_max": rows.rest_max}
    return {f"{NEW}_{name}": torch.nested.nested_tensor_from_jagged(x, offsets) for name, x in values.items()}


def take_dists(output: dict[str, Any], data: Any) -> tuple[SparseDist, SparseDist] | None:
    """Remove and return the new and the old policy on the old policy's top-k tokens; None if they were not computed.

    The distributions [M K] are those of trained tokens. Removes the new policy's fields from `output`: verl keeps the outputs
    of all micro-batches until the update ends.

    Args:
        output: `model_output` of the update.
        data: the micro-batch.
    """
    if f"{NEW}_logp" not in output:
        return None
    logp, rest, rest_max = (output.pop(f"{NEW}_{name}").values() for name in ("logp", "rest", "rest_max"))
    trained, old = data["response_mask"].values().bool(), read_support(data, logp.shape[-1])
    missing = int((trained & (old.ids[:, 0] < 0)).sum())
    if missing:
        raise ValueError(
            f"corral for verl: {missing} unmasked tokens have no support, since response_mask was 0 there in the pass of "
            f"the old policy and is 1 now. Change the mask before old log-probs are computed."
        )
    return SparseDist(old.ids, logp, rest, rest_max)[trained], old[trained]


def local_rows(packed: Tensor, pad: int, rank: int, ranks: int) -> Tensor:
    """Return this rank's share of packed ids [N K] under Ulysses sequence parallelism.

    `pad` rows of −1 are added at the end first.
    """
    packed = nn.functional.pad(packed, (0, 0, 0, pad), value=-1)
    if len(packed) % ranks:
        raise ValueError(f"corral for verl: {len(packed)} packed tokens do not split over {ranks} sequence-parallel ranks.")
    return packed.tensor_split(ranks)[rank]
