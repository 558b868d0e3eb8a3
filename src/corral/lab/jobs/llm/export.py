"""Export of a run's checkpoint as a plain model folder, without optimizer, schedule and random state."""

import os
import shutil
from pathlib import Path

from peft import PeftModel

from corral.lab.models import BUILT_IN
from corral.lab.models.load import adapter_base, load_trainable
from corral.lab.run.files import disk_errors
from corral.lab.run.folder import RunFolder, choose_checkpoint
from corral.validate import RunError

_OF_TRAINING = ("optimizer", "scheduler", "rng_state", "scaler", "trainer_state.json", "training_args.bin", "manifest.json")
"""Prefixes of checkpoint files that only training needs."""


def export_run(run: Path, out: Path, *, checkpoint: str = "latest", merge: bool = False) -> int:
    """Write the model of a run's checkpoint to the new folder `out` atomically, and return the checkpoint's step.

    An adapter stays one, for the base that its adapter_config.json names, unless it is to be merged into it.
    """
    chosen, _ = choose_checkpoint(RunFolder.open(run, write=False), checkpoint)
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
            os.replace(beside, out)  # an empty folder is replaced, anything else is not
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return chosen.step
