"""The page: rebuilt from committed runs, safe from what runs say, small, and whole on bad days."""

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report.synthetic import write_run, write_small_set

from corral.lab.report.content import RunReport, make_report
from corral.lab.report.figures import BUDGET, METRICS, curve, points, stride
from corral.lab.report.html import LARGEST, cell, note, page_json, shorten, table, visible
from corral.lab.report.outcomes import group_runs
from corral.lab.report.page import page, write_page
from corral.lab.report.read import read_run, read_runs
from corral.validate import RunError

HERE = Path(__file__).parent
GOLDEN = HERE / "golden.json"

HOSTILE = [
    "<script>window.owned = 1</script>",
    "</script><script>window.owned = 1</script>",
    "<!--<script>",
    "<img src=x onerror='window.owned=1'>",
    '"><svg onload=window.owned=1>',
    "' onmouseover='window.owned=1",
    "javascript:window.owned=1",
    "]]><![CDATA[",
    "&lt;script&gt;",
    "{{ 7 * 7 }} ${7*7} `x`",
    "abc\u202egnp.exe\u202c \u2066hidden\u2069 \u200f",
    "null\x00byte \x1b[31mred\x07",
    "\u2028\u2029 line ends",
    "日本語 العربية עברית 👩‍🔬 \ud83d",
]


class Structure(HTMLParser):
    """Elements of a page, with their attributes, and the texts of its scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.open = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.open = tag

    def handle_data(self, data: str) -> None:
        if self.open == "script":
            self.scripts.append(data)

    def handle_endtag(self, tag: str) -> None:
        self.open = ""


def data_of(text: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    content: dict[str, Any] = json.loads(found.group(1))
    return content


def rounded(value: Any) -> Any:
    """As JSON, with six digits: the last ones are the libraries' own."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def contents(report: RunReport) -> dict[str, Any]:
    """All that the golden report must say, without where its runs lie."""
    for row in report.tables["runs"]:
        row["run"] = Path(row["run"]).name
    return {"title": report.title, "threshold": rounded(report.threshold), "tables": rounded(dict(report.tables))}


def test_the_first_column_of_a_table_stands_under_its_heading() -> None:
    shown = table([{"age": 0, "n": 5}, {"age": 1, "n": 7}], {"Age": cell("age"), "Tokens": cell("n")}, "Ages")
    assert '<th scope="col">Age</th><th scope="col" class="number">Tokens</th>' in shown
    assert '<th scope="row">0</th><td class="number">5</td>' in shown


def test_golden_report() -> None:
    """`python tests/lab/report/test_page.py` writes golden.json anew; look at what changed."""
    assert contents(make_report(read_runs([HERE / "data"]))) == json.loads(GOLDEN.read_text())


def test_the_committed_runs_are_those_of_the_formula(tmp_path: Path) -> None:
    write_small_set(tmp_path / "data")
    for path in sorted((HERE / "data").rglob("*.json*")):
        assert path.read_text() == (tmp_path / "data" / path.relative_to(HERE / "data")).read_text(), path


@pytest.fixture(scope="module")
def small() -> str:
    return page(make_report(read_runs([HERE / "data"])))


def test_the_page_asks_the_network_for_nothing_and_runs_its_own_script_alone(small: str) -> None:
    structure = Structure(small)
    policy = next(found["content"] for name, found in structure.tags if found.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    for name, found in structure.tags:
        assert name not in ("iframe", "object", "embed", "link", "img", "base")
        assert not any(key.startswith("on") or key in ("src", "style", "action") for key in found)
        assert (found.get("href") or "#").startswith("#")
    assert len(structure.scripts) == 2
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", small)


def test_the_page_has_every_part(small: str) -> None:
    ids = {found.get("id") for _, found in Structure(small).tags}
    parts = {"findings", "curves", "region", "tokens", "completions", "events", "runs", "configuration", "reproduce"}
    assert parts | {"filters", "finals", "learning", "trust", "heat", "histograms", "completion-list"} <= ids
    assert "troll beats dppo on final success: +13.6 points" in small
    assert "corral train --objective dppo --seed 0" in small


def test_a_single_run_shows_greedy_success_from_start_to_end(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for greedy, shown in (({0: 0.87, 4: 0.9, 8: 0.62}, "87.0 % → 62.0 %"), ({4: 0.9}, "90.0 %"), ({}, None)):
        (run / "metrics.jsonl").write_text(
            "".join(json.dumps({**line, "greedy": greedy.get(line["step"])}) + "\n" for line in lines)
        )
        tiles = dict(re.findall(r"<div><dt>(.*?)</dt><dd>(.*?)</dd></div>", page(make_report([read_run(run)]))))
        assert tiles.get("greedy success") == shown
        assert "final success" in tiles


def test_every_control_has_a_label(small: str) -> None:
    """An input outside a label, or a field set without a legend, is silent to those who listen."""
    assert len(re.findall(r"<input|<select", small)) == len(re.findall(r"<label[^>]*>(?:[^<]*)<(?:input|select)", small))
    assert small.count("<fieldset") == small.count("<legend>")


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(tmp_path: Path, text: str) -> None:
    rows = [{"step": 1, "prompt": text, "completion": text.encode(errors="replace").decode(), "reward": 1.0, "advantage": 0.5}]
    rows = [
        {key: value.encode(errors="replace").decode() if isinstance(value, str) else value for key, value in row.items()}
        for row in rows
    ]
    first = write_run(tmp_path / "a", text, 0, completions=rows, task=text, learning_rate=text)
    write_run(tmp_path / "b", "troll", 1, completions=rows, task=text)
    summary = json.loads((first / "summary.json").read_text())
    (first / "summary.json").write_text(json.dumps({**summary, "stopped": "failed", "why": text, "model": text, "seed": text}))
    with (first / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 9, "success": text, "warnings": [text], text: 1.0}) + "\n")
    report = make_report(read_runs([tmp_path]), title=text)
    found = page(report)
    found.encode()  # no lone surrogate is left
    structure = Structure(found)
    allowed = {
        "html",
        "head",
        "meta",
        "title",
        "style",
        "body",
        "script",
        "noscript",
        "header",
        "main",
        "footer",
        "nav",
        "section",
    }
    allowed |= {
        "a",
        "div",
        "p",
        "h1",
        "h2",
        "h3",
        "ul",
        "ol",
        "li",
        "span",
        "details",
        "summary",
        "pre",
        "form",
        "fieldset",
        "legend",
    }
    allowed |= {"figure", "figcaption", "svg", "g", "path", "line", "text", "dl", "dt", "dd"}
    allowed |= {"label", "input", "select", "option", "table", "thead", "tbody", "tr", "th", "td"}
    assert {name for name, _ in structure.tags} <= allowed
    assert not any(key.startswith("on") for _, attributes in structure.tags for key in attributes)
    assert len(structure.scripts) == 2
    assert not re.search(r"[\u202a-\u202e\u2066-\u2069\x00\x07\x1b]", found)
    assert any(row["completion"] == visible(rows[0]["completion"]) for row in data_of(found)["completions"])


def test_hidden_characters_are_written_out() -> None:
    assert visible("a\u202eb\x00c\r\nd\te\ud800") == "a⟨U+202E⟩b⟨U+0000⟩c\nd\te⟨U+D800⟩"
    assert visible("👩\u200d🔬 ok") == "👩\u200d🔬 ok"


def test_html_is_escaped_everywhere() -> None:
    assert note("<b>&", good=True) == '<p class="note good">&lt;b&gt;&amp;</p>'
    assert page_json("</script>&") == '"\\u003c/script\\u003e\\u0026"'
    assert shorten("abcdef", 4) == "abcd … (2 more characters)"
    rows = [{"a": "x", "b": "1 of 2", "c": "1"}, {"a": "y", "b": "3.0 %", "c": "z"}]
    cells = table(rows, {name: cell(name) for name in "abc"}, '"label"')
    assert 'aria-label="&#34;label&#34;"' in cells or 'aria-label="&quot;label&quot;"' in cells
    assert '<td class="number">1 of 2</td><td>1</td>' in cells


def test_a_megabyte_of_completion_is_cut(tmp_path: Path) -> None:
    rows = [
        {"step": step, "prompt": "x" * 10**6, "completion": "é" * 10**6, "reward": 0.0, "advantage": 0.0}
        for step in range(1, 20)
    ]
    for seed in range(3):
        write_run(tmp_path / str(seed), "troll", seed, completions=rows)
    size = write_page(make_report(read_runs([tmp_path])), tmp_path / "page.html")
    assert size < LARGEST
    row = data_of((tmp_path / "page.html").read_text())["completions"][0]
    assert row["completion"].endswith("more characters)")


def test_a_page_is_measured_in_bytes_and_one_huge_setting_does_not_block_it(tmp_path: Path) -> None:
    """Emoji are four bytes, `<` is six in a page's JSON, a control character is written out as eight letters."""
    text = ("😀" * 30 + "<" * 30 + "\x01" * 30) * 50
    rows = [{"step": step, "prompt": text, "completion": text, "reward": 0.0, "advantage": 0.0} for step in range(64)]
    tokens = {"token": [text[:60]] * 600, "action": [""] * 600, "kl_before": [0.1] * 600, "log_ratio": [0.1] * 600}
    for seed in range(6):
        path = write_run(tmp_path / str(seed), "troll", seed, completions=rows, instruction="é" * 1_000_000 + str(seed // 3))
        pq.write_table(pa.Table.from_pylist([{"step": 1, **tokens}] * 8), path / "tokens.parquet")
        warnings = [f"warning {index} " + "!" * 2000 for index in range(1500)]
        (path / "metrics.jsonl").write_text(json.dumps({"step": 1, "success": 0.1, "warnings": warnings}) + "\n")
    report = make_report(read_runs([tmp_path]))
    assert len(report.groups) == 2
    assert write_page(report, tmp_path / "page.html") < LARGEST
    found = (tmp_path / "page.html").read_text()
    assert "rows more" in found
    assert {row["run"] for row in data_of(found)["completions"]} == set(range(6))


def test_thousands_of_steps_stay_small(tmp_path: Path) -> None:
    for seed in range(4):
        write_run(tmp_path / str(seed), "troll", seed, steps=6000, every=100)
    report = make_report(read_runs([tmp_path]))
    assert report.every > 1
    assert write_page(report, tmp_path / "page.html") < LARGEST
    columns = data_of((tmp_path / "page.html").read_text())["runs"][0]["columns"]
    assert (columns["step"][0], columns["step"][-1]) == (0, 6000)
    assert len(columns["step"]) * 4 * len(report.metrics) <= BUDGET * 1.1
    assert columns["success"][0] is not None


def test_points_are_means_and_largest_values_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "run"
    path.mkdir()
    rows = [{"step": step, "entropy": float(step), "tr/kl_max": float(step) if step != 3 else "inf"} for step in range(6)]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    metrics = [metric for metric in METRICS if metric.key in ("entropy", "tr/kl_max")]
    columns = points(read_run(path), metrics, 2)
    # Step 0 alone, then (1, 2), (3, 4), (5).
    assert columns["step"] == [0, 2, 4, 5]
    assert columns["entropy"] == [0.0, 1.5, 3.5, 5.0]
    assert columns["tr/kl_max"] == [0.0, 2.0, "inf", 5.0]
    assert stride([read_run(path)], metrics) == 1


def test_golden_curve(tmp_path: Path) -> None:
    for seed, values in enumerate([[0.1, 0.2], [0.3, 0.4], [0.5, None]]):
        path = tmp_path / str(seed)
        path.mkdir()
        lines = [{"step": step, "update": 8 * step, "success": value, "seed": seed} for step, value in enumerate(values)]
        (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        (path / "summary.json").write_text(json.dumps({"objective": "troll", "task": "x", "seed": seed}))
    (group,) = group_runs(read_runs([tmp_path]))
    success = METRICS[0]
    found = curve(group, success, interval=False, axis="update")
    assert found is not None
    assert found["step"].tolist() == [0, 1]
    assert found["value"].tolist() == pytest.approx([0.3, 0.3])
    columns = found[["low", "high", "update", "seeds"]].to_dict("list")
    assert columns == {"low": [0.1, 0.2], "high": [0.5, 0.4], "update": [0.0, 8.0], "seeds": [3, 2]}
    assert curve(group, METRICS[3]) is None


@pytest.mark.parametrize("damage", ["one seed", "empty", "no metrics", "nan", "in progress", "nothing but a config"])
def test_the_page_stands_on_bad_days(tmp_path: Path, damage: str) -> None:
    path = write_run(tmp_path / "run", stopped=None if damage == "in progress" else "finished")
    if damage == "empty":
        (path / "metrics.jsonl").write_text("")
    if damage == "no metrics":
        (path / "metrics.jsonl").unlink()
    if damage == "nan":
        (path / "metrics.jsonl").write_text(
            '{"step": 0, "success": NaN, "entropy": NaN}\n{"step": 1, "success": "nan", "entropy": "inf"}\n'
        )
    if damage == "nothing but a config":
        for name in ("metrics.jsonl", "summary.json", "completions.parquet"):
            (path / name).unlink()
        (path / "config.json").write_text("{}")
    found = page(make_report(read_runs([tmp_path])))
    assert "One run of" in found
    notes = {
        "no metrics": "metrics.jsonl is missing",
        "nan": "not finite at some steps: entropy, success",
        "in progress": "not ended after 4 of 8",
    }
    assert notes.get(damage, "Findings") in found


def test_many_tokens_fit_on_a_page(tmp_path: Path) -> None:
    """Six runs of 64 completions of 2000 tokens: every run keeps some of the first step and of the last."""
    row = {
        "token": ["word "] * 2000,
        "action": ["clipped"] * 2000,
        "kl_before": [0.0123456] * 2000,
        "log_ratio": [-0.12345] * 2000,
    }
    rows = [{"step": step, **row} for step in range(1, 9) for _ in range(8)]
    for seed in range(6):
        path = write_run(tmp_path / str(seed), "ppo_clip", seed)
        pq.write_table(pa.Table.from_pylist(rows), path / "tokens.parquet")
    found = page(make_report(read_runs([tmp_path])))
    assert len(found) < LARGEST / 2
    tokens = data_of(found)["tokens"]
    assert {entry["run"] for entry in tokens} == set(range(6))
    assert sum(len(entry["token"]) for entry in tokens) <= 25_000
    assert max(len(entry["token"]) for entry in tokens) == 600


def test_errors_are_sentences(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    report = make_report(read_runs([tmp_path]))
    with pytest.raises(RunError, match=r"to write page\.html into: make it first"):
        write_page(report, tmp_path / "nowhere" / "page.html")
    with pytest.raises(RunError, match="at least one run"):
        make_report([])


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(contents(make_report(read_runs([HERE / "data"]))), indent=1, ensure_ascii=False) + "\n")
