"""Audits that score again: a run with its models, or logged texts with a model of the user's."""

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from corral.advantage import group_advantages
from corral.deployed.state import preserve_state
from corral.lab.audit.dump import Dump, TextCompletion, read_texts
from corral.lab.audit.folder import AuditFolder
from corral.lab.audit.measure import measure
from corral.lab.audit.rules import CLIPPING, Rules, read_objective
from corral.lab.audit.scoring import logp_at
from corral.lab.audit.words import percent
from corral.lab.jobs.llm.eval_settings import EvalSettings
from corral.lab.jobs.llm.evaluate import EvalJob, prepare_evaluation
from corral.lab.jobs.llm.problems import Problems, Sampling, generate
from corral.lab.jobs.llm.rewards import verifier
from corral.lab.jobs.llm.sampler import set_pad_token
from corral.lab.jobs.llm.turns import Dialogue
from corral.lab.models.load import NO_CODE, choose_device, load_model
from corral.lab.models.subject import BUILT_IN, Subject, find_subject
from corral.lab.run.folder import RunFolder
from corral.lab.run.text import count
from corral.validate import RunError

_CHUNK = 512
"""Tokens of a completion whose distributions are held at a time."""

_Say = Callable[[str], object]


@dataclass(frozen=True)
class _Pair:
    """An older and a newer policy."""

    old: Subject
    new: Subject
    step: int
    """What the rows are marked with: the newer one's step, or 1."""


def audit_pair(old: str, new: str, settings: EvalSettings, rules: Rules, out: Path, say: _Say) -> Path:
    """Two models by name: tiny, smollm2, runs, folders, or names on the hub."""
    settings = dataclasses.replace(settings, model=old)
    pair = _Pair(find_subject(old, None), find_subject(new, None), 1)
    what = f"sampled from {old} and compared under {new}"
    return _audit([pair], prepare_evaluation(settings), rules, out, what, say)


def audit_run(path: Path, settings: EvalSettings, rules: Rules, out: Path, say: _Say) -> Path:
    """Each whole checkpoint of a run against the one before; a single one against the model that the run began with."""
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
    pairs = [_Pair(*two, step) for two, step in zip(pairwise(found), steps[1:], strict=True)]
    before, after = (" and ".join(map(str, some)) for some in (steps[:-1], steps[1:]))
    what = f"sampled at step {before} of {path} and compared at step {after}"
    return _audit(pairs, prepare_evaluation(dataclasses.replace(settings, model=str(path))), rules, out, what, say)


def _audit(pairs: Sequence[_Pair], job: EvalJob, rules: Rules, out: Path, what: str, say: _Say) -> Path:
    folder = AuditFolder(out)
    info = {"kind": "models", "what": what, "model": job.subject.name, "rules": rules.as_dict(), "settings": job.plan()}
    folder.check(rules.as_dict())
    found: dict[int, list[dict[str, Any]]] = {}
    for pair in pairs:
        say(f"{pair.old.model} → {pair.new.model}: {len(job.held_out)} problems, {job.samples} completions each")
        found[pair.step] = _compare(pair, job, rules)
    return write_audit(folder, {**info, "task": job.task.name, "command": sys.argv}, found)


def write_audit(folder: AuditFolder, info: dict[str, Any], found: dict[int, list[dict[str, Any]]]) -> Path:
    """A new audit with the rows of every step; its folder."""
    folder.begin(info)
    try:
        for step, rows in found.items():
            folder.add(step, rows)
    finally:
        folder.close()
    return folder.path


def _compare(pair: _Pair, job: EvalJob, rules: Rules) -> list[dict[str, Any]]:
    """Completions of the old model with their rewards, and both models on each of their tokens."""
    (old, new), tokenizer = load_pair(pair.old, pair.new, job.device)
    completions, advantages = _sample(old, tokenizer, job)
    how = (rules, job.sampling.temperature)
    return [
        measure_completion(old, new, tokenizer, one.prompt, one.tokens, credit, *how, own=one.own)
        for one, credit in zip(completions, advantages.tolist(), strict=True)
        if any(one.own)
    ]


def load_pair(
    old: Subject, new: Subject, device: str
) -> tuple[tuple[PreTrainedModel, PreTrainedModel], PreTrainedTokenizerBase]:
    """Two models with one vocabulary, and its tokenizer."""
    (first, tokenizer), (second, other) = (_load(one, device) for one in (old, new))
    if tokenizer.get_vocab() != other.get_vocab():
        raise RunError(f"{old.name} and {new.name} have different vocabularies, so no token of one is one of the other.")
    return (first, second), tokenizer


def measure_completion(
    old: PreTrainedModel,
    new: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: list[int],
    completion: list[int],
    advantage: float,
    rules: Rules,
    temperature: float,
    *,
    own: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Columns of an audit for every token of one completion that the model wrote: all of them where `own` does not say."""
    places = torch.arange(len(completion)) if own is None else torch.tensor(own).nonzero()[:, 0]
    with preserve_state(old), preserve_state(new):
        ids = torch.tensor(prompt + completion, device=old.device)
        positions = len(prompt) + places.to(old.device)
        parts = positions.split(len(positions) if rules.whole_sequences else _CHUNK)
        found = [_measure_tokens(old, new, ids, part, advantage, rules, temperature) for part in parts]
    columns = {name: torch.cat([piece[name] for piece in found]) for name in found[0]}
    texts = [tokenizer.decode([completion[place]]) for place in places.tolist()]
    return {**columns, "position": places, "text": texts}


def _measure_tokens(
    old: PreTrainedModel,
    new: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor,
    advantage: float,
    rules: Rules,
    temperature: float,
) -> dict[str, torch.Tensor]:
    logp_old, logp_new = (logp_at(model, ids, positions, temperature) for model in (old, new))
    if logp_old.shape != logp_new.shape:
        raise RunError(f"one model has {logp_old.shape[-1]} words in its head and the other {logp_new.shape[-1]}.")
    credit = torch.full((len(positions),), advantage)
    columns = measure(ids[positions], logp_old, logp_new, credit, rules)
    return {**columns, "token": ids[positions].cpu(), "advantage": credit}


def _load(subject: Subject, device: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """In float32: half precision rounds logits to an eighth, and that is no movement of the policy."""
    model, tokenizer = load_model(subject.model, torch.float32)
    return model.to(device), set_pad_token(tokenizer)  # type: ignore[arg-type]  # transformers wraps `to`, losing its signature


def _sample(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, job: EvalJob) -> tuple[list[Dialogue], torch.Tensor]:
    """Completions as tokens, and GRPO's advantages of the task's rewards, or of what an environment pays."""
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
    """Completions in one turn."""
    tokenizer, prompts = problems.tokenizer, problems.tokens(asked)
    for problem, prompt, tokens in zip(asked, prompts, generate(model, tokenizer, prompts, sampling), strict=True):
        one = Dialogue(problem, prompt, answer=str(tokenizer.decode(tokens, skip_special_tokens=True)))
        one.add(tokens)
        yield one


def load_tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Of a built-in model, a folder, or a name on the hub; without its weights where they are not needed."""
    if name in BUILT_IN:
        return load_model(name)[1]
    try:
        return AutoTokenizer.from_pretrained(name, **NO_CODE)
    except Exception as error:  # transformers, tokenizers and the hub have one each
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise RunError(f"the tokenizer of {name!r} could not be loaded. transformers says: {reason}") from error


class _Retokenised:
    """Texts as tokens again, and how often that is known to have gone wrong."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.completions = self.other = self.empty = 0

    def __call__(self, text: TextCompletion) -> tuple[list[int], list[int]]:
        """Tokens of the prompt, in its chat template if it has messages, and of the completion."""
        tokenizer: Any = self.tokenizer  # transformers types its call by a dozen unions
        if isinstance(text.prompt, str):
            prompt = tokenizer(text.prompt)["input_ids"]
        else:
            prompt = self._chat([{"role": role, "content": content} for role, content in text.prompt])
        completion = tokenizer(text.completion, add_special_tokens=False)["input_ids"]
        self.completions += 1
        self.empty += not completion
        self.other += tokenizer.decode(completion, skip_special_tokens=True) != text.completion
        return prompt or [tokenizer.bos_token_id or tokenizer.eos_token_id or 0], completion

    def _chat(self, messages: list[dict[str, str]]) -> list[int]:
        tokenizer: Any = self.tokenizer
        try:
            return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        except Exception as error:  # a template is a program of its own, and raises what it likes
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            raise RunError(f"the model's chat template cannot render the logged messages: {reason}") from error

    def remarks(self) -> list[str]:
        """What a reader of the audit has to know."""
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
    """Both models on every logged completion; the folder that it was written to.

    Args:
        models: old and new: tiny, smollm2, runs, folders, or names on the hub.
        settings: the `temperature` that was sampled with, the `device`, and how many prompts (`problems`) of each step.
        progress: told how many bytes were read.
    """
    folder = AuditFolder(out)
    folder.check(rules.as_dict())
    old, new = (find_subject(name, None) for name in models)
    pair, tokenizer = load_pair(old, new, choose_device(settings.device))
    retokenise = _Retokenised(tokenizer)
    notes: list[str] = []
    found: dict[int, list[dict[str, Any]]] = {}
    for step, texts in _by_step(read_texts(dump, progress, notes.append), settings.problems):
        if step in found:
            raise RunError(f"step {step} of {dump.path} comes back after another one: put each step's completions together.")
        found[step] = list(_rows(texts, pair, retokenise, rules, settings.temperature))
    found = {step: rows for step, rows in found.items() if rows}
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
    return write_audit(folder, info, found)


def _by_step(texts: Iterable[TextCompletion], prompts: int | None) -> Iterator[tuple[int, list[TextCompletion]]]:
    """Completions of one step after the other, of its first so many prompts."""
    for step, group in groupby(texts, key=lambda text: text.step):
        kept: list[TextCompletion] = []
        seen: set[Any] = set()
        for text in group:
            if prompts is None or len(seen) < prompts or text.prompt in seen:
                seen.add(text.prompt)
                kept.append(text)
        yield step, kept


def _advantages(texts: list[TextCompletion]) -> list[float]:
    """As logged, else GRPO's from the scores of equal prompts."""
    if all(text.advantage is not None for text in texts):
        return [text.advantage or 0.0 for text in texts]
    places: dict[Any, int] = {}
    groups = torch.tensor([places.setdefault(text.prompt, len(places)) for text in texts])
    return group_advantages(torch.tensor([text.reward or 0.0 for text in texts]), groups, "grpo").tolist()


def _rows(
    texts: list[TextCompletion],
    models: tuple[PreTrainedModel, PreTrainedModel],
    retokenise: _Retokenised,
    rules: Rules,
    temperature: float,
) -> Iterator[dict[str, Any]]:
    for text, advantage in zip(texts, _advantages(texts), strict=True):
        prompt, completion = retokenise(text)
        if completion:
            yield measure_completion(*models, retokenise.tokenizer, prompt, completion, advantage, rules, temperature)
