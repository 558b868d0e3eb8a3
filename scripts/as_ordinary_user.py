"""Run a command as a user who owns nothing, though interpreter and checkout may lie where only root can look.

    unshare --mount python scripts/as_ordinary_user.py COMMAND…

For root, on Linux. In the private view of mounts that `unshare --mount` makes, folders that others cannot enter are covered by
empty ones, in which the interpreter, its environment and the working folder are put back; nothing on disk changes.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

USER = 54321
"""A number that is nobody's."""


def main(command: list[str]) -> int:
    """The command's exit status."""
    needed = sorted({Path(path).resolve() for path in (sys.base_prefix, sys.prefix, os.getcwd())})
    closed = {next((one for one in (*reversed(path.parents), path) if not one.stat().st_mode & 0o001), None) for path in needed}
    for folder in filter(None, closed):
        inside = [(path, os.open(path, os.O_PATH)) for path in needed if path.is_relative_to(folder)]
        mount("-t", "tmpfs", "-o", "mode=755", "none", str(folder))
        for path, file in inside:
            path.mkdir(parents=True, exist_ok=True)
            mount("--no-canonicalize", "--bind", f"/proc/self/fd/{file}", str(path), keep=(file,))
            os.close(file)
    with tempfile.TemporaryDirectory(prefix="corral-user-") as home:
        os.chown(home, USER, USER)
        own = {"HOME": home, "TMPDIR": home, "HYPOTHESIS_STORAGE_DIRECTORY": home, "PYTHONDONTWRITEBYTECODE": "1"}
        environment = {**os.environ, **own}
        here = os.getcwd()  # by its name, through the new mounts
        return subprocess.run(command, user=USER, group=USER, extra_groups=[], env=environment, cwd=here).returncode


def mount(*arguments: str, keep: tuple[int, ...] = ()) -> None:
    """mount(8)."""
    subprocess.run(["mount", *arguments], check=True, pass_fds=keep)


if __name__ == "__main__":
    if len(sys.argv) < 2 or os.geteuid() != 0:
        sys.exit("as_ordinary_user: root runs it, as: unshare --mount python scripts/as_ordinary_user.py COMMAND…")
    sys.exit(main(sys.argv[1:]))
