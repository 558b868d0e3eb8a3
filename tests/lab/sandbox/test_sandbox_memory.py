"""Memory that a program might hold beyond its limit: refused by the filter, counted by polling, or bounded by a cgroup."""

import fcntl
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from sandboxes import EVERY_BACKEND, needs_a_sandbox, run

from corral.lab.cli.doctor import sandbox as doctor_row
from corral.lab.sandbox import SandboxJob, SandboxLimits, SandboxWorker, cgroup
from corral.lab.sandbox.inside import zygote
from corral.lab.sandbox.pool import CGROUP, POLLING, memory_bound

ROOT = str(Path(cgroup.__file__).parents[2])
SMALL = SandboxLimits(memory_mb=64, timeout=20.0)
FEW = 0.5
"""Seconds that a program which holds what it may not is given to hold on to it."""

ATTACKS = {
    "children beside their parent": """
import ctypes, errno, os, time
if os.uname().machine != "x86_64": raise PermissionError
libc = ctypes.CDLL(None, use_errno=True)
for _ in range(20):
    child = libc.syscall(ctypes.c_long(56), ctypes.c_long(0x8000 | 17), *[ctypes.c_long(0)] * 4)  # CLONE_PARENT
    if child < 0: raise PermissionError(errno.errorcode[ctypes.get_errno()])
    if child == 0:
        x = bytearray(50 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(60)
""",
    "shared anonymous memory": """
import mmap
kept = [mmap.mmap(-1, 16 << 20) for _ in range(3)]
""",
    "shared anonymous memory of another kind": """
import mmap
mmap.mmap(-1, 1 << 20, flags=3 | mmap.MAP_ANONYMOUS)  # MAP_SHARED_VALIDATE
""",
    "zeros, mapped shared": """
import mmap, os
mmap.mmap(os.open("/dev/zero", os.O_RDWR), 16 << 20)
""",
    "huge pages": """
import mmap
mmap.mmap(-1, 2 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x40000)
""",
    "pages that are swapped out": """
import mmap
page = mmap.mmap(-1, 1 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
page.madvise(21)  # MADV_PAGEOUT
""",
    "connections that nobody accepts": """
import socket
server = socket.socket(socket.AF_UNIX); server.bind("\\0name"); server.listen(4096)
kept = [socket.socket(socket.AF_UNIX) for _ in range(50)]
for one in kept: one.connect("\\0name")
""",
    "larger sockets": """
import socket
a, b = socket.socketpair()
a.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 22)
""",
    "filters on a socket": """
import ctypes, socket, struct
program = ctypes.create_string_buffer(struct.pack("=HBBI", 6, 0, 0, 0xFFFF))
a, b = socket.socketpair()
a.setsockopt(socket.SOL_SOCKET, 26, struct.pack("=HxxxxxxQ", 1, ctypes.addressof(program)))  # SO_ATTACH_FILTER
""",
    "larger pipes": """
import fcntl, os
fcntl.fcntl(os.pipe()[1], 1031, 1 << 20)  # F_SETPIPE_SZ
""",
    "leases": """
import fcntl
fcntl.fcntl(open("/tmp/x", "w+"), fcntl.F_SETLEASE, fcntl.F_WRLCK)  # whoever opens the file waits
""",
}


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("name", ATTACKS)
def test_the_way_is_closed(backend: str, name: str) -> None:
    code = f"""
try:
    exec({ATTACKS[name]!r})
    print("did it")
except (PermissionError, FileNotFoundError) as error:
    print("refused")
except OSError as error:
    print("refused" if error.errno == 38 else error)  # ENOSYS
"""
    result = run(backend, code, memory_mb=64)
    assert (result.status, result.stdout) == ("ok", "refused\n"), result


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_the_interpreters_files_have_no_leases(backend: str) -> None:
    """An ordinary user may own them: the trainer's own open() would wait for the lease to be given up."""
    code = "import fcntl, os\ntry: fcntl.fcntl(os.open(os.__file__, os.O_RDONLY), fcntl.F_SETLEASE, fcntl.F_RDLCK)\n"
    code += "except PermissionError as error: print(error.errno)"
    assert (
        run(backend, code).stdout == "1\n"
    )  # EPERM by the filter; the kernel itself says EACCES to those who are not the owner


SOCKETS = f"""
import os, socket, time
for _ in range(40):
    if os.fork() == 0:
        kept = []
        try:
            while True:
                a, b = socket.socketpair(); kept += [a, b]; a.setblocking(False); b.setblocking(False)
                for one in (a, b):
                    try:
                        while True: one.send(bytes(1 << 16))
                    except BlockingIOError: pass
        except OSError: time.sleep({FEW})
        os._exit(0)
while True: os.wait()
"""


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_sockets_of_many_processes_are_counted(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # 40 processes of 60 sockets of 208 KiB: 500 MB that no process is charged for.
    monkeypatch.setattr("corral.lab.sandbox.worker.find_cgroup_parent", lambda: None)  # a cgroup would count them too
    with SandboxWorker(backend) as worker:
        assert worker.run(SandboxJob(code=SOCKETS, limits=SMALL)).status == "memory"
    few = "import socket\nkept = [socket.socketpair() for _ in range(20)]\nimport time; time.sleep(.1)"
    assert run(backend, few, memory_mb=64).status == "ok"


MAPS = f"""
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
count = 16_000
start = libc.mmap(None, count * 4096, 0, 0x22, -1, 0)  # private, anonymous, not touched
for page in range(0, count, 2):  # no two maps beside each other can be one
    assert libc.mprotect(start + 4096 * page, 4096, 1) == 0
for _ in range(60):
    if os.fork() == 0: time.sleep(30)
time.sleep({FEW})
"""


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_memory_maps_of_many_processes_are_counted(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """60 processes of 16,000 maps of 230 bytes: 220 MB of the kernel's own, of which none is resident in any process."""
    monkeypatch.setattr("corral.lab.sandbox.worker.find_cgroup_parent", lambda: None)
    with SandboxWorker(backend) as worker:
        assert worker.run(SandboxJob(code=MAPS, limits=SandboxLimits(memory_mb=100, timeout=60.0))).status == "memory"
        one = MAPS.replace("range(60)", "range(0)").replace("16_000", "20_000")
        assert worker.run(SandboxJob(code=one, limits=SandboxLimits(memory_mb=100, timeout=60.0))).status == "ok"


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_the_address_space_of_the_largest_process_costs_nothing(backend: str) -> None:
    code = "import time\nx = bytearray(500 << 20)\nfor at in range(0, len(x), 4096): x[at] = 1\ntime.sleep(.2)"
    assert run(backend, code, memory_mb=512, timeout=30.0).status == "ok"


FORKS = """
import os, time
for _ in range(40):
    if os.fork() == 0:
        x = bytearray(60 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(30)
try:
    while True: os.wait()
except ChildProcessError: pass
"""


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("delegated", [True, False], ids=["cgroup", "no cgroup"])
def test_all_processes_together_are_bounded(backend: str, delegated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if delegated and cgroup.find_cgroup_parent() is None:
        pytest.skip("no memory cgroup is delegated here")
    if not delegated:
        monkeypatch.setattr("corral.lab.sandbox.worker.find_cgroup_parent", lambda: None)
    with SandboxWorker(backend) as worker:
        assert (worker.group is not None) == delegated
        started = time.monotonic()
        assert worker.run(SandboxJob(code=FORKS, limits=SMALL)).status == "memory"
        assert time.monotonic() - started < 15
        two = FORKS.replace("range(40)", "range(2)")  # 120 MiB, nearly all of which is pages that they hold
        assert worker.run(SandboxJob(code=two, limits=SMALL)).status == "memory"
        assert worker.run(SandboxJob(code="print('fine')")).stdout == "fine\n"


needs_a_cgroup = pytest.mark.skipif(cgroup.find_cgroup_parent() is None, reason="no memory cgroup is delegated here")


@needs_a_cgroup
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_the_kernel_holds_all_of_a_worker_to_its_limit(backend: str) -> None:
    with SandboxWorker(backend) as worker:
        group = worker.group
        assert group is not None
        worker.run(SandboxJob(code="", limits=SMALL))
        # 64 MiB, as much for /tmp, 2 MiB for each of 64 processes, 48 MiB for the worker.
        assert int(group.limit.read_text()) == (64 + 64 + 128 + 48) << 20
        worker.run(SandboxJob(code="", limits=SandboxLimits(memory_mb=4096)))
        group.limit.write_text(str(100 << 20))  # 40 × 60 MB are far below what polling would end
        assert worker.run(SandboxJob(code=FORKS, limits=SandboxLimits(memory_mb=4096, timeout=20.0))).status == "memory"
        peaks = [group.path / name for name in ("memory.peak", "memory.max_usage_in_bytes")]
        assert 60 << 20 < next(int(peak.read_text()) for peak in peaks if peak.exists()) <= 100 << 20
        assert (group.path / "cgroup.procs").read_text().split()  # the worker is in it, and alive
        assert worker.run(SandboxJob(code="print('fine')")).stdout == "fine\n"
    assert not group.path.exists()


@needs_a_cgroup
def test_groups_that_a_killed_process_left_are_removed() -> None:
    place = cgroup.find_cgroup_parent()
    assert place is not None
    left, kept = place[0] / f"{cgroup.PREFIX}left", place[0] / f"{cgroup.PREFIX}kept"
    left.mkdir()
    kept.mkdir()
    lock = os.open(kept, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        cgroup.MemoryCgroup(*place).close()
        assert (left.exists(), kept.exists()) == (False, True)
    finally:
        os.close(lock)
        kept.rmdir()


def oom_scores(process: int) -> set[int]:
    """The scores of all below a process, by which the kernel chooses what to end where memory runs out."""
    found: set[int] = set()
    for task in Path(f"/proc/{process}/task").iterdir():
        for child in (task / "children").read_text().split():
            found |= {int(Path(f"/proc/{child}/oom_score_adj").read_text()), *oom_scores(int(child))}
    return found


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_where_memory_runs_out_programs_are_ended_first_and_then_the_worker(backend: str) -> None:
    with SandboxWorker(backend) as worker, ThreadPoolExecutor(1) as thread:
        assert max(oom_scores(worker.process.pid)) == 500
        program = thread.submit(worker.run, SandboxJob(code="import time; time.sleep(30)", limits=SandboxLimits(timeout=3.0)))
        deadline = time.monotonic() + 2.5
        while 1000 not in oom_scores(worker.process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert oom_scores(worker.process.pid) >= {500, 1000}
        assert program.result().status == "timeout"


@pytest.mark.parametrize(
    ("kernel_killed", "reason", "status"),
    [(True, "", "memory"), (True, "timeout", "memory"), (False, "", "ok"), (False, "timeout", "timeout")],
)
def test_a_program_that_ends_well_after_the_kernel_killed_its_child_has_run_out_of_memory(
    kernel_killed: bool, reason: str, status: str
) -> None:
    worker = SimpleNamespace(memory=SimpleNamespace(group_ran_out=lambda: kernel_killed))
    assert zygote._Zygote.verdict(worker, reason, 0) == {"status": status}


HYBRID = """12:pids:/user.slice
9:memory:/docker/abc/task
0::/user.slice
"""
UNIFIED = "0::/user.slice/user-1000.slice/app.scope\n"
HYBRID_MOUNTS = """30 23 0:26 / {top}/unified rw,relatime - cgroup2 cgroup2 rw
35 31 0:32 /docker/abc {top}/memory rw,relatime - cgroup cgroup rw,memory
36 31 0:33 / {top}/pids rw,relatime - cgroup cgroup rw,pids
"""
UNIFIED_MOUNTS = "30 23 0:26 / {top} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"


@pytest.mark.parametrize(
    ("membership", "mounts", "passing", "found"),
    [
        (HYBRID, HYBRID_MOUNTS, [], [("memory/task", 1)]),
        (UNIFIED, UNIFIED_MOUNTS, ["user.slice/user-1000.slice"], [("user.slice/user-1000.slice", 2)]),
        (UNIFIED, UNIFIED_MOUNTS, [], []),
        ("0::/\n", UNIFIED_MOUNTS, ["."], [(".", 2)]),
        ("0::/../other\n", "30 23 0:26 /../other {top} rw - cgroup2 cgroup2 rw\n", [], []),
        (None, UNIFIED_MOUNTS, [], []),
        (UNIFIED, "30 23 0:26 /elsewhere {top} rw - cgroup2 cgroup2 rw\n", [], []),
    ],
)
def test_golden_places_for_groups(
    membership: str | None, mounts: str, passing: list[str], found: list[tuple[str, int]], tmp_path: Path
) -> None:
    if membership is not None:
        (tmp_path / "cgroup").write_text(membership)
    (tmp_path / "mountinfo").write_text(mounts.format(top=tmp_path / "fs"))
    for name in ("user.slice/user-1000.slice/app.scope", *passing):
        (tmp_path / "fs" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name / "cgroup.subtree_control").write_text("cpu memory pids\n" if name in passing else "cpu pids\n")
    places = cgroup.places(tmp_path / "cgroup", tmp_path / "mountinfo")
    assert places == [(tmp_path / "fs" / name, version) for name, version in found]


def test_a_place_that_cannot_be_written_to_lends_nothing(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cgroup\.procs"):  # an ordinary folder has no such file
        cgroup.MemoryCgroup(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


@needs_a_sandbox
def test_what_bounds_memory_is_said() -> None:
    name, what, note = doctor_row()
    assert name == "sandbox"
    assert note == memory_bound(what)
    assert note == (CGROUP if cgroup.find_cgroup_parent() else POLLING)


def test_a_missing_sandbox_is_said_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert doctor_row()[1:2] == ("–",)
    assert "it runs darwin" in doctor_row()[2]


@needs_a_cgroup
def test_a_process_that_is_killed_leaves_a_group_that_is_removed_later() -> None:
    place = cgroup.find_cgroup_parent()
    assert place is not None
    code = f"""
import os, signal, sys, types
for name, path in (("corral", {ROOT!r}), ("corral.task", {ROOT!r} + "/task")):  # without what they import
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from corral.lab.sandbox import SandboxWorker, available_backend
worker = SandboxWorker(available_backend())
print(worker.group.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    path = Path(done.stdout.strip())
    assert path.name.startswith(cgroup.PREFIX), done.stderr
    deadline = time.monotonic() + 10
    while path.exists() and time.monotonic() < deadline:  # its processes take a moment to end
        cgroup.sweep(place[0])
        time.sleep(0.05)
    assert not path.exists()
