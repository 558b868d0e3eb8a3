"""Films: they show what was played, are written whole, and what cannot be filmed is refused."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import imageio.v3 as imageio
import numpy as np
import pytest

import corral.lab.environments  # noqa: F401  # registers the environments
from corral.lab.jobs.robot.picture import caption, render_video

NAME = "corral/ViaPointReacher-v0"


def test_a_film_plays_the_recorded_actions(tmp_path: Path) -> None:
    env = gymnasium.make(NAME, render_mode="rgb_array")
    actions = np.zeros((2, 100, 5))
    actions[1] = 0.5
    pictures = render_video(env, [3, 3], actions, tmp_path / "film.gif", every=25)
    film = imageio.imread(tmp_path / "film.gif")
    assert pictures == 14  # the start and four more, then .8 s of two a second for what came of it, twice
    assert [path.name for path in tmp_path.iterdir()] == ["film.gif"]
    assert film.shape[1:] == (512, 480, 3), "and a line of words"
    words = film[:, 480:].astype(int)
    assert all(np.abs(one - other).max() > 50 for one, other in itertools.pairwise(words)), "time goes on in each"
    inside = np.s_[8:472, 8:472]  # the frame around the last picture is red: the arm at rest misses
    assert film[-1][1, 240, 0] > film[-1][1, 240, 1] + 80
    env.reset(seed=3)
    for action in actions[1].astype(np.float32):
        env.step(action)
    assert np.abs(film[-1][inside].astype(int) - env.render()[inside]).mean() < 1.5  # a GIF has 256 colours
    assert np.abs(film[0][inside].astype(int) - env.render()[inside]).mean() > 1.5
    env.close()


def test_what_cannot_be_filmed_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = gymnasium.make(NAME, render_mode="rgb_array")
    short = np.zeros((1, 1, 5))
    with pytest.raises(ValueError, match=r"ends in \.gif or \.mp4"):
        render_video(env, [0], short, tmp_path / "film.avi")
    with pytest.raises(ValueError, match="one seed per episode"):
        render_video(env, [0, 1], short, tmp_path / "film.gif")
    with pytest.raises(ValueError, match="render_mode='rgb_array'; got None"):
        render_video(gymnasium.make(NAME), [0], short, tmp_path / "film.gif")
    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", None)
    with pytest.raises(ImportError, match="imageio's ffmpeg plugin"):
        render_video(env, [0], short, tmp_path / "film.mp4")
    assert not list(tmp_path.iterdir())
    env.close()


def test_an_mp4_is_handed_to_the_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def write(path: Path, frames: np.ndarray, **settings: object) -> None:
        path.write_bytes(b"film")
        asked.update(settings, frames=len(frames))

    monkeypatch.setitem(sys.modules, "imageio_ffmpeg", SimpleNamespace())
    monkeypatch.setattr(imageio, "imwrite", write)
    env = gymnasium.make(NAME, render_mode="rgb_array")
    assert (
        render_video(env, [0], np.zeros((1, 4, 5)), tmp_path / "film.mp4", every=2) == 3
    )  # it is not over, so nothing came of it
    assert asked == {"fps": 25.0, "plugin": "FFMPEG", "frames": 3}
    env.close()


def test_a_film_says_what_marks_mean_and_is_not_stretched() -> None:
    plain, marked = (caption(np.full((360, 470, 3), 200, np.uint8), "0.00 s", marks) for marks in ("", "red: goal"))
    assert plain.shape == marked.shape == (400, 480, 3), "multiples of 16, of which an encoder stretches none"
    assert (plain[:360, :470] == 200).all()
    assert (plain[360:, 200:] == 255).all()
    assert (marked[360:, 200:] < 200).any()


def test_a_film_plays_at_its_own_speed(tmp_path: Path) -> None:
    env = gymnasium.make("corral/HopperJump-v0", render_mode="rgb_array")  # 125 steps a second, and a GIF counts hundredths
    assert render_video(env, [0], np.zeros((1, 10, 3)), tmp_path / "film.gif") == 3
    assert imageio.immeta(tmp_path / "film.gif")["duration"] == 40
    env.close()


def test_an_mp4_can_be_read_back(tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    env = gymnasium.make("corral/HopperJump-v0", render_mode="rgb_array")
    assert render_video(env, [0], np.zeros((1, 25, 3)), tmp_path / "film.mp4") == 6
    film, about = imageio.imread(tmp_path / "film.mp4", plugin="FFMPEG"), imageio.immeta(tmp_path / "film.mp4", plugin="FFMPEG")
    assert film.shape == (6, 400, 480, 3)
    assert about["fps"] == 25.0
    env.reset(seed=0)
    assert np.abs(film[0][:360].astype(int) - env.render()).mean() < 3, "what was filmed, but for the compression"
    env.close()
