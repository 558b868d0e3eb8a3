"""verl's FSDP engine with corral's head: the old pass keeps a support, updates evaluate the new policy on it.

Registered under a model type of its own, so that nothing changes for whoever does not ask for it. With `deployed_bound` the
engine also bounds the KL of its network to the weights that the sampler last got:

    before the first update    weights of this rank's shard, and the head's inputs and weight on some of the batch's sequences
    after the last             the same sequences again → KL(new‖old) over the whole vocabulary → corral.retract

The first and the last update are those between two weight synchronisations, whatever number of batches that takes.
"""

import logging
import math
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils
from verl.utils.metric import AggregationType, Metric
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead
from verl.workers.utils.padding import response_from_nested

from corral.deployed import BatchKL, Certificate, restore, retract, snapshot
from corral.engines.verl.head import NEW, OLD, HeadCall, HeadWitness, SupportHead, local_rows, write_dist
from corral.engines.verl.settings import DEPLOYED_BOUND, DEPLOYED_STATISTIC, DEPLOYED_SYNC, MASS, MODEL_TYPE, TOP_K

logger = logging.getLogger(__name__)

TOKENS = 3072
"""Tokens of a batch that are measured, about, over all ranks: whole sequences, prompts included."""

_T = TypeVar("_T")


@EngineRegistry.register(model_type=MODEL_TYPE, backend=["fsdp", "fsdp2"], device=["cuda", "npu"])
class SupportFSDPEngine(FSDPEngineWithLMHead):
    """FSDPEngineWithLMHead whose `model_output` has a support; log-probs of every pass come from one head."""

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
        """Run verl's update. With `deployed_bound` the last one before a weight synchronisation also bounds the network."""
        bound = tensordict_utils.get_non_tensor_data(data, DEPLOYED_BOUND, None)
        if bound is None:
            return super().train_batch(data, loss_function)
        if self.use_ulysses_sp:
            raise ValueError("corral for verl: deployed_bound measures whole sequences. Set ulysses_sequence_parallel_size=1.")
        if self._deployed is None:
            self._deployed = DeployedRegion(self)
        if not self._deployed.tokens:
            self._deployed.choose(data)
        outputs = super().train_batch(data, loss_function)
        last_of_batch = tensordict_utils.get_non_tensor_data(data, "update_lr_scheduler", False)
        if last_of_batch and tensordict_utils.get_non_tensor_data(data, DEPLOYED_SYNC, False):
            region, self._deployed = self._deployed, None
            certificate = region.hold(bound, tensordict_utils.get_non_tensor_data(data, DEPLOYED_STATISTIC, "mean"))
            metrics = {} if certificate is None else certificate.metrics()
            outputs["metrics"] |= {name: Metric(AggregationType.MEAN, value) for name, value in metrics.items()}
        return outputs

    def prepare_model_inputs(self, micro_batch: TensorDict) -> tuple[dict[str, Any], dict[str, Any]]:
        """verl's; and the head is told what this pass is to find out."""
        inputs, output_args = super().prepare_model_inputs(micro_batch)
        for key in ("calculate_sum_pi_squared", "distillation_use_topk", "distillation_only"):
            if tensordict_utils.get_non_tensor_data(micro_batch, key, False):
                raise ValueError(f"corral for verl: {key} reads all logits, which model_type={MODEL_TYPE} never holds.")
        tokens, ids = output_args["input_ids_rmpad_rolled"], None
        if f"{OLD}_ids" in micro_batch and torch.is_grad_enabled():
            pad = output_args.get("pad_size", 0)
            ids = local_rows(micro_batch[f"{OLD}_ids"].values(), pad, *self._sequence_shard(), fill=-1)
        self.head.expect(
            HeadCall(
                tokens,
                temperature=_one_temperature(micro_batch["temperature"]),
                top_k=tensordict_utils.get_non_tensor_data(micro_batch, TOP_K, None),
                mass=tensordict_utils.get_non_tensor_data(micro_batch, MASS, 1.0),
                ids=ids,
                entropy=bool(tensordict_utils.get_non_tensor_data(micro_batch, "calculate_entropy", False)),
                compare=not self.use_ulysses_sp,
                witness=self.witness,
            )
        )
        return inputs, output_args

    def prepare_model_outputs(
        self, output: Any, output_args: dict[str, Any], micro_batch: TensorDict, logits_processor_func: Any
    ) -> dict[str, Tensor]:
        """Log-probs and entropy as verl has them, jagged [B j], and a support [B j K]: the old one, or the new policy on it."""
        pad = output_args.get("pad_size", 0)
        rows = self.head.read(output).map(lambda x: self._gather_and_unpad_packed(x, pad))
        offsets = micro_batch["input_ids"].offsets()
        found = {"log_probs": torch.nested.nested_tensor_from_jagged(rows.logp, offsets)}
        if tensordict_utils.get_non_tensor_data(micro_batch, "calculate_entropy", False):
            found["entropy"] = torch.nested.nested_tensor_from_jagged(rows.entropy, offsets)
        if rows.dist is not None:
            found |= write_dist(NEW if torch.is_grad_enabled() else OLD, rows.dist, offsets)
        return found

    def _sequence_shard(self) -> tuple[int, int]:
        """This rank's place among those that share its sequences, and their number."""
        if not self.use_ulysses_sp:
            return 0, 1
        return self.ulysses_device_mesh["sp"].get_local_rank(), self.ulysses_sequence_parallel_size


def _one_temperature(temperature: Any) -> float:
    """verl allows one for each sequence; a support is of one."""
    if isinstance(temperature, Tensor):
        low, high = (float(x) for x in temperature.aminmax())
        if low != high:
            raise ValueError(f"corral for verl: sequences were sampled at temperatures from {low} to {high}. Use one.")
        return low
    return float(temperature)


class DeployedRegion:
    """The region around the network that the sampler has: made before the next update, and applied before the next network is
    sent there. Every rank takes part in both."""

    def __init__(self, engine: Any) -> None:
        """Keep the network as it is.

        Args:
            engine: a SupportFSDPEngine in its train mode.
        """
        self.engine, self.old = engine, snapshot(engine.module)
        self.tokens = 0
        """Tokens of all ranks that are measured; 0 until a mini-batch has some."""
        self.witness = HeadWitness()

    def choose(self, data: TensorDict) -> None:
        """Measure the old network on some sequences of a rank's mini-batch, unless all of them are masked out on every rank."""
        engine = self.engine
        self.sample = tensordict_utils.index_select_tensor_dict(data, _choose(data, engine.get_data_parallel_size()))
        self.tokens = sum(self._gather(int(self.sample["response_mask"].values().sum())))
        if self.tokens:
            new = snapshot(engine.module)  # an update on masked tokens alone may have moved it: optimizers have momentum
            restore(engine.module, self.old)
            self._pass()
            restore(engine.module, new)

    def hold(self, bound: float, statistic: str) -> Certificate | None:
        """Back towards the old weights until a statistic of the tokens' KL is at most the bound.

        None where no mini-batch had a token to measure: beside a finite bound the old weights are back then.
        """
        if self.tokens:
            return retract(self.engine.module, self.old, self._measure, bound=bound, statistic=statistic)
        if bound < math.inf:
            restore(self.engine.module, self.old)
            logger.warning(
                "corral for verl: every sequence since the last weight synchronisation is masked out, so that nothing can be "
                "measured. The weights are those of that synchronisation again; the optimizer keeps its moments."
            )
        return None

    def _measure(self) -> BatchKL:
        self._pass()
        assert self.witness.kl is not None
        offsets, live = self.sample["input_ids"].offsets(), self.sample["response_mask"]
        packed = self.witness.kl[: int(offsets[-1])].to(live.device)
        rows = response_from_nested(torch.nested.nested_tensor_from_jagged(packed, offsets), live)
        mask = live.values().bool()
        sequence = torch.repeat_interleave(torch.arange(len(live), device=live.device), live.offsets().diff())
        both = rows.values()[mask].double().cpu()
        found = torch.cat([both, sequence[mask].double().cpu()[:, None]], -1)
        return self._of_all_ranks(found)

    def _of_all_ranks(self, rows: Float[Tensor, "n 3"]) -> BatchKL:
        """The same tokens in the same order everywhere, so that all ranks decide alike."""
        everyone = self._gather(rows)
        for rank, others in enumerate(everyone):
            others[:, 2] += rank * 2**32  # sequences of this rank alone; exact in float64
        new_old, old_new, sequence = torch.cat(everyone).unbind(-1)
        return BatchKL(new_old=new_old, old_new=old_new, sequence=sequence.long())

    def _gather(self, mine: _T) -> list[_T]:
        """Of every rank, in their order."""
        everyone = [mine] * self.engine.get_data_parallel_size()
        if len(everyone) > 1:
            torch.distributed.all_gather_object(everyone, mine, group=self.engine.get_data_parallel_group())
        return everyone

    @torch.no_grad()
    def _pass(self) -> None:
        """The network as it is now on the sample, without dropout: one forward, on every rank."""
        module, engine = self.engine.module, self.engine
        was_training, engine.witness = module.training, self.witness
        module.eval()
        try:
            engine.forward_step(self.sample, loss_function=None, forward_only=True)
        finally:
            engine.witness = None
            module.train(was_training)


def _choose(data: TensorDict, ranks: int) -> list[int]:
    """Sequences with a token that counts, the first that fit into a rank's share of TOKENS; one at least, for all take part."""
    live = [index for index, mask in enumerate(data["response_mask"].unbind()) if bool(mask.any())] or [0]
    lengths = data["input_ids"].offsets().diff()[live]
    return live[: max(1, int((lengths.cumsum(0) * ranks <= TOKENS).sum()))]
