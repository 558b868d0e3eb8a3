"""Film a run's policy for the docs: three held-out episodes in a GIF that a page can carry.

python scripts/robot_film.py RUN docs/hopper.gif [--checkpoint latest] [--width 320]        (needs matplotlib and imageio)

`corral eval RUN --video FILE` makes the film, at 25 pictures a second and full size; here every second picture stays, smaller
and with few colours, a quarter of the bytes or less.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
from PIL import Image, ImageSequence

from corral.lab.jobs.robot.evaluate import evaluate
from corral.lab.run.files import write_whole

_COLOURS = 48
"""Of all pictures together: shapes are flat, and what else there is are their edges and the letters."""


def shrink(film: Path, out: Path, width: int, every: int = 2) -> int:
    """Write one picture in so many and all that are held, `width` wide, with one palette. Returns how many there are."""
    with Image.open(film) as source:
        shown = [(picture.convert("RGB"), picture.info["duration"]) for picture in ImageSequence.Iterator(source)]
    usual = min(duration for _, duration in shown)
    kept, durations, waiting = list[Image.Image](), list[float](), 0
    for picture, duration in shown:
        if waiting and duration == usual:
            durations[-1] += duration  # its predecessor is shown in its place
            waiting -= 1
        else:
            kept.append(picture.resize((width, round(width * picture.height / picture.width)), Image.Resampling.LANCZOS))
            durations.append(duration)
            waiting = every - 1 if duration == usual else 0
    held = [picture for picture, duration in zip(kept, durations, strict=True) if duration > every * usual]
    strip = Image.fromarray(np.concatenate([np.asarray(picture) for picture in [*kept[:: max(1, len(kept) // 12)], *held]]))
    palette = strip.quantize(_COLOURS, Image.Quantize.MAXCOVERAGE)
    few = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in kept]
    write_whole(
        out, lambda beside: few[0].save(beside, "GIF", save_all=True, append_images=few[1:], duration=durations, loop=0)
    )
    return len(few)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", default="latest")
    parser.add_argument("--width", type=int, default=320)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        film = Path(folder) / "film.gif"
        found = evaluate(options.run, episodes=64, checkpoint=options.checkpoint, out=Path(folder), video=film).result
        count = shrink(film, options.out, options.width)
    success, size = found["estimates"]["mean"]["success"]["value"], options.out.stat().st_size / 1e3
    print(f"{options.out}: {count} pictures, {size:.0f} kB; step {found['step']}, success {success:.1%}")  # noqa: T201


if __name__ == "__main__":
    main()
