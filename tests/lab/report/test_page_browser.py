"""The page in a real browser: figures are drawn, filters and keys work, nothing is fetched, nothing hostile runs."""

import json
import re
import shutil
from math import inf, nan
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report.conftest import CONTRAST
from report.synthetic import write_comparison, write_robot_run, write_run, write_small_set

from corral.lab.report.content import make_report
from corral.lab.report.figures import METRICS, curve
from corral.lab.report.page import write_page
from corral.lab.report.read import read_comparisons, read_runs

pytestmark = pytest.mark.browser

HOSTILE = "</script><script>window.owned = 1</script><img src=x onerror=window.owned=1>\"'\u202egnp"


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the committed runs' formula."""
    folder = tmp_path_factory.mktemp("small")
    write_page(make_report(read_runs([write_small_set(folder / "runs")])), folder / "page.html")
    return folder / "page.html"


def test_figures_are_drawn(open_page: Any, small: Path) -> None:
    page = open_page(small)
    names = page.eval_on_selector_all("figure h3", "nodes => nodes.map(node => node.textContent)")
    for name in (
        "Who is better, and by how much",
        "Final success",
        "Success",
        "Mean KL",
        "Mean KL after projection",
        "Entropy",
    ):
        assert name in names
    assert page.locator("#learning path.curve").count() == 3
    assert page.locator("#learning path.area").count() == 3
    assert page.locator("#finals circle.dot").count() == 9
    assert page.locator('figure[data-metric="tr/kl_after"] path.curve').count() == 1
    assert page.locator('figure[data-metric="tr/kl_max"] text.mark').count() == 2  # dppo is infinite at steps 3 and 6
    assert page.locator("#histograms figure").count() == 3
    assert page.locator("#histograms rect.bar").count() > 4
    assert page.locator("#histograms rect.bar.after").count() > 1  # troll's alone
    assert page.locator("#histograms line.bound").count() == 1
    assert page.locator("#heat .token.masked").count() == 3


def test_the_curves_are_pythons(open_page: Any, small: Path) -> None:
    page = open_page(small)
    report = make_report(read_runs([small.parent / "runs"]))
    drawn = page.evaluate("document.querySelector('#learning figure').series")
    success = next(metric for metric in METRICS if metric.key == "success")
    for group, series in zip(report.groups, drawn, strict=True):
        expected = curve(group, success)
        assert expected is not None
        for key, column in {"y": "value", "low": "low", "high": "high", "x": "step"}.items():
            assert [point[key] for point in series["points"]] == pytest.approx(list(expected[column]), rel=1e-4)


def test_filters(open_page: Any, small: Path) -> None:
    page = open_page(small)
    page.uncheck("input[name=group][value='0']")
    assert page.locator("#learning path.curve").count() == 2
    assert page.locator("#finals circle.dot").count() == 6
    page.select_option("select[name=band]", "seeds")
    assert page.locator("#learning path.curve").count() == 6
    page.uncheck("input[name=seed][value='1']")
    assert page.locator("#learning path.curve").count() == 4
    assert page.locator("#learning-more h3").all_inner_texts() == ["Greedy success", "Training reward"]
    assert page.locator("#learning-more figure").first.locator("path.curve").count() == 4
    page.select_option("select[name=axis]", "tokens")
    assert "tokens" in page.text_content("#learning svg")
    for box in page.locator("input[name=seed]").all():
        box.uncheck()
    assert "Nothing to draw" in page.inner_text("#learning")


def test_a_band_of_some_seeds_says_that_it_is_their_range(open_page: Any, small: Path) -> None:
    page = open_page(small)
    page.uncheck("input[name=seed][value='0']")
    assert "range of the chosen seeds" in page.inner_text("#learning figcaption")


def test_hover_and_keys_read_values(open_page: Any, small: Path) -> None:
    page = open_page(small)
    figure = page.locator("#learning figure")
    figure.locator(".body svg").hover()
    tip = figure.locator(".tip")
    assert tip.is_visible()
    assert "troll" in tip.inner_text()
    page.mouse.move(2, 2)
    assert tip.is_hidden()
    figure.locator(".body svg").focus()
    page.keyboard.press("Home")
    assert tip.inner_text().startswith("0 steps")
    page.keyboard.press("ArrowRight")
    assert tip.inner_text().startswith("2 steps")
    page.keyboard.press("End")
    assert "8 steps" in tip.inner_text()
    assert re.search(r"\d\d\.\d %", tip.inner_text())
    page.keyboard.press("Escape")
    assert tip.is_hidden()


def test_every_control_is_reached_by_the_keyboard(open_page: Any, small: Path) -> None:
    page = open_page(small)
    seen = set()
    for _ in range(60):
        page.keyboard.press("Tab")
        seen.add(page.evaluate("document.activeElement.name || document.activeElement.tagName"))
    assert {"theme", "group", "seed", "axis", "band", "smooth", "svg"} <= seen
    page.locator("input[name=group]").first.focus()
    page.keyboard.press("Space")
    assert page.locator("#learning path.curve").count() == 2


def test_values_and_csv(open_page: Any, small: Path) -> None:
    page = open_page(small)
    figure = page.locator("#learning figure")
    figure.get_by_role("button", name="Values").click()
    assert figure.locator("tbody tr").count() == 15
    with page.expect_download() as download:
        figure.get_by_role("button", name="CSV").click()
    text = Path(download.value.path()).read_text()
    assert text.startswith("objective,step,at,value,low,high\ndppo,0,0,")
    assert len(text.splitlines()) == 16


def test_every_figure_is_saved_as_a_picture(open_page: Any, small: Path) -> None:
    """SVG with its own looks, on light paper whatever the theme, and PNG three times as large."""
    page = open_page(small, color_scheme="dark")
    for place, title in (("#learning", "Success"), ("#finals", "Final success"), ("#histograms", "KL per token: dppo")):
        figure = page.locator(f"{place} figure").first
        with page.expect_download() as download:
            figure.get_by_role("button", name="SVG").click()
        text = Path(download.value.path()).read_text()
        root = ElementTree.fromstring(text)
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        assert title in "".join(root.itertext())
        assert ("troll beats dppo on final success" in "".join(root.itertext())) == (place != "#histograms")
        assert "countdown with tiny · seeds 0, 1, 2, 3 · corral" in "".join(root.itertext()), "it stands alone"
        assert "class=" not in text
        assert "var(" not in text
        assert 'fill="rgb(255, 255, 255)"' in text
        with page.expect_download() as download:
            figure.get_by_role("button", name="PNG").click()
        content = Path(download.value.path()).read_bytes()
        assert content.startswith(b"\x89PNG")
        width, height = (int.from_bytes(content[start : start + 4], "big") for start in (16, 20))
        assert (width, height) == (3 * round(float(root.get("width", 0))), 3 * round(float(root.get("height", 0))))
    assert page.evaluate("document.documentElement.dataset.theme") is None


def test_every_figure_and_table_has_its_buttons(open_page: Any, small: Path) -> None:
    page = open_page(small)
    figures, regions = page.locator("figure"), page.locator(".scroll[aria-label]:not(.values)")
    for name in ("Values", "CSV", "SVG", "PNG"):
        assert page.locator(f"figure button[aria-label^='{name} of']").count() == figures.count()
    assert page.locator(".scroll + .buttons button").count() == regions.count() > 4


def test_tables_are_saved_with_their_numbers(open_page: Any, small: Path) -> None:
    page = open_page(small)
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV of Results").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0].startswith("objective,setting,problem,runs,counted,final,final_low,final_high")
    assert lines[1].startswith("dppo,,countdown with tiny,4,3,0.5015,0.4856,0.5324")
    with page.expect_download() as download:
        page.get_by_role("button", name="CSV of Versions").click()
    assert Path(download.value.path()).read_text().startswith("Package,Version\n")


def test_tokens_are_read_by_pointer_and_keys(open_page: Any, small: Path) -> None:
    page = open_page(small)
    status = page.locator("#heat-status")
    page.locator("#heat .token").nth(1).hover()
    assert status.inner_text().startswith("Token 2 of 12, “9”: masked; KL 0.")
    page.locator("#heat").focus()
    page.keyboard.press("End")
    assert status.inner_text().startswith("Token 12 of 12, “5”: kept")
    page.keyboard.press("ArrowLeft")
    assert "Token 11" in status.inner_text()
    page.locator("#token-filters select[name=run]").select_option(label="troll, seed 0")
    assert page.locator("#heat .token.projected").count() == 3
    page.locator("#heat .token").nth(1).click()
    assert re.search(r"projected; KL 0\.\d+ nats, 0\.05 after", status.inner_text())
    assert page.inner_text("#heat-about") == "reward 1 · advantage 0.9 · bound 0.05"


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compared")
    runs = read_runs([write_comparison(folder / "runs")])
    comparisons, notes = read_comparisons([folder / "runs"], runs)
    write_page(make_report(runs, comparisons, notes=notes), folder / "page.html")
    return folder / "page.html"


def test_the_sweep_is_drawn(open_page: Any, compared: Path) -> None:
    page = open_page(compared)
    curves, grid = page.locator(".sweep-figures figure").all()
    assert curves.locator("path.curve").count() == 4
    assert grid.locator("rect.heat-cell").count() == 16
    assert grid.locator("rect.heat-ring").count() == 2  # 1 + 0 + 1 + 0 usable
    assert sum("★" in text for text in grid.locator("text").all_text_contents()) == 2
    assert curves.locator("h3").inner_text() == "Final success over learning_rate"
    for measure in ("area", "greedy", "collapsed", "kl"):
        page.select_option(".sweep-filters select", measure)
        assert page.locator(".sweep-figures path.curve").count() == 4
    assert page.locator(".sweep-figures h3").first.inner_text() == "Mean KL over learning_rate"
    page.select_option(".sweep-filters select", "collapsed")
    with page.expect_download() as download:
        page.locator(".sweep-figures figure").first.get_by_role("button", name="CSV").click()
    lines = Path(download.value.path()).read_text().splitlines()
    assert lines[0] == "objective,learning_rate,collapsed,low,high,seeds,usable,usable_of_all,chosen"
    assert len(lines) == 17
    with page.expect_download() as download:
        page.locator(".sweep-figures figure").nth(1).get_by_role("button", name="SVG").click()
    assert "learning_rate" in Path(download.value.path()).read_text()


def test_auto_stands_beside_the_axis(open_page: Any, tmp_path: Path) -> None:
    for rate in (1e-4, 1e-3, "auto"):
        for seed in range(2):
            write_run(tmp_path / f"{rate}{seed}", "troll", seed, learning_rate=rate)
    write_page(make_report(read_runs([tmp_path]), []), tmp_path / "page.html")
    curves, grid = open_page(tmp_path / "page.html").locator(".sweep-figures figure").all()
    places = [
        float(re.findall(r"[\d.]+", dot.get_attribute("transform"))[0])
        for dot in curves.locator("svg path.dot[data-said]").all()
    ]
    assert places == sorted(places)
    assert len(places) == 3
    drawn = curves.locator("path.curve").all()
    assert [path.get_attribute("d").count("L") for path in drawn] == [1, 0]  # from number to number; auto's range
    assert grid.locator("rect.heat-cell").count() == 3


def test_a_sweep_fits_a_phone(open_page: Any, compared: Path) -> None:
    page = open_page(compared, viewport={"width": 360, "height": 740}, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator(".sweep-figures rect.heat-cell").count() == 16


def test_robots_are_drawn_over_environment_steps(open_page: Any, tmp_path: Path) -> None:
    for task in ("corral/ViaPointReacher-v0", "corral/BoxPushing-v0"):
        for algorithm in ("tce", "sb3-ppo"):
            write_robot_run(tmp_path / "runs" / f"{task[7:]}{algorithm}", algorithm, task=task)
    write_page(make_report(read_runs([tmp_path / "runs"])), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert "environment steps" in page.text_content("#learning svg")
    assert page.locator("#learning path.curve").count() == 2
    assert page.locator("#learning-more h3").all_inner_texts() == ["Return", "Training reward"]
    assert page.locator("#motion-figures path.curve").count() == 6
    page.select_option("select[name=problem]", "1")
    assert page.locator("#learning path.curve").count() == 2


def test_completions_are_browsed(open_page: Any, small: Path) -> None:
    page = open_page(small)
    form = page.locator("#completion-filters")
    assert page.locator("#completion-list li").count() == 2
    form.locator("select[name=sign]").select_option("high")
    assert page.locator("#completion-list li").count() == 1
    form.locator("input[name=text]").fill("no such text")
    assert page.inner_text("#completion-count") == "0 of those kept of this step"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_themes(open_page: Any, small: Path, scheme: str) -> None:
    page = open_page(small, color_scheme=scheme)
    paper = "getComputedStyle(document.body).backgroundColor"
    first = page.evaluate(paper)
    page.check(f"input[name=theme][value={'light' if scheme == 'dark' else 'dark'}]")
    assert page.evaluate(paper) != first


def test_a_phone_scrolls_one_way(open_page: Any, small: Path) -> None:
    page = open_page(small, viewport={"width": 360, "height": 740}, is_mobile=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert page.locator("#learning path.curve").count() == 3


def test_hostile_text_does_not_run(open_page: Any, tmp_path: Path) -> None:
    rows = [{"step": 1, "prompt": HOSTILE, "completion": HOSTILE * 20, "reward": 1.0, "advantage": 1.0}]
    for seed in range(2):
        write_run(tmp_path / "runs" / str(seed), HOSTILE, seed, completions=rows, task=HOSTILE, learning_rate=HOSTILE)
    write_page(make_report(read_runs([tmp_path / "runs"]), title=HOSTILE), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    page.locator("#learning figure svg").hover()
    page.locator("#learning figure").get_by_role("button", name="Values").click()
    assert page.evaluate("window.owned") is None
    assert page.locator("img").count() == 0
    assert "<script>window.owned = 1</script>" in page.inner_text("#completion-list")
    assert "⟨U+202E⟩" in page.inner_text("#completion-list")


def test_hostile_comparisons_and_tokens_do_not_run(open_page: Any, tmp_path: Path) -> None:
    """Names of contestants and settings, errors and commands from compare.json; token by token from tokens.parquet."""
    runs = []
    for place, rate in enumerate((1e-4, 1e-3)):
        path = write_run(tmp_path / "runs" / str(place), "troll", 0)
        row = {
            "step": 1,
            "token": [HOSTILE] * 2,
            "action": [HOSTILE, "projected"],
            "kl_before": [0.1, 0.2],
            "log_ratio": [0.1, 0.2],
        }
        pq.write_table(pa.Table.from_pylist([row]), path / "tokens.parquet")
        run = {"folder": str(place), "contestant": HOSTILE, "setting": {HOSTILE: rate}, "seed": place, "state": "finished"}
        runs.append({**run, "stage": "report" if place else "sweep", "error": None})
    runs.append({**runs[0], "folder": HOSTILE, "seed": 7, "state": "failed", "error": HOSTILE})
    runs.append({**runs[0], "folder": "0", "setting": {HOSTILE: 1e-3}, "seed": 8})
    content = {"version": 1, "command": f"corral compare '{HOSTILE}'", "sweep": {HOSTILE: [1e-4, 1e-3]}, "runs": runs}
    content |= {"choose_seeds": [0], "report_seeds": [1], "chosen": {HOSTILE: {HOSTILE: 1e-3}}}
    (tmp_path / "runs/compare.json").write_text(json.dumps(content))
    found = read_runs([tmp_path / "runs"])
    comparisons, notes = read_comparisons([tmp_path / "runs"], found)
    write_page(make_report(found, comparisons, notes=notes), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    page.locator("#heat .token").first.hover()
    assert "window.owned" in page.inner_text("#heat-status")
    assert page.locator("#heat .token").first.get_attribute("class") == "token current"
    assert page.locator(".sweep-figures rect.heat-cell").count() == 2
    for name in ("Values", "SVG"):
        page.locator(".sweep-figures figure").first.get_by_role("button", name=name).click()
    assert page.evaluate("window.owned") is None
    assert page.locator("img").count() == 0


@pytest.mark.parametrize("day", ["nothing but a config", "not finite", "one point", "no projection", "odd tokens"])
def test_bad_days(open_page: Any, tmp_path: Path, day: str) -> None:
    path = write_run(tmp_path / "runs/a", "ppo_clip")
    if day == "nothing but a config":
        shutil.rmtree(path)
        path.mkdir()
        (path / "config.json").write_text("{}")
    if day == "not finite":
        (path / "metrics.jsonl").write_text('{"step": 0, "success": "inf", "entropy": "nan", "tr/kl_before": 0.0}\n')
    if day == "one point":
        (path / "metrics.jsonl").write_text('{"step": 0, "success": 0.5, "entropy": 1.0}\n')
    if day == "odd tokens":
        odd: dict[str, Any] = {"step": 1, "token": [], "action": [], "kl_before": []}
        rows = [odd, {"step": None, "token": ["a", "b", None], "action": [None, "x", ""], "kl_before": [None, inf, nan]}]
        pq.write_table(pa.Table.from_pylist(rows), path / "tokens.parquet")
    write_page(make_report(read_runs([tmp_path / "runs"])), tmp_path / "page.html")
    page = open_page(tmp_path / "page.html")
    assert page.locator("h2").count() == 8, "of a single run there is no table of runs"
    if day == "odd tokens":
        page.locator("#heat").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator("#histograms figure").count() == 1


def test_a_large_page_opens_at_once(open_page: Any, tmp_path: Path) -> None:
    for objective in ("troll", "dppo", "ppo_clip"):
        for seed in range(4):
            write_run(tmp_path / "runs" / f"{objective}{seed}", objective, seed, steps=2000, every=50)
    write_page(make_report(read_runs([tmp_path / "runs"])), tmp_path / "page.html")
    times = []
    for _ in range(3):  # a busy machine may be slow once
        page = open_page(tmp_path / "page.html")
        times.append(page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd"))
        if times[-1] < 2000:
            break
    assert min(times) < 2000


def widest(page: Any) -> int:
    return int(page.evaluate("document.documentElement.scrollWidth"))


def test_every_figure_is_read_by_pointer_keys_and_taps(open_page: Any, small: Path, compared: Path) -> None:
    """The tip stands beside what it is about; arrow keys read marks and curves; a tap on a phone shows what a mouse does."""
    page = open_page(small)
    svg, tip = page.locator("#learning .body svg"), page.locator("#learning .tip")
    svg.hover()
    over, box = svg.bounding_box(), tip.bounding_box()
    assert over["y"] <= box["y"] <= over["y"] + over["height"]
    for place, first in (
        ("#forest", "troll beats dppo"),
        ("#finals", "troll, seed 0"),
        ("#histograms", "tokens, KL"),
        ("#tails", "|log ratio|"),
    ):
        figure = page.locator(f"{place} figure").first
        figure.locator(".body svg[role=img]:visible").first.focus()
        page.keyboard.press("ArrowRight")
        assert first in figure.locator(".tip").inner_text()
    phone = open_page(small, viewport={"width": 360, "height": 740}, is_mobile=True, has_touch=True)
    for place, said in (("#learning", "steps"), ("#forest", "troll")):
        svg = phone.locator(f"{place} .body svg[role=img]:visible").first
        svg.scroll_into_view_if_needed()
        box = svg.bounding_box()
        mark = svg.locator(".pair").first.bounding_box() if place == "#forest" else box
        phone.touchscreen.tap(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
        assert said in phone.locator(f"{place} .tip:visible").inner_text()
    phone.touchscreen.tap(5, 5)
    assert phone.locator(".tip:visible").count() == 0
    sweep = open_page(compared).locator(".sweep-figures figure")
    for figure in sweep.all():
        figure.locator(".body > svg").focus()
        sweep.page.keyboard.press("End")
        assert "learning_rate 3e-3" in figure.locator(".tip").inner_text()


def test_long_names_and_many_groups_fit(open_page: Any, tmp_path: Path) -> None:
    """Twenty groups with ordinary long names: a phone scrolls one way, and what sticks to the top covers no heading."""
    long = {
        "another_setting": "some/path/that/is/long/and/has/no/spaces/in/it",
        "task": "organisation/a-data-set-with-a-long-name",
    }
    for place in range(20):
        config = {"a_setting_with_an_ordinary_but_long_name": place}
        write_run(tmp_path / "runs" / str(place), "troll", 0, steps=2, objective_config=config, tokens=place < 2, **long)
    write_page(make_report(read_runs([tmp_path / "runs"])), tmp_path / "page.html")
    phone = open_page(tmp_path / "page.html", viewport={"width": 360, "height": 740}, is_mobile=True)
    assert widest(phone) <= 360
    page = open_page(tmp_path / "page.html", reduced_motion="reduce")
    assert page.locator("#filters").bounding_box()["height"] < 170
    page.locator("nav a[href='#region']").click()
    bar, heading = page.locator("#filters").bounding_box(), page.locator("#region h2").bounding_box()
    assert heading["y"] >= bar["y"] + bar["height"]


def test_paper_and_pages_without_scripts(open_page: Any, open_file: Any, small: Path, tmp_path: Path) -> None:
    """Printed, a page is light, keeps its colours and loses no column; without scripts it has findings, and no empty boxes."""
    page = open_page(small, color_scheme="dark", viewport={"width": 700, "height": 900})
    page.emulate_media(media="print")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.evaluate("getComputedStyle(document.querySelector('#heat .token')).printColorAdjust") == "exact"
    cut = "node => node.clientWidth && node.scrollWidth > node.clientWidth + 1"
    assert page.evaluate(f"[...document.querySelectorAll('.scroll')].filter({cut}).length") == 0
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("details[open]").count() == 0
    plain = open_file(small, java_script_enabled=False)
    assert plain.locator("#findings .sentences li:visible").count() == 3
    assert plain.locator("figure").count() == 0
    assert plain.locator("form:visible, #heat:visible, select:visible, #curves:visible, #choose-theme:visible").count() == 0
    assert "Scripts are switched off" in plain.locator("noscript").inner_text()


def test_long_lines_steps_and_bounds(open_page: Any, tmp_path: Path) -> None:
    """Smoothed with the raw line behind, ticks at whole steps, the bound of the KL, and where a table of values ends."""
    for seed in range(2):
        write_run(tmp_path / "runs" / str(seed), "troll", seed, steps=1200, every=100, trainer_note="x")
    few = write_run(tmp_path / "few/a", "troll", 0, steps=3, every=1)
    write_page(make_report(read_runs([tmp_path / "runs"])), tmp_path / "page.html")
    write_page(make_report(read_runs([few])), tmp_path / "few.html")
    page = open_page(tmp_path / "page.html")
    kl = page.locator('figure[data-metric="tr/kl_before"]')
    assert kl.locator("path.curve.raw").count() == 1
    assert kl.locator("line.bound").count() == 1
    assert "bound 0.05" in kl.locator(".body svg").text_content()
    page.select_option("select[name=smooth]", "no")
    assert kl.locator("path.curve.raw").count() == 0
    page.select_option("select[name=band]", "seeds")
    kl.get_by_role("button", name="Values").click()
    assert "400 rows more" in kl.inner_text()
    alone = open_page(tmp_path / "few.html")
    alone.select_option("select[name=axis]", "step")
    texts = alone.locator("#learning .body svg text").all_text_contents()
    assert [text for text in texts if re.fullmatch(r"[\d.]+", text)] == ["0", "1", "2", "3"]
    assert "final success" in alone.inner_text("#findings")
    assert alone.locator("input[name=group]:visible, #finals, #runs").count() == 0


def test_completions_open_on_a_right_beside_a_wrong_one(open_page: Any, tmp_path: Path) -> None:
    rows = [
        ("a", "dull", 0.5, 9),
        ("a", "dull too", 0.5, 9),
        ("b", "wrong", 0.0, 5),
        ("b", "right", 1.0, 5),
        ("c", "x", 0.4, 5),
    ]
    kept = [{"step": s, "prompt": p, "completion": text, "reward": r, "advantage": 0.0} for p, text, r, s in rows]
    write_run(tmp_path / "runs/a", "troll", completions=kept)
    write_page(make_report(read_runs([tmp_path / "runs"])), tmp_path / "page.html")
    shown = open_page(tmp_path / "page.html").locator("#completion-list pre:not(.prompt)").all_text_contents()
    assert shown == ["right", "wrong", "x"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_words_and_controls_stand_out(open_page: Any, small: Path, scheme: str) -> None:
    assert open_page(small, color_scheme=scheme).evaluate(CONTRAST) == []


def test_tables_are_sorted_by_a_click_and_filtered(open_page: Any, small: Path) -> None:
    page = open_page(small)
    region = page.locator('[data-table="runs"]')
    seeds = lambda: region.locator("tbody tr:visible").evaluate_all("rows => rows.map(row => row.cells[1].textContent)")  # noqa: E731
    before = seeds()
    region.get_by_role("button", name="Seed").click()
    assert seeds() == sorted(before, reverse=True)
    region.get_by_role("button", name="Seed").click()
    assert seeds() == sorted(before)
    assert region.locator("th[aria-sort=ascending]").inner_text().startswith("Seed")
    page.get_by_role("searchbox", name="Filter Runs").fill("TROLL")
    assert 0 < len(seeds()) < len(before)
    assert set(region.locator("tbody tr:visible th").all_inner_texts()) == {"troll"}
