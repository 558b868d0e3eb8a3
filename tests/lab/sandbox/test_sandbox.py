"""The sandbox as ordinary programs meet it: status, input, output, limits; and what happens where there is none."""

import gc
import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sandboxes import EVERY_BACKEND, alive_after_a_while, needs_a_sandbox, needs_root, reason, run

import corral.lab.sandbox as sandbox
from corral.lab.sandbox import SandboxJob, SandboxLimits, SandboxUnavailable, SandboxWorker, run_python
from corral.lab.sandbox import backend as backends
from corral.lab.sandbox import view as views
from corral.lab.sandbox.inside import filter, syscalls
from corral.lab.sandbox.unsafe import run_unsafe, run_unsafe_connected
from corral.lab.sandbox.worker import run_connected

pytestmark = pytest.mark.filterwarnings("error")

# ---------------------------------------------------------------- status


ENDS = {
    "ok": [
        "",
        "print(1)",
        "import sys; sys.exit()",
        "import sys; sys.exit(0)",
        "exit()",
        "quit(0)",
        "import os; os._exit(0)",
        "raise SystemExit",
        "x = None\ndel x",
        "try:\n    'x' * 10**13\nexcept MemoryError:\n    pass",
        "import sys; sys.stdout.close()",
        "import sys; sys.stderr.close(); sys.stdin.close()",
        "import os; os.close(0)",
        "import signal; signal.alarm(60)",
        "# -*- coding: latin-1 -*-\nprint(1)",
    ],
    "error": [
        "1/0",
        "syntax error",
        "import sys; sys.exit(3)",
        "import sys; sys.exit('why')",
        "import sys; sys.exit(256 + 1)",
        "import os; os._exit(7)",
        "import os; os.abort()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
        "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
        "import ctypes; ctypes.string_at(0)",
        "def f(): f()\nf()",
        "raise KeyboardInterrupt",
        "raise BaseException('mine')",
        "import numpy",
        "import corral",
        "print('\\0')\nraise OSError(5, 'five')",
        "import atexit, os; atexit.register(os._exit, 3)",
        "import sys\ndef hook(*_): raise OSError\nsys.excepthook = hook\n1/0",
        "import sys\nsys.excepthook = sys.exit\n1/0",
        "import sys\nclass W:\n    write = flush = lambda *_: 1/0\nsys.stderr = W()\nsys.exit('x')",
        "raise type('E', (Exception,), {'__str__': lambda s: 1/0})",
        "import sys; sys.exit(type('E', (), {'__str__': lambda s: 1/0})())",
        "import os; os.close(1); print('lost')",
    ],
    "timeout": [
        "while True: pass",
        "import time; time.sleep(100)",
        "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(100,)).start()",
        "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: pass'])",
        "import atexit, time; atexit.register(time.sleep, 100)",
        "class Slow:\n    def __del__(self):\n        while True: pass\nslow = Slow()",
        "(10**8)**(10**8)",
    ],
    "memory": [
        "raise MemoryError",
        "'x' * 10**12",
        "x = bytearray(10**9)",
        "x = []\nwhile True: x.append(bytearray(10**6))",
        "x = []\nwhile True: x.append([bytes(10**5)] * 10**4)",
        "import mmap; mmap.mmap(-1, 10**9, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)",
        "def f(x):\n    return f([x, bytearray(10**6)])\nimport sys; sys.setrecursionlimit(10**9)\nf(0)",
    ],
    "output": [
        "while True: print('x' * 1000)",
        "import sys\nwhile True: sys.stderr.write('x' * 1000)",
        "import os\nwhile True: os.write(1, bytes(10**6))",
        "print('x' * 2**21)",
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'while True: print(1)'])",
    ],
}


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(("status", "code"), [(status, code) for status, codes in ENDS.items() for code in codes])
def test_how_a_program_ends(backend: str, status: str, code: str) -> None:
    started = time.monotonic()
    result = run(backend, code, timeout=0.4 if status == "timeout" else 10.0)
    assert result.status == status, result
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_golden_result(backend: str) -> None:
    code = "import sys\na, b = map(int, input().split())\nprint(a + b)\nprint('note', file=sys.stderr)"
    result = run_python(code, "3 4\n", backend=backend)
    assert (result.status, result.stdout, result.stderr) == ("ok", "7\n", "note\n")
    assert 0 < result.seconds < 5


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_tracebacks_show_the_program_alone(backend: str) -> None:
    result = run(backend, "def f():\n    return 1/0\nf()")
    assert re.fullmatch(
        r'Traceback \(most recent call last\):\n  File "<program>", line 3, in <module>\n'
        r'  File "<program>", line 2, in f\nZeroDivisionError: division by zero\n',
        result.stderr,
    ), result.stderr


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_seconds_are_the_programs_own(backend: str) -> None:
    assert 0.3 <= run(backend, "import time; time.sleep(.3)").seconds < 3
    assert 0.2 <= run(backend, "while True: pass", timeout=0.2).seconds < 3


# ---------------------------------------------------------------- input and output


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(
    ("code", "stdin", "stdout"),
    [
        ("print(input(), input())", "a\nb\n", "a b\n"),
        ("import sys; print(len(sys.stdin.read()))", "x" * 5_000_000, "5000000\n"),
        ("print('never reads')", "x" * 5_000_000, "never reads\n"),
        ("import sys; print(sum(1 for _ in sys.stdin))", "a\n\nb", "3\n"),
        ("import sys; print(sys.stdin.buffer.read())", "\ud800\0é", "b'\\xed\\xa0\\x80\\x00\\xc3\\xa9'\n"),
        ("print(repr(input()))", "é\u2028ü\n", "'é\\u2028ü'\n"),
        ("import os; os.write(1, b'\\xff\\xfe ok')", "", "\ufffd\ufffd ok"),
        ("print('日本')", "", "日本\n"),
        ("print('a\\r\\nb', end='')", "", "a\r\nb"),
        ("print(__name__, __import__('sys').argv)", "", "__main__ ['program.py']\n"),
        ("import atexit; atexit.register(print, 'bye'); print('hello')", "", "hello\nbye\n"),
        ("class A:\n    def __del__(self): print('gone')\na = A()", "", "gone\n"),
        ("import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait(); print('parent')", "", "child\nparent\n"),
        ("import threading\nt = threading.Thread(target=print, args=('thread',)); t.start()", "", "thread\n"),
        ("import asyncio\nasync def f(): return 5\nprint(asyncio.run(f()))", "", "5\n"),
        ("import multiprocessing as m\nwith m.Pool(2) as p: print(p.map(abs, [-1, -2]))", "", "[1, 2]\n"),
        (
            "import multiprocessing as m\nprint(m.Value('i', 7).value, m.Array('i', 3)[:], m.Pipe()[0].closed)",
            "",
            "7 [0, 0, 0] False\n",
        ),
        (
            "import sqlite3; c = sqlite3.connect('x'); c.execute('create table t (a)'); c.commit(); print(c.total_changes)",
            "",
            "0\n",
        ),
        (
            "import subprocess as s, sys; print(s.run([sys.executable, '-c', 'print(1)'], capture_output=True).stdout)",
            "",
            "b'1\\n'\n",
        ),
        ("import tempfile\nwith tempfile.TemporaryFile() as f: print(f.write(b'abc'))", "", "3\n"),
        ("import random, secrets, uuid; print(len(uuid.uuid4().hex))", "", "32\n"),
        ("import sqlite3; print(sqlite3.connect(':memory:').execute('select 1').fetchone())", "", "(1,)\n"),
        ("from dataclasses import dataclass\n@dataclass\nclass P:\n    x: int\nprint(P(1))", "", "P(x=1)\n"),
        ("print(sorted({'b', 'a'}), hash('x') == hash('x'))", "", "['a', 'b'] True\n"),
        ("import time, datetime; print(time.time() > 0)", "", "True\n"),
    ],
)
def test_ordinary_programs(backend: str, code: str, stdin: str, stdout: str) -> None:
    result = run(backend, code, stdin)
    assert (result.status, result.stdout, result.stderr) == ("ok", stdout, ""), result


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize("code", ["x = 1\0", "print('\ud800')", "\ufeff1/0", "#" * 1_000_000 + "\n1/0", "(" * 5000, "é = = 1"])
def test_odd_sources_are_an_error_like_any_other(backend: str, code: str) -> None:
    assert run(backend, code).status in ("error", "memory")


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_deep_recursion_has_the_stack_it_needs(backend: str) -> None:
    code = "import sys\nsys.setrecursionlimit(10**6)\ndef f(n): return n and 1 + f(n - 1)\nprint(f(50_000))"
    assert run(backend, code).stdout == "50000\n"


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_output_up_to_the_limit_is_kept_and_beyond_it_cut(backend: str) -> None:
    result = run(backend, "print('x' * 99, end='')", output=99)
    assert (result.status, result.stdout) == ("ok", "x" * 99)
    result = run(backend, "print('x' * 100, end='')", output=99)
    assert (result.status, result.stdout) == ("output", "x" * 99)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_memory_is_what_was_asked_for(backend: str) -> None:
    take = "x = bytearray({} << 20)\nfor i in range(0, len(x), 4096): x[i] = 1"
    assert run(backend, take.format(60), memory_mb=64).status == "ok"
    assert run(backend, take.format(64), memory_mb=64).status == "memory"
    assert run(backend, take.format(300), memory_mb=512).status == "ok"


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_the_same_program_has_the_same_sets_in_the_same_order(backend: str) -> None:
    code = "print({str(i) for i in range(100)})"
    assert run_python(code, backend=backend).stdout == run(backend, code).stdout


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_chance_is_new_for_every_program(backend: str) -> None:
    # All are forked from one process, which has loaded `random`.
    drawn = [run(backend, "import random; print(random.random())").stdout for _ in range(4)]
    assert len(set(drawn)) == 4


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_two_programs_that_talk(backend: str) -> None:
    asks = "import sys\nfor i in range(3):\n    print(i, flush=True)\n    sys.stderr.write(input())"
    answers = "import sys\nfor line in sys.stdin:\n    print(int(line) ** 2, flush=True)"
    with SandboxWorker(backend) as one, SandboxWorker(backend) as other:
        pair = (one, other)
        first, second = run_connected(pair, SandboxJob(code=asks), SandboxJob(code=answers))
        assert (first.status, first.stderr, second.status) == ("ok", "014", "ok")
        first, second = run_connected(pair, SandboxJob(code=asks), SandboxJob(code="1/0"))
        assert (first.status, second.status) == ("error", "error")
        quick = SandboxLimits(timeout=0.3)
        first, second = run_connected(pair, SandboxJob(code="input()", limits=quick), SandboxJob(code="input()", limits=quick))
        assert "timeout" in {first.status, second.status} <= {"timeout", "error"}  # the end of one may end the other's input
        closes = "import os, sys, time\nos.close(1)\ntime.sleep(.5)"  # its end of the pipe, seen before its own end
        reads = (
            "import sys, time\nstart = time.monotonic()\nsys.stdin.read()\nsys.stderr.write(str(time.monotonic() - start < .4))"
        )
        _, second = run_connected(pair, SandboxJob(code=closes), SandboxJob(code=reads))
        assert (second.status, second.stderr) == ("ok", "True")


@needs_a_sandbox
@settings(max_examples=40)
@given(code=st.text(max_size=200), stdin=st.text(max_size=50))
def test_any_text_has_a_result(code: str, stdin: str) -> None:
    result = run(fastest(), code, stdin, timeout=1.0)
    assert result.status in ("ok", "error", "timeout", "memory", "output")


@needs_a_sandbox
@settings(max_examples=40)
@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\r"), max_size=300))
def test_text_comes_back_as_it_went_in(text: str) -> None:
    code = "import sys\nsys.stdout.write(sys.stdin.read())"
    assert run(fastest(), code, text).stdout == text
    assert run(fastest(), f"import sys\nsys.stdout.write({text!r})").stdout == text


def fastest() -> str:
    return next(name for name in backends.BACKENDS if not reason(name))


# ---------------------------------------------------------------- nothing is left


def descendants() -> list[str]:
    """Command lines of everything below this process."""
    found, queue = [], [str(os.getpid())]
    while queue:
        for task in Path(f"/proc/{queue.pop()}/task").glob("*/children"):
            for child in task.read_text().split():
                found.append(Path(f"/proc/{child}/cmdline").read_text())
                queue.append(child)
    return found


def mine() -> list[str]:
    return [line for line in descendants() if "marshal.load" in line]


@pytest.mark.parametrize("backend", EVERY_BACKEND)
@pytest.mark.parametrize(
    "code",
    [
        "print(1)",
        "import os\nfor _ in range(9):\n    if os.fork() == 0:\n        import time; time.sleep(100)",
        "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0: time.sleep(100)\n    os._exit(0)",
        "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'while True: pass'], start_new_session=True)",
        "while True: pass",
    ],
)
def test_no_process_file_or_mount_is_left(backend: str, code: str) -> None:
    gc.collect()
    before = (len(mine()), Path("/proc/self/mounts").read_text(), os.listdir("/proc/self/fd"), sorted(os.listdir("/tmp")))
    started = time.monotonic()
    run_python(code, timeout=0.5, backend=backend)
    assert time.monotonic() - started < 5
    after = (len(mine()), Path("/proc/self/mounts").read_text(), os.listdir("/proc/self/fd"), sorted(os.listdir("/tmp")))
    assert after[:3] == before[:3]
    assert not [name for name in set(after[3]) - set(before[3]) if "corral" in name]


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_everything_ends_with_the_process_that_started_it(backend: str) -> None:
    root = str(Path(sandbox.__file__).parents[2])
    code = f"""
        import os, signal, sys, threading, time, types
        for name, path in (("corral", {root!r}), ("corral.task", {root!r} + "/task")):  # without what they import
            sys.modules[name] = types.ModuleType(name)
            sys.modules[name].__path__ = [path]
        from corral.lab.sandbox import SandboxJob, SandboxWorker
        worker = SandboxWorker({backend!r})
        threading.Thread(target=worker.run, args=(SandboxJob(code="while True: pass"),), daemon=True).start()
        time.sleep(.3)
        print(worker.process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120)
    leader = int(done.stdout)
    assert alive_after_a_while(leader) == []


# ---------------------------------------------------------------- who runs it, and where the interpreter lives


AS_NOBODY = '''
import sys, types
for name, path in (("corral", {root!r}), ("corral.task", {root!r} + "/task")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from corral.lab.sandbox import run_python
bomb = """
import os, time
try:
    while True:
        if os.fork() == 0: time.sleep(9)
except OSError: print("held")
"""
for code in ("import os; print(os.getuid(), os.path.exists('/home'))", bomb, "open('/x', 'w')", "bytearray(10**9)"):
    result = run_python(code, backend={backend!r})
    print(result.status, result.stdout.strip() or None)
'''


@needs_root
@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_an_ordinary_user_gets_the_same_sandbox(backend: str) -> None:
    python = next((path for path in ("/usr/bin/python3", "/usr/local/bin/python3") if os.path.exists(path)), None)
    if python is None:
        pytest.skip("there is no interpreter that other users can read")
    version = subprocess.run([python, "-c", "import sys; print(sys.version_info >= (3, 11))"], capture_output=True, text=True)
    if version.stdout.strip() != "True":
        pytest.skip(f"{python} is older than 3.11")
    root = Path(sandbox.__file__).parents[2]
    if not all(folder.stat().st_mode & 0o001 for folder in (root, *root.parents)):
        pytest.skip("other users cannot enter the folder of this package")
    script = AS_NOBODY.format(root=str(root), backend=backend)
    done = subprocess.run(
        [python, "-I", "-B", "-c", script], user=65534, group=65534, extra_groups=[], capture_output=True, text=True, timeout=60
    )
    assert done.stdout.splitlines() == ["ok 65534 False", "ok held", "error None", "memory None"], done.stderr


def test_only_the_interpreter_and_libraries_are_in_view() -> None:
    seen = views.file_view()
    home = os.path.expanduser("~")
    assert views.interpreter() in seen.paths or any(views.is_inside(views.interpreter(), path) for path in seen.paths)
    for path in seen.paths:
        assert path not in ("/", "/usr", "/home", "/root", home, sys.base_prefix, sys.prefix)
    ours = str(Path(sandbox.__file__).parents[2])
    visible = any(views.is_inside(ours, path) for path in seen.paths)
    assert not visible or any(views.is_inside(ours, path) for path in seen.hidden)


@pytest.mark.parametrize("backend", EVERY_BACKEND)
def test_installed_packages_are_hidden_and_paths_of_the_user_absent(backend: str) -> None:
    paths = [
        *views.file_view().hidden,
        os.getcwd(),
        os.path.expanduser("~"),
        str(Path(sandbox.__file__).parent),
        "/work",
        "/home",
    ]
    code = f"import os\nfor p in {paths!r}:\n    print(p, os.listdir(p) if os.path.exists(p) else None)"
    for line, path in zip(run(backend, code).stdout.splitlines(), paths, strict=True):
        _, _, there = line.rpartition(" ") if line.endswith(("None", "[]")) else line.partition(" ")
        is_parent = any(views.is_inside(one, path) for one in views.file_view().paths)
        assert there in ("None", "[]") or is_parent, line
        if is_parent and path == os.path.expanduser("~"):  # the interpreter lives at home: one branch leads there
            assert there.count("'") == 2, line


# ---------------------------------------------------------------- refusal, and the way around it


def test_without_namespaces_nothing_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sandbox.pool, "why_not", lambda name: "it is switched off")
    touched = tmp_path / "touched"
    with pytest.raises(SandboxUnavailable) as refused:
        run_python(f"open({str(touched)!r}, 'w')")
    assert not touched.exists()
    for words in ("bwrap: it is switched off", "unshare: it is switched off", "--unsafe-code-execution", "Install bubblewrap"):
        assert words in str(refused.value)
    result = run_python(f"open({str(touched)!r}, 'w'); print('unsafe')", unsafe_code_execution=True)
    assert (result.status, result.stdout, touched.exists()) == ("ok", "unsafe\n", True)


AS_PACKAGE = """
import sys, types
for name, path in (("corral", {root!r}), ("corral.task", {root!r} + "/task")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
from corral.lab.sandbox import SandboxUnavailable, run_python
try:
    print(run_python("print(1)").status)
except SandboxUnavailable as error:
    print(error)
"""


@pytest.mark.skipif(shutil.which("unshare") is None, reason="util-linux's unshare is not installed")
def test_a_system_without_user_namespaces_is_a_refusal() -> None:
    script = AS_PACKAGE.format(root=str(Path(sandbox.__file__).parents[2]))
    forbid = f"echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -I -c {shlex.quote(script)}"
    done = subprocess.run(
        ["unshare", "--user", "--map-root-user", "sh", "-c", forbid], capture_output=True, text=True, timeout=60
    )
    if done.returncode != 0:
        pytest.skip(f"it cannot be tried here: {done.stderr.strip()[-200:]}")
    assert "this system does not offer them" in done.stdout
    assert "--unsafe-code-execution" in done.stdout


@needs_root
@needs_a_sandbox
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="util-linux's setpriv is not installed")
def test_a_root_that_may_not_mount_becomes_nobody_first() -> None:
    if not os.path.exists("/usr/bin/python3"):
        pytest.skip("there is no interpreter that other users can read")
    script = AS_PACKAGE.format(root=str(Path(sandbox.__file__).parents[2]))
    weak = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "/usr/bin/python3", "-I", "-B", "-c", script]
    done = subprocess.run(weak, capture_output=True, text=True, timeout=60)
    if "Traceback" in done.stderr:
        pytest.skip(f"it cannot be tried here: {done.stderr.strip()[-200:]}")
    assert done.stdout == "ok\n"


def test_another_system_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxUnavailable, match="it runs darwin"):
        sandbox.pool.available_backend()


@needs_a_sandbox
def test_asking_for_the_unsafe_way_still_uses_the_wall_where_there_is_one() -> None:
    result = run_python("import os; print(os.path.exists('/proc'))", unsafe_code_execution=True)
    assert result.stdout == "False\n"


def test_a_missing_bubblewrap_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends.shutil, "which", lambda name: None)
    with pytest.raises(SandboxUnavailable, match="not installed"):
        backends._bubblewrap()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("ok", "print(input())"),
        ("error", "1/0"),
        ("timeout", "while True: pass"),
        ("timeout", "import os\nif os.fork() == 0:\n    while True: pass\nos.wait()"),
        ("memory", "x = bytearray(10**10)"),
        ("output", "while True: print('x' * 1000)"),
    ],
)
def test_the_unsafe_way_has_the_same_statuses(status: str, code: str) -> None:
    limits = SandboxLimits(timeout=0.5 if status == "timeout" else 10.0, memory_mb=256)
    result = run_unsafe(SandboxJob(code=code, stdin="line", limits=limits))
    assert result.status == status, result
    assert status != "ok" or result.stdout == "line\n"


def test_the_unsafe_way_does_not_wait_for_daemons() -> None:
    started = time.monotonic()
    code = "import os, time\nprint('done', flush=True)\nif os.fork() == 0: time.sleep(60)"
    result = run_unsafe(SandboxJob(code=code))
    assert (result.status, result.stdout) == ("ok", "done\n")
    assert time.monotonic() - started < 5


def test_two_programs_that_talk_the_unsafe_way() -> None:
    first, second = run_unsafe_connected(
        SandboxJob(code="print(7, flush=True)\nimport sys; sys.stderr.write(input())"),
        SandboxJob(code="print(int(input()) + 1)"),
    )
    assert (first.status, first.stderr, second.status) == ("ok", "8", "ok")


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings_", "words"),
    [
        ({"timeout": 0}, "`timeout` is a number of seconds and must lie in (0, 86400.0]"),
        ({"timeout": -1.0}, "got -1.0"),
        ({"timeout": float("inf")}, "got inf"),
        ({"timeout": float("nan")}, "got nan"),
        ({"memory_mb": 0}, "`memory_mb` is a number of MiB, a whole number in [1, 1048576]"),
        ({"memory_mb": 1 << 40}, "`memory_mb`"),
        ({"output": 0}, "`output` is a whole number ≥ 1"),
        ({"processes": -1}, "`processes`"),
    ],
)
def test_impossible_limits_are_refused(settings_: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        SandboxLimits(**settings_)


@pytest.mark.usefixtures("unchecked_shapes")
def test_only_text_is_run() -> None:
    with pytest.raises(TypeError, match="`code` is text"):
        SandboxJob(code=b"print(1)")
    with pytest.raises(ValueError, match="`backend` is one of bwrap, unshare"):
        run_python("", backend="docker")


# ---------------------------------------------------------------- the filter


def interpret(program: bytes, number: int, arguments: tuple[int, ...] = (0,) * 6, architecture: int = 0xC000003E) -> int:
    """Oracle: the kernel's machine, as far as the filter uses it."""
    import struct

    data = struct.pack("=iIQ6Q", number, architecture, 0, *arguments)
    lines = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at, accumulator = 0, 0
    while True:
        code, if_true, if_false, value = lines[at]
        at += 1
        if code == 0x20:
            accumulator = struct.unpack_from("=I", data, value)[0]
        elif code == 0x06:
            return value
        elif code == 0x05:
            at += value
        else:
            truth = {
                0x15: accumulator == value,
                0x25: accumulator > value,
                0x35: accumulator >= value,
                0x45: accumulator & value,
            }
            at += if_true if truth[code] else if_false


MACHINES = [("x86_64", 0, 0xC000003E), ("aarch64", 1, 0xC00000B7)]


@pytest.mark.parametrize(("machine", "column", "architecture"), MACHINES)
def test_the_filter_lets_through_the_list_and_nothing_else(machine: str, column: int, architecture: int) -> None:
    program = filter.build(machine)
    allowed = {numbers[column]: name for name, numbers in syscalls.ALLOWED.items() if numbers[column] is not None}
    for number in range(600):
        verdict = interpret(program, number, architecture=architecture)
        if number not in allowed:
            assert verdict == 0x00050026, number  # ENOSYS is 38
        elif allowed[number] in filter.ALLOWED_VALUES and 0 not in filter.ALLOWED_VALUES[allowed[number]][1]:
            assert verdict == 0x00050001, allowed[number]  # EPERM is 1; these arguments are all 0
        else:
            assert verdict == 0x7FFF0000, allowed[number]
    assert interpret(program, 0, architecture=0x40000003) == 0x80000000  # a 32-bit call: the process is killed
    assert interpret(program, 0x40000000, architecture=architecture) == 0x00050026  # x32


def test_golden_arguments_of_the_filter() -> None:
    program, numbers = filter.build("x86_64"), syscalls.allowed_numbers("x86_64")
    allowed, refused = 0x7FFF0000, 0x00050001

    def verdict(name: str, *arguments: int) -> int:
        return interpret(program, numbers[name], (*arguments, *(0,) * (6 - len(arguments))))

    assert verdict("socketpair", 1) == allowed  # AF_UNIX
    for family in (2, 10, 16, 17, 40):  # IPv4, IPv6, netlink, packet, vsock
        assert verdict("socketpair", family) == refused
    assert verdict("clone", 0x3D0F00) == allowed  # a thread
    assert verdict("clone", 0x01200011) == allowed  # a fork
    for flag in (0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000, 0x8000):
        assert verdict("clone", flag | 17) == refused  # namespaces; CLONE_PARENT
    for flags, what in (
        (0x22, allowed),
        (0x01, allowed),
        (0x02, allowed),
        (0x21, refused),
        (0x23, refused),
        (0x40022, refused),
    ):
        assert (
            verdict("mmap", 0, 4096, 3, flags) == what
        )  # private anonymous, shared file, private file; shared anonymous; huge
    for command, what in (
        (0, allowed),
        (4, allowed),
        (6, allowed),
        (1030, allowed),
        (1024, refused),
        (1026, refused),
        (1031, refused),
    ):
        assert verdict("fcntl", 3, command) == what  # duplicate, flags, lock; lease, notification, size of a pipe
    assert (verdict("madvise", 0, 4096, 4), verdict("madvise", 0, 4096, 21)) == (allowed, refused)  # free, page out
    assert (verdict("sendto", 3, 0, 1, 0x4000), verdict("sendto", 3, 0, 1, 1)) == (allowed, refused)  # no signal, out of band
    assert verdict("ioctl", 0, 0x5401) == allowed  # TCGETS: isatty
    assert verdict("ioctl", 0, 0x5412) == refused  # TIOCSTI: typing into a terminal
    assert verdict("prctl", 15) == allowed  # the thread's name
    assert verdict("prctl", 38, 0) == refused
    assert verdict("prlimit64", 0) == allowed  # one's own
    assert verdict("prlimit64", 1) == refused


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(ValueError, match="no list of system calls for riscv64"):
        filter.build("riscv64")
