"""Folders that no run of ours wrote, and settings that nobody means: a sentence each, never a traceback, never a wait."""

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file

from corral.lab.audit.folder import SCHEMA, read_audit
from corral.lab.cli import main
from corral.lab.run.files import digest, read_json, read_regular, write_json
from corral.lab.run.settings import coerce, guess, read_file
from corral.validate import RunError
from small_runs import save_model, small

DEEP = '{"a":' * 20_000 + "1" + "}" * 20_000

EVAL = ("--problems", "2", "--samples", "1", "--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from corral.lab.jobs.llm.train import train

    folder = tmp_path_factory.mktemp("honest")
    train(small(save_model(folder / "model"), steps=2), out=folder / "run", quiet=True)
    assert main(["audit", str(folder / "run"), *EVAL, "--out", str(folder / "audit")]) == 0
    assert main(["eval", str(folder / "run"), *EVAL, "--out", str(folder / "eval")]) == 0
    return folder


@pytest.fixture
def run(honest: Path, tmp_path: Path) -> Path:
    shutil.copytree(honest / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def sentence(capsys: pytest.CaptureFixture[str]) -> Callable[[], str]:
    """What was said on the error stream, which is one sentence of ours."""

    def read() -> str:
        said = capsys.readouterr().err
        assert said.startswith("corral: "), said
        assert "Traceback" not in said
        return said

    return read


COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "report": lambda run: ["report", run, "--out", f"{run}/page.html", "--quiet"],
    "eval": lambda run: ["eval", run, *EVAL],
    "audit": lambda run: ["audit", run, *EVAL],
    "export": lambda run: ["export", run, "--out", f"{run}/exported"],
    "resume": lambda run: ["train", "--resume", run, "--steps", "3", "--quiet"],
}


class TestConfig:
    ODD: tuple[Any, ...] = ([], {"a": {"b": []}}, 7, -1.5, "odd", None, True, 1e400, ["x", 3])

    KEYS = (
        *("settings", "trainer", "objective", "task", "model", "versions", "data", "reduction"),
        *("settings.task", "settings.task_config", "settings.model", "settings.objective", "settings.steps", "settings.tool"),
        *("settings.tools", "settings.environment_factory", "settings.instruction", "settings.reward", "settings.seed"),
        *("settings.lora", "settings.guard", "settings.num_generations", "settings.learning_rate", "settings.eval_size"),
        *("trainer.max_completion_length", "trainer.chat_template_kwargs", "trainer.bf16"),
        *("trainer.max_tool_calling_iterations", "objective.name", "objective.bound"),
    )

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("key", KEYS)
    @pytest.mark.parametrize("command", ["report", "eval", "audit", "export", "resume"])
    def test_odd_types(
        self, command: str, key: str, run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def reached(*_: Any, **__: Any) -> None:
            raise RunError("everything was read.")

        for place in ("jobs.llm.evaluate.TransformersSampler", "audit.models.load_pair", "run.life._live"):
            monkeypatch.setattr(f"corral.lab.{place}", reached)
        content = json.loads((run / "config.json").read_text())
        *outer, last = key.split(".")
        inner = content[outer[0]] if outer else content
        for value in self.ODD:
            inner[last] = value
            (run / "config.json").write_text(json.dumps(content))
            status = main(COMMANDS[command](str(run)))
            assert status in (0, 1), (key, value)
            if status:
                assert "corral: " in capsys.readouterr().err, (key, value)
            for name in ("exported", "audit", "evals", "page.html"):
                shutil.rmtree(run / name, ignore_errors=True)

    @pytest.mark.parametrize("command", COMMANDS)
    @pytest.mark.parametrize("text", [DEEP, "[]", "null", "3", '"a"', "{}", "\x00", '{"settings": []}'], ids=lambda t: t[:9])
    def test_other_contents(self, command: str, text: str, run: Path, sentence: Callable[[], str]) -> None:
        (run / "config.json").write_text(text)
        if main(COMMANDS[command](str(run))):
            sentence()
        else:
            assert command in (
                "report",
                "export",
            )  # one shows what there is, with a note; the other needs the checkpoints alone


def as_pipe(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def as_device(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def as_deep(path: Path) -> None:
    path.write_text(DEEP)


def as_huge(path: Path) -> None:
    with path.open("w") as file:
        file.truncate(2**40)


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("damage", [as_pipe, as_device, as_deep, as_huge])
class TestFilesThatAreNone:
    @pytest.mark.parametrize(
        "file",
        [
            *("config.json", "metrics.jsonl", "summary.json", "completions.parquet", "tokens.parquet", "compare.json"),
            *("manifest.json", "model.safetensors", "generation_config.json", "optimizer.pt", "unlisted.json"),
        ],
    )
    @pytest.mark.parametrize("command", COMMANDS)
    def test_of_a_run(
        self, command: str, file: str, damage: Callable[[Path], None], run: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        places = [path.parent for path in run.glob("checkpoints/*/manifest.json")]
        inside = file in ("manifest.json", "model.safetensors", "generation_config.json", "optimizer.pt", "unlisted.json")
        for folder in places if inside else [run]:
            damage(folder / file)
        assert main(COMMANDS[command](str(run))) in (0, 1)
        assert "Traceback" not in capsys.readouterr().err

    @pytest.mark.parametrize("command", ["eval", "audit", "export", "report"])
    def test_of_the_folder_itself(self, command: str, damage: Any, tmp_path: Path, sentence: Callable[[], str]) -> None:
        damage(tmp_path / "thing")
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(tmp_path)
            assert main(COMMANDS[command]("thing")) == 1
        sentence()

    @pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json", "generation_config.json"])
    def test_of_a_model(
        self, file: str, damage: Callable[[Path], None], honest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        shutil.copytree(honest / "model", tmp_path / "model")
        damage(tmp_path / "model" / file)
        assert main(["eval", str(tmp_path / "model"), "--task", "digits", *EVAL, "--out", str(tmp_path / "out")]) == 1
        assert "Traceback" not in capsys.readouterr().err

    @pytest.mark.parametrize("file", ["audit.json", "audit.parquet", "audit.parquet/update-00000002.parquet"])
    def test_of_an_audit(
        self, file: str, damage: Callable[[Path], None], honest: Path, tmp_path: Path, sentence: Callable[[], str]
    ) -> None:
        shutil.copytree(honest / "audit", tmp_path / "audit")
        if (tmp_path / "audit" / file).is_dir():
            shutil.rmtree(tmp_path / "audit" / file)
        damage(tmp_path / "audit" / file)
        assert main(["audit", str(tmp_path / "audit")]) == 1
        sentence()

    @pytest.mark.parametrize("file", ["eval.json", "completions.parquet"])
    def test_of_an_evaluation(
        self, file: str, damage: Callable[[Path], None], honest: Path, tmp_path: Path, sentence: Callable[[], str]
    ) -> None:
        shutil.copytree(honest / "eval", tmp_path / "eval")
        damage(tmp_path / "eval" / file)
        assert main(["eval", str(honest / "run"), *EVAL, "--against", str(tmp_path / "eval")]) == 1
        sentence()

    def test_of_problems(self, damage: Callable[[Path], None], honest: Path, tmp_path: Path, sentence: Any) -> None:
        damage(tmp_path / "rows.jsonl")
        argv = ["--task", "jsonl", "--set", f"task_config.path={tmp_path / 'rows.jsonl'}", *EVAL]
        assert main(["eval", str(honest / "model"), *argv]) == 1
        sentence()


def test_a_regular_file_of_sane_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"abc")
    assert read_regular(tmp_path / "a") == b"abc"
    assert read_regular(tmp_path / "a", 3) == b"abc"
    with pytest.raises(ValueError, match="3 bytes, and at most 2 are read"):
        read_regular(tmp_path / "a", 2)
    with pytest.raises(OSError, match="directory"):
        read_regular(tmp_path)
    (tmp_path / "b").write_text(DEEP)
    with pytest.raises(ValueError, match="too deep"):
        read_json(tmp_path / "b")


def test_a_manifest_of_no_files_is_not_whole(run: Path, sentence: Callable[[], str]) -> None:
    for manifest in run.glob("checkpoints/*/manifest.json"):
        write_json(manifest, {"step": json.loads(manifest.read_text())["step"], "files": {}})
    assert main(COMMANDS["export"](str(run))) == 1
    assert "its manifest lists no file" in sentence()


@pytest.mark.parametrize("damage", [lambda p: p.write_bytes(b""), lambda p: torch.save([1], p)], ids=["empty", "a list"])
@pytest.mark.parametrize("file", ["optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"])
def test_damaged_files_of_a_checkpoint_that_match_their_manifest(
    file: str, damage: Callable[[Path], None], run: Path, sentence: Callable[[], str]
) -> None:
    for manifest in run.glob("checkpoints/*/manifest.json"):
        path = manifest.parent / file
        damage(path)
        content = json.loads(manifest.read_text())
        content["files"][file] = {"bytes": path.stat().st_size, "sha256": digest(path)}
        write_json(manifest, content)
    assert main(COMMANDS["resume"](str(run))) == 1
    assert "cannot be resumed from, though it matches its manifest" in sentence()


@pytest.mark.parametrize("name", ["../../config.json", "/etc/hostname", "sub/../config.json"])
def test_a_manifest_names_files_of_its_checkpoint_alone(name: str, run: Path, sentence: Callable[[], str]) -> None:
    for manifest in run.glob("checkpoints/*/manifest.json"):
        path = manifest.parent / name
        content = json.loads(manifest.read_text())
        content["files"][name] = {"bytes": path.stat().st_size, "sha256": digest(path)} if path.exists() else {}
        write_json(manifest, content)
    assert main(COMMANDS["export"](str(run))) == 1
    assert "no whole checkpoint" in sentence()


@pytest.mark.parametrize("odd", [None, "1", 1.0, True, [1], -1, 2**70], ids=str)
def test_the_step_of_a_manifest_is_a_number(odd: Any, run: Path, sentence: Callable[[], str]) -> None:
    for manifest in run.glob("checkpoints/*/manifest.json"):
        write_json(manifest, json.loads(manifest.read_text()) | {"step": odd})
    for command in ("eval", "audit", "export"):
        assert main(COMMANDS[command](str(run))) == 1
        assert "no whole checkpoint" in sentence()


@pytest.mark.parametrize(
    ("column", "value", "why"),
    [
        ("kl", -1.0, "a KL below 0"),
        ("tv", 7.0, "a total variation outside 0 to 1"),
        ("tv_topk", -0.5, "a total variation outside 0 to 1"),
        ("entropy", -2.0, "an entropy below 0"),
        ("logp_old", 0.5, "a log-probability above 0"),
    ],
)
def test_numbers_that_cannot_be_are_refused(
    column: str, value: float, why: str, honest: Path, tmp_path: Path, sentence: Callable[[], str]
) -> None:
    shutil.copytree(honest / "audit", tmp_path / "audit")
    (part,) = (tmp_path / "audit" / "audit.parquet").glob("*.parquet")
    table = pq.read_table(part)
    values = table[column].to_pylist()
    values[0] = value
    place = table.column_names.index(column)
    pq.write_table(table.set_column(place, column, pa.array(values, type=SCHEMA.field(column).type)), part)
    assert main(["audit", str(tmp_path / "audit")]) == 1
    assert why in sentence()


def test_an_honest_audit_is_read(honest: Path) -> None:
    assert len(read_audit(honest / "audit")[1])


class TestTokenExports:
    LINE = json.dumps(
        {"token_ids": [1], "loss_mask": [True], "inference_logprobs": [-0.1], "trainer_logprobs": [-0.2], "advantages": [1.0]}
    )

    @pytest.mark.parametrize("place", ["token_exports", "token_exports/step_1", "token_exports/run/step_1", "step_1"])
    def test_audited_from_within(self, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = tmp_path / place
        folder.mkdir(parents=True)
        (folder / "rank_0.jsonl").write_text(self.LINE + "\n")
        (folder / "STABLE").touch()
        for where in (folder, *list(folder.parents)[: place.count("/") + 1]):
            monkeypatch.chdir(where)
            assert main(["audit", ".", "--quiet"]) == 0


def save_weights(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("command", ["eval", "audit", "train"])
def test_weights_that_are_no_numbers(command: str, value: float, honest: Path, tmp_path: Path, sentence: Any) -> None:
    shutil.copytree(honest / "model", tmp_path / "model")
    save_weights(tmp_path / "model", lambda weights: weights["lm_head.weight"][3].fill_(value))
    model = str(tmp_path / "model")
    commands = {
        "eval": ["eval", model, "--task", "digits", *EVAL],
        "audit": ["audit", "--old", model, "--new", str(honest / "model"), "--task", "digits", *EVAL],
        "train": ["train", "--model", model, "--smoke", "--device", "cpu"],
    }
    assert main([*commands[command], "--out", str(tmp_path / "out")]) == 1
    assert "lm_head.weight" in sentence()


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--smoke", "--out", "NAME"],
        ["train", "--resume", "NAME"],
        ["train", "--config", "NAME"],
        ["train", "--model", "NAME"],
        ["eval", "RUN", *EVAL, "--out", "NAME"],
        ["eval", "NAME"],
        ["eval", "RUN", *EVAL, "--against", "NAME"],
        ["audit", "NAME"],
        ["audit", "RUN", *EVAL, "--out", "NAME"],
        ["report", "RUN", "--out", "NAME"],
        ["report", "NAME"],
        ["report", "RUN", "--export", "NAME", "--out", "page.html"],
        ["export", "RUN", "--out", "NAME"],
        ["export", "NAME"],
        ["compare", "--smoke", "--objectives", "troll,dppo", "--out", "NAME"],
        ["compare", "--resume", "NAME"],
        ["explore", "--out", "NAME"],
    ],
    ids=lambda argv: " ".join(argv[:2] + argv[-2:-1]),
)
def test_a_name_of_three_hundred_letters(
    argv: list[str], run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: Callable[[], str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main([{"NAME": "a" * 300, "RUN": str(run)}.get(word, word) for word in argv]) == 1
    sentence()


@pytest.fixture
def small_files() -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_limit_on_the_size_of_files(run: Path, small_files: None, sentence: Callable[[], str]) -> None:
    assert main(COMMANDS["resume"](str(run))) == 1
    assert "limit on the size of a file (ulimit -f)" in sentence()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("value", ["0", "-1"])
@pytest.mark.parametrize(
    "flag",
    [
        *("steps", "eval-every", "eval-size", "eval-batch-size", "checkpoint-every", "keep-checkpoints", "num-generations"),
        *("per-device-train-batch-size", "per-device-eval-batch-size", "gradient-accumulation-steps", "num-iterations"),
        *("steps-per-generation", "generation-batch-size", "max-completion-length", "support-size", "temperature"),
        *("max-grad-norm", "top-p", "set task_config.n", "lora.r", "keep-completions", "learning-rate", "max-steps"),
    ],
)
def test_counts_of_zero_and_below(flag: str, value: str, honest: Path, tmp_path: Path, capsys: Any) -> None:
    name, _, key = flag.partition(" ")
    given = ["--set", f"{key}={value}"] if key else [f"--{name}", value]
    argv = ["train", "--model", str(honest / "model"), "--task", "countdown", "--smoke", "--device", "cpu", "--quiet"]
    assert main([*argv, *given, "--out", str(tmp_path / "out")]) in (0, 1)
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("word", "guard"), [("off", "off"), ("no", "off"), ("'off'", "off"), ("warn", "warn")])
def test_the_words_of_yaml_are_words(word: str, guard: str, tmp_path: Path) -> None:
    from corral.lab.jobs.llm.settings import resolve
    from corral.lab.jobs.robot.settings import resolve as resolve_robot

    path = tmp_path / "a.yaml"
    path.write_text(f"guard: {word}\n")
    assert resolve([read_file(path)]).guard == resolve_robot([read_file(path)]).guard == guard


def test_truth_is_no_word_where_there_is_none_for_it() -> None:
    from typing import Literal

    with pytest.raises(RunError, match="is one of warn, stop, off; got True"):
        coerce("guard", True, Literal["warn", "stop", "off"])


@pytest.mark.parametrize("suffix", ["toml", "yaml"])
def test_settings_nested_too_deep(suffix: str, tmp_path: Path, sentence: Callable[[], str]) -> None:
    path = tmp_path / f"a.{suffix}"
    path.write_text(f"a{' =' if suffix == 'toml' else ':'} {'[' * 20_000}{']' * 20_000}\n")
    assert main(["train", "--config", str(path)]) == 1
    sentence()
    assert guess("[" * 20_000) == "[" * 20_000


@pytest.fixture(scope="module")
def honest_robot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("robot") / "run"
    assert main(["train", "--recipe", "via_point", "--smoke", "--quiet", "--out", str(out)]) == 0
    return out


ROBOT_COMMANDS: dict[str, Callable[[str], list[str]]] = {
    "report": lambda run: ["report", run, "--out", f"{run}/page.html", "--quiet"],
    "eval": lambda run: ["eval", run, "--episodes", "2", "--out", f"{run}/odd"],
    "export": lambda run: ["export", run, "--out", f"{run}/policy.npz"],
    "resume": lambda run: ["train", "--resume", run, "--iterations", "3", "--quiet"],
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("command", ROBOT_COMMANDS)
def test_odd_types_in_the_config_of_a_robot(
    command: str, honest_robot: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def reached(*_: Any, **__: Any) -> None:
        raise RunError("everything was read.")

    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # odd values reach the checks that users meet
    for place in ("jobs.robot.train.restore", "run.life._live"):
        monkeypatch.setattr(f"corral.lab.{place}", reached)
    run = tmp_path / "run"
    shutil.copytree(honest_robot, run)
    whole = (run / "config.json").read_text()
    tables = json.loads(whole)["settings"]
    inner = [f"settings.{table}.{key}" for table in ("learner", "prodmp", "environment_config") for key in tables[table]]
    for key in [
        "settings",
        "objective",
        "task",
        "model",
        "versions",
        "settings.tce",
        *(f"settings.{x}" for x in tables),
        *inner,
    ]:
        for value in TestConfig.ODD:
            content = json.loads(whole)
            *outer, last = key.split(".")
            table = content
            for name in outer:
                table = table[name]
            table[last] = value
            (run / "config.json").write_text(json.dumps(content))
            status = main(ROBOT_COMMANDS[command](str(run)))
            assert status in (0, 1), (key, value)
            assert not status or "corral: " in capsys.readouterr().err, (key, value)
            shutil.rmtree(run / "odd", ignore_errors=True)
