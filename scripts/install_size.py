"""Megabytes that `pip install` would download, package by package; installs nothing.

    python scripts/install_size.py '.[llm]' torch==2.13.0
    python scripts/install_size.py '.[llm]' --extra-index-url https://download.pytorch.org/whl/cpu

Arguments are pip's own. Sizes are those that the index states for each file; what is installed or cached counts as well.
"""

import json
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit
from urllib.request import Request, urlopen

MEGABYTE = 1e6
SHOWN = 8


def resolve(arguments: list[str]) -> list[dict]:
    """Return pip's report on the packages that it would install; installs none."""
    asked = ["-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--report", "-"]
    done = subprocess.run([sys.executable, *asked, *arguments], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)["install"]


def size_of(package: dict) -> int:
    """Bytes of the file that pip chose; 0 for a folder, such as a checkout."""
    if "dir_info" in package["download_info"]:
        return 0
    address = package["download_info"]["url"]
    if address.startswith("file:"):
        return Path(unquote(urlsplit(address).path)).stat().st_size
    with urlopen(Request(address, method="HEAD"), timeout=60) as answer:
        return int(answer.headers["Content-Length"])


def main() -> None:
    """Print the largest files and their sum."""
    if len(sys.argv) < 2:
        sys.exit("What would be installed? python scripts/install_size.py '.[llm]'")
    sizes = {f"{p['metadata']['name']} {p['metadata']['version']}": size_of(p) for p in resolve(sys.argv[1:])}
    ranked = sorted(sizes.items(), key=lambda item: -item[1])
    for name, size in ranked[:SHOWN]:
        sys.stdout.write(f"{size / MEGABYTE:8.1f} MB  {name}\n")
    rest = ranked[SHOWN:]
    sys.stdout.write(f"{sum(size for _, size in rest) / MEGABYTE:8.1f} MB  {len(rest)} others\n")
    sys.stdout.write(f"{sum(sizes.values()) / MEGABYTE:8.1f} MB  in all, {len(sizes)} packages\n")


if __name__ == "__main__":
    main()
