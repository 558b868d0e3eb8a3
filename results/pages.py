"""Page fragments of the studies: numbers, tables, blocks between comments, and figures that are the same file every time."""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from corral.lab.run.files import write_whole

if TYPE_CHECKING:
    from corral.lab.report.statistics import Difference  # it needs corral[report], which the studies do without

ROOT = Path(__file__).parents[1]
DOCS, README = ROOT / "docs", ROOT / "README.md"
INK = ("#1f2328", "#f0f6fc")
"""Text and axes on light and on dark paper."""
Texts = dict[Path, str]


def short(value: float) -> str:
    """`.578`, and `1.000` for what does not fit that."""
    return f"{value:.3f}".removeprefix("0")


def numbers(values: Iterable[float]) -> str:
    """Numbers with blanks between them, or a dash."""
    return " ".join(map(short, values)) or "–"


def rate_text(rate: float | str) -> str:
    """`3e-4`, or `auto`."""
    return rate if isinstance(rate, str) else f"{rate:.1e}".replace(".0e", "e").replace("e-0", "e-")


def two_digits(value: float) -> str:
    """Two significant digits; a dash for NaN."""
    return "–" if math.isnan(value) else f"{float(f'{value:.2g}'):g}".removeprefix("0")


def thousands(steps: float) -> str:
    """Environment steps for people."""
    return f"{steps / 1e6:.2f} million" if steps >= 1e6 else f"{steps / 1e3:.0f} thousand"


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]], rule: str = "---") -> str:
    """A table."""
    body = [f"| {' | '.join(row)} |\n" for row in (head, *lines)]
    return "".join([body[0], f"|{f'{rule}|' * len(head)}\n", *body[1:]])


spaced_table = partial(markdown, rule=" --- ")


def tenths(value: float) -> str:
    """One decimal with a typographic minus: `−0.1`, and `0.0` without a sign."""
    text = f"{value:.1f}"
    return text.replace("-0.0", "0.0") if float(text) == 0 else text.replace("-", "−")


def points(value: float) -> str:
    """A difference with its sign: `+2.7`, `−0.1`."""
    return ("" if tenths(value).startswith("−") else "+") + tenths(value)


def interval_text(found: "Difference | None") -> str:
    """`+2.7 (0.8 … 4.5)`: a difference and its 95 % interval; a dash if no seed is shared."""
    if found is None:
        return "–"
    low, high = found.mean.low, found.mean.high
    return points(found.mean.value) + ("" if low is None or high is None else f" ({tenths(low)} … {tenths(high)})")


def p_text(p: float) -> str:
    """An adjusted p-value, bold if it is significant: `**<.001**`, `.24`."""
    from corral.lab.report.statistics import is_significant

    text = "<.001" if p < 0.001 else f"{p:.2g}".removeprefix("0") if p < 0.995 else "1"
    return f"**{text}**" if is_significant(p) else text


def fill(read: Callable[[Path], str], pages: Sequence[Path], kind: str, blocks: Mapping[str, Callable[[], str]]) -> Texts:
    """Texts of pages with what stands between `<!-- KIND: NAME -->` and `<!-- /KIND -->` written anew; the rest stays.

    A block that begins with an empty line also ends with one.

    Args:
        read: the text of a page so far.
        blocks: name → text of every block of this kind, each of which must stand on one of the pages, once.
    """
    pattern = re.compile(rf"(<!-- {kind}: ([\w-]+) -->\n)(\n?).*?(<!-- /{kind}\b[^>]*-->)", re.DOTALL)
    texts = {page: read(page) for page in pages}
    there = sorted(name for text in texts.values() for _, name, *_ in pattern.findall(text))
    if there != sorted(blocks):
        wrong = ", ".join(sorted(set(there) ^ set(blocks))) or "one of them twice"
        raise ValueError(
            f"fill: blocks `{kind}` of {', '.join(page.name for page in pages)} are not those that are written: {wrong}."
        )

    def block(found: re.Match[str]) -> str:
        begin, name, gap, end = found.groups()
        text = blocks[name]()
        return f"{begin}{gap}{text.rstrip() + chr(10) if gap else text}{gap}{end}"

    return {page: pattern.sub(block, text) for page, text in texts.items()}


def new_figure(columns: int = 1, rows: int = 1, *, sharey: bool = False, **size: Any) -> tuple[Any, Any]:
    """A figure and all of its axes, drawn without a display."""
    import matplotlib
    from matplotlib.figure import Figure

    inked = dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK[0])
    with matplotlib.rc_context(inked):
        figure = Figure(layout="constrained", **size)
        return figure, figure.subplots(rows, columns, squeeze=False, sharey=sharey).ravel()


def save_figure(figure: Any, path: Path, *, dark: bool = False) -> None:
    """Write an SVG; equal figures are equal files. `dark`: on transparent paper, with colours for dark paper too."""
    import matplotlib

    from corral.lab.report.looks import DARK, LIGHT

    def write(beside: Path) -> None:
        with matplotlib.rc_context({"svg.hashsalt": path.stem, "svg.fonttype": "none" if dark else "path"}):
            figure.savefig(beside, format="svg", metadata={"Date": None}, transparent=dark)
        if dark:
            pairs = zip((INK[0], *LIGHT), (INK[1], *DARK), strict=True)
            rules = (
                f'[style*="{kind}: {light}"]{{{kind}:{night}!important}}'
                for light, night in pairs
                for kind in ("fill", "stroke")
            )
            text = beside.read_text()
            beside.write_text(
                text.replace("</svg>", f"<style>@media (prefers-color-scheme:dark){{{''.join(rules)}}}</style></svg>")
            )

    write_whole(path, write)


def draw_line(axes: Any, values: Mapping[float, Sequence[float]], *, color: str, marker: str = "o", **look: Any) -> None:
    """A line through the mean of every place, and a dot for each run."""
    if values:
        places = sorted(values)
        axes.plot(places, [fmean(values[place]) for place in places], color=color, **look)
        dots = [(place, value) for place in places for value in values[place]]
        axes.scatter(*zip(*dots, strict=True), color=color, marker=marker, s=11, alpha=0.55, linewidth=0)
