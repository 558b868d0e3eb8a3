"""Reference outputs: what corral computes and prints, kept to show that a later change leaves it bit for bit the same.

python scripts/references.py record [--only PART] [--workers N]    compute the outputs and write them to tests/references/
python scripts/references.py check [--only PART] [--workers N]     compute them again; one line per difference, status 1 if any

Numbers are kept as hashes and depend on the machine's instruction set and on torch; texts are kept as they are. `record` leaves
the stored runs (run_*.tar.xz) alone, since older code wrote them: they show that such runs still go on. It makes missing ones.
"""

import argparse
import gzip
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, redirect_stderr, redirect_stdout
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
REFERENCES = TESTS / "references"
CORRAL = (sys.executable, "-W", "ignore", "-m", "corral.lab.cli")
ENVIRONMENT = os.environ | {
    "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{TESTS}",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "COLUMNS": "100",
    "NO_COLOR": "1",
    "HYPOTHESIS_PROFILE": "few",
}
"""Of every process that computes references: one thread, no network, lines of one width."""

Found = dict[str, Any]
"""Names of outputs, and each output: a text, a hash, or names and outputs again."""


def digest(data: bytes) -> str:
    """The first 16 digits of a SHA-256: a chance of 1e-19 that two outputs share them."""
    return hashlib.sha256(data).hexdigest()[:16]


def normalised(text: str, *places: Path) -> str:
    """The text without what changes from call to call: paths and durations."""
    for place in (*places, ROOT):
        text = text.replace(str(place), f"<{place.name if place in places else 'root'}>")
    text = re.sub(r"/tmp/[\w./-]+", "<tmp>", text)
    text = re.sub(r"\b\d+(\.\d+)?( ?(s|ms|min|h)\b| seconds)", "<time>", text)
    return "\n".join(line.rstrip() for line in text.splitlines())


def call(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run a command with the environment of references."""
    return subprocess.run(command, cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=900)


def tests_module(name: str) -> Any:
    """A module of the tests, wherever in tests/ it lies."""
    path = next(TESTS.rglob(f"{name}.py"))
    for folder in (str(TESTS), str(path.parent)):
        if folder not in sys.path:
            sys.path.insert(0, folder)
    return importlib.import_module(name)


# ---------------------------------------------------------------------------------------------------------- objectives


def objectives() -> Found:
    """Loss and gradient of every objective: the maths alone, the fused torch head, the adapter, and each engine's door."""
    import torch

    import corral

    torch.set_num_threads(1)
    cases: dict[str, tuple[str, dict[str, Any]]] = {name: (name, {}) for name in corral.objective_names()}
    cases |= {
        "reinforce, capped": ("reinforce", {"ratio_cap": 1.5}),
        "dppo, acting": ("dppo", {"bound": 0.1}),
        "dppo, kl": ("dppo", {"divergence": "kl", "bound": 0.05}),
        "dppo, topk tv": ("dppo", {"estimator": "topk", "bound": 0.1}),
        "dppo, symmetric": ("dppo", {"mask": "symmetric"}),
        "dppo, predictive": ("dppo", {"estimator": "topk", "mask": "predictive"}),
        "cppo, topk": ("cppo", {"estimator": "topk"}),
        "troll, acting": ("troll", {"bound": 0.02}),
        "troll, sequence": ("troll", {"level": "sequence"}),
        "troll, constant dual": ("troll", {"gradient": "constant_dual"}),
        "troll, unprojected": ("troll", {"gradient": "unprojected"}),
        "troll, outward": ("troll", {"project": "outward"}),
    }
    return {case: dict(_doors(name, settings)) for case, (name, settings) in cases.items()}


def _doors(name: str, settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Each door's name, and hashes of what it computes or the sentence in which it refuses."""
    import dataclasses

    import torch

    import corral
    from corral.engines.adapter import EngineObjective

    doors = tests_module("doors")
    made = corral.make_objective(name, **settings)

    def whole(batch: Any) -> corral.TokenBatch:
        """The batch with a support for every objective, and a teacher for those that read one."""
        old = corral.top_k_support(batch.old, batch.tokens, doors.TOP_K)
        new = corral.gather_support(batch.new, old.ids)
        teacher = corral.gather_support(batch.rollout, old.ids) if "dist_teacher" in made.needs else None
        sampled = (new.logp[..., 0], batch.sampled(batch.old), batch.credit, batch.mask)
        return corral.TokenBatch(*sampled, new, old, batch.sampled(batch.rollout), teacher)

    def share(batch: Any) -> Any:
        return torch.where(batch.mask, 1 / (len(batch.mask) * batch.mask.sum(-1, keepdim=True)), 0.0)

    def by_maths(batch: Any) -> tuple[Any, ...]:
        out = made(whole(batch))
        return *batch.gradient((out.loss * share(batch)).sum()), out.loss, out.metrics

    def by_head(batch: Any, **options: Any) -> tuple[Any, ...]:
        weight = torch.eye(doors.VOCABULARY, requires_grad=True)
        given = dataclasses.replace(whole(batch), dist_new=None)
        out = corral.policy_loss_from_hidden(
            batch.logits, weight, batch.tokens, given, made, weights=share(batch), impl="torch", **options
        )
        return out.loss, *torch.autograd.grad(out.loss, [batch.logits, weight]), out.metrics

    def by_adapter(batch: Any) -> tuple[Any, ...]:
        loss, metrics = EngineObjective.of("door", name, settings, support=True).token_loss(whole(batch), None)
        return *batch.gradient((loss * share(batch)).sum()), metrics

    ways: dict[str, Callable[[Any], tuple[Any, ...]]] = {
        "maths": by_maths,
        "head": by_head,
        "head, capped": lambda batch: by_head(batch, temperature=0.9, softcap=6.0, entropy=True),
        "adapter": by_adapter,
    }
    ways |= {door: lambda batch, run=run: run(name, settings, batch) for door, run in doors.DOORS.items()}
    for door, way in ways.items():
        torch.manual_seed(0)  # some objectives draw the tokens that they act on
        try:
            yield door, [_hash(part) for part in way(doors.make_batch())]
        except ValueError as refusal:
            yield door, str(refusal)


def _hash(value: Any) -> str:
    """The hash of a tensor's or a number's bits, or of metrics by name."""
    import torch

    if isinstance(value, dict):
        return digest("".join(f"{key} {_hash(value[key])}\n" for key in sorted(value)).encode())
    tensor = torch.as_tensor(value).detach().contiguous()
    return digest(f"{tensor.dtype} {list(tensor.shape)}".encode() + tensor.numpy().tobytes())


# ----------------------------------------------------------------------------------------------------- the command line


def helps() -> Found:
    """`--help` of corral and of every command, and what `explain` lists."""
    front = call(*CORRAL, "--help").stdout
    commands = re.findall(r"^  (\w+) ", front.partition("\ncommands:\n")[2], re.MULTILINE)
    lines = ["--help", *(f"{command} --help" for command in commands), "explain", "explain settings"]
    return {f"corral {line}": normalised(call(*CORRAL, *line.split()).stdout).splitlines() for line in lines}


def wrong(part: int, parts: int) -> Found:
    """Status and output of every `parts`-th command line in the tests' table of wrong ones."""
    warnings.simplefilter("ignore")
    table = tests_module("test_wrong_commands")
    found: Found = {}
    with tempfile.TemporaryDirectory() as name:
        tmp, arm, empty = (Path(name).resolve() / folder for folder in ("tmp", "arm", "empty"))
        tmp.mkdir()
        texts = {"empty.jsonl": "", "bad.toml": "steps = = 3", "bad.yaml": "steps: [1\n", "list.yaml": "- 1\n- 2\n"}
        for file, text in texts.items():
            (tmp / file).write_text(text)
        table.save_model(tmp / "model")
        assert table.main(["train", "--recipe", "via_point", "--smoke", "--quiet", "--out", str(arm)]) == 0
        for line in list(table.WRONG)[part::parts]:
            empty.mkdir()
            said = io.StringIO()
            with chdir(empty), redirect_stdout(said), redirect_stderr(said):
                status = table.status_of(shlex.split(line.replace("{tmp}", str(tmp)).replace("{arm}", str(arm))))
            found[f"corral {line}"] = [status, normalised(said.getvalue(), tmp, arm, empty)]
            shutil.rmtree(empty)
    return found


# ------------------------------------------------------------------------------------------------------ the ids of tests


def ids() -> Found:
    """The id of every test that pytest collects."""
    said = call(sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider").stdout
    found = [line for line in said.splitlines() if "::" in line and not line.startswith(("SKIPPED", "ERROR"))]
    assert found, said[-2000:]
    return dict.fromkeys(sorted(found), True)


# ------------------------------------------------------------------------------------------------------- training runs

CLOCK = re.compile("second|time|memory")
"""Columns of metrics.jsonl that no two runs share."""


def outcome(run: Path) -> Found:
    """A hash of each column of a run's metrics, of its completions and tokens, and of its newest weights."""
    import pyarrow.parquet as pq

    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    names = {name for row in rows for name in row if not CLOCK.search(name)}
    found: Found = {name: digest(json.dumps([row.get(name) for row in rows]).encode()) for name in names}
    for table in run.glob("*.parquet"):
        found[table.name] = digest(json.dumps(pq.read_table(table).to_pylist(), default=str).encode())
    weights = sorted(run.glob("checkpoints/*/*.safetensors"), key=lambda path: int(path.parent.name.rpartition("-")[2]))
    return found | {path.name: digest(path.read_bytes()) for path in weights[-1:]}


def trainings(part: int, parts: int) -> Found:
    """Outcomes of `corral train` for every `parts`-th of the runs below, or the last line of a refusal.

    Each run is a fork of this process, which has imported what takes seconds and computed nothing.
    """
    os.environ.update(ENVIRONMENT)
    import datasets  # noqa: F401
    import gymnasium  # noqa: F401
    import peft  # noqa: F401
    from trl import GRPOTrainer  # noqa: F401

    found: Found = {}
    for arguments in list(training_runs())[part::parts]:
        with tempfile.TemporaryDirectory() as folder:
            command = [*CORRAL[1:], "train", *arguments, "--quiet", "--out", "run"]
            done = forked(command[command.index("-m") + 1 :], Path(folder))
            found[" ".join(arguments)] = refusal(done) if done.returncode else outcome(Path(folder) / "run")
    return found


def forked(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run `python -m` with a module and its arguments in a fork of this process."""
    said = cwd / "said.txt"

    def run() -> None:
        os.chdir(cwd)
        file = os.open(said, os.O_CREAT | os.O_WRONLY)
        for number in (1, 2):
            os.dup2(file, number)
        warnings.simplefilter("ignore")
        sys.argv = command
        runpy.run_module(command[0], run_name="__main__", alter_sys=True)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    return subprocess.CompletedProcess(command, process.exitcode or 0, "", said.read_text())


def refusal(done: subprocess.CompletedProcess[str]) -> list[Any]:
    return [done.returncode, normalised(done.stderr).splitlines()[-1:]]


def training_runs() -> Iterator[tuple[str, ...]]:
    """Arguments of `corral train`: every recipe in smoke form, those of the embedded model on it, and one of each feature."""
    few = "--steps 3 --num-generations 4 --per-device-train-batch-size 8 --eval-size 8 --eval-every 2"
    recipes = [path for path in (ROOT / "src").rglob("*.toml") if "recipes" in path.parts]
    assert recipes, "no recipes under src/"
    for path in sorted(recipes, key=lambda path: path.name):
        text, recipe = path.read_text(), f"--recipe {path.stem}"
        robot = re.search("^environment = ", text, re.MULTILINE)
        yield tuple(f"{recipe} --smoke {'--iterations 2' if robot else '--steps 3'}".split())
        if re.search('^model = "tiny"', text, re.MULTILINE) and path.stem != "tool_use":
            yield tuple(f"{recipe} {few}".split())
    for algorithm in ("bbrl", "sb3-ppo", "sb3-ppo-gsde", "sb3-ppo-pink", "sb3-trpl"):
        yield tuple(f"--recipe via_point --smoke --algorithm {algorithm}".split())
    for feature in (
        "--objective dppo", "--objective gspo", "--objective ppo_clip --beta 0.01", "--support union",
        "--learning-rate auto --num-iterations 4", "--reuse auto --learning-rate auto --num-iterations 4",
        "--deployed-bound 1e-4 --learning-rate 1e-2", "--objective distill --teacher tiny", "--lora.r 2",
        "--advantage rloo --loss-type luspo", "--objective dppo --set objective_config.estimator=topk",
    ):  # fmt: skip
        yield tuple(f"{few} {feature}".split())


# ---------------------------------------------------------------------------------------------------- runs to go on with

STOPPED = {
    "lora": "--smoke --steps 4 --lora.r 2 --keep-checkpoints 9 --eval-every 2",
    "auto": "--smoke --steps 4 --learning-rate auto --num-iterations 4 --reuse auto --keep-checkpoints 9",
    "robot": "--recipe via_point --smoke --iterations 4 --set environment_config.reward=sparse",
}
"""Runs of four steps of which one checkpoint is kept: that of the second step, or of the third where only two are written."""


def resumed(name: str) -> Found:
    """Outcome of a stored run that is resumed, evaluated and exported."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        with tarfile.open(REFERENCES / f"run_{name}.tar.xz") as file:
            file.extractall(folder, filter="data")
        done = call(*CORRAL, "train", "--resume", "run", "--quiet", cwd=Path(folder))
        found: Found = {"metrics": refusal(done) if done.returncode else outcome(run)}
        sizes = ("--episodes", "4") if name == "robot" else ("--problems", "2", "--samples", "2")
        done = call(*CORRAL, "eval", "run", *sizes, "--quiet", cwd=Path(folder))
        found["eval"] = [done.returncode, normalised(done.stdout, Path(folder)).splitlines()]
        form = {"lora": ("--out", "exported", "--merge"), "auto": ("--out", "exported"), "robot": ("--out", "exported.npz")}
        done = call(*CORRAL, "export", "run", *form[name], cwd=Path(folder))
        files = list(Path(folder).rglob("exported*/*")) + list(Path(folder).glob("exported*.*"))
        weights = {path.name: digest(path.read_bytes()) for path in files if path.suffix in (".safetensors", ".npz")}
        found["export"] = [done.returncode, sorted(path.name for path in files), weights]
    return {name: found}


def make_stopped(name: str) -> None:
    """Write a run that stopped halfway; check that going on with it is the run that did not stop."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        done = call(*CORRAL, "train", *STOPPED[name].split(), "--quiet", "--out", "run", cwd=Path(folder))
        assert done.returncode == 0, done.stderr
        whole = outcome(run)
        checkpoints = sorted((run / "checkpoints").iterdir(), key=lambda path: int(re.findall(r"\d+", path.name)[-1]))
        kept = checkpoints[max(len(checkpoints) - 3, 0)]
        assert kept != checkpoints[-1], checkpoints
        for path in checkpoints:
            if path != kept:
                shutil.rmtree(path)
        (run / "summary.json").unlink()
        with tarfile.open(REFERENCES / f"run_{name}.tar.xz", "w:xz") as file:
            file.add(run, "run")
    again = resumed(name)[name]["metrics"]
    assert again == whole, list(differences(whole, again, name))


# ----------------------------------------------------------------------------------------------------------------- pages


class Texts(HTMLParser):
    """The texts of a page by heading, and its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.heading, self.open, self.found = "top", "", dict[str, list[str]]()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.open = "data" if dict(attributes).get("type") == "application/json" else tag

    def handle_endtag(self, tag: str) -> None:
        self.open = ""

    def handle_data(self, data: str) -> None:
        if self.open in ("style", "script") or not data.strip():
            return
        if self.open in ("h1", "h2"):
            self.heading = data.strip()
        self.found.setdefault("data" if self.open == "data" else self.heading, []).append(" ".join(data.split()))


def pages() -> Found:
    """Texts of the pages of synthetic runs, comparisons, robots and audits, and what the commands print."""
    synthetic, dumps = tests_module("synthetic"), tests_module("dumps")
    found: Found = {}
    with tempfile.TemporaryDirectory() as name:
        tmp = Path(name)

        def show(title: str, *command: str) -> None:
            done = call(*CORRAL, *command, cwd=tmp)
            printed = normalised(done.stdout + done.stderr, tmp).splitlines()
            found[title] = {"printed": [done.returncode, *printed]}
            if (tmp / "x.html").exists():
                texts = Texts((tmp / "x.html").read_text()).found
                found[title] |= {key: digest(normalised(" ".join(text), tmp).encode()) for key, text in texts.items()}
                (tmp / "x.html").unlink()

        synthetic.write_small_set(tmp / "runs")
        show("runs", "report", "runs", "--out", "x.html")
        show("two runs", "report", "runs/troll-0", "runs/dppo-0", "--out", "x.html")
        show("one run", "report", "runs/troll-0", "--out", "x.html")
        synthetic.write_comparison(tmp / "comparison")
        show("comparison", "report", "comparison", "--out", "x.html")
        synthetic.write_comparison_of_two(tmp / "smallest")
        show("smallest comparison", "report", "smallest", "--out", "x.html")
        for algorithm in ("tce", "bbrl", "sb3-ppo"):
            for seed in range(3):
                synthetic.write_robot_run(tmp / "robots" / f"{algorithm}-{seed}", algorithm, seed)
        show("robots", "report", "robots", "--out", "x.html")
        dumps.write_lines(tmp / "dump.jsonl", [dumps.drawn_line(seed, step=1 + seed // 8) for seed in range(24)])
        show("audit of a dump", "audit", "dump.jsonl", "--page", "x.html")
        dumps.write_exports(tmp / "exports", range(1, 4), lines=3)
        show("audit of exports", "audit", "exports", "--page", "x.html")
        call(*CORRAL, "train", "--smoke", "--steps", "3", "--learning-rate", "1e-2", "--quiet", "--out", "trained", cwd=tmp)
        show("audit of a run", "audit", "trained", "--problems", "2", "--samples", "2", "--device", "cpu", "--page", "x.html")
        show("explore", "explore", "--out", "x.html")
    return found


# ------------------------------------------------------------------------------------------------------------- the parts

PARTS: dict[str, list[tuple[str, tuple[Any, ...]]]] = {
    "objectives": [("objectives", ())],
    "helps": [("helps", ())],
    "wrong": [("wrong", (0, 2)), ("wrong", (1, 2))],
    "ids": [("ids", ())],
    "pages": [("pages", ())],
    "resumed": [("resumed", (name,)) for name in STOPPED],
    "metrics": [("trainings", (0, 2)), ("trainings", (1, 2))],
}
"""Each part, and the functions that compute it: name and arguments. Each runs in a process of its own."""


def path_of(part: str) -> Path:
    return REFERENCES / (f"test_{part}.txt.gz" if part == "ids" else f"{part}.json")


def read(part: str) -> Found:
    if part == "ids":
        return dict.fromkeys(gzip.decompress(path_of(part).read_bytes()).decode().splitlines(), True)
    return json.loads(path_of(part).read_text())


def write(part: str, found: Found) -> None:
    if part == "ids":
        path_of(part).write_bytes(gzip.compress("".join(f"{line}\n" for line in found).encode(), mtime=0))
    else:
        path_of(part).write_text(json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n")


def machine() -> str:
    """Versions and instruction set that numbers depend on."""
    import torch
    import transformers

    return f"torch {torch.__version__}, transformers {transformers.__version__}, {torch.backends.cpu.get_cpu_capability()}"


def compute(job: tuple[str, tuple[Any, ...]]) -> Found:
    """Call a function in a process of its own and return its outputs."""
    done = call(sys.executable, __file__, "job", json.dumps(job))
    if done.returncode:
        raise RuntimeError("".join(done.stderr.strip().splitlines()[-1:]))
    return json.loads(done.stdout.splitlines()[-1])


def differences(before: Any, now: Any, name: str) -> Iterator[str]:
    """Yield a line for each output that is gone, new or different."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted(before.keys() | now.keys()):
            if key not in now:
                yield f"{name}: {key}: gone"
            elif key not in before:
                yield f"{name}: {key}: new"
            else:
                yield from differences(before[key], now[key], f"{name}: {key}")
    elif before != now:
        if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
            before, now = next((old, new) for old, new in zip(before, now, strict=True) if old != new)
        yield f"{name}: {str(before)[:200]!r} is now {str(now)[:200]!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["record", "check", "job"])
    parser.add_argument("job", nargs="?", help="for processes that this script starts")
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; repeatable; all by default")
    parser.add_argument("--workers", type=int, default=2, help="processes at a time")
    arguments = parser.parse_args()
    if arguments.what == "job":
        name, given = json.loads(arguments.job)
        out = sys.stdout
        with redirect_stdout(sys.stderr):
            found = globals()[name](*given)
        print(json.dumps(found), file=out)
        return 0
    parts = arguments.only or list(PARTS)
    jobs = [(part, job) for part in parts for job in PARTS[part]]
    if arguments.what == "record" and "resumed" in parts:
        for name in STOPPED:
            if not (REFERENCES / f"run_{name}.tar.xz").exists():
                make_stopped(name)
    with ThreadPoolExecutor(arguments.workers) as pool:
        started = [(part, pool.submit(compute, job)) for part, job in jobs]
    count, here, place = 0, machine(), REFERENCES / "machine.txt"
    if arguments.what == "check" and place.read_text().strip() != here:
        print(f"recorded with {place.read_text().strip()}, and this is {here}: hashes of numbers may differ for that alone")
    for part in parts:
        found: Found = {}
        failure = next((error for of, future in started if of == part and (error := future.exception())), None)
        if failure is not None:  # what the part would have found is neither gone nor to be recorded
            print(f"{part}: could not be computed: {failure}")
            count += 1
            continue
        for of, future in started:
            found |= json.loads(json.dumps(future.result())) if of == part else {}
        if arguments.what == "record":
            REFERENCES.mkdir(exist_ok=True)
            write(part, found)
            place.write_text(here + "\n")
            print(f"{part}: {len(found)} outputs")
            continue
        for line in differences(read(part), found, part):
            print(line)
            count += 1
    if arguments.what == "check":
        print(f"{count} differences in {', '.join(parts)}")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
