"""Audits that rescore completions with two models: checkpoints of a run, models by name, or models for logged texts."""

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from corral.advantage import group_advantages
from corral.deployed.state import preserve_state
from corral.lab.audit.dump import Dump, read_texts
from corral.lab.audit.folder import AuditFolder
from corral.lab.audit.rules import CLIPPING, Rules, read_objective
from corral.lab.audit.scoring import AuditedCompletion, logp_at
from corral.lab.audit.words import percent
from corral.lab.jobs.llm.eval_settings import EvalSettings, Subject, find_subject
from corral.lab.jobs.llm.evaluate import EvalJob, prepare_evaluation
from corral.lab.jobs.llm.problems import Dialogue
from corral.lab.jobs.llm.rewards import verifier
from corral.lab.jobs.llm.sampler import set_pad_token
from corral.lab.models.load import choose_device, load_model
from corral.lab.run.folder import RunFolder
from corral.lab.run.text import count
from corral.validate import RunError

_CHUNK = 512
"""Number of tokens whose full distributions are in memory at a time."""


@dataclass(frozen=True)
class ModelPair:
    """Two models with one vocabulary, the old and the new policy, with the settings of their comparison."""

    old: PreTrainedModel
    new: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    rules: Rules
    temperature: float

    def measure(
        self, prompt: list[int], completion: list[int], advantage: float, own: Sequence[int] | None = None
    ) -> pd.DataFrame:
        """Measure how both models differ on each token of a completion. Returns one row per token.

        `own` marks the tokens that a model wrote, and only these are measured; None means all.
        """
        places = torch.arange(len(completion)) if own is None else torch.tensor(own).nonzero()[:, 0]
        ids = torch.tensor(prompt + completion, device=self.old.device)
        found = []
        with preserve_state(self.old), preserve_state(self.new):
            for part in places.split(len(places) if self.rules.whole_sequences else _CHUNK):
                kept = AuditedCompletion(
                    ids, len(prompt), (len(prompt) + part).to(ids.device), torch.full((len(part),), advantage)
                )
                old, new = (logp_at(model, ids, kept.positions, self.temperature) for model in (self.old, self.new))
                if old.shape != new.shape:
                    raise RunError(f"one model has {old.shape[-1]} words in its head and the other {new.shape[-1]}.")
                found.append(kept.measure(old, new, self.rules, self.tokenizer))
        return pd.concat(found)


def load_pair(old: Subject, new: Subject, device: str, rules: Rules, temperature: float) -> ModelPair:
    """Load the old and the new model in float32. Half precision would round logits by as much as an update changes them."""
    (first, tokenizer), (second, other) = (load_model(one.model, torch.float32) for one in (old, new))
    if tokenizer.get_vocab() != other.get_vocab():
        raise RunError(f"{old.name} and {new.name} have different vocabularies, so no token of one is one of the other.")
    for model in (first, second):
        model.to(device)  # type: ignore[arg-type]  # transformers wraps `to`, losing its signature
    return ModelPair(first, second, set_pad_token(tokenizer), rules, temperature)


def audit_pair(old: str, new: str, settings: EvalSettings, rules: Rules, out: Path, say: Callable[[str], object]) -> Path:
    """Audit the change from an old to a new model, each given as tiny, smollm2, a run, a folder, or a name on the hub."""
    job = prepare_evaluation(dataclasses.replace(settings, model=old))
    pairs = {1: (find_subject(old, None), find_subject(new, None))}
    return _audit(pairs, job, rules, out, f"sampled from {old} and compared under {new}", say)


def audit_run(path: Path, settings: EvalSettings, rules: Rules, out: Path, say: Callable[[str], object]) -> Path:
    """Audit each intact checkpoint of a run against the previous checkpoint, or a single checkpoint against the first model."""
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


def _audit(
    pairs: Mapping[int, tuple[Subject, Subject]], job: EvalJob, rules: Rules, out: Path, what: str, say: Callable[[str], object]
) -> Path:
    """Sample from the older model of each pair, compare both models on these completions, and return the audit's folder."""
    folder = AuditFolder(out)
    info = {"kind": "models", "what": what, "model": job.subject.name, "rules": rules.as_dict(), "settings": job.plan()}
    folder.check(rules.as_dict())
    found: dict[int, list[pd.DataFrame]] = {}
    for step, (old, new) in pairs.items():
        say(f"{old.model} → {new.model}: {len(job.held_out)} problems, {job.samples} completions each")
        pair = load_pair(old, new, job.device, rules, job.sampling.temperature)
        completions, advantages = _sample(pair.old, pair.tokenizer, job)
        credits = zip(completions, advantages.tolist(), strict=True)
        found[step] = [pair.measure(one.prompt, one.tokens, credit, one.own) for one, credit in credits if any(one.own)]
    return folder.fill({**info, "task": job.task.name}, found)


def _sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: EvalJob) -> tuple[list[Dialogue], torch.Tensor]:
    """Sample completions of held-out problems, and compute GRPO's advantages from the completions' rewards."""
    problems = job.problems(tokenizer)
    problems.check_length(job.held_out, model.config, job.sampling.max_tokens)
    repeated = [problem for problem in job.held_out for _ in range(job.samples)]
    found: list[Dialogue] = []
    with preserve_state(model):
        torch.manual_seed(job.seed)
        for start in range(0, len(repeated), job.batch_size):
            asked = repeated[start : start + job.batch_size]
            found += job.turns.play(model, problems, asked, job.sampling)
    rewards = [one.reward for one in found]
    if None in rewards:
        texts = [one.answer for one in found]
        rewards = verifier(job.task)(prompts=repeated, completions=texts, problem=repeated)
    group = torch.arange(len(job.held_out)).repeat_interleave(job.samples)
    return found, group_advantages(torch.tensor([reward or 0.0 for reward in rewards]), group, "grpo")


def audit_texts(
    dump: Dump, models: Sequence[str], settings: EvalSettings, rules: Rules, out: Path, progress: Callable[[int], object]
) -> Path:
    """Compare an old and a new model on every logged completion, and return the audit's folder.

    Args:
        models: old and new: tiny, smollm2, runs, folders, or names on the hub.
        settings: the `temperature` that was sampled with, the `device`, and how many prompts (`problems`) of each step.
        progress: told how many bytes were read.
    """
    folder = AuditFolder(out)
    folder.check(rules.as_dict())
    old, new = (find_subject(name, None) for name in models)
    pair = load_pair(old, new, choose_device(settings.device), rules, settings.temperature)
    tokenizer: Any = pair.tokenizer  # transformers types its call by a dozen unions
    left_out = Counter[str]()
    found: dict[int, list[pd.DataFrame]] = {}
    completions = other = 0
    logged = pd.DataFrame(read_texts(dump, progress, lambda reason: left_out.update([reason])))
    for step, texts in logged.groupby("step", sort=False) if len(logged) else ():
        place = pd.factorize(texts["prompt"])[0]  # of the prompt among those of the step
        if settings.problems is not None:
            texts, place = texts[place < settings.problems], place[place < settings.problems]
        if "advantage" in texts:
            credits = texts["advantage"].tolist()
        else:
            credits = group_advantages(torch.tensor(texts["reward"].tolist()), torch.tensor(place), "grpo").tolist()
        for said, text, credit in zip(texts["prompt"], texts["completion"], credits, strict=True):
            written = tokenizer(text, add_special_tokens=False)["input_ids"]
            completions += 1
            other += tokenizer.decode(written, skip_special_tokens=True) != text
            if written:
                found.setdefault(int(step), []).append(pair.measure(_prompt_tokens(tokenizer, said), written, credit))
            else:
                left_out["completions without a token"] += 1
    if not found:
        raise RunError(f"{dump.path} has no completion with a token.")
    remark = (
        "The texts were tokenised again. Special tokens (ends, chat markers) are gone from such logs, so they are neither "
        f"read nor scored; in {count(other, 'completion')} of {completions:,} ({percent(other / completions)}) the tokens do "
        "not spell the text, and in others they may be different ones from those that were sampled."
    )
    of = {"dump": str(dump.path), "format": dump.format, "temperature": settings.temperature, "prompts": settings.problems}
    info = {
        "kind": "texts",
        "what": f"logged by {dump.format} and rescored by {models[0]} (old) and {models[1]} (new)",
        "model": models[1],
        "rules": rules.as_dict(),
        "remarks": [remark, *(f"Left out: {number:,} {what}." for what, number in left_out.items())],
        "settings": of,
    }
    return folder.fill(info, found)


def _prompt_tokens(tokenizer: Any, said: str | tuple[tuple[str, str], ...]) -> list[int]:
    """Tokenise a prompt into at least one token. Messages, as (role, content) pairs, go through the chat template."""
    if isinstance(said, str):
        tokens = tokenizer(said)["input_ids"]
    else:
        messages = [{"role": role, "content": content} for role, content in said]
        try:
            tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program of its own, and raises what it likes
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RunError(f"the model's chat template cannot render the logged messages: {reason}") from error
    return tokens or [tokenizer.bos_token_id or tokenizer.eos_token_id or 0]
