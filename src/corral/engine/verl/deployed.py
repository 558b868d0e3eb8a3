"""The deployed region under verl: the network is measured before a batch's updates, and held near itself after the last.

before the first update    weights of this rank's shard, and the head's inputs and weight on some of the batch's sequences
after the last             the same sequences again → KL(new‖old) over the whole vocabulary → corral.retract
"""

from typing import Any, TypeVar

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor
from verl.utils import tensordict_utils
from verl.workers.utils.padding import response_from_nested

from corral.deployed import BatchKL, Certificate, retract, snapshot
from corral.engine.verl.head import HeadWitness

TOKENS = 3072
"""Tokens of a batch that are measured, about, over all ranks: whole sequences, prompts included."""

_T = TypeVar("_T")


class DeployedRegion:
    """One batch's: made before its first update, asked after its last. Every rank takes part in both."""

    def __init__(self, engine: Any, data: TensorDict) -> None:
        """Measure the network as it is.

        Args:
            engine: a SupportFSDPEngine in its train mode.
            data: the first mini-batch of this rank, some of whose sequences are measured.
        """
        self.engine = engine
        self.old = snapshot(engine.module)
        self.sample = tensordict_utils.index_select_tensor_dict(data, _choose(data, engine.get_data_parallel_size()))
        self.tokens = sum(self._gather(int(self.sample["response_mask"].values().sum())))
        """Of all ranks; where there is none, nothing can be measured."""
        self.witness = HeadWitness()
        self._pass()

    def hold(self, bound: float, statistic: str) -> Certificate:
        """Back towards the old weights until a statistic of the tokens' KL is at most the bound."""
        return retract(self.engine.module, self.old, self._measure, bound=bound, statistic=statistic)

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
