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


def main(command: list[str]) -> None:
    """Does not return."""
    needed = sorted({Path(path).resolve() for path in (sys.base_prefix, sys.prefix, os.getcwd())})
    closed = {next((one for one in (*reversed(path.parents), path) if not one.stat().st_mode & 0o001), None) for path in needed}
    for folder in filter(None, closed):
        inside = [(path, os.open(path, os.O_PATH)) for path in needed if path.is_relative_to(folder)]
        mount("-t", "tmpfs", "-o", "mode=755", "none", str(folder))
        for path, file in inside:
            path.mkdir(parents=True, exist_ok=True)
            mount("--no-canonicalize", "--bind", f"/proc/self/fd/{file}", str(path), keep=(file,))
            os.close(file)
    home = tempfile.mkdtemp(prefix="corral-user-")
    os.chown(home, USER, USER)
    os.setgroups([])
    os.setresgid(USER, USER, USER)
    os.setresuid(USER, USER, USER)
    own = {"HOME": home, "TMPDIR": home, "HYPOTHESIS_STORAGE_DIRECTORY": home, "PYTHONDONTWRITEBYTECODE": "1"}
    os.chdir(os.getcwd())  # through the new mounts
    os.execvpe(command[0], command, {**os.environ, **own})


def mount(*arguments: str, keep: tuple[int, ...] = ()) -> None:
    """mount(8)."""
    subprocess.run(["mount", *arguments], check=True, pass_fds=keep)


if __name__ == "__main__":
    if len(sys.argv) < 2 or os.geteuid() != 0:
        sys.exit("as_ordinary_user: root runs it, as: unshare --mount python scripts/as_ordinary_user.py COMMAND…")
    main(sys.argv[1:])
