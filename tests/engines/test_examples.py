"""The examples of engines run as they stand, where the engine installs; the others do what they say beside stand-ins."""

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from doors import module_named, nemo_interfaces

from corral.engines import nemo_rl, skyrl

EXAMPLES = Path(__file__).parents[2] / "examples" / "engines"


def test_each_is_short() -> None:
    for path in EXAMPLES.glob("*.py"):
        lines = [line for line in path.read_text().partition('"""\n\n')[2].splitlines() if line and not line.startswith("#")]
        assert len(lines) <= 24, path.name


@pytest.mark.skipif(find_spec("tinker") is None, reason="needs tinker (make test-engines)")
def test_tinkers_runs(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "tinker_troll.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert float(printed.partition("tokens outside the region ")[2].partition(",")[0]) > 0, "the region must act"


def test_skyrls_registers_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    registry: Any = ModuleType(skyrl.REGISTRY)
    registry.PolicyLossRegistry = SimpleNamespace(register=lambda name, loss: order.append(name))
    main: Any = ModuleType("skyrl.train.entrypoints.main_base")
    main.main = lambda: order.append("main")
    for module in (registry, main):
        parent = module.__name__
        while parent:
            monkeypatch.setitem(sys.modules, parent, module if parent == module.__name__ else ModuleType(parent))
            parent = parent.rpartition(".")[0]
    monkeypatch.setitem(sys.modules, skyrl.REGISTRY, registry)
    runpy.run_path(str(EXAMPLES / "skyrl_dppo.py"), run_name="__main__")
    assert order == ["corral_dppo", "main"]


def test_nemo_rls_own_script_gets_corrals_loss_and_a_support(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    policy = SimpleNamespace(train=lambda data, loss_fn, eval_mode=False: loss_fn)
    grpo: Any = ModuleType("nemo_rl.algorithms.grpo")
    grpo.setup = lambda config: (policy, "generation", SimpleNamespace(loss_type="theirs"), "logger")
    package: Any = ModuleType("nemo_rl.algorithms")
    package.grpo = grpo
    for name, module in {"nemo_rl": ModuleType("nemo_rl"), "nemo_rl.algorithms": package, grpo.__name__: grpo}.items():
        monkeypatch.setitem(sys.modules, name, module)
    script = tmp_path / "run_grpo.py"
    script.write_text("from nemo_rl.algorithms.grpo import setup\nfound = setup('config')\nimport sys\nsys.found = found\n")
    monkeypatch.setattr(sys, "argv", ["nemo_rl_troll.py", str(script)])
    before = policy.train
    with module_named(nemo_rl.INTERFACES, nemo_interfaces()):
        runpy.run_path(str(EXAMPLES / "nemo_rl_troll.py"), run_name="__main__")
    found = vars(sys).pop("found")
    assert [type(part).__name__ for part in found] == ["SimpleNamespace", "str", "CorralLoss", "str"]
    assert found[2].wanted.name == "troll"
    assert policy.train is not before
    assert torch.is_grad_enabled()
