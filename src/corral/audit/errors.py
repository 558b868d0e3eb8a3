"""What a live audit waits for, and every other one ends with."""

from corral.validate import RunError


class NothingYet(RunError):
    """There is nothing to audit so far, and there may be later."""
