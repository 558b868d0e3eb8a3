"""Trust region for the deployed network: measure its exact KL after each step, and scale back steps that went too far.

`statistics`   per-token KLs → the numbers a bound is put on
`retract`      back along the straight line to the old weights until one of them fits; a certificate says what was done
`rate`         a learning rate that makes the measured distance what it should be
"""

from corral.deployed.rate import RateController
from corral.deployed.retract import Certificate, restore, retract, snapshot
from corral.deployed.statistics import STATISTICS, BatchKL, TokenKL

__all__ = ["STATISTICS", "BatchKL", "Certificate", "RateController", "TokenKL", "restore", "retract", "snapshot"]
