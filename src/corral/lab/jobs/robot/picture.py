"""Films of a robot's episodes, with captions."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray

from corral.robot.tracking import Array
from corral.validate import pip_install

try:
    import imageio.v3 as imageio
    from PIL import Image, ImageDraw, ImageFont  # imageio's own
except ImportError as error:
    raise ImportError(f"corral.lab.jobs.robot.picture needs imageio: {pip_install('robot')}.") from error

_Image = NDArray[np.uint8]

_BAR = 32
"""Height in pixels of the caption below each picture of a film."""
_BLOCK = 16
"""Divisor of a film's width and height in pixels, without which the video encoder would stretch the picture."""
_FPS = 25
"""Approximate number of pictures per second in a film.
GIF delays are in hundredths of a second, and players slow down very short delays."""
_HOLD = 0.8
"""Time in seconds for which a film shows an episode's outcome."""


def render_video(
    env: gymnasium.Env, seeds: Sequence[int], actions: Array, path: str | Path, *, every: int | None = None
) -> int:
    """Play recorded episodes again and film them in sequence. Captions show the time, and success or failure at the end.

    What an environment's marks mean, it may say in `metadata["render_marks"]`.

    Args:
        env: made with render_mode="rgb_array".
        seeds: what the episodes were started with [E].
        actions: as recorded, [E T D]; those after an early end are left out.
        path: ends in .gif, or in .mp4 where imageio has its ffmpeg plugin.
        every: keep one picture in so many; None keeps about 25 a second.
    Returns:
        How many pictures the film has.
    """
    path = Path(path)
    if env.render_mode != "rgb_array":
        raise ValueError(f"render_video: make the environment with render_mode='rgb_array'; got {env.render_mode!r}.")
    if len(seeds) != len(actions) or (every is not None and every < 1):
        raise ValueError(f"render_video: one seed per episode and every ≥ 1; got {len(seeds)} seeds, {len(actions)} episodes.")
    check_film(path)
    rate, marks = env.metadata.get("render_fps", 50), env.metadata.get("render_marks", "")
    every = every or max(1, round(rate / _FPS))
    fps = rate / every
    frames: list[_Image] = []
    for number, (seed, episode) in enumerate(zip(seeds, actions, strict=True), 1):
        env.reset(seed=seed)
        title = f"episode {number} of {len(seeds)}   "
        frames.append(caption(env.render(), f"{title}0.00 s", marks))
        for t, action in enumerate(np.asarray(episode, env.action_space.dtype)):
            _, _, terminated, truncated, info = env.step(action)
            over, words = terminated or truncated, f"{title}{(t + 1) / rate:.2f} s"
            if (t + 1) % every == 0 or over:
                frames.append(caption(env.render(), words, marks))
            if over:
                success = info.get("success", info.get("is_success"))
                last = caption(env.render(), words, marks, None if success is None else bool(success))
                frames += [last] * round(_HOLD * fps)
                break
    how: dict[str, Any] = {"duration": 1000 / fps, "loop": 0} if path.suffix == ".gif" else {"fps": fps, "plugin": "FFMPEG"}
    partial = path.with_name(f".partial.{path.name}")  # its ending says in what form
    try:
        imageio.imwrite(partial, np.stack(frames), **how)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return len(frames)


def caption(picture: Any, words: str, marks: str = "", success: bool | None = None) -> _Image:
    """Add a caption below a picture [Y X 3]: text, a legend of marks and, if known, success or failure."""
    image = np.asarray(picture)
    height, width = image.shape[:2]
    size = (-(-width // _BLOCK) * _BLOCK, -(-(height + _BAR) // _BLOCK) * _BLOCK)
    out, line = Image.new("RGB", size, "white"), (height + size[1]) // 2
    out.paste(Image.fromarray(image), (0, 0))
    draw, font = ImageDraw.Draw(out), ImageFont.load_default(size=_BAR // 2)
    draw.text((8, line), words, fill="black", font=font, anchor="lm")
    draw.text((width - 80, line), marks, fill="#555555", font=ImageFont.load_default(size=13), anchor="rm")
    if success is not None:
        text, colour = ("success", "#0a7d33") if success else ("missed", "#b3261e")
        draw.rectangle((0, 0, width - 1, height - 1), outline=colour, width=4)
        draw.text((width - 8, line), text, fill=colour, font=font, anchor="rm")
    return np.asarray(out)


def check_film(path: Path) -> None:
    """Refuse a film's path that could not be written, before any episode is played."""
    if path.suffix not in (".gif", ".mp4") or not path.parent.is_dir():
        raise ValueError(f"a film is a file in a folder that is there, and ends in .gif or .mp4; got {path}.")
    if path.suffix == ".mp4":
        try:
            import imageio_ffmpeg  # noqa: F401  # imageio's own plugin for mp4
        except ImportError as error:
            raise ImportError("an .mp4 needs imageio's ffmpeg plugin: pip install imageio-ffmpeg. A .gif does not.") from error
