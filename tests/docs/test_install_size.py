"""What `scripts/install_size.py` adds up, without asking pip or an index."""

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "install_size.py"


def package(name: str, **download: object) -> dict[str, object]:
    return {"metadata": {"name": name, "version": "1.0"}, "download_info": download}


def test_golden_sum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    # Files of 2.5 MB and 0.5 MB, and the checkout itself, which is not downloaded: 3.0 MB in three packages.
    spec = importlib.util.spec_from_file_location("install_size", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for name, size in (("large one.whl", 2_500_000), ("small.whl", 500_000)):
        (tmp_path / name).write_bytes(bytes(size))
    chosen = [
        package("corral", url=tmp_path.as_uri(), dir_info={"editable": True}),
        package("small", url=(tmp_path / "small.whl").as_uri()),
        package("large", url=(tmp_path / "large one.whl").as_uri()),
    ]
    monkeypatch.setattr(module, "resolve", lambda arguments: chosen if arguments == [".[llm]", "torch==2"] else [])
    monkeypatch.setattr(module, "SHOWN", 1)
    monkeypatch.setattr(sys, "argv", ["install_size.py", ".[llm]", "torch==2"])
    module.main()
    assert capsys.readouterr().out == ("     2.5 MB  large 1.0\n     0.5 MB  2 others\n     3.0 MB  in all, 3 packages\n")
