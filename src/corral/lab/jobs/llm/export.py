"""Export of a run's checkpoint as a plain model folder, without optimizer, schedule and random state."""

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peft import PeftModel

from corral import __version__
from corral.lab.models import BUILT_IN
from corral.lab.models.load import adapter_base, is_local, load_trainable
from corral.lab.models.packaged import PACKAGED
from corral.lab.run.files import disk_errors
from corral.lab.run.folder import RunFolder, choose_checkpoint
from corral.lab.run.settings import SECRET
from corral.lab.run.text import count
from corral.trl.card import model_card
from corral.validate import RunError

_OF_TRAINING = ("optimizer", "scheduler", "rng_state", "scaler", "trainer_state.json", "training_args.bin", "manifest.json")
"""Beginnings of the names of checkpoint files that only training needs."""


def _card(run: RunFolder, name: str, step: int, *, adapter: bool) -> str:
    """Build the model card of a run's checkpoint: measurements, settings, and whom to cite."""
    config = run.read_config()
    settings: dict[str, Any] = config["settings"]
    model, task, objective = (str(settings.get(key)) for key in ("model", "task", "objective"))
    about = f"{_public(model)} after {count(step, 'step')} of training on the task {task}, trained with corral."
    measured = [line for line in run.lines() if isinstance(line.get("success"), float) and line["step"] <= step]
    if measured:
        last = measured[-1]
        about += f" Held-out success at step {last['step']}: {last['success']:.1%} by one sample at temperature 1"
        about += "." if not isinstance(last.get("greedy"), float) else f", {last['greedy']:.1%} by the likeliest tokens."
    shown = _public({key: value for key, value in settings.items() if value not in (None, "", [], {}) and key != "objective"})
    made = config.get("objective")  # with defaults; older runs may not have it
    if isinstance(made, Mapping):
        shown["objective_config"] = _public({key: value for key, value in made.items() if key != "name"})
    base = None if is_local(model) or model in PACKAGED else model
    library = "peft" if adapter else "transformers"
    return model_card(name, objective, shown | {"corral": __version__}, about, base=base, library=library)


def _public(value: Any) -> Any:
    """Make a setting safe to publish on a model card: without secrets, and with absolute paths cut to file names."""
    if isinstance(value, Mapping):
        return {key: _public(entry) for key, entry in value.items() if not SECRET.search(key)}
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def export_run(run: Path, out: Path, *, checkpoint: str = "latest", merge: bool = False) -> int:
    """Write the model of a run's checkpoint to the new folder `out` atomically, and return the checkpoint's step.

    An adapter stays one, for the base that its adapter_config.json names, unless it is to be merged into it.
    """
    folder = RunFolder.open(run, write=False)
    chosen, _ = choose_checkpoint(folder, checkpoint)
    adapter = "adapter_config.json" in chosen.files()
    if merge and not adapter:
        raise RunError(f"{run} has no adapter to merge: its checkpoints are whole models. Leave --merge out.")
    try:
        base = adapter_base(chosen.path) if adapter else None
    except (OSError, ValueError) as error:
        raise RunError(f"{chosen.path} cannot be exported: {error}") from error
    if base in BUILT_IN and not merge:
        raise RunError(f"{run} is an adapter of `{base}`, which nothing but corral can load. --merge writes one whole model.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunError(f"{out} is there already and is not an empty folder: choose another --out.")
    beside = out.with_name(f".{out.name}.{os.getpid()}.part")
    try:
        with disk_errors(out):
            beside.mkdir(parents=True)
            if merge:
                model, tokenizer = load_trainable(str(chosen.path))
                assert isinstance(model, PeftModel)  # its folder has an adapter_config.json
                model.merge_and_unload().save_pretrained(beside)
                tokenizer.save_pretrained(beside)
            else:  # files of the manifest alone, none of which is a link: a link could stand for any file of the user's
                for name in sorted(chosen.files()):
                    if "/" not in name and not name.startswith(_OF_TRAINING):
                        # Not its mode: weights are written for their owner alone.
                        shutil.copyfile(chosen.path / name, beside / name)
            card = _card(folder, out.name, chosen.step, adapter=adapter and not merge)
            (beside / "README.md").write_text(card, encoding="utf-8")
            os.replace(beside, out)  # an empty folder is replaced, anything else is not
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return chosen.step
