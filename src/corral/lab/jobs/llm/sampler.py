"""Samplers of completions for evaluations: transformers, or vLLM if it is installed."""

import importlib
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from corral.lab.jobs.llm.eval_settings import Subject
from corral.lab.jobs.llm.problems import Dialogue, OneTurn, Problems, Sampling, end_tokens
from corral.lab.jobs.llm.turns import Turns
from corral.lab.models import BUILT_IN
from corral.lab.models.load import NO_CODE, load_model
from corral.validate import RunError

Backend = Literal["transformers", "vllm"]


def choose_backend(requested: str, subject: Subject, device: str, *, played: bool = False) -> Backend:
    """Resolve the sampler's name: `auto` is vLLM on a GPU if it is installed and can run the model, else transformers."""
    is_adapter = Path(subject.model, "adapter_config.json").is_file()
    reasons = [
        (played, "tools and environments are played with transformers here."),
        (find_spec("vllm") is None, "vLLM is not installed. Install it: pip install vllm."),
        (is_adapter, "this checkpoint is an adapter, and vLLM takes whole models here."),
        (subject.model in BUILT_IN, f"{subject.model} is built into corral, and vLLM takes a folder or a name on the hub."),
    ]
    why = next((sentence for holds, sentence in reasons if holds), None)
    if requested == "vllm" and why is not None:
        raise RunError(f"--backend vllm: {why} Or use --backend transformers.")
    suits = why is None and (requested == "vllm" or device == "cuda")
    return "vllm" if suits and requested != "transformers" else "transformers"


def choose_dtype(subject: Subject, device: str) -> torch.dtype:
    """Data type for evaluation: bfloat16 on a GPU; float32 on a CPU or for a run that was trained in float32."""
    return torch.bfloat16 if device == "cuda" and subject.half else torch.float32


class TransformersSampler:
    """Sampler that calls `generate` of transformers. Each batch has one random stream, seeded by its first prompt."""

    def __init__(self, subject: Subject, device: str) -> None:
        model, self.tokenizer = load_model(subject.model, choose_dtype(subject, device))
        self.model = model.to(device).eval()  # type: ignore[arg-type]  # transformers wraps `to` and loses its signature
        self.config = self.model.config
        set_pad_token(self.tokenizer)

    def start(self, room: int) -> None:
        """Do nothing: transformers' cache grows during generation."""

    def complete(
        self, turns: Turns, problems: Problems, asked: list[str], seeds: list[int], sampling: Sampling
    ) -> list[Dialogue]:
        devices = [self.model.device] if self.model.device.type == "cuda" else []
        try:
            with torch.random.fork_rng(devices=devices):
                torch.manual_seed(seeds[0])
                found = turns.play(self.model, problems, asked, sampling)
        except torch.OutOfMemoryError as error:
            raise RunError(f"the GPU's memory is too small for {len(seeds)} prompts at a time: lower --batch-size.") from error
        ends = end_tokens(self.model, self.tokenizer)
        for one in found:
            one.ended = one.tokens[-1:] != [] and one.tokens[-1] in ends
        return found


class VllmSampler:
    """Sampler that calls vLLM. Each prompt has a random seed of its own, so results do not depend on the batch size."""

    def __init__(self, subject: Subject, device: str) -> None:
        self.name = subject.model
        self.dtype = str(choose_dtype(subject, device)).removeprefix("torch.")
        try:
            self.tokenizer = set_pad_token(AutoTokenizer.from_pretrained(self.name, **NO_CODE))
            self.config = AutoConfig.from_pretrained(self.name, **NO_CODE)
        except (OSError, ValueError) as error:
            raise RunError(f"the model {self.name!r} could not be loaded: {str(error).splitlines()[0]}") from error

    def start(self, room: int) -> None:
        """Start vLLM for sequences of at most `room` tokens: the model's full length may not fit into memory."""
        vllm: Any = importlib.import_module("vllm")
        try:
            self.engine = vllm.LLM(model=self.name, dtype=self.dtype, seed=0, max_model_len=room)
        except (OSError, ValueError, RuntimeError) as error:
            raise RunError(f"vLLM could not start with {self.name!r}: {str(error).splitlines()[0]}") from error
        self.parameters = vllm.SamplingParams

    def complete(
        self, turns: Turns, problems: Problems, asked: list[str], seeds: list[int], sampling: Sampling
    ) -> list[Dialogue]:
        assert type(turns) is OneTurn  # `choose_backend` has seen to it
        how = {"temperature": 0.0} if sampling.greedy else {"temperature": sampling.temperature, "top_p": sampling.top_p}
        parameters = [self.parameters(max_tokens=sampling.max_tokens, seed=seed, **how) for seed in seeds]
        found = [Dialogue(problem, prompt) for problem, prompt in zip(asked, problems.tokens(asked), strict=True)]
        prompts = [{"prompt_token_ids": one.prompt} for one in found]
        for one, request in zip(found, self.engine.generate(prompts, parameters, use_tqdm=False), strict=True):
            written = request.outputs[0]
            one.add(written.token_ids)
            one.answer = one.transcript = written.text
            one.ended = written.finish_reason == "stop"
        return found


def set_pad_token(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Make a tokenizer without padding token use its end-of-sequence token for padding, as TRL does."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


Sampler = TransformersSampler | VllmSampler
"""Sampler of completions for an evaluation, with transformers or vLLM.

`start` is called before the first prompt, and reserves `room` tokens for the longest prompt and its completion. `complete`
gives a completion per problem, each with its own random seed.
"""
