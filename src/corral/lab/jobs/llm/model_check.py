"""Checks of `corral doctor --model NAME`: saving keeps the tokenizer, and attention kernels agree with float32.

Attention kernels have been wrong on some devices, silently: for few key-value heads, for padded batches, at single lengths. A
sampler and a trainer that share such a kernel agree with each other, so nothing in training shows it. Here a padded batch in
the precision of training is compared with float32, one prompt at a time, for each kernel that torch has. A tokenizer that
cuts words differently once it was saved makes checkpoints worse than the run they come from: it is saved and read, too.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from corral.engines.checkup import Checkup
from corral.lab.jobs.llm.eval_settings import find_subject
from corral.lab.jobs.llm.problems import Sampling, cut_at_end, end_tokens, sampling_config
from corral.lab.jobs.llm.sampler import set_pad_token
from corral.lab.models import EMBEDDED
from corral.lab.models.load import choose_device, load_model
from corral.lab.tasks import Task
from corral.lab.tasks.procedural import Arithmetic, Countdown, TwoNumbers

KERNELS = {
    "as in training": None,
    "math": SDPBackend.MATH,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
"""Attention kernels of torch by name; None stands for torch's automatic choice."""
PROMPTS, TOKENS = 8, 12
"""Number of problems to answer, and the largest number of tokens in an answer."""
TOLERANCE = 0.1
"""Largest mean KL divergence per token, in nats, with which the check passes.

Half precision alone gave at most .02, with Gemma on a CPU and with Gemma and SmolLM2 on an H200.
"""

_FINE = "Padded batches give what float32 gives, one prompt at a time, and the tokenizer survives saving."


class Distance(NamedTuple):
    """KL divergence of a model's next-token distributions from those in float32, in nats per token."""

    mean: float
    largest: float

    def __str__(self) -> str:
        return f"KL {self.mean:.1e}, at most {self.largest:.1e}"


def check_model(name: str) -> Checkup:
    """Check that saving leaves the tokenizer unchanged, and that each attention kernel agrees with float32."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()  # of settings that greedy sampling does not read
    subject, on = find_subject(name, None), choose_device("auto")
    model, tokenizer = load_model(subject.model)
    set_pad_token(tokenizer)
    model.to(on).eval()  # type: ignore[arg-type]  # transformers' own annotation takes no string
    half = torch.bfloat16 if on == "cuda" and subject.half and name not in EMBEDDED else None  # as `corral train` has it
    embedded: dict[str, Task] = {"tiny": Countdown(), "tiny-sums": Arithmetic(operations="+")}
    task = embedded.get(name, TwoNumbers())
    asked = prompts(task, tokenizer)
    found = Checkup([("model", name), ("device", f"{on}, {'float32' if half is None else 'bfloat16'}")], verdict=_FINE)
    changed = count_changed(tokenizer, task.held_out_prompts(PROMPTS, seed=0))
    found.rows.append(("tokenizer", f"{changed} of {PROMPTS} problems have other tokens once it is saved and loaded"))
    if changed:
        found.trouble.append(
            f"{name}'s tokenizer is not what it was once it is saved and loaded: a run's checkpoints would read other tokens "
            f"than it was trained on. Another release of transformers may save it whole."
        )
    for kernel, backend in KERNELS.items():
        try:
            drawn, scored = distances(model, tokenizer, asked, half, backend)
        except RuntimeError as error:  # torch says so where a kernel cannot do it
            if backend is None or isinstance(error, torch.OutOfMemoryError):
                raise
            found.rows.append((kernel, "not for this model and device"))
            continue
        found.rows.append((kernel, f"sampling: {drawn}; scoring: {scored}"))
        if backend is None and max(drawn.mean, scored.mean) > TOLERANCE:
            found.trouble.append(
                f"{name} computes something else here than in float32: {max(drawn.mean, scored.mean):.2g} nats a token, where "
                f"rounding leaves .02. If another kernel above is near, turn this one off: before training, "
                f"torch.backends.cuda.enable_cudnn_sdp(False) for cudnn, or another release of torch."
            )
    return found


def count_changed(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> int:
    """Count texts whose tokens change after the tokenizer is saved and loaded again, as checkpoints do."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        again = AutoTokenizer.from_pretrained(folder)
    return sum(tokenizer(text)["input_ids"] != again(text)["input_ids"] for text in texts)


def prompts(task: Task, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return held-out problems as token ids. Problem k lacks its last k tokens, so that the batch needs padding."""
    ids: list[list[int]] = tokenizer(task.held_out_prompts(PROMPTS, seed=0))["input_ids"]
    return [row[: max(1, len(row) - place)] for place, row in enumerate(ids)]


@torch.no_grad()
def distances(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    asked: Sequence[list[int]],
    half: torch.dtype | None,
    backend: SDPBackend | None,
) -> tuple[Distance, Distance]:
    """Measure the KL divergence of a padded batch from float32, first in sampling with a KV cache, then in scoring tokens."""
    writer: Any = model  # causal models can generate; transformers' base class does not say so
    ends = end_tokens(model, tokenizer)
    batch = tokenizer.pad({"input_ids": list(asked)}, padding_side="left", return_tensors="pt").to(model.device)
    width = batch["input_ids"].shape[1]
    kernel = nullcontext() if backend is None else sdpa_kernel(backend)
    greedy = sampling_config(model, tokenizer, Sampling(max_tokens=TOKENS, greedy=True))
    with greedy as how, kernel, torch.autocast(model.device.type, half or torch.bfloat16, enabled=half is not None):
        how.update(return_dict_in_generate=True, output_logits=True)
        out = writer.generate(**batch, generation_config=how)
        drawn = torch.stack(out.logits, dim=1)
        mask = torch.cat([batch["attention_mask"], torch.ones_like(out.sequences[:, width:])], dim=1)
        scored = writer(out.sequences, attention_mask=mask, logits_to_keep=drawn.shape[1] + 1).logits[:, :-1]
    answers = [cut_at_end(row, ends) for row in out.sequences[:, width:].tolist()]
    exact = []  # logits of the answers' tokens [T V], one sequence at a time and without padding
    with sdpa_kernel(SDPBackend.MATH):
        for prompt, answer in zip(asked, answers, strict=True):
            ids = torch.tensor([[*prompt, *answer]], device=model.device)
            exact.append(writer(ids, logits_to_keep=len(answer) + 1).logits[0, :-1])
    return _distance(exact, drawn), _distance(exact, scored)


def _distance(exact: Sequence[Tensor], logits: Tensor) -> Distance:
    """Mean and largest KL(exact ‖ logits) over the tokens of all answers, in float64."""
    each = []
    for row, ours in zip(exact, logits, strict=True):
        p, q = row.double().log_softmax(-1), ours[: len(row)].double().log_softmax(-1)
        each.append((p.exp() * (p - q)).sum(-1))
    every = torch.cat(each)
    return Distance(every.mean().item(), every.max().item())
