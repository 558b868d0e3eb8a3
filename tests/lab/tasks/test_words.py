"""Word problems: rows of three data sets, and splits that share nothing. ASDiv may not be passed on: its rows here are ours."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from corral.lab.jobs.llm.smoke import TASK_CONFIG
from corral.lab.tasks import make_task, verify_all
from corral.lab.tasks.math_problems import WordProblems, words

SVAMP = Path(__file__).with_name("svamp") / "svamp.jsonl"
OURS = Path(TASK_CONFIG["words"]["path"])


def folder(path: Path, asdiv: list[dict[str, object]], mawps: list[dict[str, object]]) -> str:
    for name, rows in (("asdiv", asdiv), ("mawps", mawps)):
        (path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (path / "svamp.jsonl").write_text(SVAMP.read_text())
    return str(path)


def test_the_three_files_make_one_task() -> None:
    task = WordProblems(path=str(OURS))
    # ASDiv's comparison has a name for an answer, MAWPS repeats a problem of ASDiv, and asks one of SVAMP's with other numbers.
    assert set(task.train_prompts(6, 0)) == {
        "A shelf holds 12 red books and 9 blue ones. How many books are on the shelf?",
        "Rosa had 30 beads and used 14 of them. How many beads are left?",
        "A school bought 5 boxes with 8 pens in each, how many pens did it buy?",
        "A farmer picked 45 pears and sold 18 of them. How many pears does he have now ?",
        "Each of 6 tables seats 4 guests. How many guests can sit down ?",
        "A rope of 7.5 meters is cut into 3 equal pieces. How long is each piece ?",
    }
    assert task.sizes == (6, 3)
    assert [task.answer(prompt) for prompt in task.train_prompts(6, 1)].count("21") == 1


def test_halves_share_nothing_and_are_all_of_it() -> None:
    parts = {part: set(make_task("words", path=str(OURS), part=part).train_prompts(6, 0)) for part in ("all", "sft", "rl")}
    assert not parts["sft"] & parts["rl"]
    assert parts["sft"] | parts["rl"] == parts["all"]


def test_two_ways_of_writing_a_problem_are_in_one_half(tmp_path: Path) -> None:
    story, question = "There are {} cats and 2 dogs.", "How many animals are there?"
    texts = [story.format(n) for n in range(3, 60)]
    asdiv = [{"body": text, "question": question, "answer": "5 (animals)"} for text in texts]
    mawps = [{"input": f"{text} {question}".upper().replace("?", " ?"), "target": 5.0} for text in texts]
    path = folder(tmp_path, asdiv, mawps)
    halves = [make_task("words", path=path, part=part) for part in ("sft", "rl")]
    assert [prompt for task in halves for prompt in task.train_prompts(task.sizes[0], 0) if prompt.isupper()] == []
    assert sum(task.sizes[0] for task in halves) == len(texts)


def test_every_gold_answer_of_svamp_is_right_and_its_neighbour_wrong(tmp_path: Path) -> None:
    task = WordProblems(
        path=folder(
            tmp_path,
            [{"body": "Two and two.", "question": "How many?", "answer": "4"}],
            [{"input": "What is 2 plus 3 ?", "target": 5.0}],
        )
    )
    rows = [json.loads(line) for line in SVAMP.read_text().splitlines()]
    prompts = task.held_out_prompts(100, 0)
    assert len(prompts) == len(rows) == 25
    golds = [task.answer(prompt) for prompt in prompts]
    assert sorted(map(int, golds)) == sorted(int(row["Answer"]) for row in rows)
    assert verify_all(task, prompts, [rf"So it is \boxed{{{gold}}}." for gold in golds]) == [1.0] * 25
    assert verify_all(task, prompts, [rf"\boxed{{{int(gold) + 1}}}" for gold in golds]) == [0.0] * 25


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from(["", " ", "  \n"]))
def test_other_numbers_case_and_blanks_are_the_same_words(a: int, b: int, blank: str) -> None:
    one, other = f"Tom has {a} cats,{blank} and 1,000 dogs.", f"TOM HAS {b} CATS and 2.5 dogs"
    assert words(one, numbers=False) == words(other, numbers=False) == "tom has # cats and # dogs"
    assert (words(one, numbers=True) == words(one.replace(str(a), str(b)), numbers=True)) == (a == b)


def test_what_cannot_be_read_is_told(tmp_path: Path, unchecked_shapes: None) -> None:
    with pytest.raises(ValueError, match=r"words: .*nowhere should be a folder with asdiv, mawps and svamp, or a file"):
        WordProblems(path=str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"should hold one file svamp.jsonl"):
        WordProblems(path=str(tmp_path))
    with pytest.raises(ValueError, match=r"words: SVAMP is held out, and `held_out` is for a single file as `path`; got 0.5"):
        WordProblems(path=str(OURS), held_out=0.5)
    with pytest.raises(ValueError, match=r"`part` is one of all, sft, rl; got 'half'"):
        WordProblems(path=str(OURS), part="half")


def test_a_single_file_is_split_by_share() -> None:
    assert WordProblems(path=str(SVAMP), held_out=0.2).sizes == (20, 5)
