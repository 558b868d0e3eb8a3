"""verl's own workers on a CPU: a tiny model, a few sequences, and what corral alone makes of them."""

import copy
import functools
import os
from typing import Any

from cpu_platform_environment import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # before verl is imported

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils
from verl.workers.config import (
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.padding import response_from_nested

import corral
from corral.engines.verl.config import CorralPolicyLossConfig
from corral.engines.verl.loss import corral_ppo_loss
from corral.lab.models.tiny import TINY_FOLDER

TEMPERATURE, SEQUENCES, TOP_K, VOCABULARY, LENGTH, BUCKET = 0.9, 4, 8, 100, 32, 16
RATES = {
    "token-mean": 5e-4, "token-sum": 2e-5, "seq-mean-token-sum": 8e-5, "seq-mean-token-mean": 5e-4,
    "seq-mean-token-sum-norm": 8e-5 * LENGTH,
}  # fmt: skip
"""verl's loss_agg_modes, and for each a learning rate that moves about as far; LENGTH is its loss_scale_factor."""


def make_worker(
    model_type: str,
    *,
    remove_padding: bool = True,
    dtype: str = "fp32",
    engine: dict[str, Any] | None = None,
    config: dict[str, Any] | None = None,
    **model: Any,
) -> TrainingWorker:
    """verl's TrainingWorker with the embedded model under FSDP2."""
    tokens = {"max_token_len_per_gpu": 20, "infer_max_token_len_per_gpu": 20}
    whole = TrainingWorkerConfig(
        model_type=model_type,
        model_config=HFModelConfig(
            path=str(TINY_FOLDER), use_remove_padding=remove_padding,
            override_config={"attn_implementation": "sdpa", **(config or {})}, **model,
        ),
        engine_config=FSDPEngineConfig(
            strategy="fsdp2", use_torch_compile=False, use_dynamic_bsz=True,
            mixed_precision={"param_dtype": dtype, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
            **(engine or tokens),
        ),
        optimizer_config=FSDPOptimizerConfig(
            lr=1.0, optimizer="SGD", weight_decay=0.0, clip_grad=1e9, total_training_steps=10
        ),
        checkpoint_config=CheckpointConfig(),
    )  # fmt: skip
    worker = TrainingWorker(whole)
    worker.reset()
    return worker


def actor_config(loss_mode: str, agg: str = "token-mean", **policy_loss: Any) -> FSDPActorConfig:
    """verl's ActorConfig with corral's policy loss in it."""
    given = {"bypass_mode": False, "support_size": TOP_K, "support_mass": 1.0, **policy_loss}
    return FSDPActorConfig(
        strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, loss_agg_mode=agg, loss_scale_factor=LENGTH,
        policy_loss=CorralPolicyLossConfig(loss_mode=loss_mode, **given),
    )  # fmt: skip


def loss_of(config: FSDPActorConfig) -> Any:
    """What corral's trainers set in every worker."""
    return functools.partial(corral_ppo_loss, config=config)


def sequences() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Prompts, responses, and advantages token by token, from GAE."""
    draw = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 60, (3 + i % 2,), generator=draw) for i in range(SEQUENCES)]
    responses = [torch.randint(3, 60, (5 + i,), generator=draw) for i in range(SEQUENCES)]
    advantages = []
    for response in responses:
        rewards, values = (torch.randn(1, len(response), generator=draw) for _ in range(2))
        mask = torch.ones(1, len(response), dtype=torch.bool)
        advantages.append(corral.gae(rewards, values, mask, gamma=0.9, lam=0.8)[0][0])
    return prompts, responses, advantages


def jagged(rows: list[Tensor]) -> Tensor:
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def batch_of(which: slice = slice(None), **extra: Any) -> TensorDict:
    """Some of the sequences as verl's trainer hands them to a worker."""
    prompts, responses, advantages = (rows[which] for rows in sequences())
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]
    masks = [torch.ones(len(response), dtype=torch.long) for response in responses]
    fields = {
        "prompts": prompts, "responses": responses, "input_ids": whole, "position_ids": [torch.arange(len(x)) for x in whole],
        "response_mask": masks, "loss_mask": masks, "advantages": advantages,
    }  # fmt: skip
    batch = TensorDict({name: jagged(rows) for name, rows in fields.items()}, batch_size=[len(whole)])
    given = {"temperature": TEMPERATURE, "compute_loss": False, "global_token_num": [len(x) for x in whole], **extra}
    tensordict_utils.assign_non_tensor(batch, **given)
    return batch


def with_old(batch: TensorDict, found: TensorDict) -> TensorDict:
    """A batch for the update: the old pass's log-probs cut to the response, its support as it is."""
    batch["old_log_probs"] = response_from_nested(found["log_probs"], batch["response_mask"])
    for name in [name for name in found.keys() if name.startswith("corral_")]:  # noqa: SIM118 - a TensorDict is no dict
        batch[name] = found[name]
    tensordict_utils.assign_non_tensor(
        batch, global_batch_size=SEQUENCES, mini_batch_size=SEQUENCES, epochs=2, calculate_entropy=False
    )
    return batch


def weights_of(worker: TrainingWorker) -> dict[str, Tensor]:
    """The whole weights, on every rank."""
    state = worker.engine.module.state_dict()
    return {name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone() for name, x in state.items()}


def two_updates_by_corral(
    objective: corral.objective.Objective, agg: str, top_k: int = TOP_K, *, halves: bool = False
) -> tuple[dict[str, Tensor], list[float]]:
    """Weights after two updates of the whole batch, without an engine; and the mean KL before each."""
    model = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)
    old_model = copy.deepcopy(model)
    _, responses, advantages = sequences()
    policies = _policies_of_halves if halves else _policies
    optimizer, moved = torch.optim.SGD(model.parameters(), lr=RATES[agg]), []
    for _ in range(2):
        optimizer.zero_grad()
        losses, kl = [], []
        for old, new, response, credit in zip(policies(old_model), policies(model), responses, advantages, strict=True):
            dist_old = corral.top_k_support(old.detach(), response[None], top_k)
            dist_new = corral.gather_support(new, dist_old.ids)
            mask = torch.ones(1, len(response), dtype=torch.bool)
            out = objective(corral.TokenBatch.on_support(dist_new, dist_old, credit[None], mask))
            losses.append(out.loss[0])
            kl += [out.metrics["tr/kl_before"].item()] * len(response)
        _reduce(losses, agg).backward()
        optimizer.step()
        moved.append(sum(kl) / len(kl))
    return {name: x.detach() for name, x in model.state_dict().items()}, moved


def log_probs(weights: dict[str, Tensor] | None = None) -> list[Tensor]:
    """Log-probs of the responses under the embedded model, or with these weights in it."""
    model = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)
    if weights is not None:
        model.load_state_dict(weights)
    _, responses, _ = sequences()
    with torch.no_grad():
        policies = _policies(model)
    return [policy[0].gather(-1, response[:, None])[:, 0] for policy, response in zip(policies, responses, strict=True)]


def embedded_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32)


@torch.no_grad()
def all_log_probs(model: Any) -> Tensor:
    """log π of every token of every response, one after the other [N V]."""
    return torch.cat([policy[0] for policy in _policies(model)])


def assert_moved_alike(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Whether weights went from the embedded model's to where they should, to a thousandth of the way."""
    start = AutoModelForCausalLM.from_pretrained(TINY_FOLDER, dtype=torch.float32).state_dict()
    for name, before in start.items():
        way = expected[name] - before
        assert way.abs().max() > 0, name
        torch.testing.assert_close(weights[name] - before, way, rtol=0, atol=1e-3 * float(way.abs().max()) + 1e-7)


def _policies(model: Any) -> list[Tensor]:
    """log π [1 T V] of every response, sequence by sequence."""
    prompts, responses, _ = sequences()
    logits = [model(torch.cat(pair)[None]).logits for pair in zip(prompts, responses, strict=True)]
    return [_tempered(z[:, len(prompt) - 1 : -1]) for z, prompt in zip(logits, prompts, strict=True)]


def _policies_of_halves(model: Any) -> list[Tensor]:
    """The same of the packed sequences, padded to BUCKET, whose halves do not see each other.

    That is what two sequence-parallel ranks make of them where attention is not exchanged, as without flash attention.
    """
    prompts, responses, _ = sequences()
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses, strict=True)]
    pad = -sum(lengths) % BUCKET
    tokens = torch.cat(
        [*(torch.cat(pair) for pair in zip(prompts, responses, strict=True)), torch.zeros(pad, dtype=torch.int64)]
    )
    positions = torch.cat([torch.arange(length) for length in (*lengths, pad)])
    parts = zip(tokens.tensor_split(2), positions.tensor_split(2), strict=True)
    logits = torch.cat([model(ids[None], position_ids=places[None], use_cache=False).logits for ids, places in parts], 1)
    whole = logits[:, : sum(lengths)].split(lengths, 1)
    return [_tempered(z[:, len(prompt) - 1 : -1]) for z, prompt in zip(whole, prompts, strict=True)]


def _tempered(logits: Tensor) -> Tensor:
    return (logits.float() / TEMPERATURE).log_softmax(-1)


def _reduce(losses: list[Tensor], agg: str) -> Tensor:
    """verl's five, written out."""
    sums = torch.stack([loss.sum() for loss in losses])
    counts = torch.tensor([float(len(loss)) for loss in losses])
    return {
        "token-mean": sums.sum() / counts.sum(),
        "token-sum": sums.sum(),
        "seq-mean-token-sum": sums.mean(),
        "seq-mean-token-mean": (sums / counts).mean(),
        "seq-mean-token-sum-norm": sums.mean() / LENGTH,
    }[agg]
