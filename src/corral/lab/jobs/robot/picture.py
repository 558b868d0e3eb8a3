"""Figures and films: tracked trajectories, correlation of plans over time, learning curves, episodes."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from corral.lab.run.files import write_whole
from corral.robot.prodmp import ProDMP
from corral.robot.tracking import Array
from corral.validate import pip_install

try:
    import imageio.v3 as imageio
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from PIL import Image, ImageDraw, ImageFont  # imageio's own
except ImportError as error:
    raise ImportError(f"corral.lab.jobs.robot.picture needs matplotlib and imageio: {pip_install('robot')}.") from error

_Image = NDArray[np.uint8]

_BAR = 32
"""Pixels below a film's pictures for the caption."""
_BLOCK = 16
"""Divisor of a film's width and height in pixels, without which an encoder would stretch the picture."""
_FPS = 25
"""Approximate pictures per second: a GIF counts hundredths of a second, and players slow down very short delays."""
_HOLD = 0.8
"""Seconds for which a film shows an episode's outcome."""

_BLUE, _RED = "#2563eb", "#dc2626"
_COLOURS = (_BLUE, _RED, "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4b5563")


def plot_tracking(times: Array, desired: Array, executed: Array, *, title: str = "") -> Figure:
    """Desired (dashed) against executed (solid) positions of one episode, a panel for each joint.

    Args:
        times: seconds [T].
        desired, executed: [T D]; both at the end of each step, so `executed` is `observations[1:, joints]`.
    """
    if desired.shape != executed.shape or desired.shape[:-1] != times.shape:
        raise ValueError(
            f"plot_tracking: desired and executed are [T D], times [T]; got {desired.shape}, {executed.shape}, {times.shape}."
        )
    dof = desired.shape[-1]
    columns = min(dof, 4)
    rows = -(-dof // columns)
    figure = _figure(2.8 * columns, 2.0 * rows + 0.3)
    panels = figure.subplots(rows, columns, squeeze=False).ravel()
    for joint, axes in enumerate(panels):
        axes.set_visible(joint < dof)
        if joint >= dof:
            continue
        axes.plot(times, executed[:, joint], color=_BLUE, lw=1.6, label="executed")
        axes.plot(times, desired[:, joint], "--", color=_RED, lw=1.2, label="desired")
        error = np.abs(desired[:, joint] - executed[:, joint]).max()
        axes.set_title(f"joint {joint + 1}, at most {error:.2g} apart", fontsize=9)
        axes.set_xlabel("time [s]")
    panels[0].legend(frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=10)
    return figure


def plot_correlation(prodmp: ProDMP, times: Float[Tensor, "T"], chols: Mapping[str, Float[Tensor, "W W"]]) -> Figure:
    """Correlation of plans over time, for each policy: spread of each joint above, correlation of all joints below.

    Args:
        times: seconds [T].
        chols: a factor of the parameters' covariance under each name, for example before and after training.
    """
    figure = _figure(3.6 * len(chols) + 0.4, 5.6)
    spreads, squares = figure.subplots(2, len(chols), squeeze=False, height_ratios=(1, 2), sharey="row")
    size, dof = len(times), prodmp.dof
    for (name, chol), above, below in zip(chols.items(), spreads, squares, strict=True):
        cov = prodmp.covariance(times, chol @ chol.mT).detach().double().numpy()
        std = np.sqrt(np.diag(cov))
        for joint, spread in enumerate(std.reshape(dof, size)):
            above.plot(times.numpy(), spread, color=_COLOURS[joint % len(_COLOURS)], lw=1.3, label=f"joint {joint + 1}")
        above.set(title=name, xlabel="time [s]")
        # Where nothing varies yet there is no correlation to show.
        std[std == 0] = np.nan
        correlation = cov / std / std[:, None]
        image = below.imshow(correlation, vmin=-1, vmax=1, cmap="RdBu_r", interpolation="none", extent=(0, dof, dof, 0))
        ticks = np.arange(dof) + 0.5
        below.set(xticks=ticks, yticks=ticks, xticklabels=range(1, dof + 1), yticklabels=range(1, dof + 1))
        below.set(xlabel="joint, and time within it")
        for edge in range(1, dof):
            below.axhline(edge, color="white", lw=0.5)
            below.axvline(edge, color="white", lw=0.5)
    spreads[0].set_ylim(0, None)
    spreads[0].set_ylabel("plan's std")
    spreads[0].legend(frameon=False, fontsize=7, ncols=2)
    squares[0].set_ylabel("joint, and time within it")
    figure.colorbar(image, ax=squares.ravel().tolist(), shrink=0.8, label="correlation")
    return figure


def plot_curves(
    steps: Mapping[str, NDArray[np.number]], values: Mapping[str, Array], *, label: str = "return", title: str = ""
) -> Figure:
    """Learning curves: the median over seeds, and a band between the quartiles (over all seeds if under four).

    Args:
        steps: environment steps [N] under each algorithm's name.
        values: what was measured there, [seeds N].
    """
    figure = _figure(6.4, 3.8)
    axes = figure.subplots()
    for (name, curve), colour in zip(values.items(), _COLOURS * len(values), strict=False):
        if name not in steps or curve.ndim != 2 or curve.shape[1:] != steps[name].shape:
            raise ValueError(
                f"plot_curves: `values` are [seeds N], `steps` [N] under the same names; {name!r} has {curve.shape}."
            )
        ends = (0, 100) if len(curve) < 4 else (25, 75)
        low, high = np.percentile(curve, ends, axis=0)
        axes.fill_between(steps[name], low, high, color=colour, alpha=0.15, lw=0)
        axes.plot(steps[name], np.median(curve, 0), color=colour, lw=1.8, label=f"{name} ({len(curve)} seeds)")
    axes.set(xlabel="environment steps", ylabel=label, title=title)
    axes.legend(frameon=False, fontsize=8)
    return figure


def save_figure(figure: Figure, path: str | Path) -> None:
    """Write a picture atomically; the file ending selects the format."""
    path = Path(path)
    write_whole(path, lambda beside: figure.savefig(beside, dpi=150, format=path.suffix[1:]))


def render_video(
    env: gymnasium.Env, seeds: Sequence[int], actions: Array, path: str | Path, *, every: int | None = None
) -> int:
    """Play episodes again and film them in sequence: each picture shows its time, each end shows success or failure.

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
    check_format(path)
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
                success = info.get("success")
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
    """A picture [Y X 3] with a caption below: text, the meaning of marks, and at the end success or failure."""
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


def check_format(path: Path) -> None:
    """Refuse a film that could not be written, before any episode is filmed."""
    if path.suffix not in (".gif", ".mp4"):
        raise ValueError(f"render_video: `path` ends in .gif or .mp4; got {str(path)!r}.")
    if path.suffix == ".mp4":
        try:
            import imageio_ffmpeg  # noqa: F401  # imageio's own plugin for mp4
        except ImportError as error:
            raise ImportError("an .mp4 needs imageio's ffmpeg plugin: pip install imageio-ffmpeg. A .gif does not.") from error


def _figure(width: float, height: float) -> Figure:
    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
