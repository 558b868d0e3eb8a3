"""Finite tasks: what is in the files is used, split without leaks, or named by its line."""

import copy
import json
import pickle
import sys
import types
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.tasks import settings_of
from corral.lab.tasks.dataset import FiniteTask, Hub, Row, split_by_share, text_column


@dataclass(frozen=True, kw_only=True)
class Letters(FiniteTask):
    """Problems of one letter."""

    name: ClassVar[str] = "letters"
    HUB: ClassVar[Hub | None] = Hub("someone/letters", "main", train="train", held_out="test")

    def problem(self, row: Row) -> tuple[str, Any]:
        return text_column(row, "q"), text_column(row, "a")

    def verify(self, prompt: str, completion: str) -> float:
        return float(self.answer(prompt) == completion)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def rows(letters: str) -> list[Row]:
    return [{"q": letter, "a": letter.upper()} for letter in letters]


ALPHABET = "abcdefghijklmnopqrstuvwxyz"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path / "train.jsonl", rows(ALPHABET[:20]))
    write(tmp_path / "test.jsonl", rows(ALPHABET[20:]))
    return tmp_path


def test_a_folder_has_a_file_per_split(folder: Path) -> None:
    task = Letters(path=str(folder))
    assert task.sizes == (20, 6)
    assert set(task.train_prompts(20, 0)) == set(ALPHABET[:20])
    assert set(task.held_out_prompts(100, 0)) == set(ALPHABET[20:])
    assert (task.verify("a", "A"), task.verify("z", "A")) == (1.0, 0.0)
    assert settings_of(task) == {"path": str(folder), "held_out": None, "skip_malformed": False, "max_completion_length": 1024}


@given(seed=st.integers(-(2**70), 2**70), count=st.integers(0, 70))
def test_epochs_go_through_everything_and_longer_draws_extend_shorter(seed: int, count: int) -> None:
    task = Letters.__new__(Letters)
    vars(task)["_splits"] = {False: dict.fromkeys(ALPHABET[:20]), True: dict.fromkeys(ALPHABET[20:])}
    drawn = task.train_prompts(70, seed)
    assert drawn[:count] == task.train_prompts(count, seed)
    for epoch in range(3):
        assert sorted(drawn[20 * epoch : 20 * epoch + 20]) == list(ALPHABET[:20])
    assert drawn[:20] != drawn[20:40]
    held_out = task.held_out_prompts(6, seed)
    assert sorted(held_out) == list(ALPHABET[20:])
    assert held_out[: min(count, 6)] == task.held_out_prompts(min(count, 6), seed)
    assert drawn != task.train_prompts(70, seed + 1)


def test_a_share_is_held_out_whatever_the_order(tmp_path: Path) -> None:
    one = Letters(path=write(tmp_path / "one.jsonl", rows(ALPHABET)), held_out=0.25)
    other = Letters(path=write(tmp_path / "other.jsonl", rows(ALPHABET[::-1])), held_out=0.25)
    assert one.sizes == other.sizes == (20, 6)  # 26/4 = 6.5, and round takes the even
    assert set(one.held_out_prompts(6, 0)) == set(other.held_out_prompts(6, 0))
    assert not set(one.held_out_prompts(6, 0)) & set(one.train_prompts(20, 0))
    assert set(one.held_out_prompts(6, 0)) == set("efpquy"), "pinned: a released evaluation must mean the same tomorrow"


@given(count=st.integers(1, 40), share=st.floats(0.001, 1))
def test_shares(count: int, share: float) -> None:
    train, held_out = split_by_share({str(number): number for number in range(count)}, share)
    assert len(held_out) == max(1, round(share * count))
    assert len(train) + len(held_out) == count


def test_everything_held_out_has_nothing_to_train_on(tmp_path: Path) -> None:
    task = Letters(path=write(tmp_path / "a.jsonl", rows("ab")), held_out=1)
    assert task.sizes == (0, 2)
    assert task.train_prompts(0, 0) == []
    with pytest.raises(ValueError, match=r"letters: every problem is held out.* To train, give `held_out` as a share"):
        task.train_prompts(1, 0)


def test_held_out_as_a_file(folder: Path) -> None:
    task = Letters(path=str(folder / "train.jsonl"), held_out=str(folder / "test.jsonl"))
    assert task.sizes == (20, 6)
    other = Letters(path=str(folder), held_out=write(folder / "few.jsonl", rows("xyz")))
    assert other.sizes == (20, 3)


def test_one_file_and_nothing_said_of_the_held_out(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"train.jsonl has one split. Say with `held_out` what is held out"):
        Letters(path=str(folder / "train.jsonl"))


MALFORMED = [
    {"q": "a", "a": "A"},
    "{broken",
    "",
    {"q": "b"},
    {"q": " ", "a": "B"},
    {"q": None, "a": "B"},
    {"q": ["c"], "a": "C"},
    "[1, 2]",
    '"text"',
    {"q": "a", "a": "B"},
    {"q": "d", "a": True},
    {"q": "e", "a": 5},
    {"q": "f", "a": 5.0},
    {"q": "g", "a": 5.5},
    "\x00",
    "{" * 10_000,
]


def test_malformed_rows_are_named_by_line_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", MALFORMED)
    Path(path).write_bytes(Path(path).read_bytes() + b'{"q": "\xff", "a": "A"}\n')
    with pytest.raises(ValueError, match=r"^letters: 12 rows are malformed:") as raised:
        Letters(path=path, held_out=0.5)
    message = str(raised.value)
    for line, why in [
        (2, "this is not JSON"),
        (4, "there is no `a`; the row has q"),
        (5, "`q` should be a text that is not empty; got ' '"),
        (6, "`q` should be a text that is not empty; got 'None'"),
        (8, "a row is an object, {…}; got [1, 2]"),
        (10, "the prompt of bad.jsonl, line 1 with another answer"),
        (11, "`a` should be a text that is not empty; got 'True'"),
    ]:
        assert f"\n  bad.jsonl, line {line}: {why}" in message
    assert "\n  … and 2 more\nMend them, or go on without them: skip_malformed=true." in message
    assert message.count("\n") == 12
    assert len(message) < 2_000
    with pytest.warns(UserWarning, match=r"letters: 12 rows are malformed and skipped:\n  bad.jsonl, line 2: this is not JSON"):
        task = Letters(path=path, held_out=0.5, skip_malformed=True)
    assert task.sizes == (2, 2)  # a, e, f and g: numbers are texts too
    assert [task.answer(prompt) for prompt in "aefg"] == ["A", "5", "5", "5.5"]


def test_repeated_rows_are_used_once_and_said(tmp_path: Path) -> None:
    path = write(tmp_path / "twice.jsonl", rows("abab"))
    with pytest.warns(
        UserWarning, match=r"letters: 2 rows are repeated and used once:\n  twice.jsonl, line 3: as twice.jsonl, line 1"
    ):
        assert Letters(path=path, held_out=0.5).sizes == (1, 1)


def test_a_held_out_problem_among_those_to_train_on_is_refused(folder: Path) -> None:
    write(folder / "train.jsonl", rows("abz"))
    with pytest.raises(ValueError, match=r"letters: 1 row is malformed:\n  train.jsonl, line 3: this prompt is held out"):
        Letters(path=str(folder))
    with pytest.warns(UserWarning, match="1 row is malformed and skipped"):
        assert Letters(path=str(folder), skip_malformed=True).sizes == (2, 6)


def test_other_files(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(rows("abc")))
    pq.write_table(pa.Table.from_pylist(rows("abcd")), tmp_path / "a.parquet")
    (tmp_path / "bom.jsonl").write_bytes(b"\xef\xbb\xbf" + b'{"q": "a", "a": "A"}\r\n\r\n{"q": "b", "a": "B"}')
    for name, size in (("a.json", 3), ("a.parquet", 4), ("bom.jsonl", 2)):
        assert sum(Letters(path=str(tmp_path / name), held_out=0.5).sizes) == size
    folder = tmp_path / "hub"
    folder.mkdir()
    pq.write_table(pa.Table.from_pylist(rows("abcd")), folder / "train-00000-of-00001.parquet")
    pq.write_table(pa.Table.from_pylist(rows("xyz")), folder / "test-00000-of-00001.parquet")
    assert Letters(path=str(folder)).sizes == (4, 3)


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (None, "none.jsonl", r"none.jsonl cannot be read: No such file"),
        ("", "empty.jsonl", "empty.jsonl is empty: there is no problem in it"),
        ("{", "bad.json", r"bad.json is not JSON: .* A file of one row per line is named .jsonl"),
        ("{}", "bad.json", r"should hold a list of rows, .* got dict"),
        ("[1]", "bad.json", r"bad.json, row 1: a row is an object, {…}; got 1"),
        ("", "bad.parquet", r"bad.parquet cannot be read"),
    ],
)
def test_files_that_cannot_be_read(content: str | None, name: str, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        Letters(path=str(tmp_path / name), held_out=0.5)


def test_a_folder_without_its_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"should hold one file test.jsonl, test.json or test.parquet; there is none"):
        Letters(path=str(tmp_path))


@pytest.mark.parametrize("held_out", [0, -0.1, 1.5, True, float("nan")])
@pytest.mark.usefixtures("unchecked_shapes")
def test_impossible_shares_are_refused(held_out: Any, folder: Path) -> None:
    with pytest.raises(ValueError, match="letters: `held_out` is a file, or a share above 0 and up to 1"):
        Letters(path=str(folder), held_out=held_out)


def test_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str) -> list[Row]:
        asked.append((name, config, split))
        return rows("abc" if split == "train" else "xy")

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    assert Letters().sizes == (3, 2)
    assert sorted(asked) == [("someone/letters", "main", "test"), ("someone/letters", "main", "train")]
    assert Letters(held_out=0.3).sizes == (2, 1)

    def offline(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'someone/letters' on the Hub\nand more")

    fake.load_dataset = offline
    sentence = r"someone/letters \(t\w+\) cannot be loaded from the hub: .*[^.]\. Without .* give them as `path`: --set"
    with pytest.raises(ValueError, match=sentence):
        Letters()
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"letters needs datasets. Install it: pip install 'corral\[task\]'"):
        Letters()


def test_copies_are_equal_and_draw_the_same(folder: Path) -> None:
    task = Letters(path=str(folder))
    for twin in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert twin == task
        assert twin.train_prompts(5, 0) == task.train_prompts(5, 0)


def test_nothing_is_said_of_good_files(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Letters(path=str(folder))
