"""Command `corral eval`: evaluate a run or a model on held-out problems or episodes."""

import argparse
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_type_hints

from corral.lab.cli import INTERRUPTED, check_kind, given_flags, kind_of_run, refuse
from corral.lab.cli.train import TOOLS, UNSAFE, quiet_libraries
from corral.lab.run.settings import coerce, guess, nested
from corral.validate import RunError

FLAGS = {
    "task": "what to ask; by default the run's own task",
    "samples": "completions per problem, besides the greedy one (4)",
    "problems": "held-out problems (all of a data set, 512 of a procedural task)",
    "checkpoint": "of a run: latest, best, or the number of a step (latest)",
    "instruction": "what the model reads, with {problem} in it",
    "tool": "who answers within completions: calculator or module:Class (the run's own)",
    "environment-factory": "an environment whose methods a chat model calls: module:Class (the run's own)",
    "temperature": "of the samples (1)",
    "top-p": "of the samples (1)",
    "max-tokens": "longest completion (the run's, or what the task needs)",
    "batch-size": "prompts at a time (256; vLLM 2048)",
    "seed": "random seed of problems and samples (0)",
    "device": "auto, cpu or cuda",
    "backend": "auto, transformers or vllm",
}

_EPILOG = """
A task's own settings: --set task_config.path=problems.jsonl.
Interrupted, the same command resumes. Finished, it shows the results.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `corral eval` to the parser."""
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="RUN|MODEL", nargs="?", help="a run's folder, or tiny, smollm2, a folder, a hub id")
    for name, what in FLAGS.items():
        parser.add_argument(f"--{name}", metavar="VALUE", help=what)
    parser.add_argument("--tools", metavar="FUNCTION", action="append", help=TOOLS)
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="task_config.…; repeatable")
    parser.add_argument("--out", metavar="DIR", type=Path, help="folder of the results; by default RUN/evals/… or evals/…")
    parser.add_argument("--against", metavar="DIR", type=Path, help="an evaluation of the same problems to compare with")
    parser.add_argument("--episodes", metavar="VALUE", help="of a robot's run: held-out contexts (256)")
    parser.add_argument("--video", metavar="FILE", type=Path, help="of a robot's run: a film of three episodes, .gif or .mp4")
    parser.add_argument("--unsafe-code-execution", action="store_true", help=UNSAFE)
    parser.add_argument("--smoke", action="store_true", help="a random model and two problems, to see that it runs")
    parser.add_argument("--quiet", action="store_true", help="say only what is wrong, and what came out")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate a run of a language model or robot, or a model without a run."""
    kind = "llm" if arguments.model is None else kind_of_run(Path(arguments.model))
    check_kind(kind, "evaluating")
    try:
        if kind == "robot":
            _evaluate_robot(arguments)
        else:
            _evaluate_model(arguments)
    except KeyboardInterrupt:
        resumable = " What is answered is kept: the same command resumes." if kind == "llm" else ""
        return refuse(f"interrupted.{resumable}", INTERRUPTED)
    return 0


def _evaluate_robot(arguments: argparse.Namespace) -> None:
    """Evaluate a robot's run: play episodes, print a table, and film a video if requested."""
    from corral.lab.jobs.robot.evaluate import evaluate, show
    from corral.lab.jobs.robot.smoke import EPISODES

    unknown = [name for name in given_flags(arguments, FLAGS) if name != "checkpoint"]
    unknown += [name for name in ("set", "against", "tools", "unsafe_code_execution") if vars(arguments)[name]]
    if unknown:
        flag = unknown[0].replace("_", "-")
        raise RunError(f"robots are evaluated by --episodes, --checkpoint, --video and --out; not by --{flag}.")
    given = arguments.episodes if arguments.episodes is not None else EPISODES if arguments.smoke else 256
    done = evaluate(
        Path(arguments.model),
        episodes=coerce("episodes", given, int),
        checkpoint=arguments.checkpoint or "latest",
        out=arguments.out,
        video=arguments.video,
    )
    show(done.result, done.path, arguments.video, quiet=arguments.quiet)


def _evaluate_model(arguments: argparse.Namespace) -> None:
    """Evaluate a language model with the settings in the flags, and compare with an earlier evaluation if requested."""
    from corral.lab.jobs.llm.eval_settings import EvalSettings

    for name in given_flags(arguments, ("episodes", "video")):
        raise RunError(f"--{name} is for runs of robots, and {arguments.model} is none.")
    chosen = eval_settings(arguments, ("model", "tools", *FLAGS))
    if arguments.smoke:
        from corral.lab.jobs.llm.smoke import EVALUATION, TASK_CONFIG

        if "model" in chosen:
            raise RunError(f"--smoke evaluates a random model, so {chosen['model']} cannot be given with it.")
        chosen = {"task": "countdown", **EVALUATION, **chosen}
        chosen["task_config"] = {**TASK_CONFIG.get(chosen["task"], {}), **chosen["task_config"]}
    if "model" not in chosen:
        raise RunError("eval takes a run's folder or a model: `corral eval tiny --task countdown`.")
    settings = EvalSettings(**chosen)
    settings.find()  # what is not there is said before torch is imported
    quiet_libraries()
    from corral.lab.jobs.llm.eval_results import compare, comparison, read_evaluation
    from corral.lab.jobs.llm.evaluate import evaluate
    from corral.lab.run.view import PatientConsole

    if arguments.against is not None:
        read_evaluation(arguments.against)  # an error is better now than hours later
    outcome = evaluate(settings, out=arguments.out, quiet=arguments.quiet)
    if arguments.against is not None:
        PatientConsole().print(comparison(compare(arguments.against, outcome.path)))


def eval_settings(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Convert flags into typed settings of an evaluation. Settings of the task go into `task_config`."""
    from corral.lab.jobs.llm.eval_settings import EvalSettings
    from corral.lab.jobs.llm.settings import FUNCTIONS, TABLES

    hints = get_type_hints(EvalSettings)
    chosen = {
        key: FUNCTIONS[key](value) if key in FUNCTIONS else coerce(key, value, hints[key])
        for key, value in given_flags(arguments, names).items()
    }
    pairs = [text.partition("=") for text in arguments.set]
    if not all(equals and key.startswith("task_config.") for key, equals, _ in pairs):
        raise RunError(f"--set takes task_config.key=value; got {' '.join(arguments.set)!r}.")
    config = nested([(key, value) for key, _, value in pairs], TABLES).get("task_config", {})
    chosen["task_config"] = {key: guess(value) for key, value in config.items()}
    if arguments.unsafe_code_execution:
        chosen["task_config"]["unsafe_code_execution"] = True
    return chosen
