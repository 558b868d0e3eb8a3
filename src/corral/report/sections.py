"""The body of a page: its parts in order, the filters, and the places where its script draws."""

import corral
from corral.report.appendix import configuration, event_table, reproduce, run_table
from corral.report.content import Report
from corral.report.findings import count, findings
from corral.report.html import Safe, join, note, tag

AXES = {"update": "updates", "tokens": "tokens", "seconds": "seconds"}
BANDS = {"interval": "95 % interval", "range": "range of seeds", "seeds": "each seed"}
THEMES = {"": "Auto", "light": "Light", "dark": "Dark"}
ACTIONS = {"projected": "projected back", "masked": "masked", "clipped": "clipped"}
SIGNS = {"": "any", "high": "above its group's mean", "low": "below"}

FILTERED = ("curves", "region", "tokens")
"""Parts that the filters are for."""

NO_TOKENS = """
These runs have no tokens.parquet, so there is no picture of single tokens: which ones were projected, masked or clipped, and
how far they wanted to go.
"""


def body(report: Report) -> Safe:
    """Header, parts, footer."""
    parts = {
        "findings": ("Findings", findings(report)),
        "curves": ("Learning curves", tag("div", id="learning", class_="figures wide")),
        "region": ("Trust region", region()),
        "tokens": ("Tokens", tokens(report)),
        "completions": ("Completions", completions(report)),
        "events": ("Failures and warnings", event_table(report)),
        "runs": ("Runs", run_table(report)),
        "configuration": ("Configuration", configuration(report)),
        "reproduce": ("Reproduce", reproduce(report)),
    }
    made = {name: tag("section", tag("h2", heading), content, id=name) for name, (heading, content) in parts.items()}
    links = [tag("li", tag("a", heading, href=f"#{name}")) for name, (heading, _) in parts.items()]
    middle = tag("div", controls(report), *(made.pop(name) for name in FILTERED))
    return join(
        tag("a", "Skip to the findings", href="#findings", class_="skip"),
        tag(
            "header",
            tag("div", tag("h1", report.title), choice("theme", "Theme", THEMES), class_="top"),
            tag("p", summary(report), class_="lead"),
            tag("nav", tag("ul", *links), aria_label="Sections"),
        ),
        tag("noscript", note("Figures need this page's script; tables do not.")),
        tag("main", made.pop("findings"), middle, *made.values()),
        tag("footer", tag("p", f"Made by corral {corral.__version__} from the files of {count(len(report.runs), 'run')}.")),
    )


def summary(report: Report) -> str:
    """How many runs of what, and how they ended."""
    ends: dict[str, int] = {}
    for run in report.runs:
        ends[run.stopped] = ends.get(run.stopped, 0) + 1
    how = ", ".join(f"{number} {stopped}" for stopped, number in sorted(ends.items()))
    seeds = {len(group.runs) for group in report.groups}
    each = count(max(seeds), "seed") + (" each" if len(seeds) == 1 else " at most")
    return f"{count(len(report.runs), 'run')}, {each}: {how}."


def controls(report: Report) -> Safe:
    """Filters: real form controls, for all figures at once. The boxes of the objectives are the figures' legend."""
    seeds = list(dict.fromkeys(run.seed for run in report.runs))
    problems = list(dict.fromkeys(group.problem for group in report.groups))
    learning = {metric.key: metric.title for metric in report.metrics if metric.section == "learning"}
    boxes = []
    for group in report.groups:
        box = tag("input", type="checkbox", name="group", value=group.key, checked=True)
        swatch = tag("span", class_="swatch", data_group=group.key)
        boxes.append(tag("label", box, swatch, group.label, data_problem=problems.index(group.problem)))
    picks = [tag("label", tag("input", type="checkbox", name="seed", value=seed, checked=True), seed) for seed in seeds]
    return tag(
        "form",
        select("problem", "Problem", dict(enumerate(problems))) if len(problems) > 1 else None,
        tag("fieldset", tag("legend", "Objective"), *boxes),
        tag("fieldset", tag("legend", "Seed"), *picks),
        select("axis", "Over", AXES),
        select("band", "Band", BANDS),
        select("metric", "Metric", learning) if learning else None,
        id="filters",
        class_="controls",
    )


def region() -> Safe:
    """Small figures, one per metric."""
    text = "Lines are interquartile means over seeds; bands reach from the smallest to the largest seed."
    return join(tag("p", text, class_="count"), tag("div", id="trust", class_="figures"))


def tokens(report: Report) -> Safe:
    """Heat-map and histogram, where runs kept tokens."""
    if not any(run.tokens for run in report.runs):
        return note(NO_TOKENS)
    marks = [tag("span", text, class_=f"token {name}") for name, text in ACTIONS.items()]
    text = "The darker a token, the further it wanted to go: its KL to the old policy before the region acted. "
    return join(
        tag("p", text, *marks, class_="legend"),
        tag("form", select("tokens", "Completion", {}), id="token-filters", class_="controls"),
        tag("div", id="heat", class_="heat"),
        tag("div", id="histogram", class_="figures wide"),
    )


def completions(report: Report) -> Safe:
    """A browser of sampled completions."""
    if not any(run.completions for run in report.runs):
        return note("These runs kept no completions.")
    search = tag("label", "Contains ", tag("input", type="search", name="text", autocomplete="off"), class_="field")
    picks = (select("run", "Run", {}), select("step", "Step", {}), select("sign", "Advantage", SIGNS), search)
    return join(
        tag("form", *picks, id="completion-filters", class_="controls"),
        tag("p", id="completion-count", class_="count", role="status"),
        tag("ol", id="completion-list", class_="completions"),
    )


def choice(name: str, heading: str, options: dict[str, str]) -> Safe:
    """A set of radio buttons, the first one chosen."""
    labels = []
    for index, (key, text) in enumerate(options.items()):
        labels.append(tag("label", tag("input", type="radio", name=name, value=key, checked=index == 0), text))
    return tag("fieldset", tag("legend", heading), *labels, class_="choice", id=f"choose-{name}")


def select(name: str, heading: str, options: dict[str, str] | dict[int, str]) -> Safe:
    """A list to pick from."""
    items = [tag("option", text, value=key) for key, text in options.items()]
    return tag("label", f"{heading} ", tag("select", *items, name=name), class_="field")
