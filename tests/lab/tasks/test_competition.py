"""MATH500, AIME, AMC and DAPO-Math in the shapes in which they are passed around."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from corral.lab.tasks import make_task, verify_all
from corral.lab.tasks.math_problems import DAPO_AFTER, DAPO_BEFORE

SHAPES: dict[str, tuple[str, list[dict[str, Any]], list[str]]] = {
    "MATH-500": (
        "math500",
        [
            {
                "problem": "Convert $(0,3)$ to polar coordinates.",
                "solution": r"… \boxed{\left( 3, \frac{\pi}{2} \right)}",
                "answer": r"\left( 3, \frac{\pi}{2} \right)",
                "subject": "Precalculus",
                "level": 2,
                "unique_id": "test/precalculus/807.json",
            },
            {"problem": "Half of one?", "solution": "", "answer": r"\frac{1}{2}", "subject": "x", "level": 1, "unique_id": "b"},
        ],
        [r"\boxed{(3, \pi/2)}", r"\boxed{0.5}"],
    ),
    "HuggingFaceH4/aime_2024": (
        "aime24",
        [{"id": 60, "problem": "Every morning …", "solution": "…", "answer": "204", "url": "…", "year": "2024"}],
        [r"\boxed{204}"],
    ),
    "Maxwell-Jia/AIME_2024": (
        "aime24",
        [{"ID": "2024-I-1", "Problem": "Every …", "Solution": "…", "Answer": 204}],
        ["#### 204"],
    ),
    "math-ai/aime24": ("aime24", [{"id": 1, "problem": "Every …", "solution": r"\boxed{204}", "url": "…"}], ["204"]),
    "math-ai/aime25": ("aime25", [{"problem": "Find …", "answer": "070", "id": "0"}], [r"\boxed{70}"]),
    "opencompass/AIME2025": ("aime25", [{"question": "Find …", "answer": "70"}], [r"\boxed{70}"]),
    "AI-MO/aimo-validation-amc": ("amc", [{"id": 0, "problem": "$\\frac{m}{n}$", "answer": 142.0, "url": "…"}], ["142"]),
    "math-ai/amc23": ("amc", [{"id": 0, "question": "Cities …", "answer": "27.0", "url": "…"}], [r"\boxed{27}"]),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_usual_shapes(shape: str, tmp_path: Path) -> None:
    name, rows, answers = SHAPES[shape]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    for file in ("rows.jsonl", "rows.parquet"):
        task = make_task(name, path=str(tmp_path / file))
        assert task.sizes == (0, len(rows))
        prompts = [next(row[key] for key in ("problem", "Problem", "question") if key in row) for row in rows]
        assert verify_all(task, prompts, answers) == [1.0] * len(rows)
        assert verify_all(task, prompts, [r"\boxed{7}"] * len(rows)) == [0.0] * len(rows)
        with pytest.raises(ValueError, match="every problem is held out"):
            task.train_prompts(1, 0)


def test_training_on_one_file_and_evaluating_on_another(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"problem": "a", "solution": "So \\\\boxed{1}."}\n')
    (tmp_path / "math500.jsonl").write_text('{"problem": "b", "answer": "2"}\n')
    task = make_task("math500", path=str(tmp_path / "train.jsonl"), held_out=str(tmp_path / "math500.jsonl"))
    assert (task.train_prompts(2, 0), task.held_out_prompts(2, 0)) == (["a", "a"], ["b"])
    assert verify_all(task, ["a", "b"], ["1", "2"]) == [1.0, 1.0]


DAPO = {
    "data_source": "math_dapo",
    "prompt": [{"content": f"{DAPO_BEFORE}In triangle $ABC$ …{DAPO_AFTER}", "role": "user"}],
    "ability": "MATH",
    "reward_model": {"ground_truth": "34", "style": "rule-lighteval/MATH_v2"},
    "extra_info": {"index": "9a9b6eb4"},
}
PROCESSED = {"prompt": "In triangle $DEF$ …", "solution": "113", "data_source": "math_dapo", "ability": "MATH"}


def test_dapo(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist([DAPO]), tmp_path / "train.parquet")
    (tmp_path / "test.jsonl").write_text(json.dumps(PROCESSED) + "\n")
    task = make_task("dapo_math", path=str(tmp_path), held_out=None)
    assert task.train_prompts(1, 0) == ["In triangle $ABC$ …"]
    assert task.held_out_prompts(1, 0) == ["In triangle $DEF$ …"]
    prompts = ["In triangle $ABC$ …"] * 4 + ["In triangle $DEF$ …"]
    assert verify_all(task, prompts, [r"\boxed{34}", "Answer: 34", "Answer: $34$", "Answer: 35", "113"]) == [1, 1, 1, 0, 1]


def test_dapo_repeats_itself_and_that_is_said(tmp_path: Path) -> None:
    rows = [DAPO] * 3 + [{**DAPO, "prompt": "other"}] * 2
    (tmp_path / "dapo.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.warns(UserWarning, match="dapo_math: 3 rows are repeated and used once"):
        assert make_task("dapo_math", path=str(tmp_path / "dapo.jsonl")).sizes == (1, 1)


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({**DAPO, "prompt": []}, "`prompt` should be a chat that ends with the user's message"),
        ({**DAPO, "prompt": [{"role": "system", "content": "x"}]}, "`prompt` should be a chat that ends with the user's"),
        (
            {**DAPO, "prompt": [{"role": role, "content": "x"} for role in ("system", "user")]},
            "`prompt` should be one message of the user's",
        ),
        ({**DAPO, "prompt": [{"role": "user"}]}, "`prompt` should be a text that is not empty"),
        ({**DAPO, "prompt": None}, "`prompt` should be a text that is not empty"),
        ({**DAPO, "reward_model": {"ground_truth": ""}}, "`ground_truth` should be a text that is not empty"),
        ({"prompt": "x"}, "there is no `solution` or `answer`"),
    ],
)
def test_malformed_rows_of_dapo(row: dict[str, Any], why: str, tmp_path: Path) -> None:
    (tmp_path / "dapo.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=f"dapo_math: 1 row is malformed:\n  dapo.jsonl, line 1: {why}"):
        make_task("dapo_math", path=str(tmp_path / "dapo.jsonl"))


@pytest.mark.parametrize("row", [{"problem": "x"}, {"problem": "x", "answer": None}, {"problem": "x", "solution": "none"}])
def test_a_problem_without_an_answer_is_malformed(row: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "amc.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=r"amc: 1 row is malformed:\n  amc.jsonl, line 1: there is n"):
        make_task("amc", path=str(tmp_path / "amc.jsonl"))


def test_where_they_are_on_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, str | None, str]] = []

    def load_dataset(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
        asked.append((name, config, split))
        return [{"problem": "x", "question": "x", "prompt": "x", "answer": "#### 1" if "gsm8k" in name else "1"}]

    fake = types.ModuleType("datasets")
    fake.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", fake)
    for name in ("math500", "aime24", "aime25", "amc", "dapo_math"):
        assert sum(make_task(name).sizes) == 1
    assert asked == [
        ("HuggingFaceH4/MATH-500", None, "test"),
        ("HuggingFaceH4/aime_2024", None, "train"),
        ("math-ai/aime25", None, "test"),
        ("AI-MO/aimo-validation-amc", None, "train"),
        ("BytedTsinghua-SIA/DAPO-Math-17k", None, "train"),
    ]
