"""Learning rate that is found automatically from the measured KL of each step."""

import math
from typing import Any

from corral.validate import number_in, require


class RateController:
    """Scales a learning rate until the updates of one batch move the network by the target KL δ.

        rate ← rate · clip((δ / D)^power, low, high)

    D is measured after a batch's updates and before anything is undone. Near the old weights D grows with the square of the
    rate, so `power` = ½ would reach δ in one step; a smaller one averages over noisy measurements.

    Ref:
        Schulman et al. 2017, arXiv:1707.06347, §4 adapts a KL penalty so. Invariant: with D = c · rate², the logarithm of
        rate / √(δ/c) shrinks by the factor 1 − 2 · power at every step that is not clipped.
    """

    def __init__(self, *, power: float = 0.35, low: float = 0.25, high: float = 1.5) -> None:
        self.power, self.low, self.high = power, low, high
        require(self, "power", above=0, below=1, note="from ½ upwards it overshoots")
        require(self, "low", above=0, at_most=1)
        require(self, "high", at_least=1, finite=True)
        self.scale = 1.0
        """Current factor on the initial learning rate: the product of all changes so far."""

    def update(self, distance: float, bound: float) -> float:
        """Adapt `scale` after a batch that moved the network by KL `distance`, with target `bound`. Returns the factor used.

        A network that did not move gets the largest factor, a distance of NaN or inf the smallest.
        """
        if not (number_in(bound, 0) and 0 < bound < math.inf):
            raise ValueError(f"RateController: `bound` is a divergence > 0 and finite; got {bound!r}.")
        if not math.isfinite(distance):
            factor = self.low
        elif distance <= 0:
            factor = self.high
        else:
            factor = min(self.high, max(self.low, (bound / distance) ** self.power))
        self.scale *= factor
        return factor

    def state_dict(self) -> dict[str, float]:
        """Return the controller's state, which a resumed run needs."""
        return {"scale": self.scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the controller's state from the result of `state_dict`."""
        scale: Any = state.get("scale")
        if not (number_in(scale, 0) and 0 < scale < math.inf):
            raise ValueError(f"RateController: a saved `scale` is a number > 0; got {state!r}. Is the checkpoint whole?")
        self.scale = float(scale)
