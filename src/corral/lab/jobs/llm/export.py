"""A run's checkpoint → a plain model folder, without optimizer, schedule and random state."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from peft import PeftModel

from corral.lab.models.load import adapter_base, load_trainable
from corral.lab.models.subject import BUILT_IN
from corral.lab.run.files import disk_sentence, is_disk_full
from corral.lab.run.folder import Checkpoint, RunFolder, choose_checkpoint
from corral.validate import RunError

_OF_TRAINING = ("optimizer", "scheduler", "rng_state", "scaler", "trainer_state.json", "training_args.bin", "manifest.json")
"""How files of a checkpoint begin that only its training needs."""


def export_run(run: Path, out: Path, *, checkpoint: str = "latest", merge: bool = False) -> int:
    """Write the model of a run's checkpoint to the new folder `out`, whole or not at all; its step is returned.

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
    if merge:
        _write_folder(out, lambda beside: _save_merged(str(chosen.path), beside))
    else:
        _write_folder(out, lambda beside: _copy(chosen, beside))
    return chosen.step


def _copy(checkpoint: Checkpoint, folder: Path) -> None:
    """Files of the manifest alone, none of which is a link: a link could stand for any file of the user's."""
    for name in sorted(checkpoint.files()):
        if "/" not in name and not name.startswith(_OF_TRAINING):
            shutil.copyfile(checkpoint.path / name, folder / name)  # not its mode: weights are written for their owner alone


def _save_merged(checkpoint: str, folder: Path) -> None:
    model, tokenizer = load_trainable(checkpoint)
    assert isinstance(model, PeftModel)  # its folder has an adapter_config.json
    merged = model.merge_and_unload()
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_folder(path: Path, write: Callable[[Path], None]) -> None:
    """`write` fills a folder beside `path`, which then gets its name."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        beside.mkdir(parents=True)
        write(beside)
        os.replace(beside, path)  # an empty folder is replaced, anything else is not
    except (OSError, RuntimeError) as error:  # safetensors and torch have one each for a full disk
        if isinstance(error, OSError) or is_disk_full(error):
            raise RunError(disk_sentence(error, path)) from error
        raise
    finally:
        shutil.rmtree(beside, ignore_errors=True)
