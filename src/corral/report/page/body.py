"""The body of a page: its parts in order, the filters, and the places where its script draws."""

from corral.report.content import RunReport
from corral.report.html import Safe, join, note, page_body, sections, shorten, tag
from corral.report.page.appendix import configuration, event_table, reproduce, run_table
from corral.report.page.findings import findings
from corral.report.page.sweep import sweep_headline, sweep_section
from corral.run.text import count

_AXES = {
    "update": "updates", "step": "steps", "rollouts": "rollouts", "env_steps": "environment steps", "tokens": "tokens",
    "seconds": "seconds",
}  # fmt: skip
_LOGGED = {"env_steps": "env_steps", "tokens": "num_tokens"}
"""What a line of metrics calls them."""
_BANDS = {"interval": "95 % interval", "range": "range of seeds", "seeds": "each seed"}
_ACTIONS = {"projected": "projected back", "masked": "masked", "clipped": "clipped"}
_SIGNS = {"": "any", "high": "above its group's mean", "low": "below"}

_FILTERED = ("curves", "region", "motion", "tokens")
"""Parts that the filters are for."""

_DARK = """
A few completions of every step, as its last update saw them. The darker a token, the further it wanted to go: the KL between
the new and the old policy before the region acted, on the support and its tail where the objective has one, else of the sampled
token against all others. Both are lower bounds of the KL over all tokens.
"""

_BAND = "Lines are interquartile means over seeds (means of fewer than four); bands reach from the smallest to the largest."
_MOTION = "On held-out contexts, without exploration and with it. Medians over episodes."

_NO_TOKENS = """
These runs have no tokens.parquet, so there is no picture of single tokens: which ones were projected, masked or clipped, and
how far they wanted to go.
"""


def body(report: RunReport) -> Safe:
    """Header, parts, footer."""
    moves = any(metric.section == "motion" for metric in report.metrics)
    speaks = not all(run.is_robot for run in report.runs)
    alone = report.is_single
    wanted = {
        "findings": ("Findings", findings(report, sweep_headline(report))),
        "sweep": ("Sweep", sweep_section(report)) if report.sweeps else None,
        "curves": ("Learning curves", tag("div", id="learning", class_="figures wide")),
        "region": ("Trust region", _figures("" if alone else _BAND, "trust")),
        "motion": ("Motion", _figures(_MOTION, "motion-figures")) if moves else None,
        "tokens": ("Tokens", _tokens(report)) if speaks else None,
        "completions": ("Completions", _completions(report)) if speaks else None,
        "events": ("Failures and warnings", event_table(report)),
        "runs": None if alone else ("Runs", run_table(report)),
        "configuration": ("Configuration", configuration(report)),
        "reproduce": ("Reproduce", reproduce(report)),
    }
    parts = {name: part for name, part in wanted.items() if part is not None}
    made = sections(parts, (*_FILTERED, "completions"))
    middle = tag("div", _controls(report), *(made.pop(name) for name in _FILTERED if name in made))
    return page_body(
        report.title,
        _summary(report),
        parts,
        tag("main", made.pop("findings"), made.pop("sweep", None), middle, *made.values()),
        f"the files of {count(len(report.runs), 'run')}",
        tag(
            "noscript",
            note(
                "Scripts are switched off: curves, tokens and completions need this page's own. Findings and tables are here."
            ),
        ),
    )


def _summary(report: RunReport) -> str:
    """How many runs of what, and how they ended."""
    ends: dict[str, int] = {}
    for run in report.runs:
        ends[run.stopped] = ends.get(run.stopped, 0) + 1
    how = ", ".join(f"{number} {stopped}" for stopped, number in sorted(ends.items()))
    seeds = {len(group.runs) for group in report.groups}
    each = "" if report.is_single else f", {count(max(seeds), 'seed')} {'each' if len(seeds) == 1 else 'at most'}"
    swept = sum(len(group.runs) for group in report.sweep_groups)
    more = f" Their settings were chosen on {count(swept, 'run')} of a sweep." if swept else ""
    return f"{count(len(report.runs), 'run')}{each}: {how}.{more}"


def _controls(report: RunReport) -> Safe:
    """Filters: real form controls, for all figures at once. The boxes of the objectives are the figures' legend."""
    seeds = list(dict.fromkeys(run.seed for run in report.runs))
    problems = list(dict.fromkeys(group.problem for group in report.groups))
    learning = {metric.key: metric.title for metric in report.metrics if metric.section == "learning"}
    boxes = []
    for group in report.groups:
        box = tag("input", type="checkbox", name="group", value=group.key, checked=True)
        swatch = tag("span", class_="swatch", data_group=group.key)
        boxes.append(tag("label", box, swatch, shorten(group.label, 120), data_problem=problems.index(group.problem)))
    picks = [
        tag("label", tag("input", type="checkbox", name="seed", value=shorten(seed, 60), checked=True), shorten(seed, 60))
        for seed in seeds
    ]
    return tag(
        "form",
        _select("problem", "Problem", {place: shorten(name, 120) for place, name in enumerate(problems)})
        if len(problems) > 1
        else None,
        tag("fieldset", tag("legend", "Objective"), *boxes, hidden=report.is_single),
        tag("fieldset", tag("legend", "Seed"), *picks, hidden=report.is_single),
        _select("axis", "Over", _axes(report)),
        _select("band", "Band", _BANDS) if not report.is_single else None,
        _select("smooth", "Long lines", {"yes": "smoothed", "no": "as they are"}),
        _select("metric", "Metric", learning) if learning else None,
        id="filters",
        class_="controls scripted",
    )


def _axes(report: RunReport) -> dict[str, str]:
    """What the curves can be drawn over; environment steps or tokens, as it was robots or language models that learned."""
    logged = {key for run in report.runs for line in run.lines for key in line}
    always = {"update", "step", "seconds"} | ({"rollouts"} if all(run.rollouts_per_step for run in report.runs) else set())
    found = {key: text for key, text in _AXES.items() if key in always or _LOGGED.get(key) in logged}
    first = {"env_steps": _AXES["env_steps"]} if all(run.is_robot for run in report.runs) and "env_steps" in found else {}
    return first | found


def _figures(text: str, name: str) -> Safe:
    """The place of small figures, one per metric, below a line of text."""
    return join(tag("p", text, class_="count"), tag("div", id=name, class_="figures"))


def _tokens(report: RunReport) -> Safe:
    """Heat-map and histogram, where runs kept tokens."""
    if not any(run.tokens for run in report.runs):
        return note(_NO_TOKENS)
    marks = [tag("span", text, class_=f"token {name}") for name, text in _ACTIONS.items()]
    picks = (_select("run", "Run", {}), _select("step", "Step", {}), _select("tokens", "Completion", {}))
    return join(
        tag("p", _DARK, class_="count"),
        tag("p", *marks, class_="legend"),
        tag("form", *picks, id="token-filters", class_="controls scripted"),
        tag("p", id="heat-about", class_="count"),
        tag(
            "div",
            id="heat",
            class_="heat scripted",
            tabindex="0",
            role="group",
            aria_label="Tokens; arrow keys read their values",
        ),
        tag("p", id="heat-status", class_="count", role="status"),
        tag("div", id="histograms", class_="figures"),
        tag("div", id="tails", class_="figures wide"),
    )


def _completions(report: RunReport) -> Safe:
    """A browser of sampled completions."""
    if not any(run.completions for run in report.runs):
        return note("These runs kept no completions.")
    search = tag("label", "Contains ", tag("input", type="search", name="text", autocomplete="off"), class_="field")
    picks = (_select("run", "Run", {}), _select("step", "Step", {}), _select("sign", "Advantage", _SIGNS), search)
    return join(
        tag("form", *picks, id="completion-filters", class_="controls scripted"),
        tag("p", id="completion-count", class_="count", role="status"),
        tag("ol", id="completion-list", class_="completions"),
    )


def _select(name: str, heading: str, options: dict[str, str] | dict[int, str]) -> Safe:
    """A list to pick from."""
    items = [tag("option", text, value=key) for key, text in options.items()]
    return tag("label", f"{heading} ", tag("select", *items, name=name), class_="field")
