"""Audits that rescore completions: a run with its models, or logged texts with a model of the user's."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from corral.advantage import group_advantages
from corral.deployed.state import preserve_state
from corral.lab.audit.dump import Dump, read_texts
from corral.lab.audit.folder import AuditFolder
from corral.lab.audit.measure import measure
from corral.lab.audit.rules import CLIPPING, Rules, read_objective
from corral.lab.audit.scoring import logp_at
from corral.lab.audit.words import percent
from corral.lab.jobs.llm.eval_settings import EvalSettings, Subject, find_subject
from corral.lab.jobs.llm.evaluate import EvalJob, prepare_evaluation
from corral.lab.jobs.llm.problems import Problems, Sampling, generate
from corral.lab.jobs.llm.rewards import verifier
from corral.lab.jobs.llm.sampler import set_pad_token
from corral.lab.jobs.llm.turns import Dialogue
from corral.lab.models import BUILT_IN
from corral.lab.models.load import NO_CODE, choose_device, load_model
from corral.lab.run.folder import RunFolder
from corral.lab.run.text import count
from corral.validate import RunError

_CHUNK = 512
"""Number of a completion's tokens whose distributions are in memory at a time."""

_Say = Callable[[str], object]


_Rows = list[dict[str, Any]]
"""Columns of an audit, filled completion by completion."""


@dataclass(frozen=True)
class ModelPair:
    """An older and a newer policy with a common vocabulary, and the settings of their comparison."""

    old: PreTrainedModel
    new: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rules: Rules
    temperature: float

    def measure(
        self, prompt: list[int], completion: list[int], advantage: float, own: Sequence[int] | None = None
    ) -> dict[str, Any]:
        """Columns for the tokens of a completion that the model wrote: all tokens if `own` is None."""
        places = torch.arange(len(completion)) if own is None else torch.tensor(own).nonzero()[:, 0]
        ids = torch.tensor(prompt + completion, device=self.old.device)
        positions = len(prompt) + places.to(ids.device)
        credit, found = torch.full((len(places),), advantage), []
        with preserve_state(self.old), preserve_state(self.new):
            for part in positions.split(len(positions) if self.rules.whole_sequences else _CHUNK):
                old, new = (logp_at(model, ids, part, self.temperature) for model in (self.old, self.new))
                if old.shape != new.shape:
                    raise RunError(f"one model has {old.shape[-1]} words in its head and the other {new.shape[-1]}.")
                found.append(measure(ids[part], old, new, credit[: len(part)], self.rules))
        columns = {name: torch.cat([piece[name] for piece in found]) for name in found[0]}
        tokens = torch.tensor(completion)[places]
        texts = [self.tokenizer.decode([token]) for token in tokens.tolist()]
        return {**columns, "token": tokens, "advantage": credit, "position": places, "text": texts}


def load_pair(old: Subject, new: Subject, device: str, rules: Rules, temperature: float) -> ModelPair:
    """Load both models in float32: half precision rounds logits to an eighth, which would look like a policy change."""
    (first, tokenizer), (second, other) = (load_model(one.model, torch.float32) for one in (old, new))
    if tokenizer.get_vocab() != other.get_vocab():
        raise RunError(f"{old.name} and {new.name} have different vocabularies, so no token of one is one of the other.")
    for model in (first, second):
        model.to(device)  # type: ignore[arg-type]  # transformers wraps `to`, losing its signature
    return ModelPair(first, second, set_pad_token(tokenizer), rules, temperature)


def audit_pair(old: str, new: str, settings: EvalSettings, rules: Rules, out: Path, say: _Say) -> Path:
    """Audit two models by name: tiny, smollm2, runs, folders, or names on the hub."""
    job = prepare_evaluation(dataclasses.replace(settings, model=old))
    pairs = {1: (find_subject(old, None), find_subject(new, None))}
    return _audit(pairs, job, rules, out, f"sampled from {old} and compared under {new}", say)


def audit_run(path: Path, settings: EvalSettings, rules: Rules, out: Path, say: _Say) -> Path:
    """Audit each intact checkpoint of a run against its predecessor; a single checkpoint against the run's first model."""
    folder = RunFolder.open(path, write=False)
    config = folder.read_config()
    try:
        objective = dict(config.get("objective") or {})
        if objective.get("name") in CLIPPING:
            rules = dataclasses.replace(rules, clip=read_objective(objective), own=True)
    except (TypeError, ValueError) as error:
        raise RunError(f"{folder.config} is not what a run writes: its objective cannot be read ({error}).") from error
    steps = sorted(folder.whole_checkpoints())
    if not steps:
        raise RunError(f"the run in {path} has no whole checkpoint to look at.")
    found = [find_subject(str(path), str(step)) for step in steps]
    if len(found) == 1:
        found, steps = [find_subject(str(config["settings"].get("model")), None), *found], [0, *steps]
    before, after = (" and ".join(map(str, some)) for some in (steps[:-1], steps[1:]))
    what = f"sampled at step {before} of {path} and compared at step {after}"
    job = prepare_evaluation(dataclasses.replace(settings, model=str(path)))
    return _audit(dict(zip(steps[1:], pairwise(found), strict=True)), job, rules, out, what, say)


def _audit(pairs: Mapping[int, tuple[Subject, Subject]], job: EvalJob, rules: Rules, out: Path, what: str, say: _Say) -> Path:
    """Measure pairs of models, by step of the newer model, on completions of the older model, and return the audit's folder."""
    folder = AuditFolder(out)
    info = {"kind": "models", "what": what, "model": job.subject.name, "rules": rules.as_dict(), "settings": job.plan()}
    folder.check(rules.as_dict())
    found: dict[int, _Rows] = {}
    for step, (old, new) in pairs.items():
        say(f"{old.model} → {new.model}: {len(job.held_out)} problems, {job.samples} completions each")
        pair = load_pair(old, new, job.device, rules, job.sampling.temperature)
        completions, advantages = _sample(pair.old, pair.tokenizer, job)
        credits = zip(completions, advantages.tolist(), strict=True)
        found[step] = [pair.measure(one.prompt, one.tokens, credit, one.own) for one, credit in credits if any(one.own)]
    return folder.fill({**info, "task": job.task.name, "command": sys.argv}, found)


def _sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: EvalJob) -> tuple[list[Dialogue], torch.Tensor]:
    """Completions as tokens, and GRPO's advantages from the rewards of the task or environment."""
    problems = job.problems(tokenizer)
    problems.check_length(job.held_out, model.config, job.sampling.max_tokens)
    repeated = [problem for problem in job.held_out for _ in range(job.samples)]
    found: list[Dialogue] = []
    with preserve_state(model):
        torch.manual_seed(job.seed)
        for start in range(0, len(repeated), job.batch_size):
            asked = repeated[start : start + job.batch_size]
            if job.turns is not None:
                found += job.turns.play(model, problems, asked, job.sampling)
            else:
                found += _complete(model, problems, asked, job.sampling)
    rewards = [one.reward for one in found]
    if None in rewards:
        texts = [one.answer for one in found]
        rewards = verifier(job.task)(prompts=repeated, completions=texts, problem=repeated)
    group = torch.arange(len(job.held_out)).repeat_interleave(job.samples)
    return found, group_advantages(torch.tensor([reward or 0.0 for reward in rewards]), group, "grpo")


def _complete(model: PreTrainedModel, problems: Problems, asked: list[str], sampling: Sampling) -> Iterator[Dialogue]:
    """Completions of a single turn."""
    tokenizer, prompts = problems.tokenizer, problems.tokens(asked)
    for problem, prompt, tokens in zip(asked, prompts, generate(model, tokenizer, prompts, sampling), strict=True):
        one = Dialogue(problem, prompt, answer=str(tokenizer.decode(tokens, skip_special_tokens=True)))
        one.add(tokens)
        yield one


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a built-in model, a folder or a name on the hub, without weights if possible."""
    if name in BUILT_IN:
        return load_model(name)[1]
    try:
        return AutoTokenizer.from_pretrained(name, **NO_CODE)
    except Exception as error:  # transformers, tokenizers and the hub have one each
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"the tokenizer of {name!r} could not be loaded. transformers says: {reason}") from error


class _Retokenised:
    """Tokenizer of logged texts that counts known mismatches."""

    def __init__(self, tokenizer: Any) -> None:  # transformers types its call by a dozen unions
        self.tokenizer = tokenizer
        self.completions = self.other = self.empty = 0

    def __call__(self, said: str | tuple[tuple[str, str], ...], text: str) -> tuple[list[int], list[int]]:
        """Tokens of a prompt and a completion; a prompt of messages goes through its chat template."""
        if isinstance(said, str):
            prompt = self.tokenizer(said)["input_ids"]
        else:
            messages = [{"role": role, "content": content} for role, content in said]
            try:
                prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            except Exception as error:  # a template is a program of its own, and raises what it likes
                reason = (str(error).splitlines() or [type(error).__name__])[0]
                raise RunError(f"the model's chat template cannot render the logged messages: {reason}") from error
        completion = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        self.completions += 1
        self.empty += not completion
        self.other += self.tokenizer.decode(completion, skip_special_tokens=True) != text
        return prompt or [self.tokenizer.bos_token_id or self.tokenizer.eos_token_id or 0], completion

    def remarks(self) -> list[str]:
        """Remarks for a reader of the audit."""
        said = (
            "The texts were tokenised again. Special tokens (ends, chat markers) are gone from such logs, so they are neither "
            f"read nor scored; in {count(self.other, 'completion')} of {self.completions:,} "
            f"({percent(self.other / max(self.completions, 1))}) the tokens do not spell the text, and in others they may be "
            "different ones from those that were sampled."
        )
        return [said, *([f"{count(self.empty, 'completion')} without a token left out."] if self.empty else [])]


def audit_texts(
    dump: Dump,
    models: tuple[str, str],
    settings: EvalSettings,
    rules: Rules,
    out: Path,
    progress: Callable[[int], object],
) -> Path:
    """Measure both models on every logged completion and return the audit's folder.

    Args:
        models: old and new: tiny, smollm2, runs, folders, or names on the hub.
        settings: the `temperature` that was sampled with, the `device`, and how many prompts (`problems`) of each step.
        progress: told how many bytes were read.
    """
    folder = AuditFolder(out)
    folder.check(rules.as_dict())
    old, new = (find_subject(name, None) for name in models)
    pair = load_pair(old, new, choose_device(settings.device), rules, settings.temperature)
    retokenise = _Retokenised(pair.tokenizer)
    notes: list[str] = []
    logged = pd.DataFrame(read_texts(dump, progress, notes.append))
    found: dict[int, _Rows] = {}
    for step, texts in logged.groupby("step", sort=False) if len(logged) else ():
        prompts = pd.factorize(texts["prompt"])[0]  # prompts of the step, in their order
        if settings.problems is not None:
            texts, prompts = texts[prompts < settings.problems], prompts[prompts < settings.problems]
        if "advantage" in texts:
            credits = texts["advantage"].tolist()
        else:
            credits = group_advantages(torch.tensor(texts["reward"].tolist()), torch.tensor(prompts), "grpo").tolist()
        tokens = map(retokenise, texts["prompt"], texts["completion"])
        rows = [
            pair.measure(prompt, written, credit) for (prompt, written), credit in zip(tokens, credits, strict=True) if written
        ]
        found |= {int(step): rows} if rows else {}
    if not found:
        raise RunError(f"{dump.path} has no completion with a token.")
    info = {
        "kind": "texts",
        "what": f"logged by {dump.format} and rescored by {models[0]} (old) and {models[1]} (new)",
        "model": models[1],
        "rules": rules.as_dict(),
        "remarks": [*retokenise.remarks(), *(f"Left out: {note}." for note in sorted(set(notes)))],
        "settings": {
            "dump": str(dump.path),
            "format": dump.format,
            "temperature": settings.temperature,
            "prompts": settings.problems,
        },
        "command": sys.argv,
    }
    return folder.fill(info, found)
