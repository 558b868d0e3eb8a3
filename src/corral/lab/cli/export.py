"""Command `corral export`: write a run's model or policy without its training state."""

import argparse
from pathlib import Path

from corral.lab.cli import check_kind, kind_of_run, say
from corral.lab.cli.train import quiet_libraries
from corral.validate import RunError

_EPILOG = """
corral export runs/mine --out mine/               a folder that transformers, TRL and vLLM load
corral export runs/mine --out mine/ --merge       of a LoRA run: one model, the adapter merged into its base
corral export runs/arm --out arm_policy.npz       of a robot: plans as arrays, and arm_policy.py, which loads them
corral export runs/arm --out arm_policy.pt2       of a robot: a program for torch.export.load
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `corral export` to the parser."""
    parser.epilog = _EPILOG
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder")
    parser.add_argument("--out", metavar="PATH", type=Path, help="a new folder (RUN-model), or a robot's file (policy.npz)")
    parser.add_argument("--checkpoint", metavar="VALUE", default="latest", help="latest, best, or a step's number (latest)")
    parser.add_argument("--merge", action="store_true", help="merge an adapter into the model that it was trained on")


def run(arguments: argparse.Namespace) -> int:
    """Write the exported model or policy files, and print their paths."""
    if not (arguments.run / "config.json").is_file():
        raise RunError(f"{arguments.run} is no run: it has no config.json. Give the folder that `corral train` printed.")
    kind = kind_of_run(arguments.run)
    check_kind(kind, "exporting")
    if kind == "robot":
        from corral.lab.jobs.robot.export import export_run

        if arguments.merge:
            raise RunError(f"--merge is for adapters of language models, and {arguments.run} is a robot's run.")
        out = arguments.out or Path("policy.npz")
        step = export_run(arguments.run, out, checkpoint=arguments.checkpoint)
        loads = "torch.export.load" if out.suffix == ".pt2" else f"{out.with_suffix('.py')}"
        with_what = "" if out.suffix == ".pt2" else " with NumPy alone"
        say(f"{out} has the policy after step {step}; {loads} loads it{with_what}.")
        return 0
    quiet_libraries()
    from corral.lab.jobs.llm.export import export_run as export_model

    out = arguments.out or arguments.run.with_name(f"{arguments.run.resolve().name}-model")
    step = export_model(arguments.run, out, checkpoint=arguments.checkpoint, merge=arguments.merge)
    say(f'{out} has the model after step {step}: AutoModelForCausalLM.from_pretrained("{out}")')
    return 0
