"""Isolation of programs by bubblewrap if it is installed, else by Linux namespaces directly. Without either, an error."""

import marshal
import os
import shutil
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from corral.lab.sandbox.inside.root import HOST
from corral.lab.sandbox.view import SandboxUnavailable, file_view, interpreter

BACKENDS = ("bwrap", "unshare")
"""Names of the isolation backends, in order of preference."""

_INSIDE = Path(__file__).with_name("inside")
_PACKAGE = "corral.lab.sandbox.inside"
_MODULES = ("syscalls", "kernel", "filter", "root", "program", "memory", "zygote")
"""Names of the modules in folder `inside`. Each module comes after the modules that it imports."""

# Bound modules are given as code objects: nothing of this package has to be visible inside, nor is compiled twice.
_BOOT = """
import marshal, sys, types
with open(int(sys.argv[1]), "rb") as file:
    modules, config = marshal.load(file)
for name, code in modules:
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    parent, _, leaf = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], leaf, module)
    if code:
        exec(code, module.__dict__)
sys.modules[name].main(**config)
"""

ENVIRONMENT = {
    "PYTHONHASHSEED": "0",  # the same program has the same sets in the same order, and so the same verdict
    "MALLOC_ARENA_MAX": "1",  # each further arena of a thread reserves 64 MiB of address space, which is limited
    "LANG": "C.UTF-8",
    "PATH": "/usr/bin:/bin",
}


def refusal(reasons: str) -> SandboxUnavailable:
    """Build the error for a system without a working sandbox, with the reasons and what to do."""
    return SandboxUnavailable(
        f"sandbox: programs written by a model are run in Linux namespaces, and this system does not offer them ({reasons}). "
        "Install bubblewrap or allow unprivileged user namespaces. To run such programs as yourself, with all your files and "
        "your network in their reach, pass --unsafe-code-execution (in Python: unsafe_code_execution=True)."
    )


@cache
def _modules() -> tuple[tuple[str, Any], ...]:
    """Names and code objects of the modules that run inside the sandbox. The names of their packages come first."""
    packages = accumulate(_PACKAGE.split("."), "{}.{}".format)
    sources = {name: (_INSIDE / f"{name}.py").read_text() for name in _MODULES}
    codes = ((f"{_PACKAGE}.{name}", compile(text, f"<{name}.py>", "exec", dont_inherit=True)) for name, text in sources.items())
    return (*((name, None) for name in packages), *codes)


def payload(config: dict[str, Any]) -> bytes:
    """Serialize the code objects and the configuration for the sandboxed interpreter with `marshal`."""
    return marshal.dumps((_modules(), config))


def command(backend: str) -> list[str]:
    """Command line that starts a sandboxed interpreter. The caller appends a file descriptor with its `payload`."""
    python = [interpreter(), "-P", "-s", "-S", "-B", "-X", "utf8", "-c", _BOOT]
    return [*_bubblewrap(), *python] if backend == "bwrap" else python


def _bubblewrap() -> list[str]:
    """Build the part of the command line that starts bubblewrap (bwrap).

    Root is given up only inside, after the interpreter has started. A user namespace would map nobody to root, whose number
    of processes is not limited.
    """
    if (program := shutil.which("bwrap")) is None:
        raise SandboxUnavailable("sandbox: bubblewrap (bwrap) is not installed.")
    arguments = [program, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--hostname", HOST]
    arguments += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"] if os.geteuid() == 0 else ["--unshare-user"]
    visible = file_view()
    parents = {str(parent) for path in (*visible.paths, *visible.devices) for parent in Path(path).parents} - {"/"}
    for folder in sorted({*parents, "/tmp"}):  # made in passing, they would be root's alone
        arguments += ["--perms", "0755", "--dir", folder]
    for path in visible.paths:
        arguments += ["--ro-bind", path, path]
    for target, link in visible.links:
        arguments += ["--symlink", target, link]
    for path in visible.devices:
        arguments += ["--dev-bind", path, path]
    for path in visible.hidden:
        arguments += ["--tmpfs", path, "--remount-ro", path]
    return [*arguments, "--remount-ro", "/", "--chdir", "/", "--"]
