"""Bound the KL between verl's current network and the weights that the sampler last received.

before the first update    weights of this rank's shard, and the head's inputs and weight on some of the batch's sequences
after the last             the same sequences again → KL(new‖old) over the whole vocabulary → corral.retract

The first and the last update are those between two weight synchronisations, whatever number of batches that takes.
"""

import logging
import math
from typing import Any, TypeVar

import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils
from verl.workers.utils.padding import response_from_nested

from corral.deployed import BatchKL, Certificate, restore, retract, snapshot
from corral.engines.verl.head import HeadWitness

logger = logging.getLogger(__name__)

TOKENS = 3072
"""Approximate number of tokens, over all ranks, on which the KL is measured.
Whole sequences are measured, prompts included."""

_T = TypeVar("_T")


class DeployedRegion:
    """Trust region around the sampler's network: create it before an update, apply it before the sampler gets new weights.

    Every rank takes part in both.
    """

    def __init__(self, engine: Any) -> None:
        """Store a copy of the network's weights as the centre of the trust region.

        Args:
            engine: a SupportFSDPEngine in its train mode.
        """
        self.engine, self.old = engine, snapshot(engine.module)
        self.tokens = 0
        """Number of tokens, over all ranks, on which the KL is measured; 0 until a mini-batch has an unmasked token."""
        self.witness = HeadWitness()

    def choose(self, data: TensorDict) -> None:
        """Choose some sequences of a mini-batch on every rank, and compute hidden states of the old network for the KL."""
        engine = self.engine
        self.sample = tensordict_utils.index_select_tensor_dict(data, _choose(data, engine.get_data_parallel_size()))
        self.tokens = sum(self._gather(int(self.sample["response_mask"].values().sum())))
        if self.tokens:
            new = snapshot(engine.module)  # an update on masked tokens alone may have moved it: optimizers have momentum
            restore(engine.module, self.old)
            self._pass()
            restore(engine.module, new)

    def hold(self, bound: float, statistic: str) -> Certificate | None:
        """Move the weights back towards the old weights until a statistic of the per-token KL is within the bound.

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
        # Tokens of all ranks, in the same order everywhere, so that all ranks decide alike.
        everyone = self._gather(torch.cat([both, sequence[mask].double().cpu()[:, None]], -1))
        for rank, others in enumerate(everyone):
            others[:, 2] += rank * 2**32  # sequences of this rank alone; exact in float64
        new_old, old_new, sequence = torch.cat(everyone).unbind(-1)
        return BatchKL(new_old=new_old, old_new=old_new, sequence=sequence.long())

    def _gather(self, mine: _T) -> list[_T]:
        """Gather a value from all ranks into a list, in the order of the ranks."""
        everyone = [mine] * self.engine.get_data_parallel_size()
        if len(everyone) > 1:
            torch.distributed.all_gather_object(everyone, mine, group=self.engine.get_data_parallel_group())
        return everyone

    @torch.no_grad()
    def _pass(self) -> None:
        """Run a forward pass of the current network on the chosen sequences, on every rank and without dropout."""
        module, engine = self.engine.module, self.engine
        was_training, engine.witness = module.training, self.witness
        module.eval()
        try:
            engine.forward_step(self.sample, loss_function=None, forward_only=True)
        finally:
            engine.witness = None
            module.train(was_training)


def _choose(data: TensorDict, ranks: int) -> list[int]:
    """Choose sequences for a KL measurement: the first ones with unmasked tokens that fit in a rank's share of TOKENS.

    At least one is chosen.
    """
    live = [index for index, mask in enumerate(data["response_mask"].unbind()) if bool(mask.any())] or [0]
    lengths = data["input_ids"].offsets().diff()[live]
    return live[: max(1, int((lengths.cumsum(0) * ranks <= TOKENS).sum()))]
