"""Limits on an audit's numbers, such as `ess<0.7`. A number beyond its limit is explained in docs/symptoms.md."""

import re
from dataclasses import dataclass
from typing import Any

from corral.lab.audit.tally import Audit
from corral.validate import RunError, nearest

QUANTITIES = {
    "blocked": ("clipping would block {} of all tokens", "which-threshold"),
    "wrong": ("clipping would block {} of all tokens though inside the KL ball", "which-threshold"),
    "missed": ("clipping would miss {} of all tokens outside the KL ball", "which-threshold"),
    "ess": ("the effective sample size is {} of the number of tokens", "may-i-reuse-rollouts"),
    "kl": ("the mean KL to the old policy is {} nats", "it-got-worse-with-more-passes"),
    "mismatch": ("sampler and trainer differ by a mean TV of {}", "ratios-differ-from-1-before-any-update"),
    "age": ("the oldest tokens were sampled {} steps before they were trained on", "rollouts-are-stale"),
    "entropy": ("the entropy of the last step is {} nats", "entropy-collapses"),
    "alarms": ("the number of signs of a collapse is {}", "reward-collapses"),
}
"""Mapping from each quantity of an audit that can have a limit to a sentence and a heading of docs/symptoms.md."""

SHARES = ("blocked", "wrong", "missed", "ess", "mismatch")
"""Quantities from 0 to 1: shares of tokens, and a TV. A larger limit would never be reached, or always."""


def quantities(audit: Audit) -> dict[str, Any]:
    """Compute every quantity of an audit that can have a limit. The value is None if the quantity was not logged."""
    ball = audit.verdicts["clipped"]["kl"]
    return {
        "blocked": ball.share,
        "wrong": ball.wrong,
        "missed": ball.missed,
        "ess": audit.ess,
        "kl": audit.distances["kl"]["mean"],
        "mismatch": audit.distances.get("mismatch", {}).get("mean"),
        "age": audit.by_age[-1]["age"] if audit.by_age else None,
        "entropy": audit.by_step[-1]["entropy"],
        "alarms": len(audit.alarms),
    }


@dataclass(frozen=True)
class Limit:
    """An upper or lower limit on a quantity of an audit."""

    name: str
    sign: str
    bound: float
    unit: str
    """Unit of the limit: "%" for percent, otherwise empty."""

    def exceeded(self, audit: Audit) -> str | None:
        """Return a sentence if the audit exceeds this limit, else None. Raises RunError if the quantity was not logged."""
        value = quantities(audit)[self.name]
        if value is None:
            raise RunError(f"--fail-if asks for `{self.name}`, which nobody logged for this audit.")
        value = 100 * value if self.unit else value
        if not (value > self.bound if self.sign == ">" else value < self.bound):
            return None
        words, symptom = QUANTITIES[self.name]
        how = f"{'more' if self.sign == '>' else 'less'} than {self.bound:g} {self.unit}".rstrip()
        return f"{words.format(f'{value:.3g} {self.unit}'.rstrip())}, {how}: see docs/symptoms.md#{symptom}."


def read_limit(text: str) -> Limit:
    """Parse a limit on an audit's quantity from a text such as `ess<0.7` or `wrong > 2 %`."""
    found = re.fullmatch(r"\s*(\w+)\s*([<>])\s*([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)\s*(%?)\s*", text)
    if found is None:
        raise RunError(f"--fail-if takes NAME<NUMBER or NAME>NUMBER such as 'ess<0.7' or 'wrong>2%'; got {text!r}.")
    name, sign, bound, unit = found.groups()
    if name not in QUANTITIES:
        raise RunError(f"--fail-if has no number `{name}`.{nearest(name, QUANTITIES)}")
    limit = Limit(name, sign, float(bound), unit)
    if name in SHARES and limit.bound > (100 if unit else 1):
        if unit or limit.bound > 100:
            raise RunError(f"--fail-if: `{name}` is a share, at most 1 or 100 %; got {text!r}.")
        either = f"'{name}{sign}{limit.bound:g}%' or '{name}{sign}{limit.bound / 100:g}'"
        raise RunError(
            f"--fail-if: `{name}` is a share from 0 to 1, so {limit.bound:g} is {100 * limit.bound:g} %. Write {either}."
        )
    return limit
