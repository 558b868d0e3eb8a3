"""`scripts/robot_film.py`: a film is made small enough for a page, and its colours stay."""

import importlib.util
from pathlib import Path

import numpy as np
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "scripts" / "robot_film.py"


def test_a_film_is_shrunk_and_a_small_mark_keeps_its_colour(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("robot_film", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pictures = np.full((6, 60, 80, 3), 230, dtype=np.uint8)
    pictures[:, 30:] = np.linspace(90, 220, 80, dtype=np.uint8)[:, None]  # many greys, and
    for number, picture in enumerate(pictures):
        picture[10:14, 10 * number : 10 * number + 4] = (220, 0, 0)  # a red mark of few pixels that moves
    first, *rest = map(Image.fromarray, pictures)
    first.save(tmp_path / "film.gif", save_all=True, append_images=rest, duration=40)
    assert module.shrink(tmp_path / "film.gif", tmp_path / "small.gif", 40) == 3
    with Image.open(tmp_path / "small.gif") as small:
        assert (small.size, small.n_frames, small.info["duration"], small.info["loop"]) == ((40, 30), 3, 80, 0)
        small.seek(2)
        red, green, _ = small.convert("RGB").getpixel((21, 6))  # the mark of picture 4 begins at 40
    assert red > green + 80
