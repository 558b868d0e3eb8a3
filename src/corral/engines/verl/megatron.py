"""verl's Megatron engine with top-k tokens, from logits whose vocabulary is split over tensor-parallel ranks.

Megatron's own output layer makes the logits. verl hands this rank's part of them to one method, which is overridden here.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from tensordict import TensorDict
from torch import Tensor
from verl.models.mcore.util import preprocess_bshd_engine, preprocess_thd_engine
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead

from corral.engines.verl.engine import exchange, given_ids, one_temperature, refuse_dense
from corral.engines.verl.settings import DEPLOYED_BOUND, MASS, MODEL_TYPE, TOP_K, refuse_megatron
from corral.head.from_logits import head_from_logits
from corral.tensors import SparseDist

_FIELDS = ("corral_ids", "corral_logp", "corral_rest", "corral_rest_max")
"""Field names under which verl unpacks the tensors of a next-token distribution into sequences."""


@EngineRegistry.register(model_type=MODEL_TYPE, backend="megatron")
class SupportMegatronEngine(MegatronEngineWithLMHead):
    """verl's MegatronEngineWithLMHead with corral's log-probs; `model_output` also holds log-probs of top-k tokens."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        refuse_megatron(engine_config, model_config)
        model_config.model_type = "language_model"  # verl builds the module by this word, and knows two of them
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def train_batch(self, data: TensorDict, loss_function: Any) -> Any:
        """Run verl's update of the policy. Raises ValueError if `deployed_bound` is set, which only FSDP2 supports."""
        if get_non_tensor_data(data, DEPLOYED_BOUND, None) is not None:
            raise ValueError("corral for verl: deployed_bound holds the weights of FSDP2, and this engine is Megatron's.")
        return super().train_batch(data, loss_function)

    def _lm_head_logits_processor(
        self, logits: Tensor, label: Tensor, temperature: Tensor, *, calculate_entropy: bool, batch: TensorDict,
        data_format: str, **others: Any,
    ) -> dict[str, Tensor]:  # fmt: skip
        """Compute log-probs, entropy and top-k tokens [b n] from this rank's part of the logits [b n V/ranks].

        Args:
            label: the token that follows each position, 0 at padding.
            temperature, others: verl's own, which `one_temperature` and `refuse_dense` read from the batch.
            data_format: "thd" for sequences behind one another, "bshd" for padded ones.
        """
        refuse_dense(batch)
        group = parallel_state.get_tensor_model_parallel_group()
        # Megatron pads the vocabulary to a multiple of the ranks. The sampler draws no such token, so it has no probability.
        vocabulary, width = self.model_config.hf_config.get_text_config().vocab_size, logits.shape[-1]
        real = min(max(vocabulary - torch.distributed.get_rank(group) * width, 0), width)
        ids = given_ids(batch, vocabulary)
        if ids is not None:
            rows = torch.nested.nested_tensor_from_jagged(ids + 1, batch["input_ids"].offsets())  # verl pads with 0
            if data_format == "thd":
                split = preprocess_thd_engine(rows)[0]
            else:
                split = preprocess_bshd_engine(rows, forced_max_seqlen=get_non_tensor_data(batch, "forced_max_seqlen", None))[0]
            if split.shape[:2] != label.shape:
                raise ValueError(
                    f"corral for verl: the old policy's top-k tokens are of {list(split.shape[:2])} positions, and the logits "
                    f"of {list(label.shape)}. Megatron pads them in a way that is not known here; please report it."
                )
            ids = split.flatten(0, 1) - 1
        top_k = get_non_tensor_data(batch, TOP_K, None) if ids is None else None
        head = head_from_logits(
            logits[..., :real].flatten(0, 1), label.flatten(), temperature=one_temperature(batch), ids=ids,
            top_k=None if top_k is None else min(top_k, vocabulary),
            mass=1.0 if top_k is None else get_non_tensor_data(batch, MASS, 1.0), entropy=calculate_entropy, group=group,
        )  # fmt: skip
        found = {"log_probs": head.logp}
        if head.entropy is not None:
            found["entropy"] = head.entropy
        if head.dist is not None:
            assert head.dist.rest_max is not None  # of every head
            found |= dict(zip(_FIELDS, (head.dist.ids, head.dist.logp, head.dist.rest, head.dist.rest_max), strict=True))
        return {name: x.unflatten(0, label.shape) for name, x in found.items()}

    def prepare_model_outputs(self, output: dict[str, Tensor], data: TensorDict) -> dict[str, Tensor]:
        """Return log-probs and entropy of all tokens, and the distribution on top-k tokens at response tokens.

        Log-probs and entropy are jagged [B j].
        """
        if _FIELDS[0] not in output:
            return output
        dist = SparseDist(*(output[name].values() for name in _FIELDS))
        return {name: x for name, x in output.items() if name not in _FIELDS} | exchange(dist, data)
