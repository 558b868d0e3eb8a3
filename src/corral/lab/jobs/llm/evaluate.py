"""Evaluation by `corral eval`: sample completions of held-out problems, grade them, and estimate success with intervals.

During training `trainer.py` measures success.
"""

import hashlib
import json
import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from corral.lab.jobs.llm.eval_results import RIGHT, EvalFolder, Row, show, summarise
from corral.lab.jobs.llm.eval_settings import MULTI_TURN, EvalSettings, Subject
from corral.lab.jobs.llm.problems import Problems, Sampling
from corral.lab.jobs.llm.rewards import Reward, path_of, verifier
from corral.lab.jobs.llm.sampler import Backend, Sampler, TransformersSampler, VllmSampler, choose_backend
from corral.lab.jobs.llm.settings import Settings
from corral.lab.jobs.llm.turns import Turns, make_turns
from corral.lab.models.load import choose_device
from corral.lab.run.life import Evaluation
from corral.lab.run.view import RunView, make_view
from corral.lab.tasks import Task, make_task, settings_of
from corral.provenance import commit, plain, versions
from corral.validate import RewardError, RunError, run_errors

_PROCEDURAL = 512
"""Default number of held-out problems of a procedural task, which can generate any number of problems."""

_BATCH_SIZES = {"transformers": 256, "vllm": 2048}

_Batch = list[tuple[int, int, bool]]
"""Batch of completions to generate: one tuple (problem index, sample index, greedy or not) for each completion."""


@dataclass(frozen=True, kw_only=True)
class EvalJob:
    """An evaluation that is ready to run: all settings have values, and no model is loaded yet."""

    subject: Subject
    task: Task
    instruction: str
    held_out: list[str]
    samples: int
    sampling: Sampling
    batch_size: int
    seed: int
    device: str
    backend: Backend
    turns: Turns
    """Generator of completions: in a single turn, or with a tool, functions or an environment that reply."""
    how: dict[str, Any] = field(default_factory=dict)
    """Settings of `turns` and of the chat template for plan.json. Empty if the evaluation has no such settings."""

    def plan(self) -> dict[str, Any]:
        """Return all settings that the result depends on. Evaluations with equal plans count as the same evaluation."""
        return plain(
            {
                "model": self.subject.name,
                "step": self.subject.step,
                "identity": self.subject.identity,
                "task": {"name": self.task.name, **settings_of(self.task)},
                "instruction": self.instruction,
                "problems": len(self.held_out),
                "problems_sha256": hashlib.sha256("\0".join(self.held_out).encode(errors="surrogatepass")).hexdigest(),
                "samples": self.samples,
                **{name: vars(self.sampling)[name] for name in ("temperature", "top_p", "max_tokens")},
                "batch_size": self.batch_size,
                "seed": self.seed,
                "device": self.device,
                "backend": self.backend,
                **self.how,
            }
        )

    def problems(self, tokenizer: PreTrainedTokenizerBase) -> Problems:
        """Make the converter of held-out problems into prompts, with the instruction and the chat template."""
        with run_errors():
            tools = self.turns.template(tokenizer)
        template = tools | self.how.get("chat_template_kwargs", {})
        return Problems(task=self.task, tokenizer=tokenizer, instruction=self.instruction, template=template)

    def batches(self) -> Iterator[_Batch]:
        """Split all completions into batches: first the greedy completions, then the samples, grouped by problem."""
        greedy = [(problem, 0, True) for problem in range(len(self.held_out))]
        sampled = [(problem, sample, False) for problem in range(len(self.held_out)) for sample in range(self.samples)]
        for wanted in (greedy, sampled):
            for start in range(0, len(wanted), self.batch_size):
                yield wanted[start : start + self.batch_size]


def evaluate(settings: EvalSettings, *, out: Path | str | None = None, quiet: bool = False) -> Evaluation:
    """Run an evaluation, or resume it if it is unfinished, and return the result.

    A stored evaluation must have an equal plan. If it is finished, its result is returned.
    """
    job, view = prepare_evaluation(settings), make_view(quiet=quiet)
    plan = job.plan()
    if out is None:  # beside a run's checkpoints or under evals/, named by the plan, so that the same command finds it again
        key, run = hashlib.sha256(json.dumps(plan, sort_keys=True).encode()).hexdigest()[:8], job.subject.run
        label = re.sub(r"[^\w.-]+", "-", job.subject.name).strip("-.")[-60:] if run is None else f"step{job.subject.step}"
        out = (Path() if run is None else run) / "evals" / f"{job.task.name}-{label}-{key}"
    folder = EvalFolder(Path(out))
    done = folder.read_result(plan)
    for sentence in job.subject.complaints:
        view.warn(sentence)
    if done is None:
        sampler = (VllmSampler if job.backend == "vllm" else TransformersSampler)(job.subject, job.device)
        problems = job.problems(sampler.tokenizer)
        problems.check_length(job.held_out, sampler.config, job.sampling.max_tokens)
        folder.open({"settings": plan, "versions": versions()})
        try:
            done = _run(job, problems, sampler, folder, view)
        finally:
            view.close()
            folder.close()
    else:
        view.say(f"{folder.path} has this evaluation already.")
    show(view, done, folder.path)
    return Evaluation(folder.path, done)


def prepare_evaluation(settings: EvalSettings) -> EvalJob:
    """Resolve and check all settings of an evaluation, without loading the model."""
    subject, name = settings.find()
    own = subject.settings is not None and subject.settings.task == name
    device = choose_device(settings.device)
    how = settings.multi_turn(subject)
    backend = choose_backend(settings.backend, subject, device, played=not how.keys().isdisjoint(MULTI_TURN))
    with run_errors():
        turns = make_turns(how.get("tool", ""), how.get("tools", ()), how.get("environment_factory", ""), how.get("max_turns"))
        task = make_task(name, **{**subject.settings_of(name), **settings.task_config})
        held_out = task.held_out_prompts(settings.problems or default_problems(task), settings.seed)
    if not held_out:
        raise RunError(f"the task {task.name} has no held-out problems to evaluate on.")
    needed, trained = task.max_completion_length + 1, subject.trainer.get("max_completion_length", 0)
    longest = settings.max_tokens or (trained if own else max(needed, trained))  # another task's answers may be longer
    return EvalJob(
        subject=subject,
        task=task,
        instruction=settings.instruction or (subject.settings or Settings()).instruction,
        held_out=held_out,
        samples=settings.samples,
        sampling=Sampling(temperature=settings.temperature, top_p=settings.top_p, max_tokens=longest),
        batch_size=settings.batch_size or _BATCH_SIZES[backend],
        seed=settings.seed,
        device=device,
        backend=backend,
        turns=turns,
        how=how | {"tools": [path_of(one) for one in how["tools"]]} if "tools" in how else how,
    )


def default_problems(task: Task) -> int:
    """Default number of held-out problems: all of a data set (a task with `sizes`), or 512 of a procedural task."""
    sizes = getattr(task, "sizes", None)  # (to train on, held out); no part of the protocol
    return _PROCEDURAL if sizes is None else max(1, sizes[1])


def _run(job: EvalJob, problems: Problems, sampler: Sampler, folder: EvalFolder, view: RunView) -> dict[str, Any]:
    """Generate and grade the batches that are not yet on disk, then summarise all batches."""
    score = verifier(job.task)
    batches = list(job.batches())
    kept = {index: part for index in range(len(batches)) if (part := folder.part(index)) is not None}
    step = "" if job.subject.step is None else f", after step {job.subject.step}"
    how = f"temperature {job.sampling.temperature:g}, top_p {job.sampling.top_p:g}, at most {job.sampling.max_tokens} tokens"
    tools = [f"{name} {job.how[name]}" for name in MULTI_TURN if name in job.how]
    heading = [
        ("model", f"{job.subject.name}{step}"),
        ("task", f"{job.task.name}, {len(job.held_out):,} held-out problems"),
        *([("tools", ", ".join(tools))] if tools else []),
        ("answers", f"1 greedy and {job.samples} sampled each: {how}, seed {job.seed}"),
        ("device", f"{job.device}, {job.backend}, {job.batch_size} at a time"),
        ("results", str(folder.path)),
    ]
    view.begin(heading, sum(map(len, batches)), sum(map(len, kept.values())), "completions")
    if kept:
        view.say(f"resuming after {len(kept)} of {len(batches)} batches, kept in {folder.parts}")
    started = time.monotonic()
    rows: list[Row] = []
    right: dict[bool, list[bool]] = {True: [], False: []}  # by whether the answer is greedy
    if len(kept) < len(batches):
        sampler.start(max(map(len, problems.tokens(job.held_out))) + job.sampling.max_tokens)
    for index, batch in enumerate(batches):
        found = kept.get(index)
        if found is None:
            found = answer_batch(job, problems, batch, sampler, score)
            folder.add(index, found)
        rows += found
        marks = right[found[0]["greedy"]]
        marks += [row["reward"] >= RIGHT for row in found]
        view.line({"step": len(rows), "greedy" if found[0]["greedy"] else "success": sum(marks) / len(marks)})
    result = {
        **summarise(rows),
        "settings": job.plan(),
        "seconds": time.monotonic() - started,
        "command": sys.argv,
        "versions": versions(),
        "commit": commit(),
    }
    folder.finish(rows, result)
    return result


def answer_batch(job: EvalJob, problems: Problems, batch: _Batch, sampler: Sampler, score: Reward) -> list[Row]:
    """Generate and grade the completions of one batch."""
    greedy = batch[0][2]
    seeds = [draw_seed(job.seed, problem, sample) for problem, sample, _ in batch]
    prompts = [job.held_out[problem] for problem, _, _ in batch]
    written = sampler.complete(job.turns, problems, prompts, seeds, replace(job.sampling, greedy=greedy))
    rewards = [one.reward for one in written]
    if any(reward is None for reward in rewards):
        rewards = score(prompts=prompts, completions=[one.answer for one in written], problem=prompts)
    rows = []
    for (problem, sample, _), prompt, one, reward in zip(batch, prompts, written, rewards, strict=True):
        if reward is None or not 0 <= reward <= 1:
            who = f"{job.task.name}.verify" if one.reward is None else "get_reward of the environment"
            raise RewardError(f"{who} gave {reward} for {one.answer!r}. An evaluation needs rewards in 0..1.")
        row = {"problem": problem, "sample": sample, "greedy": greedy, "prompt": prompt, "completion": one.transcript}
        rows.append({**row, "reward": reward, "tokens": sum(one.own), "ended": one.ended})
    return rows


def draw_seed(seed: int, problem: int, sample: int) -> int:
    """Compute the random seed of one completion, 63 bits from a hash.

    Seeds made by addition would give neighbours equal random streams.
    """
    return int.from_bytes(hashlib.sha256(f"{seed} {problem} {sample}".encode()).digest()[:8], "big") >> 1
