"""Execution of a comparison: check the plan, run the jobs side by side, and write the report."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from corral.lab.compare import plan as plans
from corral.lab.compare.local import Engine, LocalEngine, visible_gpus
from corral.lab.compare.plan import Budget, ChosenSettings
from corral.lab.compare.record import ENDED, Comparison, Progress, failure_reason, log_tail, read_summary
from corral.lab.compare.view import CompareView, align_columns, run_cells
from corral.lab.report.content import make_report
from corral.lab.report.outcomes import COUNTED, RETURN, Measure, main_metric
from corral.lab.report.page import write_page
from corral.lab.report.read import PlannedRun, read_comparison, read_run, read_runs, setting_pairs, value_text
from corral.lab.report.statistics import ENOUGH
from corral.lab.report.sweep import RULE, SweepRow, choose_setting, sweep_row
from corral.lab.run.folder import LOG
from corral.lab.run.life import Interruptible
from corral.lab.run.text import count, duration
from corral.validate import RunError

_START = 10.0
"""Seconds that a run's process needs to import its packages."""

_PACE = {"demo": 3.4, "sums": 7.6, "via_point": 0.5, "via_point_sparse": 0.35, "via_point_sparse_short": 0.5}
"""Seconds per training step of the built-in recipes on one core. Step-based baselines take several times as long."""

_PAUSE = 0.2
"""Seconds between two polls of a comparison's jobs."""

_Status = Literal["finished", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """Result of the checks before a comparison starts: training budget, engine that runs the jobs, and warnings."""

    budget: Budget
    engine: Engine
    reductions: Mapping[str, str] = field(default_factory=dict)
    """Mapping from objective to its `loss_type` in TRL. Empty without objectives, or if a sweep sets `loss_type`."""
    warnings: Sequence[str] = ()
    """Warnings about objectives whose loss is averaged over tokens differently from the objective's own reduction."""


def set_up(
    comparison: Comparison, config: Path | None, *, engine: Literal["local", "ray"] = "local", jobs: int | None = None
) -> Preparation:
    """Check every planned run of a comparison and make its engine.

    The number of threads is written into `comparison.training`.

    Args:
        config: the file of settings, if there is one.
        engine: this machine, or a Ray cluster.
        jobs: runs at a time; None for as many as cores or GPUs allow.
    """
    if jobs is not None and jobs < 1:
        raise RunError(f"--jobs must be at least 1; got {jobs}.")
    plan, training = comparison.plan, comparison.training
    budget = plans.check_plan(plan, training, config)
    settings = plans.resolve_run(plan.kind, training, plans.make_run(plan.contestants[0], {}, 0, "report"), config)
    on_gpu, threads = plan.kind == "llm" and settings.device != "cpu", training.threads
    chosen: Engine
    if engine == "ray":
        from corral.lab.compare.ray import RayEngine  # needs corral[ray]

        chosen = RayEngine(jobs=jobs, threads=threads, gpus=on_gpu)
    else:
        gpus = visible_gpus() if on_gpu else []
        # On a CPU a process has one thread, on a GPU as many as it likes.
        chosen = LocalEngine(jobs=jobs, threads=threads if threads is not None or gpus else 1, gpus=gpus)
    shared = dict(training.settings)
    if plan.kind == "robot" and chosen.threads is not None:
        shared.setdefault("workers", str(chosen.threads))  # its environments are stepped by as many as there are threads
    comparison.training = replace(training, threads=chosen.threads, settings=shared)
    fixed = plan.kind == "llm" and not any(key in plan.sweep for key in plans.WEIGHTS)
    configs = plans.trainer_configs(plan.contestants, training, config, plan.settings[0]) if fixed else {}
    reductions = {contestant: args.loss_type for contestant, args in configs.items()}
    warnings = [args.other_reduction for args in configs.values() if args.other_reduction]
    return Preparation(budget=budget, engine=chosen, reductions=reductions, warnings=warnings)


def describe(comparison: Comparison, prepared: Preparation) -> list[tuple[str, str]]:
    """List the lines that are printed before a comparison starts, each as a name and a sentence."""
    budget, engine, plan = prepared.budget, prepared.engine, comparison.plan
    done = sum(record.state in ENDED for record in comparison.records)
    name = comparison.training.recipe or comparison.training.config
    seeds = ", ".join(map(str, plan.report_seeds))
    if plan.choose_seeds:
        seeds += f"; settings are chosen on {', '.join(map(str, plan.choose_seeds))}"
    time = "unknown until the first steps are done"
    if name in _PACE and not comparison.training.smoke:  # a smoke run takes as long as its imports
        rounds, seconds = -(-(plan.count - done) // engine.slots), _PACE[name]
        whole = duration(rounds * (_START + budget.steps * seconds))
        time = f"about {whole} ({seconds:.2g} s a step, as {name} took on one core elsewhere)"
    who = count(len(plan.contestants), "contestant")
    runs = f"{who} × {count(len(plan.report_seeds), 'seed')}"
    if plan.sweep:
        swept = f"{who} × {count(len(plan.settings), 'setting')} × {count(len(plan.choose_seeds), 'seed')}"
        runs = f"{swept}, then {runs} with the setting chosen for each"
    lines = [("compare", f"{name}: {', '.join(plan.contestants)}")]
    lines += [("sweep", f"{key} {', '.join(map(value_text, values))}") for key, values in plan.sweep.items()]
    lines += [("reduction", _reduction_text(prepared.reductions))] if prepared.reductions else []
    lines += [("seeds", seeds), ("budget", f"{plans.budget_text(budget)}, for every run"), ("runs", f"{plan.count}: {runs}")]
    lines += [("engine", engine.about), ("time", time), ("folder", str(comparison.path))]
    lines += [("note", sentence) for sentence in prepared.warnings]
    lines += [("done", f"{count(done, 'run')} already")] if done else []
    if len(plan.report_seeds) < ENOUGH:
        lines.append(("note", f"with fewer than {ENOUGH} seeds, differences are shown and none can be claimed"))
    return lines


def _reduction_text(reductions: Mapping[str, str]) -> str:
    """Format the reductions of the objectives: `grpo, for every run`, or a note that no claims are possible."""
    if len(set(reductions.values())) == 1:
        return f"{next(iter(reductions.values()))}, for every run"
    each = ", ".join(f"{loss_type} for {contestant}" for contestant, loss_type in reductions.items())
    return f"{each}. Where they differ, no difference between objectives can be claimed: --common gives all the same"


# ------------------------------------------------------------------------------------------------------------- schedule


@dataclass(kw_only=True)
class Schedule(Interruptible):
    """Scheduler that starts, polls and ends the jobs of a comparison until all are done, or until it is interrupted."""

    comparison: Comparison
    engine: Engine
    view: CompareView
    steps: int
    """Number of training steps of each run."""
    stall: float = 3600.0
    """Seconds without new metrics or log output after which a run counts as hung and its process is ended."""
    running: dict[str, PlannedRun] = field(default_factory=dict)
    progress: dict[str, Progress] = field(default_factory=dict)
    attempted: set[str] = field(default_factory=set)
    """Runs that this process has started. Each run is started once; an interrupted run waits for a later `--resume`."""
    hung: set[str] = field(default_factory=set)
    stop_requested: bool = False
    """True if the jobs have been asked to stop after their current step."""

    def run(self) -> None:
        """Run the comparison's jobs until no run is left to start. A second Ctrl-C ends all jobs at once."""
        self.began = time.monotonic()
        for record in self.comparison.records:
            self._progress(record).update()
        self.done_before = self._work_done()
        with self.stop_on_signals():
            self.patient = True
            try:
                while self._poll():
                    time.sleep(_PAUSE)
            except KeyboardInterrupt:
                self.interrupted = True
            finally:
                self.patient = False
                self.engine.close()
                for record in self.running.values():  # their last checkpoints stay
                    self._change(record, "interrupted")
                self.running.clear()

    def _poll(self) -> bool:
        """Poll the comparison's jobs once, and start waiting runs. Returns True while jobs are running."""
        for name, status in self.engine.poll().items():
            self._end(self.running.pop(name), status)
        for name, record in self.running.items():
            progress = self._progress(record)
            progress.update()
            if progress.silence() > self.stall and name not in self.hung:
                self.hung.add(name)
                self.engine.kill(name)
        if self.interrupted and not self.stop_requested:
            self.stop_requested = True
            for name in self.running:
                self.engine.stop(name)
        if not self.interrupted:
            self._fill()
            if self.comparison.must_choose:
                self._choose()
                self._fill()
        self.view.update_time(self.left)
        return bool(self.running)

    def _fill(self) -> None:
        """Start waiting runs, or resume interrupted runs, while the engine has free slots."""
        plan, training, path = self.comparison.plan, self.comparison.training, self.comparison.path
        for record in self.comparison.records:
            if len(self.running) >= self.engine.slots:
                return
            if record.state not in ("waiting", "interrupted") or record.folder in self.attempted:
                continue
            self.attempted.add(record.folder)
            self._progress(record).begin()
            try:
                self.engine.start(path / record.folder, plans.run_arguments(plan.kind, training, record, path.absolute()))
            except RunError as error:
                self._change(record, "failed", str(error))
                continue
            self.running[record.folder] = record
            self._change(record, "running")

    def _end(self, record: PlannedRun, status: int) -> None:
        """Record how a run ended, from its summary file. A run without a summary failed, unless it was asked to stop."""
        folder = self.comparison.path / record.folder
        self._progress(record).update()
        if record.folder in self.hung:
            self._change(record, "failed", f"no sign of life for {self.stall:g} s: it hung, and was ended")
            return
        stopped = read_summary(folder).get("stopped")
        if stopped in ("finished", "collapsed"):
            self._change(record, stopped)
        elif self.stop_requested or stopped == "interrupted":
            self._change(record, "interrupted")
        else:
            self._change(record, "failed", failure_reason(folder, status))

    def _choose(self) -> None:
        """Choose the best setting of each compared method and plan the final runs, or extend the sweep first if necessary."""
        chosen = choose(self.comparison)
        plan = self.comparison.plan = self.comparison.plan.grown(chosen)
        self.comparison.add_runs()
        if not self.comparison.must_choose:
            self.comparison.save()
            grown = "; ".join(f"{key} {', '.join(map(value_text, values))}" for key, values in plan.added.items())
            self.view.say(f"a best setting is at an end of the sweep, which grows for all contestants: {grown}")
            return
        self.comparison.chosen = chosen
        self.comparison.add_runs()
        self.comparison.save()
        for name, setting in self.comparison.chosen.items():
            self.view.say(f"chosen for {name}: {', '.join(setting_pairs(setting))}")

    def _change(self, record: PlannedRun, state: str, error: str | None = None) -> None:
        record.state, record.error = state, error
        self.comparison.save()
        self.view.update_run(record, self._progress(record))

    @property
    def left(self) -> float | None:
        """Estimated seconds until the comparison ends, at the present pace. None before the first steps."""
        done = self._work_done() - self.done_before
        if done <= 0.02:
            return None
        plan, records = self.comparison.plan, self.comparison.records
        to_come = plan.count - len(records)  # runs whose setting has not been chosen
        open_work = sum(1 - self._progress(record).share for record in records if record.state not in ENDED) + to_come
        return (time.monotonic() - self.began) * open_work / done

    def _work_done(self) -> float:
        """Completed work of the comparison as a number of runs, including fractions of running runs."""
        return sum(1.0 if record.state in ENDED else self._progress(record).share for record in self.comparison.records)

    def _progress(self, record: PlannedRun) -> Progress:
        """Return the progress of a run. It is created at the first call."""
        return self.progress.setdefault(record.folder, Progress(self.comparison.path / record.folder, self.steps))


def run_comparison(comparison: Comparison, prepared: Preparation, view: CompareView, *, stall: float = 3600.0) -> _Status:
    """Run the remaining runs of a comparison, print all runs and the findings, and write the report's HTML page."""
    schedule = Schedule(comparison=comparison, engine=prepared.engine, view=view, steps=prepared.budget.steps, stall=stall)
    view.open(comparison)
    try:
        schedule.run()
    finally:
        view.close()
    status = comparison_status(comparison)
    for line in ["", *align_columns(run_cells(comparison.records, schedule.progress))]:
        view.end(line)
    for record in comparison.records:
        if record.state == "failed":
            folder = comparison.path / record.folder
            view.end(f"\n{record.label} failed: {record.error}\nThe end of {folder / LOG}:")
            for line in log_tail(folder, 5):
                view.end(f"  {line}")
    for line in [] if schedule.interrupted else findings(comparison, view.warn):
        view.end(line)
    if status == "interrupted":
        view.end(f"Resume with: corral compare --resume {comparison.path}")
        view.end(f"See what there is with: corral report {comparison.path}")
    elif status == "failed":
        view.end(f"Try failed runs again with: corral compare --resume {comparison.path} --retry-failed")
    return status


def comparison_status(comparison: Comparison) -> _Status:
    """Return the status of a comparison, from the states of its runs: interrupted, failed, or finished."""
    states = [record.state for record in comparison.records]
    if any(state in ("waiting", "running", "interrupted") for state in states):
        return "interrupted"
    return "failed" if "failed" in states else "finished"


def findings(comparison: Comparison, warn: Callable[[str], object]) -> list[str]:
    """Write report.html into the comparison's folder and return its findings as lines to print, or none if it cannot be made.

    Lines are the usable range of each swept setting, each contestant's results, and pairwise comparisons.
    """
    page = comparison.path / "report.html"
    try:
        report = make_report(read_runs([comparison.path]), [read_comparison(comparison.path)])
        write_page(report, page)
    except RunError as error:
        warn(f"there is no report: {error}")
        return []
    lines = [""]
    for sweep in report.sweeps:
        measured = f"final {report.measure.name} and its mean over the run ({sweep.seeds_text})"
        lines += [f"Usable range of {sweep.key}, by {measured}: {RULE}"]
        lines += [*(f"{found.sentence}; by the best of all: {found.text(found.overall)}" for found in sweep.ranges), ""]
    lines += [*_result_lines(report.tables["results"], report.measure), ""]
    lines += [row["sentence"] for row in report.tables["comparisons"] if row["measure"] == "final"]
    return [*lines, "", f"The report is in {page}"]


# ------------------------------------------------------------------------------------------- results, as the page has them


def choose(comparison: Comparison) -> ChosenSettings:
    """Choose the best swept setting of each compared method. A method whose runs all failed has none."""
    alive = {record.contestant for record in comparison.sweep_records if record.state in COUNTED}
    return choose_setting([row for row in sweep_rows(comparison) if row.contestant in alive], comparison.plan.choose_by)


def sweep_rows(comparison: Comparison) -> list[SweepRow]:
    """Build the rows of scores of a comparison's sweep, one per run. A failed run gets the worst score."""
    done = [record for record in comparison.sweep_records if record.state in COUNTED]
    runs = {record.folder: read_run(comparison.path / record.folder) for record in done}
    measure = main_metric([*runs.values()])
    return [
        sweep_row(record.contestant, record.setting, record.seed, runs.get(record.folder), measure)
        for record in comparison.sweep_records
    ]


def _result_lines(results: Sequence[Mapping[str, Any]], measure: Measure) -> list[str]:
    """Build the lines of the table of results, one per compared method, with its chosen setting."""
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
