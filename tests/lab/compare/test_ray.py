"""The Ray engine on a local Ray of two CPUs: the same schedules, the same endings. `make test-ray` brings ray."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

ray = pytest.importorskip("ray", reason="needs ray (make test-ray)")

from fake_comparisons import FAKE, Notes, begun, drive, interrupt_when, resumed, states  # noqa: E402

from corral.lab.cli import main  # noqa: E402 - only where there is ray
from corral.lab.compare.local import Engine  # noqa: E402
from corral.lab.compare.ray import RayEngine, stop_file  # noqa: E402
from corral.lab.compare.record import failure_reason, log_tail  # noqa: E402
from corral.validate import RunError  # noqa: E402

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::FutureWarning")]  # Ray's own


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """A Ray that is there already when the engine comes."""
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


def engine(**given: int) -> RayEngine:
    return RayEngine(program=FAKE, **given)


@pytest.mark.usefixtures("cluster")
def test_slots_are_the_clusters_cpus() -> None:
    here = engine()
    assert isinstance(here, Engine)
    assert (here.slots, here.threads, here.ours) == (2, 1, False)
    assert here.about == "2 at a time on the Ray cluster of this process"
    assert engine(threads=2).slots == 1
    assert engine(jobs=5).slots == 5
    here.close()
    assert ray.is_initialized()  # it was not ours


@pytest.mark.usefixtures("cluster")
def test_one_failed_run_does_not_sink_the_rest(tmp_path: Path) -> None:
    notes = Notes()
    comparison = begun(tmp_path, "crash", "refused", "killed", "fine", seeds=1)
    drive(comparison, notes, engine=engine())
    assert states(comparison) == {
        "crash_seed0": "failed", "refused_seed0": "failed", "killed_seed0": "failed", "fine_seed0": "finished",
    }  # fmt: skip
    errors = {record.contestant: record.error for record in comparison.records}
    assert errors["crash"] == "RuntimeError: out of luck"
    assert errors["killed"] == "killed by SIGKILL, as when memory runs out"
    assert notes.most == 2
    assert log_tail(comparison.path / "fine_seed0") == ["fine begins in fine_seed0, threads 1"]
    (comparison.path / "mended").touch()
    again = resumed(comparison.path, retry_failed=True)
    drive(again, engine=engine())
    assert set(states(again).values()) == {"finished"}


@pytest.mark.usefixtures("cluster")
def test_an_interrupted_comparison_stops_cleanly_and_goes_on(tmp_path: Path) -> None:
    comparison = begun(tmp_path, "slow", "fine", seeds=1)
    assert drive(comparison, Notes(then=interrupt_when(10, comparison)), engine=engine()).interrupted
    assert states(comparison) == {"slow_seed0": "interrupted", "fine_seed0": "finished"}
    assert not stop_file(comparison.path / "slow_seed0").exists()
    again = resumed(comparison.path)
    drive(again, engine=engine())
    assert set(states(again).values()) == {"finished"}
    lines = [json.loads(line)["step"] for line in (again.path / "slow_seed0" / "metrics.jsonl").read_text().splitlines()]
    assert lines == list(range(121))


@pytest.mark.usefixtures("cluster")
def test_a_second_ctrl_c_leaves_no_process(tmp_path: Path) -> None:
    comparison = begun(tmp_path, "slow", "hang", seeds=1)
    schedule = drive(comparison, Notes(then=interrupt_when(5, comparison, times=2)), engine=engine())
    assert schedule.interrupted
    assert states(comparison) == {"slow_seed0": "interrupted", "hang_seed0": "interrupted"}
    left = [path for path in Path("/proc").glob("[0-9]*/cmdline") if str(comparison.path).encode() in _read(path)]
    assert left == []


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


@pytest.mark.usefixtures("cluster")
def test_a_task_that_ray_loses_is_a_failed_run(tmp_path: Path) -> None:
    here = engine()
    folder = tmp_path / "hang_seed0"
    here.start(folder, ["train", "--objective=hang", "--seed=0", f"--out={folder}"])
    threading.Timer(3.0, lambda: ray.cancel(here.started["hang_seed0"][1], force=True)).start()
    found: dict[str, int] = {}
    for _ in range(200):
        found |= here.poll()
        if found:
            break
        threading.Event().wait(0.1)
    assert list(found) == ["hang_seed0"]
    assert failure_reason(folder, found["hang_seed0"])
    for path in Path("/proc").glob("[0-9]*/cmdline"):  # the child of a worker that was shot
        if str(folder).encode() in _read(path):
            os.kill(int(path.parent.name), signal.SIGKILL)
    here.close()


def test_a_cluster_that_cannot_be_joined_is_no_local_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**given: object) -> None:
        assert given["address"] == "127.0.0.1:1"
        raise ConnectionError("Failed to connect to Ray cluster at 127.0.0.1:1")

    ray.shutdown()
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr("ray.init", refuse)
    with pytest.raises(RunError, match=r"\(127.0.0.1:1\) cannot be joined: Failed to connect"):
        engine()


def test_a_local_ray_is_started_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ray.shutdown()
    out = tmp_path / "out"
    words = ["--recipe", "via_point", "--algorithms", "tce,bbrl", "--seeds", "1", "--smoke", "--engine", "ray"]
    assert main(["compare", *words, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "at a time on a local Ray of" in printed
    assert "No difference can be claimed between" in printed
    assert [run["state"] for run in json.loads((out / "compare.json").read_text())["runs"]] == ["finished", "finished"]
    assert (out / "tce_seed0" / "log.txt").read_text().count("finished after 2 steps") == 1
    assert not ray.is_initialized()
