"""Entry point for `python -m corral.lab.cli`, which `accelerate launch -m corral.lab.cli` uses too."""

import sys

from corral.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
