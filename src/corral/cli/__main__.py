"""`python -m corral.cli`, and so `accelerate launch -m corral.cli`."""

import sys

from corral.cli import main

if __name__ == "__main__":
    sys.exit(main())
