"""The pool: results in order, workers that die or hang, an end that leaves nothing."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from io import FileIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandboxes import EVERY_BACKEND, alive_after_a_while, needs_a_sandbox, pool

import corral.lab.sandbox.pool as module
import corral.lab.sandbox.worker as workers
from corral.lab.sandbox import SandboxJob, SandboxLimits, SandboxResult, SandboxUnavailable, SandboxWorker
from corral.lab.sandbox.backend import BACKENDS
from corral.lab.sandbox.pool import SandboxPool, available_backend, shared_pool


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_golden_results_come_in_order(backend: str) -> None:
    # Later programs end first: 40 ms, 30 ms, …, 0 ms.
    jobs = [
        SandboxJob(code=f"import time; time.sleep({(4 - i) / 100}); print({i}, input())", stdin=str(i * i)) for i in range(5)
    ]
    with SandboxPool(3, backend=backend) as pool:
        results = pool.map(pool.run_one, jobs)
    assert [result.stdout for result in results] == ["0 0\n", "1 1\n", "2 4\n", "3 9\n", "4 16\n"]


@needs_a_sandbox
@settings(max_examples=10)
@given(ends=st.lists(st.sampled_from(["ok", "error", "output", "memory", "timeout"]), max_size=8))
def test_every_mixture_of_ends_keeps_its_order(ends: list[str]) -> None:
    codes = {
        "ok": "print(1)", "error": "1/0", "output": "while True: print('x' * 999)", "memory": "bytearray(1 << 40)",
        "timeout": "while True: pass",
    }  # fmt: skip
    limits = {end: SandboxLimits(timeout=0.15 if end == "timeout" else 10.0) for end in codes}
    jobs = [SandboxJob(code=codes[end], limits=limits[end]) for end in ends]
    assert [result.status for result in shared_pool(2).map(shared_pool(2).run_one, jobs)] == ends


@needs_a_sandbox
@pytest.mark.parametrize("error", [IndexError, KeyError, KeyboardInterrupt])
def test_what_goes_wrong_in_one_ends_all(error: type[BaseException]) -> None:
    seen: list[int] = []

    def fails_at_three(number: int) -> int:
        seen.append(number)
        if number == 3:
            raise error("three")
        time.sleep(0.01)
        return -number

    with SandboxPool(2) as pool:
        with pytest.raises(error, match="three"):
            pool.map(fails_at_three, range(1000))
        assert len(seen) < 100
        assert pool.map(lambda a, b: a - b, [5, 7, 9], [1, 2, 3]) == [4, 5, 6]


@needs_a_sandbox
def test_ctrl_c_in_the_main_thread_ends_the_others() -> None:
    """Else they would go on to the last of them, and the process would wait for that when it ends."""
    started: list[int] = []

    def slow(number: int) -> None:
        started.append(number)
        time.sleep(0.1)

    with SandboxPool(2) as pool:
        threading.Timer(0.3, signal.pthread_kill, [threading.main_thread().ident, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            pool.map(slow, range(1000))
        closing = time.monotonic()
    assert time.monotonic() - closing < 10
    assert len(started) < 200


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_pipes_that_a_forked_process_holds_open_are_not_waited_for(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[int] = []

    class Copied(SandboxWorker):
        def start(self, job: SandboxJob, *streams: FileIO) -> None:
            held.extend(os.dup(file.fileno()) for file in streams)  # as a fork of another thread has them
            super().start(job, *streams)

    monkeypatch.setattr(module, "SandboxWorker", Copied)
    begin = time.monotonic()
    with SandboxPool(1, backend=backend) as pool:
        result = pool.run_one(SandboxJob(code="print('x' * 300_000)", limits=SandboxLimits(timeout=20.0)))
    for file in held:
        os.close(file)
    assert (result.status, len(result.stdout)) == ("ok", 300_001)
    assert time.monotonic() - begin < 15


@needs_a_sandbox
def test_no_programs_no_results() -> None:
    assert shared_pool(2).map(shared_pool(2).run_one, []) == []


def during(
    backend: str, act: Callable[[SandboxWorker], None], job: SandboxJob, size: int = 1
) -> tuple[SandboxResult, SandboxResult, float]:
    """Run `job`, do something to its worker meanwhile, and run another one after it."""
    started: list[SandboxWorker] = []

    class Watched(SandboxWorker):
        def __init__(self, backend: str) -> None:
            super().__init__(backend)
            started.append(self)

    with pytest.MonkeyPatch.context() as patch, SandboxPool(size, backend=backend) as pool:
        patch.setattr(module, "SandboxWorker", Watched)
        patch.setattr(workers, "GRACE", 1.0)
        pool.run_one(SandboxJob(code=""))
        threading.Timer(0.2, act, [started[0]]).start()
        begin = time.monotonic()
        result = pool.run_one(job)
        seconds = time.monotonic() - begin
        after = pool.run_one(SandboxJob(code="print('after')"))
        leaders = [worker.process.pid for worker in started]
    assert [alive_after_a_while(leader) for leader in leaders] == [[]] * len(leaders)
    return result, after, seconds


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_a_killed_worker_is_replaced_and_its_program_run_again(backend: str) -> None:
    job = SandboxJob(code="import time; time.sleep(.5); print('done')")
    result, after, _ = during(backend, lambda worker: os.killpg(worker.process.pid, signal.SIGKILL), job)
    assert (result.status, result.stdout, after.stdout) == ("ok", "done\n", "after\n")


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_a_hung_worker_does_not_hang_anyone(backend: str) -> None:
    job = SandboxJob(code="import time; time.sleep(.5)", limits=SandboxLimits(timeout=1.0))
    result, after, seconds = during(backend, lambda worker: os.killpg(worker.process.pid, signal.SIGSTOP), job)
    assert (result.status, result.seconds, after.stdout) == ("timeout", 1.0, "after\n")
    assert seconds < 8


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_output_without_end_does_not_postpone_the_deadline(backend: str) -> None:
    """The worker is stopped, so nothing ends the program, and there is always something to read."""
    job = SandboxJob(code="import time; time.sleep(.5)\nwhile True: print('x' * 999)", limits=SandboxLimits(timeout=1.0))
    result, after, _ = during(backend, lambda worker: os.killpg(worker.process.pid, signal.SIGSTOP), job)
    assert (result.status, after.stdout) == ("timeout", "after\n")


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_a_worker_that_always_dies_is_an_error_not_a_loop(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Doomed(SandboxWorker):
        def run(self, job: SandboxJob) -> SandboxResult:
            os.killpg(self.process.pid, signal.SIGKILL)
            return super().run(job)

    monkeypatch.setattr(module, "SandboxWorker", Doomed)
    with SandboxPool(1, backend=backend) as pool:
        result = pool.run_one(SandboxJob(code="print(1)"))
    assert result.status == "error"
    assert "worker has gone" in result.stderr


@needs_a_sandbox
def test_workers_are_replaced_after_long_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "USES", 2)
    with SandboxPool(1) as pool:
        first = pool._take()
        pool._put(*first)
        for _ in range(3):
            assert pool.run_one(SandboxJob(code="print(1)")).status == "ok"
        second = pool._take()
        pool._put(*second)
    assert first[0] is not second[0]


@needs_a_sandbox
def test_a_closed_pool_says_so() -> None:
    with SandboxPool(1) as pool:
        pool.map(pool.run_one, [SandboxJob(code="")])
    pool.close()
    with pytest.raises(RuntimeError, match="it has been closed"):
        pool.map(pool.run_one, [SandboxJob(code="")] * 2)
    with pytest.raises(RuntimeError, match="it has been closed"):
        pool.run_one(SandboxJob(code=""))


@needs_a_sandbox
def test_settings_share_one_pool() -> None:
    assert shared_pool(2) is shared_pool(2)
    assert shared_pool(2) is not shared_pool(1)


@needs_a_sandbox
@pytest.mark.parametrize("there", [1, 3])
def test_without_a_size_there_is_one_worker_per_core(there: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "cores", lambda: there)
    with SandboxPool() as pool:
        assert pool.size == there
        assert [result.stdout for result in pool.map(pool.run_one, [SandboxJob(code="print(1)")] * 4)] == ["1\n"] * 4


@pytest.mark.parametrize("workers_", [0, -1])
def test_impossible_sizes_are_refused(workers_: int) -> None:
    with pytest.raises(ValueError, match="`workers` is a whole number above 0"):
        SandboxPool(workers_)


def test_without_namespaces_it_refuses_or_runs_unsafely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not", lambda name: "it is switched off")
    with pytest.raises(SandboxUnavailable, match="--unsafe-code-execution"):
        SandboxPool(1)
    with SandboxPool(2, unsafe_code_execution=True) as pool:
        assert [
            result.stdout for result in pool.map(pool.run_one, [SandboxJob(code="print(1)"), SandboxJob(code="print(2)")])
        ] == [
            "1\n",
            "2\n",
        ]
        first, second = pool.run_connected(SandboxJob(code="print(1)"), SandboxJob(code="assert input() == '1'"))
        assert (first.status, second.status) == ("ok", "ok")


@needs_a_sandbox
def test_a_process_that_just_ends_leaves_nothing() -> None:
    code = """
        from corral.lab.sandbox.pool import SandboxPool
        from corral.lab.sandbox import SandboxJob
        pool = SandboxPool(2)
        pool.map(pool.run_one, [SandboxJob(code="")] * 4)
        print(*[worker.process.pid for worker, _ in pool._idle])
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    leaders = done.stdout.split()
    assert [alive_after_a_while(int(leader)) for leader in leaders] == [[], []]


@needs_a_sandbox
def test_after_a_fork_the_pool_of_the_parent_is_left_alone() -> None:
    parents = shared_pool(2)
    parents.map(parents.run_one, [SandboxJob(code="")])
    before = [worker.process.pid for worker, _ in parents._idle]
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (
            lambda: parents.map(parents.run_one, [SandboxJob(code="")] * 2),
            lambda: parents.run_one(SandboxJob(code="")),
        ):
            try:
                use()
            except RuntimeError:
                refused += 1
        parents.close()  # as on leaving a context
        ours = shared_pool(2)
        os._exit(0 if refused == 2 and ours is not parents and ours.run_one(SandboxJob(code="print(1)")).stdout == "1\n" else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert parents.map(parents.run_one, [SandboxJob(code="print(2)")])[0].stdout == "2\n"
    assert [worker.process.pid for worker, _ in parents._idle] == before


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_many_threads_may_share_a_pool(backend: str) -> None:
    found: list[str] = []
    threads = [
        threading.Thread(target=lambda i=i: found.append(pool(backend).run_one(SandboxJob(code=f"print({i})")).stdout))
        for i in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert sorted(found) == [f"{i}\n" for i in range(8)]


def test_backends_are_tried_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr(module, "why_not", lambda name: tried.append(name) or ("" if name == "unshare" else "no"))
    assert available_backend() == "unshare"
    assert tried == list(BACKENDS) == ["bwrap", "unshare"]
