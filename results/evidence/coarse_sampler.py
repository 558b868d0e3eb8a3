"""A sampler in lower precision than the trainer: rollouts by a copy of the network with rounded weights, as engines have it.

Inference engines compute in bf16 or fp8 and report log-probs of their own; what differs from the trainer's is the mismatch that
DPPO is about. Here weights alone are rounded, so that it can be had on a CPU and repeated bit for bit.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from corral.deployed import restore, snapshot
from corral.lab.jobs.llm import train
from corral.lab.jobs.llm.problems import cut_at_end, end_tokens
from corral.lab.jobs.llm.trainer import RunTrainer

REPORTED = 64
"""Likeliest tokens that the sampler reports of each place."""
MANTISSA, LEAST = 3, 2.0**-9
"""Bits after the leading one of an e4m3 number, and its smallest step."""


def to_bf16(weight: Tensor) -> Tensor:
    """Rounded to bfloat16."""
    return weight.bfloat16().to(weight.dtype)


def to_fp8(weight: Tensor) -> Tensor:
    """Rounded to e4m3 by row, each row's largest entry at 448, as engines quantise weights."""
    if weight.ndim < 2:  # scales of norms stay as they are
        return weight
    scale = weight.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    scaled = weight / scale
    step = torch.exp2(torch.floor(torch.log2(scaled.abs().clamp(min=2.0**-6))) - MANTISSA).clamp(min=LEAST)
    return (scaled / step).round() * step * scale


PRECISIONS: dict[str, Callable[[Tensor], Tensor]] = {"float32": lambda weight: weight, "bf16": to_bf16, "fp8": to_fp8}


@contextmanager
def rounded(model: Any, precision: str) -> Iterator[None]:
    """Inside, the model is a sampler with weights of this precision; then it is what it was, bit for bit."""
    exact, mode = snapshot(model), model.training
    restore(model, {name: PRECISIONS[precision](weight) for name, weight in exact.items()})
    model.eval()
    try:
        yield
    finally:
        model.train(mode)
        restore(model, exact)


@torch.no_grad()
def roll_out(prompts: list[Any], trainer: RunTrainer, precision: str) -> dict[str, Any]:
    """TRL's rollout function: tokens of prompts and completions, and log-probs of the sampler's likeliest at every place."""
    model, tokenizer = trainer.model, trainer.processing_class
    ids = trainer.parts.problems.tokenise(prompts)  # what TRL would do with them
    with rounded(model, precision):
        tokens, logits = _sample(model, tokenizer, ids, trainer.max_completion_length)
    logp = logits.float().log_softmax(-1)
    found: dict[str, Any] = {"prompt_ids": ids, "completion_ids": tokens}
    if not (trainer.needs_support and trainer.anchor == "rollout"):  # one number a token
        places = enumerate(tokens)
        return found | {"logprobs": [logp[i, range(len(row)), row].tolist() for i, row in places]}
    values, likely = (x.tolist() for x in logp.topk(min(REPORTED, logp.shape[-1] - 1)))
    for i, row in enumerate(tokens):
        del values[i][len(row) :], likely[i][len(row) :]
        for t, token in enumerate(row):
            if token not in likely[i][t]:
                likely[i][t].append(token)
                values[i][t].append(float(logp[i, t, token]))
    return found | {"logprobs": values, "logprob_token_ids": likely}


def _sample(model: Any, tokenizer: Any, ids: list[list[int]], longest: int) -> tuple[list[list[int]], Tensor]:
    """Completions at temperature 1, and the logits they were drawn from, [B T V]."""
    batch = tokenizer.pad({"input_ids": ids}, padding_side="left", return_tensors="pt").to(model.device)
    ends = end_tokens(model, tokenizer)
    config = GenerationConfig(
        max_new_tokens=longest,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=sorted(ends) or None,
    )
    out = model.generate(**batch, generation_config=config, return_dict_in_generate=True, output_logits=True)
    rows = out.sequences[:, batch["input_ids"].shape[1] :].tolist()
    return [cut_at_end(row, ends) for row in rows], torch.stack(out.logits, 1)


@contextmanager
def sampling_in(precision: str) -> Iterator[None]:
    """Inside, `corral train` draws its rollouts in this precision, and reports their log-probs."""
    own = train.RunTrainer
    roll = partial(roll_out, precision=precision)
    train.RunTrainer = partial(own, rollout_func=roll)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        train.RunTrainer = own  # type: ignore[misc]
