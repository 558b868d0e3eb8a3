"""verl's FSDP engine with corral's LM head: the old-policy pass stores top-k tokens, and updates evaluate them again.

Registered under a model type of its own, so that nothing changes for whoever does not ask for it.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils.metric import AggregationType, Metric
from verl.utils.tensordict_utils import get_non_tensor_data
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from corral.engines.verl.deployed import DeployedRegion
from corral.engines.verl.head import (
    HeadCall,
    HeadWitness,
    SupportHead,
    local_rows,
    read_support,
    response_positions,
    write_new,
    write_support,
)
from corral.engines.verl.settings import DEPLOYED_BOUND, DEPLOYED_STATISTIC, DEPLOYED_SYNC, MASS, MODEL_TYPE, TOP_K
from corral.tensors import SparseDist


@EngineRegistry.register(model_type=MODEL_TYPE, backend=["fsdp", "fsdp2"], device=["cuda", "npu"])
class SupportFSDPEngine(FSDPEngineWithLMHead):
    """verl's FSDPEngineWithLMHead with corral's LM head in every pass; `model_output` also holds log-probs of top-k tokens."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any) -> None:
        if model_config.use_fused_kernels:
            raise ValueError(
                f"corral for verl: model_type={MODEL_TYPE} has a head of its own, and use_fused_kernels puts verl's there. Set "
                f"actor_rollout_ref.model.use_fused_kernels=false: neither holds all logits."
            )
        self.witness: HeadWitness | None = None
        self._deployed: DeployedRegion | None = None
        model_config.model_type = "language_model"  # verl builds the module by this word, and knows two of them
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def _build_module(self) -> nn.Module:
        module: nn.Module = super()._build_module()
        self.head = SupportHead(module)
        return module

    def train_batch(self, data: TensorDict, loss_function: Any) -> Any:
        """Run verl's update of the policy. With `deployed_bound`, also bound the KL from the sampler's network."""
        bound = get_non_tensor_data(data, DEPLOYED_BOUND, None)
        if bound is None:
            return super().train_batch(data, loss_function)
        if self._deployed is None:
            self._deployed = DeployedRegion(self)
        if not self._deployed.tokens:
            self._deployed.choose(data)
        outputs = super().train_batch(data, loss_function)
        last_of_batch = get_non_tensor_data(data, "update_lr_scheduler", False)
        if last_of_batch and get_non_tensor_data(data, DEPLOYED_SYNC, False):
            region, self._deployed = self._deployed, None
            certificate = region.hold(bound, get_non_tensor_data(data, DEPLOYED_STATISTIC, "mean"))
            metrics = {} if certificate is None else certificate.metrics()
            outputs["metrics"] |= {name: Metric(AggregationType.MEAN, value) for name, value in metrics.items()}
        return outputs

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """Prepare verl's model inputs, and tell corral's LM head what to compute in this pass."""
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        refuse_dense(micro_batch)
        if self.use_ulysses_sp and "vision_config" in self.head.model.config.to_dict():
            raise ValueError(
                "corral for verl: Ulysses splits the tokens of models that see images inside the model, and no support was "
                "tried there. Set actor.fsdp_config.ulysses_sequence_parallel_size=1."
            )
        ids = given_ids(micro_batch, self.head.linear.out_features)
        if ids is not None:
            rank, ranks = 0, 1
            if self.use_ulysses_sp:
                rank, ranks = self.ulysses_device_mesh["sp"].get_local_rank(), self.ulysses_sequence_parallel_size
            ids = local_rows(ids, output_args.get("pad_size", 0), rank, ranks)
        self.head.expect(
            HeadCall(
                output_args["input_ids_rmpad_rolled"],
                temperature=one_temperature(micro_batch),
                top_k=get_non_tensor_data(micro_batch, TOP_K, None) if ids is None else None,
                mass=get_non_tensor_data(micro_batch, MASS, 1.0),
                ids=ids,
                entropy=bool(get_non_tensor_data(micro_batch, "calculate_entropy", False)),
                compare=not self.use_ulysses_sp,
                witness=self.witness,
            )
        )
        return inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Return log-probs and entropy of all tokens, and the distribution on top-k tokens at response tokens.

        Log-probs and entropy are jagged [B j].
        """
        pad = output_args.get("pad_size", 0)
        rows = self.head.read(output).map(lambda x: self._gather_and_unpad_packed(x, pad))
        offsets = micro_batch["input_ids"].offsets()
        found = {"log_probs": torch.nested.nested_tensor_from_jagged(rows.logp, offsets)}
        if get_non_tensor_data(micro_batch, "calculate_entropy", False):
            assert rows.entropy is not None  # a column of every pass
            found["entropy"] = torch.nested.nested_tensor_from_jagged(rows.entropy, offsets)
        if rows.dist is not None:
            found |= exchange(rows.dist, micro_batch)
        return found


def refuse_dense(data: TensorDict) -> None:
    """Raise ValueError if a verl setting needs all logits of a pass, which corral's LM head never stores."""
    for key in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"):
        if get_non_tensor_data(data, key, False):
            raise ValueError(f"corral for verl: {key} reads all logits, which model_type={MODEL_TYPE} never holds.")


def given_ids(data: TensorDict, vocabulary: int) -> Tensor | None:
    """Return the old policy's top-k tokens at every packed position [N K]; None in the pass that computes the old policy.

    −1 at positions that no response token follows.
    """
    top_k = get_non_tensor_data(data, TOP_K, None)
    if top_k is None or not torch.is_grad_enabled():
        return None
    slots, tokens = min(top_k, vocabulary) + 1, data["input_ids"].values()
    ids = tokens.new_full((len(tokens), slots), -1)
    return ids.index_copy(0, response_positions(data), read_support(data, slots).ids)


def exchange(dist: SparseDist, data: TensorDict) -> dict[str, Tensor]:
    """Convert a distribution on the old policy's top-k tokens to named fields of a forward pass's output.

    In an update it is the new policy's distribution, in any other pass the old policy's.
    """
    return (write_new if torch.is_grad_enabled() else write_support)(dist, data)


def one_temperature(data: TensorDict) -> float:
    """Return the sampling temperature of a batch. Raises ValueError if sequences have different temperatures."""
    low, high = torch.as_tensor(data["temperature"], dtype=torch.float64).aminmax()
    if low != high:
        raise ValueError(f"corral for verl: sequences were sampled at temperatures from {low:g} to {high:g}. Use one.")
    return float(low)
