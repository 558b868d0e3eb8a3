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
    first.save(tmp_path / "film.gif", save_all=True, append_images=rest, duration=[40, 40, 40, 40, 40, 800])
    assert module.shrink(tmp_path / "film.gif", tmp_path / "small.gif", 40) == 4  # of 0, 2 and 4, and 5, which is held
    with Image.open(tmp_path / "small.gif") as small:
        assert (small.size, small.n_frames, small.info["loop"]) == ((40, 30), 4, 0)
        durations, marks = [], []
        for number, begins in enumerate((0, 20, 40, 50)):
            small.seek(number)
            durations.append(small.info["duration"])
            marks.append(small.convert("RGB").getpixel((begins // 2 + 1, 6)))
    assert durations == [80, 80, 40, 800]
    assert all(red > green + 80 for red, green, _ in marks)
