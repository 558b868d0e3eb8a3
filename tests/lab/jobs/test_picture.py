"""Pictures and films: they show what they were given, are written whole, and what cannot be drawn is refused."""

import itertools
import sys
from pathlib import Path
from types import SimpleNamespace

import gymnasium
import imageio.v3 as imageio
import numpy as np
import pytest
import torch

import corral.lab.environments  # noqa: F401  # registers the environments
from corral.lab.jobs.robot.picture import caption, plot_correlation, plot_curves, plot_tracking, render_video, save_figure
from corral.robot.prodmp import ProDMP

NAME = "corral/ViaPointReacher-v0"


def test_tracking_shows_both_curves_of_every_joint(tmp_path: Path) -> None:
    times = np.linspace(0.02, 2, 100)
    desired = np.sin(times[:, None] * np.arange(1, 6))
    executed = desired + 0.25
    figure = plot_tracking(times, desired, executed, title="one episode")
    shown = [axes for axes in figure.axes if axes.get_visible()]
    assert len(shown) == 5
    for joint, axes in enumerate(shown):
        drawn = {line.get_label(): line.get_ydata() for line in axes.lines}
        np.testing.assert_array_equal(drawn["desired"], desired[:, joint])
        np.testing.assert_array_equal(drawn["executed"], executed[:, joint])
        assert "0.25 apart" in axes.get_title()
    save_figure(figure, tmp_path / "tracking.png")
    assert [path.name for path in tmp_path.iterdir()] == ["tracking.png"]
    assert imageio.imread(tmp_path / "tracking.png").std() > 1  # not blank


def test_correlation_is_one_on_the_diagonal_and_the_covariance_s_elsewhere() -> None:
    prodmp = ProDMP(2, 3, 1.0, delay=0.1)
    times = torch.linspace(0.05, 1.0, 20, dtype=torch.float64)
    chol = torch.eye(8, dtype=torch.float64)
    chol[7, 3] = 2.0  # joint 2's goal leans on joint 1's
    figure = plot_correlation(prodmp, times, {"before": torch.eye(8, dtype=torch.float64), "after": chol})
    images = [np.ma.getdata(axes.images[0].get_array()) for axes in figure.axes[:4] if axes.images]
    assert len(images) == 2
    for image in images:
        assert np.isnan(image[0]).all()  # before the delay nothing varies
        np.testing.assert_allclose(np.diag(image)[2:20], 1.0)
    assert np.nanmax(np.abs(images[0][:20, 20:])) == 0  # joints are independent before …
    assert np.nanmax(np.abs(images[1][:20, 20:])) > 0.3  # … and not after


def test_curves_have_the_middle_and_its_band() -> None:
    steps = {"tce": np.array([1, 2]), "bbrl": np.array([1, 2, 3])}
    values = {"tce": np.array([[0.0, 1.0], [2.0, 3.0], [10.0, 20.0]]), "bbrl": np.arange(15.0).reshape(5, 3)}
    axes = plot_curves(steps, values, label="success").axes[0]
    assert [line.get_ydata().tolist() for line in axes.lines] == [[2.0, 3.0], [6.0, 7.0, 8.0]]
    bands = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
    assert (bands[0].min(), bands[0].max()) == (0.0, 20.0)  # three seeds: all of them
    assert (bands[1].min(), bands[1].max()) == (3.0, 11.0)  # five: quartiles, rows 1 and 3
    assert axes.get_ylabel() == "success"
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["tce (3 seeds)", "bbrl (5 seeds)"]


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


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="desired and executed are"):
        plot_tracking(np.zeros(3), np.zeros((4, 2)), np.zeros((4, 2)))
    with pytest.raises(ValueError, match="'tce' has"):
        plot_curves({"tce": np.zeros(3)}, {"tce": np.zeros((2, 4))})
