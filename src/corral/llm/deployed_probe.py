"""How far the network is from the one that a step began with, on completions of the step's own rollouts."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from corral.deployed import BatchKL, restore, snapshot
from corral.deployed.retract import FEW
from corral.kernels.torch.head_kl import head_kl_both_ways
from corral.llm.scoring_pass import HeadInputs, ScoringPass
from corral.llm.trl_api import steps_per_batch, updates_per_step

if TYPE_CHECKING:
    from corral.llm.trainer import CorralTrainer

TOKENS = 3072
"""About as many tokens of a step are measured, over all processes: whole completions, evenly spread over the rollouts."""
CHEAP = 0.01
"""The share of a step's cost up to which `FEW` tokens are measured instead, so that a 99.9th percentile means something."""
COMPLETIONS = 8
"""Completions of a step that are measured at least, however long they are: tokens of one completion move together, so that
many of them say little about the others."""
GOLDEN = 0.618034
"""Fractional parts of its multiples are evenly spread, however many are taken."""


@dataclass(frozen=True, eq=False)
class _Scored:
    """A network on the live tokens of some completions."""

    hidden: Float[Tensor, "N H"]
    logp: Float[Tensor, " N"]


@dataclass(eq=False)
class _Rollouts:
    """Some completions of a batch, as TRL scores them."""

    ids: Int[Tensor, "b L"]
    """Prompt and completion."""
    seen: Int[Tensor, "b L"]
    """Attention mask."""
    live: Bool[Tensor, "b T"]
    """Tokens of the completion that the network wrote."""
    old: _Scored | None
    """Under the weights that the step began with, where TRL's old-policy pass was made with them."""


class DeployedProbe:
    """Measures KL(now‖old) and KL(old‖now) per token on some of a step's completions, on all processes.

    The old network's hidden states come from the pass in which TRL scores fresh rollouts, where that was made with the step's
    first weights and without dropout. Elsewhere it takes a pass of its own.
    """

    def __init__(self, trainer: "CorralTrainer") -> None:
        self.trainer = trainer
        self._rollouts: list[_Rollouts] = []
        self.tool_mask: list[list[int]] | None = None
        """Of the newest rollouts, as TRL's `_generate` returns it: for each completion 1 where the network wrote a token, 0
        where a tool did. TRL makes its old-policy pass before it hands over the mask with the batch."""
        self._head: HeadInputs | None = None
        """The old network's, of this step."""

    def clear(self) -> None:
        """A new step begins."""
        self._rollouts, self._head = [], None

    def watch(self, scoring: ScoringPass) -> None:
        """Before rollouts are scored: have the old-policy pass keep what a measurement needs."""
        trainer = self.trainer
        first = trainer.state.global_step % updates_per_step(trainer.args) == 0
        if first and trainer.off_policy and not scoring.keep_hidden:  # on-policy, TRL's first pass may be the reference's
            scoring.keep_hidden, scoring.choose = True, self._choose_early

    def _choose_early(self, mask: Bool[Tensor, "B T"]) -> Bool[Tensor, " B"]:
        """The choice during TRL's old-policy pass, from the mask of the completions and the tool mask of `_generate`."""
        if self.tool_mask is None:
            return self.choose(mask)
        rows = pad_sequence([torch.as_tensor(row, dtype=torch.bool) for row in self.tool_mask], batch_first=True)
        written = torch.zeros_like(mask)  # TRL may pad further, with tokens of no completion
        written[:, : rows.shape[1]] = rows
        return self.choose(mask & written)

    def choose(self, trained: Bool[Tensor, "B T"], passes: int = 1) -> Bool[Tensor, " B"]:
        """The completions of a batch of rollouts to measure, given the tokens that are trained on.

        Only completions with such tokens are chosen, evenly spread, until there are enough tokens and enough completions on
        all processes together. A sharded network needs every process in every pass, so all choose equally many: a process that
        has too few fills up with completions that have no token to measure.

        `passes` is how many forward passes a measurement takes: of the new network, and of the old one if its states are not
        kept.
        """
        args, length = self.trainer.args, trained.sum(-1)
        live, empty = length.nonzero()[:, 0], (length == 0).nonzero()[:, 0]
        order = torch.cat([live[(torch.arange(len(live), device=live.device) * GOLDEN % 1).argsort()], empty])
        first = torch.stack([length[order], (length[order] > 0).long()]).cumsum(1)
        # Column k: tokens and completions of all processes, where each of them takes its first k + 1 rows.
        tokens, completions = self.trainer.accelerator.reduce(first, reduction="sum")
        batches = max(1, updates_per_step(args) * args.gradient_accumulation_steps // steps_per_batch(args))
        wanted = self._tokens_wanted(int(tokens[-1]) * batches, passes) / batches
        enough = (tokens >= tokens[-1].clamp(max=wanted)) & (completions >= completions[-1].clamp(max=COMPLETIONS / batches))
        chosen = torch.zeros_like(length, dtype=torch.bool)
        chosen[order[: int(enough.long().argmax()) + 1]] = True
        return chosen

    def _tokens_wanted(self, tokens: int, passes: int) -> int:
        """`FEW` tokens where measuring them costs at most 1 % of the step, else `TOKENS`.

            FEW · passes ≤ 1 % · tokens · (1 + o + 3 p)

        Both sides count forward passes of one token. The step generates its tokens once, scores them with the old policy where
        several updates follow (o = 1, else 0), and makes p passes over the batch: forward, and backward at twice the cost.
        """
        args, old = self.trainer.args, int(self.trainer.off_policy)
        over_batch = 1 if args.reuse == "auto" else args.num_iterations  # it measures after each pass
        return FEW if FEW * passes <= CHEAP * tokens * (1 + old + 3 * over_batch) else TOKENS

    def add(self, batch: dict[str, Any], scoring: ScoringPass) -> None:
        """Fresh rollouts of TRL's, of which some are remembered, and the pass that scored them."""
        if "pixel_values" in batch:
            raise ValueError(
                "CorralTrainer: `deployed_bound` measures text alone, and these prompts have images. Leave it out."
            )
        mask = batch["completion_mask"].bool()
        live = mask & batch["tool_mask"].bool() if "tool_mask" in batch else mask
        kept = None if scoring.drew_random else scoring.hidden()
        chosen = self.choose(live, passes=2 if kept is None else 1) if scoring.chosen is None else scoring.chosen
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
        seen = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
        old = None
        if kept is not None:
            wanted = (live & chosen[:, None]).flatten()
            self._head = self._head or kept.head.freeze()
            old = _Scored(kept.states[wanted[kept.places]], batch["old_per_token_logps"].flatten()[wanted])
        self._rollouts.append(_Rollouts(ids[chosen], seen[chosen], live[chosen], old))

    def prepare(self, old: dict[str, Tensor]) -> bool:
        """Once the step's updates are done: the old network where it is not known yet. False where there is no token at all."""
        model, missing = self.trainer.model, [some for some in self._rollouts if some.old is None]
        if missing:
            new = snapshot(model)
            restore(model, old)
            for some in missing:
                some.old, head = self._score(some)
                self._head = self._head or head.freeze()
            restore(model, new)
        count = torch.tensor(float(sum(int(some.live.sum()) for some in self._rollouts)))
        return bool(self.trainer.accelerator.reduce(count.to(self.trainer.accelerator.device)) > 0)

    def measure(self) -> BatchKL:
        """The network as it is now."""
        assert self._head is not None
        return self._kl(self._rollouts, self._head)

    def measure_on(self, rows: list[tuple[list[int], list[int]]], old: dict[str, Tensor]) -> BatchKL:
        """The network as it is now, on other tokens than the step's: prompts and completions as token ids."""
        model = self.trainer.model
        some = self._pad(rows)
        new = snapshot(model)
        restore(model, old)
        some.old, head = self._score(some)
        head = head.freeze()
        restore(model, new)
        return self._kl([some], head)

    def _kl(self, rollouts: list[_Rollouts], old_head: HeadInputs) -> BatchKL:
        """The network as it is now against the old one, whose hidden states are known; on all processes."""
        found, sequences = [], 0
        for some in rollouts:
            assert some.old is not None
            new, head = self._score(some)
            kl = head_kl_both_ways(
                new.hidden, head.weight, some.old.hidden, old_head.weight,
                bias_new=head.bias, bias_old=old_head.bias, **vars(head.spec),
            )  # fmt: skip
            sequence = some.live.nonzero()[:, 0] + sequences
            sequences += len(some.live)
            found.append(torch.stack([x.double() for x in (*kl, sequence, new.logp - some.old.logp)], -1))
        new_old, old_new, sequence, log_ratio = self._of_all_processes(torch.cat(found)).unbind(-1)
        return BatchKL(new_old=new_old, old_new=old_new, sequence=sequence.long(), log_ratio=log_ratio)

    def _pad(self, rows: list[tuple[list[int], list[int]]]) -> _Rollouts:
        """Prompts padded on the left, completions on the right, as TRL has them."""
        before, after = max(len(prompt) for prompt, _ in rows), max(len(completion) for _, completion in rows)
        # Padding is never looked at: any token will do.
        ids = [[0] * (before - len(a)) + a + b + [0] * (after - len(b)) for a, b in rows]
        seen = [[0] * (before - len(a)) + [1] * (len(a) + len(b)) + [0] * (after - len(b)) for a, b in rows]
        mask = torch.tensor(seen, device=self.trainer.accelerator.device)
        return _Rollouts(torch.tensor(ids, device=mask.device), mask, mask[:, before:].bool(), None)

    def _score(self, some: _Rollouts) -> tuple[_Scored, HeadInputs]:
        """The network as it is now on the live tokens, from a scoring pass as every other one."""
        trainer, scoring = self.trainer, ScoringPass(keep_hidden=True)
        width, size = some.live.shape[1], trainer.args.per_device_train_batch_size
        with trainer.policy_head.expect(scoring):
            logp = trainer._get_per_token_logps_and_entropies(trainer.model, some.ids, some.seen, width, size)[0]
        if (kept := scoring.hidden()) is None:
            raise RuntimeError("CorralTrainer: TRL's scoring pass showed no hidden states. Has it changed? Please report it.")
        return _Scored(kept.states[some.live.flatten()[kept.places]], logp[some.live]), kept.head

    def _of_all_processes(self, rows: Float[Tensor, "n C"]) -> Float[Tensor, "N C"]:
        """The same tokens in the same order everywhere, so that all processes decide alike."""
        accelerator = self.trainer.accelerator
        if accelerator.num_processes == 1:
            return rows
        rows[:, 2] += accelerator.process_index * 2**32  # sequences of this process alone; exact in float64
        everyone = accelerator.gather(accelerator.pad_across_processes(rows, pad_index=-1))
        return everyone[~(everyone[:, 0] < 0)]  # a KL is ≥ 0, or no number
