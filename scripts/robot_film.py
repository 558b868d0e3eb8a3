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

from corral.robot.evaluate import evaluate
from corral.run.files import write_whole

_COLOURS = 48
"""Of all pictures together: shapes are flat, and what else there is are their edges and the letters."""


def shrink(film: Path, out: Path, width: int, every: int = 2) -> int:
    """Write one picture in so many, `width` wide, with one palette for all. Returns how many there are."""
    with Image.open(film) as source:
        duration = source.info["duration"] * every
        pictures = [picture.convert("RGB") for picture in ImageSequence.Iterator(source)]
    kept = pictures[::every]
    size = (width, round(width * kept[0].height / kept[0].width))
    kept = [picture.resize(size, Image.Resampling.LANCZOS) for picture in kept]
    ends = [*kept[:: max(1, len(kept) // 12)], kept[-1]]  # frames of success and failure among them
    palette = Image.fromarray(np.concatenate([np.asarray(picture) for picture in ends])).quantize(
        _COLOURS, Image.Quantize.MAXCOVERAGE
    )
    few = [picture.quantize(palette=palette, dither=Image.Dither.NONE) for picture in kept]
    write_whole(
        out,
        lambda beside: few[0].save(beside, "GIF", save_all=True, append_images=few[1:], duration=duration, loop=0),
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
