"""`corral doctor --engine`: what it says of an engine that is there, missing, or of another release."""

import json
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from corral.engines import checkup, skyrl
from corral.engines.verl.checkup import LINES, SDPA, attention, self_test
from corral.engines.verl.policy_loss import make_policy_loss
from corral.lab.cli import main
from corral.objective.reduction import reduce_loss

ROOT = Path(__file__).parents[2]


def test_an_unknown_engine_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--engine", "ver"]) == 2
    assert "there is no engine 'ver'. Did you mean 'verl'?" in capsys.readouterr().err


def test_an_engine_that_is_not_there_is_told_with_the_lines_for_when_it_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "version", _absent)
    assert main(["doctor", "--engine", "verl"]) == 1
    printed = capsys.readouterr().out
    assert "wrong: verl >=0.9,<0.10 is not installed" in printed
    assert LINES["TROLL"] in printed
    assert "corral is active" not in printed


def test_a_thin_adapters_engine_is_looked_up_by_the_names_it_uses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkup, "version", lambda package: "0.3.0")
    module: Any = ModuleType(skyrl.REGISTRY)
    for name in ("skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, skyrl.REGISTRY, module)
    assert main(["doctor", "--engine", "skyrl"]) == 1
    assert "PolicyLossRegistry is not there, and the adapter needs it" in capsys.readouterr().out
    module.PolicyLossRegistry = object
    assert main(["doctor", "--engine", "skyrl"]) == 0
    printed = capsys.readouterr().out
    assert 'register("dppo", bound=0.2)' in printed
    assert printed.endswith("\nThe engine has what the adapter uses.\n")


def test_an_adapters_engine_that_cannot_be_imported_is_not_said_to_lack_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    # Engines import CUDA libraries and each other, and these end with errors of many kinds.
    def broken(name: str) -> Any:
        raise OSError("libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(checkup, "version", lambda package: "0.4.0")
    monkeypatch.setattr(checkup, "resolve_name", broken)
    (found,) = checkup.run_checkup("skyrl").trouble
    assert found.startswith(f"{skyrl.REGISTRY}:PolicyLossRegistry cannot be imported, and the adapter needs it: OSError: libcu")


@pytest.mark.parametrize("engine", checkup.ENGINES)
def test_an_engine_that_is_missing_is_told_with_how_to_use_it(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "version", _absent)
    found = checkup.run_checkup(engine)
    assert len(found.trouble) == 1
    assert "is not installed" in found.trouble[0]
    assert all(found.lines.values())


@pytest.mark.parametrize(("found", "fine"), [("0.8.9", False), ("0.9.0", True), ("0.9.12", True), ("0.10.0", False)])
def test_releases_are_compared_as_numbers(found: str, fine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkup, "version", lambda package: found)
    report = checkup.Checkup()
    assert report.check_release("verl", ">=0.9,<0.10") == fine
    assert bool(report.trouble) != fine


@pytest.mark.parametrize(
    ("release", "fits"),
    [("0.9.0", True), ("0.9.1.post1", True), ("0.9rc2", True), ("0.9.12+local", True), ("0.10", False), ("a tree", False)],
)
def test_a_release_in_range(release: str, fits: bool) -> None:
    assert checkup.release_in(release, ">=0.9,<0.10") == fits
    assert not checkup.release_in(release, ">=0.11")


VERL = json.loads((Path(__file__).parent / "signatures" / "verl.json").read_text())


def test_the_page_and_doctor_install_the_attention_that_verl_takes_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    (extras,) = re.findall(r"^pip install 'verl\[(.+)\]==", (ROOT / "docs" / "verl.md").read_text(), re.MULTILINE)
    assert {"vllm"} < {*extras.split(",")} & {"vllm", *VERL["flash-attn comes with"]}
    monkeypatch.setattr("corral.engines.verl.checkup.find_spec", lambda name: None)
    assert attention() == f"– verl's default attention needs it: pip install 'verl[{extras}]', or {SDPA}"


@pytest.mark.parametrize("factor", [1.0, 1.001])
def test_the_self_test_finds_a_loss_that_is_off(factor: float, caplog: pytest.LogCaptureFixture) -> None:
    def aggregate(loss_mat, loss_mask, loss_agg_mode, **info):  # type: ignore[no-untyped-def]
        return factor * reduce_loss(loss_mat, loss_mask.bool(), loss_agg_mode)

    gap = self_test(lambda mode: make_policy_loss(mode, aggregate))
    assert (gap == 0) == (factor == 1.0)
    assert gap < 0.01
    assert not caplog.messages, "its two policies are near enough"


def _absent(package: str) -> str:
    raise checkup.PackageNotFoundError(package)
