"""verl's FSDP engine with corral's head: the old-policy pass stores top-k tokens, and updates evaluate them again.

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


@EngineRegistry.register(model_type=MODEL_TYPE, backend=["fsdp", "fsdp2"], device=["cuda", "npu"])
class SupportFSDPEngine(FSDPEngineWithLMHead):
    """FSDPEngineWithLMHead with corral's head in every pass, whose `model_output` also has the policy on top-k tokens."""

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
        """Run verl's update. With `deployed_bound`, also bound the network before its weights go to the sampler."""
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
        """Prepare verl's inputs, and tell corral's head what this pass must compute."""
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        for key in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"):
            if get_non_tensor_data(micro_batch, key, False):
                raise ValueError(f"corral for verl: {key} reads all logits, which model_type={MODEL_TYPE} never holds.")
        tokens, ids = output_args["input_ids_rmpad_rolled"], None
        top_k = get_non_tensor_data(micro_batch, TOP_K, None)
        if top_k is not None and torch.is_grad_enabled():
            slots, top_k = min(top_k, self.head.linear.out_features) + 1, None
            ids = tokens.new_full((len(micro_batch["input_ids"].values()), slots), -1)  # where no response token follows
            ids = ids.index_copy(0, response_positions(micro_batch), read_support(micro_batch, slots).ids)
            rank, ranks = 0, 1
            if self.use_ulysses_sp:
                rank, ranks = self.ulysses_device_mesh["sp"].get_local_rank(), self.ulysses_sequence_parallel_size
            ids = local_rows(ids, output_args.get("pad_size", 0), rank, ranks)
        self.head.expect(
            HeadCall(
                tokens,
                temperature=_one_temperature(micro_batch["temperature"]),
                top_k=top_k,
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
        """Return verl's log-probs and entropy, jagged [B j], and for response tokens the policy on top-k tokens."""
        pad = output_args.get("pad_size", 0)
        rows = self.head.read(output).map(lambda x: self._gather_and_unpad_packed(x, pad))
        offsets = micro_batch["input_ids"].offsets()
        found = {"log_probs": torch.nested.nested_tensor_from_jagged(rows.logp, offsets)}
        if get_non_tensor_data(micro_batch, "calculate_entropy", False):
            assert rows.entropy is not None  # a column of every pass
            found["entropy"] = torch.nested.nested_tensor_from_jagged(rows.entropy, offsets)
        if rows.dist is not None:
            found |= (write_new if torch.is_grad_enabled() else write_support)(rows.dist, micro_batch)
        return found


def _one_temperature(temperature: Any) -> float:
    """Temperature of a batch. Several are refused, since a top-k distribution belongs to one temperature."""
    if isinstance(temperature, Tensor):
        low, high = (float(x) for x in temperature.aminmax())
        if low != high:
            raise ValueError(f"corral for verl: sequences were sampled at temperatures from {low} to {high}. Use one.")
        return low
    return float(temperature)
