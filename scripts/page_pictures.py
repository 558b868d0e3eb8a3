"""Take the pictures of pages in docs/ anew, in a real browser: explore (and its recording), reports, audits.

python scripts/page_pictures.py --runs runs/pictures        (after `make test-browser`; needs chromium, playwright, Pillow)

What a page shows is trained first where --runs does not have it yet, by the commands that the docs print: some ten minutes.
"""

import argparse
import functools
import io
import json
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops
from playwright.sync_api import Page, sync_playwright

from corral.lab.run.files import write_whole

ROOT = Path(__file__).resolve().parents[1]
COMPARE = """compare --recipe demo --objectives ppo_clip,troll --sweep learning_rate=2e-4,8e-4,3e-3 --seeds 3 --choose-seeds 1 \
--steps 4 --set eval_size=64 --set eval_every=1"""
"""The comparison that docs/report.md and docs/compare.md show."""
WIDE = 1200
"""Of a page whose tables have all their columns, in pixels."""


def main() -> None:
    """Take all pictures, or the named ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/pictures"), help="where the runs are, or go")
    parser.add_argument("only", nargs="*", choices=[*TAKEN, []], help="explore, report, audit; by default all")
    given = parser.parse_args()
    runs = given.runs.resolve()
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        browser = driver.chromium.launch(executable_path=chromium, args=["--disable-gpu", "--no-sandbox"])
        for name in given.only or TAKEN:
            TAKEN[name](browser, runs, Path(folder))


def take_explore(browser: Any, runs: Path, folder: Path) -> None:
    """The whole page, and recordings of its panels on light and on dark paper."""
    corral("explore", "--out", str(folder / "explore.html"))
    save("explore.png", picture(open_page(browser, folder / "explore.html", 1280), full_page=True))
    for name, scheme in (("explore.gif", "light"), ("explore-dark.gif", "dark")):
        frames = record_panels(open_page(browser, folder / "explore.html", 1280, scheme))
        palette = stacked([frame for frame, _ in frames[::7]]).quantize(256, method=Image.Quantize.MAXCOVERAGE)
        first, *others = [frame.quantize(palette=palette, dither=Image.Dither.NONE) for frame, _ in frames]
        times = [time for _, time in frames]
        options: dict[str, Any] = {"save_all": True, "append_images": others, "duration": times, "loop": 0, "optimize": True}
        write_whole(ROOT / "docs" / name, functools.partial(first.save, format="GIF", **options))


def record_panels(page: Page) -> list[tuple[Image.Image, int]]:
    """Frames and their milliseconds: a policy is dragged away, then a rare token, then from near."""
    box, sliders = page.locator(".panels").bounding_box(), page.locator(".panels input").first.bounding_box()
    height = sliders["y"] - box["y"] + 8  # down to the bounds, without their sliders
    clip = {"x": box["x"] - 6, "y": box["y"] - 6, "width": box["width"] + 12, "height": height}
    frames: list[tuple[Image.Image, int]] = []

    def record(milliseconds: int) -> None:
        frame = picture(page, clip=clip, full_page=True)
        frames.append((frame.resize((900, round(frame.height * 900 / frame.width)), Image.Resampling.LANCZOS), milliseconds))

    start, end, count = (0.46, 0.33, 0.21), (0.16, 0.70, 0.14), 22
    page.evaluate("([old, next]) => change({ old, next, token: 1, advantage: 1 })", [[0.5, 0.3, 0.2], start])
    for index in range(count):
        share = (1 - math.cos(math.pi * index / (count - 1))) / 2
        page.evaluate("next => change({ next })", [a + (b - a) * share for a, b in zip(start, end, strict=True)])
        record(90 if 0 < index < count - 1 else 1200)
    page.evaluate("choosePreset(1)")
    record(1600)
    page.evaluate("change({ zoom: 4, centre: state.old })")
    record(1800)
    return frames


def take_report(browser: Any, runs: Path, folder: Path) -> None:
    """The findings of a comparison, its sweep, KL per token; and its last runs alone, down to their curves."""
    compared = runs / "compared"
    if not (compared / "compare.json").exists():
        corral(*COMPARE.split(), "--out", str(compared))
    entries = json.loads((compared / "compare.json").read_text())["runs"]
    last = [str(compared / entry["folder"]) for entry in entries if entry["stage"] == "report"]
    corral("report", *last, "--out", str(folder / "runs.html"))
    page = open_page(browser, folder / "runs.html", WIDE)
    save("report.png", picture(page, clip=from_top(page, "#curves figure")))
    corral("report", str(compared), "--out", str(folder / "report.html"))
    page = open_page(browser, folder / "report.html", WIDE)
    save("compare.png", picture(page, clip=from_top(page, "#findings")))
    save("report-sweep.png", side_by_side([picture(one) for one in page.locator("#sweep figure").all()[:2]]))
    save("report-tokens.png", side_by_side([picture(one) for one in page.locator("#tokens figure").all()[:2]]))


def take_audit(browser: Any, runs: Path, folder: Path) -> None:
    """The top of the page, two of its figures, and the thresholds."""
    if not (runs / "audit_grpo" / "audit" / "audit.json").exists():
        runs.mkdir(parents=True, exist_ok=True)
        subprocess.run([sys.executable, ROOT / "examples" / "audit_grpo.py"], cwd=runs.parent, check=True)
        (runs.parent / "runs" / "audit_grpo").rename(runs / "audit_grpo")
    corral("audit", str(runs / "audit_grpo" / "audit"), "--page", str(folder / "audit.html"), "--quiet")
    page = open_page(browser, folder / "audit.html", 1100)
    save("audit.png", picture(page))
    save("audit-figures.png", stacked([picture(page.locator(f"#{name} figure").first) for name in ("probability", "ratio")]))
    save("audit-threshold.png", picture(page.locator("#threshold figure").first))


TAKEN = {"explore": take_explore, "report": take_report, "audit": take_audit}


def corral(*words: str) -> None:
    """A command of this tree."""
    subprocess.run([sys.executable, "-m", "corral.lab.cli", *words], check=True)


def open_page(browser: Any, path: Path, width: int, scheme: str = "light") -> Page:
    """A page in a theme, once it is drawn."""
    page = browser.new_context(viewport={"width": width, "height": 1000}, color_scheme=scheme).new_page()
    page.goto(path.as_uri())
    page.wait_for_timeout(500)
    return page


def picture(what: Any, **options: Any) -> Image.Image:
    """Take a picture of a page, or of an element on it."""
    return Image.open(io.BytesIO(what.screenshot(**options))).convert("RGB")


def from_top(page: Page, selector: str) -> dict[str, float]:
    """Clip of a page from its top to the end of the first such element."""
    box = page.locator(selector).first.bounding_box()
    page.set_viewport_size({"width": WIDE, "height": math.ceil(box["y"] + box["height"]) + 20})
    box = page.locator(selector).first.bounding_box()
    return {"x": 0, "y": 0, "width": WIDE, "height": box["y"] + box["height"] + 16}


def side_by_side(pictures: Sequence[Image.Image], gap: int = 16) -> Image.Image:
    """Join pictures in a row, on white."""
    whole = Image.new("RGB", (sum(one.width + gap for one in pictures) - gap, max(one.height for one in pictures)), "white")
    left = 0
    for one in pictures:
        whole.paste(one, (left, 0))
        left += one.width + gap
    return whole


def stacked(pictures: Sequence[Image.Image], gap: int = 16) -> Image.Image:
    """Join pictures in a column, on white."""
    turned = side_by_side([one.transpose(Image.Transpose.TRANSPOSE) for one in pictures], gap)
    return turned.transpose(Image.Transpose.TRANSPOSE)


def save(name: str, taken: Image.Image) -> None:
    """Save a picture in docs/, with a palette of 256 colours unless that visibly changes one."""
    small = taken.quantize(256, dither=Image.Dither.NONE)
    largest = max(high for _, high in ImageChops.difference(taken, small.convert("RGB")).getextrema())
    write_whole(ROOT / "docs" / name, lambda beside: (small if largest <= 16 else taken).save(beside, "PNG", optimize=True))


if __name__ == "__main__":
    main()
