"""A comparison from plan to page: check, run side by side, report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from corral.lab.compare.check import WEIGHTS, Budget, budget_text, check_plan, resolve_run, trainer_configs
from corral.lab.compare.folder import Progress, duration, log_tail, seconds_per_step
from corral.lab.compare.local import Engine, LocalEngine, visible_gpus
from corral.lab.compare.plan import ChosenSettings, ComparisonPlan, Kind, make_run
from corral.lab.compare.record import COUNTED, ENDED, Comparison
from corral.lab.compare.schedule import Schedule
from corral.lab.compare.view import CompareView, align_columns, run_cells
from corral.lab.report.content import RunReport, make_report
from corral.lab.report.outcomes import RETURN, Measure, main_metric
from corral.lab.report.page import write_page
from corral.lab.report.read import read_comparison, read_run, read_runs, value_text
from corral.lab.report.statistics import ENOUGH
from corral.lab.report.sweep import RULE, Sweep, SweepRow, choose_setting, sweep_row
from corral.lab.run.text import count
from corral.validate import RunError

_START = 10.0
"""Seconds until a process has imported what it needs."""

_Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """Execution of a comparison: engine, runs at a time, and when a silent run counts as hung. It changes no result."""

    engine: Literal["local", "ray"] = "local"
    jobs: int | None = None
    stall: float = 3600.0

    def __post_init__(self) -> None:
        if self.jobs is not None and self.jobs < 1:
            raise RunError(f"--jobs must be at least 1; got {self.jobs}.")
        if not self.stall > 0:
            raise RunError(f"--stall is in seconds, and more than 0; got {self.stall}.")


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A checked budget, an engine and an estimate of the time: all that comes before the first run."""

    budget: Budget
    engine: Engine
    pace: tuple[float, str] | None
    """Seconds per step, and where that is known from."""
    reductions: Mapping[str, str] = field(default_factory=dict)
    """TRL's loss type of each objective; empty where there are no objectives, or a sweep sets it."""
    warnings: Sequence[str] = ()
    """Of reductions that are not an objective's own."""


def set_up(comparison: Comparison, config: Path | None, execution: ExecutionConfig) -> Preparation:
    """Check every planned run and make the engine. Writes the number of threads into `comparison.training`.

    Args:
        config: the file of settings, if there is one.
    """
    plan, training = comparison.plan, comparison.training
    budget = check_plan(plan, training, config)
    settings = resolve_run(plan.kind, training, make_run(plan.contestants[0], {}, 0, "report"), config)
    engine = _make_engine(plan.kind, settings, execution, training.threads)
    shared = dict(training.settings)
    if plan.kind == "robot" and engine.threads is not None:
        shared.setdefault("workers", str(engine.threads))  # its environments are stepped by as many as there are threads
    comparison.training = replace(training, threads=engine.threads, settings=shared)
    # A smoke run takes as long as its imports.
    pace = None if training.smoke else seconds_per_step(plan.kind, settings, training.recipe, [Path("runs")])
    fixed = plan.kind == "llm" and not any(key in plan.sweep for key in WEIGHTS)
    configs = trainer_configs(plan.contestants, training, config, plan.settings[0]) if fixed else {}
    reductions = {contestant: args.loss_type for contestant, args in configs.items()}
    warnings = [args.other_reduction for args in configs.values() if args.other_reduction]
    return Preparation(budget=budget, engine=engine, pace=pace, reductions=reductions, warnings=warnings)


def _make_engine(kind: Kind, settings: Any, execution: ExecutionConfig, threads: int | None) -> Engine:
    """The engine; robots and `device=cpu` need no GPU.

    Args:
        settings: of any of the runs, resolved.
        threads: of each process; None is one on a CPU, and as many as it likes on a GPU.
    """
    wanted = kind == "llm" and settings.device != "cpu"
    if execution.engine == "ray":
        from corral.lab.compare.ray import RayEngine  # needs corral[ray]

        return RayEngine(jobs=execution.jobs, threads=threads, gpus=wanted)
    gpus = visible_gpus() if wanted else []
    return LocalEngine(jobs=execution.jobs, threads=threads if threads is not None or gpus else 1, gpus=gpus)


def describe(comparison: Comparison, prepared: Preparation) -> list[tuple[str, str]]:
    """The banner of a comparison: names, and sentences about each."""
    budget, engine, plan = prepared.budget, prepared.engine, comparison.plan
    done = sum(record.state in ENDED for record in comparison.records)
    name = comparison.training.recipe or comparison.training.config
    seeds = ", ".join(map(str, plan.report_seeds))
    if plan.choose_seeds:
        seeds += f"; settings are chosen on {', '.join(map(str, plan.choose_seeds))}"
    time = "unknown: no such run is here to judge by"
    if prepared.pace is not None:
        seconds, source = prepared.pace
        rounds = -(-(plan.count - done) // engine.slots)
        time = f"about {duration(rounds * (_START + budget.steps * seconds))} ({seconds:.2g} s a step, {source})"
    lines = [("compare", f"{name}: {', '.join(plan.contestants)}")]
    lines += [("sweep", f"{key} {', '.join(map(value_text, values))}") for key, values in plan.sweep.items()]
    lines += [("reduction", _reduction_text(prepared.reductions))] if prepared.reductions else []
    lines += [("seeds", seeds), ("budget", f"{budget_text(budget)}, for every run"), ("runs", _runs_text(plan))]
    lines += [("engine", engine.about), ("time", time), ("folder", str(comparison.path))]
    lines += [("note", sentence) for sentence in prepared.warnings]
    lines += [("done", f"{count(done, 'run')} already")] if done else []
    if len(plan.report_seeds) < ENOUGH:
        lines.append(("note", f"with fewer than {ENOUGH} seeds, differences are shown and none can be claimed"))
    return lines


def _reduction_text(reductions: Mapping[str, str]) -> str:
    """`grpo, for every run`, or that nothing can be claimed."""
    if len(set(reductions.values())) == 1:
        return f"{next(iter(reductions.values()))}, for every run"
    each = ", ".join(f"{loss_type} for {contestant}" for contestant, loss_type in reductions.items())
    return f"{each}. Where they differ, no difference between objectives can be claimed: --common gives all the same"


def _runs_text(plan: ComparisonPlan) -> str:
    """`12: 4 contestants × 3 seeds`."""
    who = count(len(plan.contestants), "contestant")
    last = f"{who} × {count(len(plan.report_seeds), 'seed')}"
    if not plan.sweep:
        return f"{plan.count}: {last}"
    swept = f"{who} × {count(len(plan.settings), 'setting')} × {count(len(plan.choose_seeds), 'seed')}"
    return f"{plan.count}: {swept}, then {last} with the setting chosen for each"


def run_comparison(comparison: Comparison, prepared: Preparation, view: CompareView, *, stall: float = 3600.0) -> _Status:
    """Run what is left of a comparison, say what was found, write the page."""
    schedule = Schedule(
        comparison=comparison, engine=prepared.engine, view=view, steps=prepared.budget.steps, choose=choose, stall=stall
    )
    view.open(comparison)
    try:
        schedule.run()
    finally:
        view.close()
    status = comparison_status(comparison)
    _show_runs(comparison, schedule.progress, view)
    for line in [] if schedule.interrupted else findings(comparison, view.warn):
        view.end(line)
    if status == "interrupted":
        view.end(f"Resume with: corral compare --resume {comparison.path}")
        view.end(f"See what there is with: corral report {comparison.path}")
    elif status == "failed":
        view.end(f"Try failed runs again with: corral compare --resume {comparison.path} --retry-failed")
    return status


def comparison_status(comparison: Comparison) -> _Status:
    """The worst state of all runs: interrupted, failed, or finished."""
    states = [record.state for record in comparison.records]
    if any(state in ("waiting", "running", "interrupted") for state in states):
        return "interrupted"
    return "failed" if "failed" in states else "finished"


def _show_runs(comparison: Comparison, progress: dict[str, Progress], view: CompareView) -> None:
    """Every run, and the end of the log of those that failed."""
    for line in ["", *align_columns(run_cells(comparison.records, progress))]:
        view.end(line)
    for record in comparison.records:
        if record.state == "failed":
            folder = comparison.folder(record)
            view.end(f"\n{record.label} failed: {record.error}\nThe end of {folder / 'log.txt'}:")
            for line in log_tail(folder, 5):
                view.end(f"  {line}")


def findings(comparison: Comparison, warn: Callable[[str], object]) -> list[str]:
    """The page, and what it says, to print. Without a single run there is no page."""
    try:
        report, page = write_report(comparison)
    except RunError as error:
        warn(f"there is no report: {error}")
        return []
    return ["", *report_lines(report), "", f"The report is in {page}"]


# ------------------------------------------------------------------------------------------- results, as the page has them


def choose(comparison: Comparison) -> ChosenSettings:
    """The best setting of each contestant; none for one whose runs all failed."""
    alive = {record.contestant for record in comparison.sweep_records if record.state in COUNTED}
    return choose_setting([row for row in sweep_rows(comparison) if row.contestant in alive])


def sweep_rows(comparison: Comparison) -> list[SweepRow]:
    """One row per run of the sweep. One that failed counts as the worst there is."""
    done = [record for record in comparison.sweep_records if record.state in COUNTED]
    runs = {record.folder: read_run(comparison.folder(record)) for record in done}
    measure = main_metric([*runs.values()])
    return [
        sweep_row(record.contestant, record.setting, record.seed, runs.get(record.folder), measure)
        for record in comparison.sweep_records
    ]


def write_report(comparison: Comparison) -> tuple[RunReport, Path]:
    """DIR/report.html, and what it says."""
    report = make_report(read_runs([comparison.path]), [read_comparison(comparison.path)])
    page = comparison.path / "report.html"
    write_page(report, page)
    return report, page


def report_lines(report: RunReport) -> list[str]:
    """The sweep with the usable ranges, then the results of each contestant, then what may be claimed."""
    swept = [line for sweep in report.sweeps for line in [*_sweep_lines(sweep, report.measure), ""]]
    said = [row["sentence"] for row in report.tables["comparisons"] if row["measure"] == "final"]
    return [*swept, *_result_lines(report.tables["results"], report.measure), "", *said]


def _result_lines(results: Sequence[Mapping[str, Any]], measure: Measure) -> list[str]:
    """One line per contestant, with the setting that was chosen for it."""
    beside = [key for key in ("greedy", "return") if key != measure.key and any(row.get(key) is not None for row in results)]
    swept = any(row["setting"] for row in results)
    names = ["contestant", *(["setting"] if swept else []), "runs", f"final {measure.name}", "mean over the run"]
    rows = [[*names, *beside, "collapsed", "seconds"]]
    for row in results:
        cells = [row["objective"], *([row["setting"]] if swept else []), f"{row['counted']} of {row['runs']}"]
        for key in ("final", "area", *beside):
            of = RETURN if key == "return" else measure
            cells.append(of.estimate(row[key], row[f"{key}_low"], row[f"{key}_high"]))
        rows.append([*cells, str(row["collapsed"]), "—" if row["seconds"] is None else f"{row['seconds']:.0f}"])
    return align_columns(rows)


def _sweep_lines(sweep: Sweep, measure: Measure) -> list[str]:
    """One line per contestant and setting; then the usable ranges, by each one's own best and by the best of all."""
    settings = list(dict.fromkeys(name for cell in sweep.cells for name in cell.setting))
    greedy = any(cell.greedy is not None for cell in sweep.cells)
    rows = [["contestant", *settings, f"final {measure.name}", "mean over the run", *(["greedy"] if greedy else [])]]
    rows[0] += ["collapsed", "KL"]
    for cell in sweep.cells:
        values = [value_text(cell.setting.get(name)) for name in settings]
        numbers = [cell.final, cell.auc, *([cell.greedy] if greedy else [])]
        kl = "—" if cell.kl is None else f"{cell.kl:.3g}"
        rows.append([cell.contestant, *values, *(measure.estimate(number, None, None) for number in numbers)])
        rows[-1] += [f"{cell.collapsed:.0%}", kl]
    lead = f"Usable range of {sweep.key}, by final {measure.name} and its mean over the run ({sweep.seeds_text}): {RULE}"
    ranges = [f"{found.sentence}; by the best of all: {found.text(found.overall)}" for found in sweep.ranges]
    return [*align_columns(rows), "", lead, *ranges]
