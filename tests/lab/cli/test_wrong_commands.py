"""Wrong command lines: each ends with one sentence that says what is wrong, a status that is not 0, and no traceback."""

import importlib.util
import shlex
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from corral.lab.cli import COMMANDS, main
from corral.lab.jobs.llm.trainer import RunTrainer
from small_runs import save_model

TRAIN = {
    # Numbers that no training can use.
    "--num-iterations 0": "`num_iterations` is a whole number ≥ 1; got 0",
    "--num-iterations -1 --smoke": "`num_iterations` is a whole number ≥ 1; got -1",
    "--num-iterations 1.5": "`num_iterations` is int; got '1.5'",
    "--steps-per-generation 0": "`steps_per_generation` is a whole number ≥ 1",
    "--gradient-accumulation-steps 0": "`gradient_accumulation_steps` is a whole number ≥ 1",
    "--per-device-train-batch-size 0": "`per_device_train_batch_size` is a whole number ≥ 1",
    "--per-device-eval-batch-size 0": "`per_device_eval_batch_size` is a whole number ≥ 1",
    "--generation-batch-size 7": "can not be both configured",
    "--num-generations 0": "`num_generations` is a whole number ≥ 2",
    "--num-generations 1": "`num_generations` is a whole number ≥ 2",
    "--num-generations 3": "must be divisible by num_generations (3)",
    "--num-generations many": "`num_generations` is int or none; got 'many'",
    "--max-completion-length 0": "`max_completion_length` is a whole number ≥ 1",
    "--learning-rate -1": "`learning_rate` must be finite and ≥ 0 (or 'auto', which finds one); got -1.0",
    "--learning-rate nan": "`learning_rate` must be finite and ≥ 0",
    "--learning-rate inf": "`learning_rate` must be finite and ≥ 0",
    "--learning-rate fast": "`learning_rate` is a number, or auto, which finds one; got 'fast'",
    "--learning-rate aut": "`learning_rate` is a number, or auto",
    "--beta -1": "`beta` is the weight of a KL and must be finite and ≥ 0",
    "--beta nan": "`beta` is the weight of a KL",
    "--dry-run --beta -1": "`beta` is the weight of a KL",
    "--smoke --beta 0.1": "`beta` needs a reference, which TRL loads by name, and smoke is no folder",
    "--temperature 0": "`temperature` divides the logits",
    "--top-p 2": "`top_p` is a probability and must lie in (0, 1]",
    "--min-p 2": "`min_p` is a probability and must lie in [0, 1]",
    "--top-k x": "`top_k` is int; got 'x'",
    "--weight-decay -1": "`weight_decay` must be finite and ≥ 0",
    "--adam-beta1 2": "`adam_beta1` must lie in [0, 1)",
    "--adam-epsilon -1": "`adam_epsilon` must be finite and ≥ 0",
    "--max-grad-norm -1": "`max_grad_norm` is a norm and must be ≥ 0",
    "--dataloader-num-workers -1": "`dataloader_num_workers` is a whole number ≥ 0",
    "--scale-rewards sometimes": "`scale_rewards` is one of True, False, group, batch, none",
    "--bf16 maybe": "`bf16` is bool or none; got 'maybe'",
    "--reward-weights x": "`reward_weights` is list or none",
    "--repetition-penalty 2": "`repetition_penalty` is 2.0",
    "--lr-scheduler-type zigzag": "zigzag is not a valid SchedulerType",
    "--optim adamm": "adamm is not a valid OptimizerNames",
    "--lora.r x": "`lora.r` is int; got 'x'",
    "--lora.r 0": "`lora.r` is the rank of an adapter and must be at least 1",
    "--lora.nothing 3": "lora: there is no setting `nothing`",
    "--lora x": "`lora` is dict; got 'x'",
    # The objective, and what belongs to it.
    "--objective trol": "no objective 'trol'. Did you mean 'troll'?",
    "--objective grpo": "no objective 'grpo'. Did you mean 'ppo_clip'?",
    "--set objective_config.bound=-1": "troll: `bound` is a KL in nats and must be ≥ 0",
    "--set objective_config.bnd=1": "troll: there is no setting `bnd`. Did you mean 'bound'?",
    "--objective ppo_clip --set objective_config.clip_low=2": "`clip_low` is a distance from ratio 1 and must lie in [0, 1]",
    "--objective dual_clip --set objective_config.dual_clip=1": "`dual_clip` is a ratio and must be > 1",
    "--objective-config x": "`objective_config` is dict; got 'x'",
    "--loss-type troll": "Did you mean objective='troll'?",
    "--epsilon 0.3": "Use --objective ppo_clip",
    "--delta 3": "Use --objective dual_clip",
    "--advantage gae": "needs a critic",
    "--advantage ppo": "`advantage` is one of grpo, dr_grpo, rloo, reinforce++",
    "--anchor middle": "`anchor` is one of auto, old, rollout",
    "--correction nope": "there is no correction 'nope'",
    "--support half": "`support` is one of old, union",
    "--support-size 0": "`support_size` is a whole number ≥ 1",
    "--support-mass 2": "`support_mass` must lie in (0, 1]",
    "--deployed-bound 0": "`deployed_bound` is a divergence and must be > 0",
    "--reuse maybe": "`reuse` is one of fixed, auto",
    "--reuse auto --fp16": "loss scaling of fp16 cannot",
    "--teacher tiny": "objective='troll' reads no teacher",
    "--teacher-instruction hello": "`teacher_instruction` is for objective='distill'",
    "--use-liger-kernel": "Leave it off",
    "--generation-kwargs nonsense": "`generation_kwargs` is a dictionary",
    # The task, its rewards and who answers.
    "--task count-down": "no task 'count-down'. Did you mean 'countdown'?",
    "--task nomodule:Class": "cannot be imported: No module named 'nomodule'",
    "--task json:JSONDecoder": "is not a task: it has no name",
    "--task jsonl": "jsonl: `path` is missing",
    "--task jsonl --set task_config.path=/no/such.jsonl": "cannot be read: No such file",
    "--task jsonl --set task_config.path={tmp}/empty.jsonl": "empty.jsonl is empty: there is no problem in it",
    "--set task_config.n=x": "countdown: `n` is a whole number in [2, 9]",
    "--reward nomodule:f": "'nomodule:f' cannot be imported",
    "--reward verifier=x": "got 'verifier=x'",
    "--reward {tmp}/none.py:f": "No such file",
    "--tool calc": "there is no tool 'calc'",
    "--tool calculator --tools my.py:f": "use one or the other",
    "--environment-factory nomodule:Class": "cannot be imported",
    "--instruction 'Solve it.'": "`instruction` must contain {problem}",
    "--model /no/such/model": "there is no folder /no/such/model",
    "--model nobody/nothing": "'nobody/nothing' could not be loaded",
    # The run.
    "--steps 0": "`steps` is a whole number ≥ 1; got 0",
    "--steps many": "`steps` is int; got 'many'",
    "--seed -1": "`seed` is a whole number in [0, 4294967295]",
    "--seed 99999999999": "`seed` is a whole number in [0, 4294967295]",
    "--eval-every 0": "`eval_every` is a whole number ≥ 1",
    "--keep-completions -1": "`keep_completions` is a whole number ≥ 0",
    "--guard maybe": "`guard` is one of warn, stop, off",
    "--report-to wandb": "`report_to=wandb` needs the package wandb, which is not installed: pip install wandb",
    "--report-to nobody": "`report_to` has 'nobody', which transformers cannot report to",
    "--use-vllm": "`use_vllm` needs the package vllm",
    "--deepspeed zero.json": "`deepspeed` needs the package deepspeed",
    "--push-to-hub": "`push_to_hub` is decided by the run. Use `corral export RUN --out DIR`, then `hf upload",
    "--max-steps 3": "`max_steps` is decided by the run. Use steps",
    "--device tpu": "`device` is one of auto, cpu, cuda",
    "--lerning-rate 1": "no setting `lerning_rate`. Did you mean 'learning_rate'?",
    "--optim.lr 3": "only objective_config, task_config and lora have settings of their own",
    "--set stepz=1": "no setting `stepz`. Did you mean 'steps'?",
    "--set steps": "--set takes key=value; got 'steps'",
    "quickly": "'quickly' belongs to no flag. Settings are given as --key value, a recipe as --recipe NAME",
    "--config": "argument --config: expected one argument",
    "--config /no/such.toml": "cannot be read: No such file",
    "--config {tmp}": "cannot be read: Is a directory",
    "--config {tmp}/bad.toml": "bad.toml is not TOML",
    "--config {tmp}/bad.yaml": "bad.yaml is not YAML: while parsing a flow sequence",
    "--config {tmp}/list.yaml": "should hold settings",
    "--recipe dmo": "no recipe 'dmo'. Did you mean 'demo'?",
    "--resume /no/such/run": "is no run",
    "--resume /no/such/run --seed 1 --out x": "so seed, out cannot be given with it",
    "--smoke --out {tmp}": "is not an empty folder",
    "--smoke --out {tmp}/empty.jsonl/run": "could not be written",
    # Robots.
    "--recipe via_pont": "no recipe 'via_pont'. Did you mean 'via_point'?",
    "--recipe via_point --steps 3": "robots have no setting `steps`. Use iterations.",
    "--recipe via_point --algorithm tec": "`algorithm` is one of tce, bbrl",
    "--recipe via_point --tracking.p 3": "`tracking` is for environments that are not corral's",
    "--recipe via_point --set learner.points=1": "`points` is a whole number ≥ 2",
    "--recipe via_point --set learner.policy_rate=-1": "`policy_rate` must be finite and > 0",
    "--recipe via_point --iterations 0": "`iterations` is a whole number ≥ 1",
    "--recipe demo --algorithm tce": "there is no setting `algorithm`",
}
"""Arguments of `corral train`, and a word of the sentence that they get."""

TWO = "--objectives ppo_clip,troll"

OTHERS = {
    "trian": "there is no command 'trian'. Did you mean 'train'?",
    "--nothing": "unrecognized arguments: --nothing",
    "compare": "whom to compare?",
    "compare --objectives nope": "there is no objective 'nope'",
    "compare --objectives troll": "troll alone has nothing to be compared with",
    "compare --objectives troll,troll": "troll is there twice",
    "compare --algorithms tce,bbrl": "here a language model learns",
    "compare --recipe via_point --objectives troll": "here a robot learns",
    f"compare {TWO} --lr 3": "Did you mean 'learning_rate'?",
    f"compare {TWO} --learning-rate fast": "`learning_rate` is a number, or auto",
    f"compare {TWO} --beta -1": "`beta` is the weight of a KL",
    f"compare {TWO} --num-iterations 0": "`num_iterations` is a whole number ≥ 1",
    f"compare {TWO},troll:bnd=1": "there is no setting `bnd`",
    f"compare {TWO},ppo_clip:clip_low=2": "`clip_low` is a distance from ratio 1",
    f"compare {TWO} --seeds 0": "--seeds must be at least 1",
    f"compare {TWO} --seeds x": "argument --seeds: invalid int value: 'x'",
    f"compare {TWO} --jobs 0": "jobs",
    f"compare {TWO} --threads 0": "--threads must be at least 1",
    f"compare {TWO} --sweep steps": "`steps` cannot be swept",
    f"compare {TWO} --choose-seeds 2": "--choose-seeds goes with --sweep",
    f"compare {TWO} --engine slurm": "argument --engine: invalid choice: 'slurm'",
    f"compare {TWO} --retry-failed": "--retry-failed goes with --resume DIR",
    "compare --resume /no/such": "holds no comparison",
    "eval": "eval takes a run's folder or a model",
    "eval tiny": "say which with --task",
    "eval tiny --task countdwn": "no task 'countdwn'. Did you mean 'countdown'?",
    "eval tiny --task countdown --samples x": "`samples` is int; got 'x'",
    "eval tiny --task countdown --samples 0": "`samples` is a whole number ≥ 1",
    "eval tiny --task countdown --temperature 0": "`temperature` must be > 0",
    "eval tiny --task countdown --top-p 2": "`top_p` must lie in (0, 1]",
    "eval tiny --task countdown --backend sglang": "`backend` is one of auto, transformers, vllm",
    "eval tiny --task countdown --set n=3": "--set takes task_config.key=value; got 'n=3'",
    "eval tiny --task countdown --against /no/such": "cannot be read",
    "eval tiny --task countdown --video film.gif": "--video is for runs of robots, and tiny is none",
    "eval tiny --sampels 3": "eval has no '--sampels'",
    "eval nowhere": "is no folder here, and a model of the hub has no task of its own",
    "eval runs/no-such-run": "there is no run or model folder runs/no-such-run",
    "eval tiny --task countdown --set task_config.m=4": "countdown: there is no setting `m`",
    "eval tiny --task countdown --checkpoint best": "chooses among those of a run, and tiny is no run",
    f"eval tiny --task countdown --instruction {'x' * 600}{{problem}}": "more than the 512 positions of the model",
    "eval tiny --smoke": "--smoke evaluates a random model",
    "eval {arm} --samples 3": "not by --samples",
    "eval {arm} --episodes 0": "`episodes` must be at least 1",
    "eval {arm} --video film.avi": "ends in .gif or .mp4",
    "eval {arm} --checkpoint 9": "keeps no whole checkpoint of step 9",
    "audit": "audit takes an audit's folder",
    "audit /no/such": "cannot be read: No such file",
    "audit --old tiny --new tiny": "say which with --task",
    "audit {arm}": "is a robot's run",
    "audit {tmp}/empty.jsonl": "is empty",
    "audit {tmp}/bad.toml --kl-bound x": "argument --kl-bound: invalid float value: 'x'",
    "audit {tmp}/bad.toml --fail-above 101": "--fail-above is a percentage from 0 to 100; got 101",
    "audit {tmp}/bad.toml --live --interval 0": "--interval is a number of seconds, 0.1 or more",
    "audit x --sampels 3": "audit has no '--sampels'",
    "report": "the following arguments are required: DIR",
    "report /no/such": "/no/such is no folder",
    "report {tmp}/model": "no runs in",
    "report {arm} --out /no/such/x.html": "there is no folder /no/such to write x.html into",
    "report {arm} --out {tmp}": "is a folder, and the page is a file",
    "report {arm} --threshold 2": "a threshold of success lies between 0 and 1",
    "report {arm} --oout x": "report has no '--oout'",
    "explore x": "explore has no 'x'",
    "leaderboard --against clip": "there is no objective 'clip'",
    "leaderboard --passes 3": "argument --passes: invalid choice: 3",
    "explore --out /no/such/x.html": "there is no folder /no/such",
    "bench heat": "there is no benchmark 'heat'. Did you mean 'head'?",
    "explain dpo": "Did you mean 'dppo'?",
    "explain troll dppo": "explain has no 'dppo'",
    "doctor please": "doctor has no 'please'",
    "doctor --engine nope": "there is no engine 'nope'",
    "doctor --model /no/such": "there is no run or model folder /no/such",
    "doctor --engine verl --model tiny": "not allowed with argument",
    "export": "the following arguments are required: RUN",
    "export /no/such": "/no/such is no run",
    "export {arm} --merge": "--merge is for adapters of language models",
    "export {arm} --checkpoint x": "--checkpoint is latest, best or the number of a step",
    "export {arm} more": "export has no 'more'",
}
"""Other command lines, and a word of the sentence that they get."""

WRONG = {**{f"train {arguments}": word for arguments, word in TRAIN.items()}, **OTHERS}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of files that are no good, and a robot's run of two steps."""
    tmp = tmp_path_factory.mktemp("wrong")
    texts = {"empty.jsonl": "", "bad.toml": "steps = = 3", "bad.yaml": "steps: [1\n", "list.yaml": "- 1\n- 2\n"}
    for name, text in texts.items():
        (tmp / name).write_text(text)
    save_model(tmp / "model")
    arm = tmp_path_factory.mktemp("robot") / "arm"
    assert main(["train", "--recipe", "via_point", "--smoke", "--quiet", "--out", str(arm)]) == 0
    return {"tmp": tmp, "arm": arm}


def status_of(argv: list[str]) -> Any:
    """The exit status, also where argparse ends the process."""
    try:
        return main(argv)
    except SystemExit as stop:
        return stop.code


@pytest.mark.refuses("run: settings that do not exist, or of another type", door="command line")
@pytest.mark.refuses("run: settings that do not exist, or of another type", door="robots")
@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("line", WRONG)
def test_one_sentence_and_no_traceback(
    line: str,
    places: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def reached(*_: Any, **__: Any) -> NoReturn:
        pytest.fail(f"corral {line} trains")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(RunTrainer, "train", reached)
    missing = ("wandb", "vllm", "deepspeed")
    monkeypatch.setattr(
        "corral.lab.jobs.llm.settings.find_spec", lambda name: None if name in missing else importlib.util.find_spec(name)
    )
    found = line
    for name, path in places.items():
        found = found.replace(f"{{{name}}}", str(path))
    status = status_of(shlex.split(found))
    said = capsys.readouterr().err
    assert status in (1, 2)
    assert said.startswith("corral: ")
    assert said.count("\n") == 1, said
    assert WRONG[line] in said
    assert "Traceback" not in said
    assert not list(tmp_path.rglob("config.json")), "nothing was begun"


@pytest.mark.skipif(torch.cuda.is_available(), reason="asks what is said where there is no GPU")
def test_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--device", "cuda"]) == 1
    assert "torch finds no GPU" in capsys.readouterr().err


def test_every_command_is_in_the_table() -> None:
    assert len(WRONG) >= 110
    assert {line.split()[0] for line in WRONG} >= COMMANDS.keys()


@pytest.mark.refuses("run: training without the extra `llm`", door="command line")
def test_a_package_that_is_missing_comes_with_the_command_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "trl" else find(name, *rest))
    assert main(["train"]) == 1
    how = "pip install 'corral[llm]', or in a checkout pip install -e '.[llm]'."
    assert capsys.readouterr().err == f"corral: training needs trl. Install them: {how}\n"


@pytest.mark.refuses("run: a reward that returns None for every completion", door="command line")
def test_a_reward_that_never_gives_a_number(
    places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rewards.py").write_text("def silent(completions, **columns):\n    return [None] * len(completions)\n")
    assert main(["train", "--smoke", "--quiet", "--reward", "rewards.py:silent"]) == 1
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert said.splitlines()[-1].startswith("corral: no reward function gave a number for any of ")
    assert "silent returned None for each" in said
