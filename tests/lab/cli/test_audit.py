"""`corral audit`: of a folder that a trainer filled, of a run's checkpoints, of two models; and sentences for mistakes."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from audit.four_tokens import RULES, completion
from transformers import AutoModelForCausalLM

from corral.lab.audit.folder import AuditFolder, read_audit
from corral.lab.cli import main
from corral.lab.jobs.llm.train import train
from small_runs import save_model, small

EXAMPLE = Path(__file__).parents[3] / "examples" / "audit_grpo.py"
SMALL = "--task digits --problems 2 --samples 4 --device cpu"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def moved(model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same model a little further on."""
    folder = tmp_path_factory.mktemp("moved")
    shutil.copytree(model, folder, dirs_exist_ok=True)
    found = AutoModelForCausalLM.from_pretrained(model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter += 0.3 * parameter.std() * torch.randn(parameter.shape, generator=generator)
    found.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def audit_folder(tmp_path: Path) -> Path:
    folder = AuditFolder(tmp_path / "audit")
    folder.begin({"what": "compared", "model": "m", "rules": {**RULES.as_dict(), "own": True}})
    folder.add(1, [completion("[red]\x1b[31m")])
    folder.close()
    return tmp_path / "audit"


def test_a_folder_is_shown_and_gets_a_page(audit_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(audit_folder)]) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed, "a token's control characters do not reach the terminal"
    assert "[red]⟨U+001B⟩[31m" in printed
    assert "would block 50 % of tokens; 50 % of these are inside the KL ball" in printed
    rows = {line.split("  ")[0].strip(): line.split() for line in printed.splitlines() if line.startswith(" ")}
    assert rows["clipping"][1:] == ["50", "%", "1", "(50", "%)", "1", "(50", "%)", "1", "(25", "%)"]
    page = (audit_folder / "audit.html").read_text()
    assert "would block 50 % of tokens" in page
    assert "The page is in" in printed


def test_quiet_says_the_sentences(audit_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", str(audit_folder), "--quiet", "--page", str(tmp_path / "x.html")]) == 0
    printed = capsys.readouterr().out
    assert "True KL to the old policy" in printed
    assert "advantage" not in printed
    assert (tmp_path / "x.html").is_file()
    assert not (audit_folder / "audit.html").exists()


def test_two_models(model: str, moved: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "audit"
    assert main(["audit", "--old", model, "--new", moved, *SMALL.split(), "--out", str(out), "--clip", "0.1,0.3"]) == 0
    assert "clipping (ratio 0.9 … 1.3) would block" in capsys.readouterr().out
    info, columns = read_audit(out)
    assert info["rules"]["clip"]["clip_high"] == 0.3
    assert len(set(columns["sequence"].tolist())) == 8
    assert columns["kl"].max() > 1e-3
    # By hand on one completion: the model's own softmax, over everything.
    here = columns["sequence"] == 3
    old, new = (AutoModelForCausalLM.from_pretrained(name) for name in (model, moved))
    from corral.lab.models.tiny import tiny_tokenizer

    prompt = tiny_tokenizer()(["qqq"])["input_ids"][0]
    ids = torch.tensor([prompt + columns["token"][here].tolist()])
    with torch.no_grad():
        p, q = (one(input_ids=ids).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1) for one in (old, new))
    assert columns["kl"][here].tolist() == pytest.approx((q.exp() * (q - p)).sum(-1).tolist(), rel=1e-3, abs=1e-6)
    assert columns["tv"][here].tolist() == pytest.approx(((p.exp() - q.exp()).abs().sum(-1) / 2).tolist(), rel=1e-3)
    advantages = {float(columns["advantage"][columns["sequence"] == index].iloc[0]) for index in range(4)}
    assert abs(sum(float(columns["advantage"][columns["sequence"] == index].iloc[0]) for index in range(4))) < 1e-4
    assert len(advantages) > 1


def test_the_example_and_its_audit_warn_of_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Updates large enough that policies end far apart, by more than half a nat on the sampled tokens of some completion."""
    script = EXAMPLE.read_text()
    short = script.replace("max_steps=8 * 12", "max_steps=4").replace(
        "per_device_train_batch_size=32", "per_device_train_batch_size=8"
    )
    short = short.replace("learning_rate=4e-4", "learning_rate=4e-3")
    assert short.count("max_steps=4") == short.count("per_device_train_batch_size=8") == short.count("rate=4e-3") == 1
    monkeypatch.chdir(tmp_path)
    exec(compile(short.replace("steps_per_generation=8", "steps_per_generation=4"), EXAMPLE, "exec"), {"__name__": "__main__"})
    folder = re.search(r"now: corral audit (\S+)", capsys.readouterr().out)
    assert folder is not None
    assert main(["audit", folder[1], "--quiet"]) == 0
    said = capsys.readouterr().out
    assert "of 32 completions, compared with the old policy after the updates on their batch; shares of so few" in said
    assert not [record for record in caplog.records if record.name.startswith("corral")]


def test_a_model_against_itself_has_not_moved(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--old", model, "--new", model, *SMALL.split(), "--out", str(tmp_path / "audit"), "--quiet"]) == 0
    assert "would block no token" in capsys.readouterr().out
    assert max(read_audit(tmp_path / "audit")[1]["kl"].tolist()) == 0.0


def test_a_run(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(small(model, objective="clip_higher", steps=3), out=tmp_path / "run", quiet=True).path
    capsys.readouterr()
    assert main(["audit", str(run), "--problems", "2", "--samples", "2", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert f"sampled at step 1 and 2 of {run} and compared at step 2 and 3, 2 times" in printed
    assert "clipping (ratio 0.8 … 1.28) would block" in printed
    info, table = read_audit(run / "audit")
    assert info["rules"]["own"]
    assert info["rules"]["clip"]["name"] == "clip_higher"
    assert set(table["update"].tolist()) == {2, 3}
    assert main(["audit", str(run), "--problems", "2"]) == 1
    assert "holds an audit already" in capsys.readouterr().err
    # With one checkpoint, the model that the run began with is the old policy.
    for path in sorted((run / "checkpoints").glob("checkpoint-*"))[:2]:
        shutil.rmtree(path)
    argv = ["audit", str(run), "--problems", "2", "--samples", "2", "--device", "cpu", "--out", str(tmp_path / "b"), "--quiet"]
    assert main(argv) == 0
    assert "sampled at step 0" in capsys.readouterr().out
    shutil.rmtree(run / "checkpoints")
    assert main(["audit", str(run), "--out", str(tmp_path / "c")]) == 1
    assert "no whole checkpoint" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "audit takes an audit's folder, a dump, a run's folder, or --old MODEL --new MODEL"),
        (["--old", "tiny"], "audit takes an audit's folder, a dump, a run's folder, or --old MODEL --new MODEL"),
        (["nothing"], "nothing cannot be read: No such file or directory."),
        (["empty"], "empty holds nothing to audit: it is no audit (it has no audit.json), no run (it has no config.json)"),
        (["empty", "--old", "tiny", "--new", "tiny"], "empty holds nothing to audit"),
        (["--old", "tiny", "--new", "tiny"], "has no task of its own: say which with --task"),
        (["--old", "tiny", "--new", "tiny", "--task", "countdwn"], "Did you mean 'countdown'?"),
        (["--old", "tiny", "--new", "tiny", "--task", "countdown", "--clip", "wide"], "0.2,0.28; got 'wide'"),
        (["--old", "tiny", "--new", "tiny", "--task", "countdown", "--kl-bound", "-1"], "`kl_bound` is the radius of a ball"),
        (["--old", "tiny", "--new", "tiny", "--task", "countdown", "--samples", "0"], "`samples` is a whole number ≥ 1"),
        (["--old", "tiny", "--new", "tiny", "--task", "countdown", "--set", "n=4"], "--set takes task_config.key=value"),
        (["--old", "runs/none", "--new", "tiny", "--task", "countdown"], "there is no run or model folder runs/none"),
    ],
)
def test_mistakes_get_a_sentence(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    assert main(["audit", *argv]) == 1
    printed = capsys.readouterr()
    assert printed.err.startswith("corral: ")
    assert message in printed.err
    assert printed.out == ""
    assert [path.name for path in tmp_path.rglob("*")] == ["empty"], "nothing is written before everything is checked"


@pytest.mark.parametrize(
    ("files", "old", "new"),
    [
        (["checkpoint-2/trainer_state.json", "checkpoint-10/optimizer.pt", "checkpoint-10/trainer_state.json"], "2", "10"),
        (["config.json", "checkpoint-2/trainer_state.json", "checkpoint-10/trainer_state.json"], "2", "10"),
        (["checkpoint-4/trainer_state.json", "checkpoint-4/optimizer.pt"], "MODEL", "4"),
        (["config.json", "model.safetensors"], "MODEL", "here"),
    ],
    ids=["checkpoints", "checkpoints and a model", "one checkpoint", "a model"],
)
def test_the_output_folder_of_a_trainer_is_explained(
    files: list[str], old: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text('{"model_type": "qwen2"}')
    names = {"MODEL": "MODEL", "here": str(tmp_path)}
    old, new = (names.get(name, f"{tmp_path}/checkpoint-{name}") for name in (old, new))
    assert main(["audit", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"corral: {tmp_path} is the output folder of a trainer: it holds models")
    assert f"corral audit --old {old} --new {new} --task TASK. To audit the next training run, call corral.llm.audit(" in said


def test_other_vocabularies_are_refused(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--old", model, "--new", "smoke", *SMALL.split(), "--out", str(tmp_path / "audit")]) == 1
    assert "different vocabularies" in capsys.readouterr().err
    assert not (tmp_path / "audit").exists()


def test_rules_that_were_tampered_with(audit_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    info = json.loads((audit_folder / "audit.json").read_text())
    for rules in ({}, {**info["rules"], "kl_bound": "far"}, {**info["rules"], "clip": 7}):
        (audit_folder / "audit.json").write_text(json.dumps({**info, "rules": rules}))
        assert main(["audit", str(audit_folder)]) == 1
        assert "is not what an audit writes" in capsys.readouterr().err


def test_what_it_does_not_know_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "x", "--sampels", "3"]) == 2
    assert "audit has no '--sampels'" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--clip 0.3", "--kl-bound 0.1", "--old tiny", "--task countdown", "--set task_config.n=4"])
def test_flags_that_could_change_nothing_are_refused(
    flags: str, audit_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["audit", str(audit_folder), *flags.split()]) == 1
    assert f"measured already, so {flags.split()[0]} cannot be given with it" in capsys.readouterr().err
