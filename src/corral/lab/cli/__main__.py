"""Entry point for `python -m corral.lab.cli`, and so for `accelerate launch -m corral.lab.cli`."""

import sys

from corral.lab.cli import main

if __name__ == "__main__":
    sys.exit(main())
