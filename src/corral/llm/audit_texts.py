"""An audit of logged texts: two models rescore them, over the whole vocabulary."""

import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from corral.advantage import group_advantages
from corral.audit.dump.find import Dump
from corral.audit.dump.texts import TextCompletion, read_texts
from corral.audit.folder import AuditFolder
from corral.audit.rules import Rules
from corral.audit.words import percent
from corral.llm.audit_models import load_pair, measure_completion, write_audit
from corral.llm.eval_settings import EvalSettings
from corral.llm.models import NO_CODE, choose_device, load_model
from corral.llm.subject import BUILT_IN, find_subject
from corral.run.text import count
from corral.validate import RunError


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
