"""Renderer of MuJoCo scenes without OpenGL, whose images are equal on every machine, with or without a display.

Shapes are projected without perspective and painted from the farthest to the nearest: capsules, cylinders and spheres as
thick lines; boxes, planes and the bounding boxes of meshes as the faces that look towards the camera. What belongs to the
world lies beneath the rest.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import mujoco
import numpy as np
from numpy.typing import NDArray

from corral.robot.tracking import Array

_LIGHT = np.array([0.3, -0.4, 0.866])
_GEOM = mujoco.mjtGeom
_PLANE, _SPHERE, _CAPSULE = int(_GEOM.mjGEOM_PLANE), int(_GEOM.mjGEOM_SPHERE), int(_GEOM.mjGEOM_CAPSULE)
_CYLINDER, _MESH = int(_GEOM.mjGEOM_CYLINDER), int(_GEOM.mjGEOM_MESH)
_HIDDEN = 3
"""Lowest MuJoCo geom group that is hidden. Higher groups are hidden too, as in MuJoCo's own renderer."""


@dataclass(frozen=True, kw_only=True)
class Camera:
    """Orthographic camera aimed at the point `centre`, whose picture is `width` metres wide."""

    centre: tuple[float, float, float]
    width: float
    azimuth: float
    """Azimuth of the camera in degrees. At 0 the camera looks along +y, with x to the right."""
    elevation: float
    """Elevation of the camera in degrees above the horizon."""
    pixels: tuple[int, int] = (480, 360)

    @property
    def axes(self) -> Array:
        """Axes of the camera as rows of a matrix: right, up, and towards the camera."""
        a, e = np.radians([self.azimuth, self.elevation])
        towards = np.array([np.sin(a) * np.cos(e), -np.cos(a) * np.cos(e), np.sin(e)])
        right = np.array([np.cos(a), np.sin(a), 0.0])
        return np.stack([right, np.cross(towards, right), towards])


def picture(
    model: mujoco.MjModel, data: mujoco.MjData, camera: Camera, marks: Sequence[tuple[Sequence[float], str]] = ()
) -> NDArray[np.uint8]:
    """Render the scene as an image [height width 3]. `marks` are coloured points (x, y, z), drawn as crosses on top."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Polygon

    width, height = camera.pixels
    figure = Figure((width / 100, height / 100), dpi=100, facecolor="#eef2f7")
    half = camera.width / 2
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-half, half), ylim=(-half * height / width, half * height / width))
    axes.axis("off")
    points_per_metre = width / camera.width * 0.72
    for _, _, kind, style in sorted(_shapes(model, data, camera), key=lambda shape: shape[:2]):
        if kind == "face":
            axes.add_patch(Polygon(style["corners"], closed=True, facecolor=style["colour"], edgecolor=(0, 0, 0, 0.25), lw=0.5))
        else:
            axes.plot(*style["ends"].T, lw=style["width"] * points_per_metre, color=style["colour"], solid_capstyle=kind)
    for point, colour in marks:
        axes.plot(*_project(np.asarray(point, float), camera)[:2], "x", ms=12, mew=3, color=colour)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _project(points: Array, camera: Camera) -> Array:
    """Project points [* 3] into the camera's frame: right, up and nearness to the camera [* 3]."""
    return (points - np.asarray(camera.centre)) @ camera.axes.T


def _shapes(model: mujoco.MjModel, data: mujoco.MjData, camera: Camera) -> Iterator[tuple[bool, float, str, dict[str, Any]]]:
    """List the visible shapes of a scene as tuples (belongs to a body, nearness to the camera, kind, style)."""
    for index in range(model.ngeom):
        kind, size, colour = int(model.geom_type[index]), model.geom_size[index], model.geom_rgba[index]
        centre, axes = data.geom_xpos[index], data.geom_xmat[index].reshape(3, 3)
        if model.geom_group[index] >= _HIDDEN:
            continue
        if kind == _MESH:
            centre, size = centre + axes @ model.geom_aabb[index, :3], model.geom_aabb[index, 3:]
        elif kind == _PLANE:
            drawn = np.where(size[:2] > 0, np.minimum(size[:2], camera.width), camera.width)  # as far as seen, below the camera
            room = np.where(size[:2] > 0, size[:2] - drawn, np.inf)
            centre = centre + axes[:, :2] @ np.clip((camera.centre - centre) @ axes[:, :2], -room, room)
            size = np.array([*drawn, 0.0])
        if kind in (_SPHERE, _CAPSULE, _CYLINDER):
            reach = 0.0 if kind == _SPHERE else size[1]
            ends = centre + np.outer([-reach, reach], axes[:, 2])
            found = _strokes(ends, size[0], kind == _CYLINDER, colour, camera)
            if kind == _CYLINDER:
                found = chain(found, [_lid(ends[int(axes[:, 2] @ camera.axes[2] > 0)], axes, size[0], colour, camera)])
        else:
            found = _faces(centre, axes, size, colour, camera)
        for shape in found:
            yield bool(model.geom_bodyid[index]), *shape


def _strokes(
    ends: Array, radius: float, flat: bool, colour: Array, camera: Camera
) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Draw a line twice, with a narrower, lighter stroke on top, so that the line looks like a rounded body."""
    seen = _project(ends, camera)
    for share, shade in ((1.0, 0.75), (0.55, 1.0)):
        style = {"ends": seen[:, :2], "width": 2 * float(radius) * share, "colour": _shade(colour, shade)}
        yield float(seen[:, 2].mean()) + 1e-6 * shade, "butt" if flat else "round", style


def _lid(centre: Array, axes: Array, radius: float, colour: Array, camera: Camera) -> tuple[float, str, dict[str, Any]]:
    """Compute the end disc of a cylinder that faces the camera, the only visible part of a flat cylinder from above."""
    angle = np.linspace(0, 2 * np.pi, 24, endpoint=False)
    seen = _project(centre + radius * (np.outer(np.cos(angle), axes[:, 0]) + np.outer(np.sin(angle), axes[:, 1])), camera)
    return float(seen[:, 2].mean()), "face", {"corners": seen[:, :2], "colour": _shade(colour, 0.9)}


def _faces(
    centre: Array, axes: Array, extent: Array, colour: Array, camera: Camera
) -> Iterator[tuple[float, str, dict[str, Any]]]:
    """Compute the faces of a box that face the camera. A box without thickness has only its upper face."""
    for axis, sign in product(range(3), (-1.0, 1.0)):
        normal = sign * axes[:, axis]
        if normal @ camera.axes[2] <= 1e-6 or (not extent[2] and axis != 2):
            continue
        first, second = (other for other in range(3) if other != axis)
        corners = np.zeros((4, 3))
        corners[:, axis] = sign * extent[axis]
        corners[:, first] = extent[first] * np.array([-1, 1, 1, -1])
        corners[:, second] = extent[second] * np.array([-1, -1, 1, 1])
        seen = _project(centre + corners @ axes.T, camera)
        shade = 0.65 + 0.35 * max(0.0, float(normal @ _LIGHT))
        yield float(seen[:, 2].mean()), "face", {"corners": seen[:, :2], "colour": _shade(colour, shade)}


def _shade(colour: Array, shade: float) -> tuple[float, ...]:
    return (*(float(part) * shade for part in colour[:3]), float(colour[3]))
