"""What one run of the study is: an arm that holds the network, a rate, a schedule, a seed."""

from dataclasses import dataclass

LEVEL = {"mean": 1.0, "k3": 1.2, "p999": 115.0, "cvar": 58.0}
"""A statistic's bound in multiples of the mean's, so that arms move the network equally far on average."""


@dataclass(frozen=True, kw_only=True)
class Arm:
    """What holds the network that is deployed; with everything off, nothing does."""

    retract: str | None = None
    """Retraction by this statistic."""
    slack: float = 1.0
    """Its bound, in multiples of what the arm aims at."""
    control: str | None = None
    """A learning rate controlled by this statistic."""
    within: bool = False
    """A learning rate controlled after every update, as rsl_rl does it: by 1.5, outside half and twice the target of k3."""
    redo: bool = False
    """Updates again at a smaller rate, from the old weights and Adam's old state, where less than half would be kept."""
    first: bool = False
    """The same for the first batch alone: it finds the rate that `control` starts from."""
    accept: bool = False
    """A quarter of the batch is not trained on; nothing is kept where the surrogate on it does not improve."""
    stop: bool = False
    """No more updates on a batch once its sampled KL is at the target."""
    share: float | None = None
    """Lookahead: always this share of a batch's step."""
    ema: float | None = None
    """Rollouts and measurements by a running mean of the weights, this much of which stays at every batch."""
    calm: bool = False
    """Warm-up over a tenth of the updates, gradients clipped at norm .2."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run."""

    arm: str
    held: Arm
    rate: float
    schedule: str
    seed: int
    objective: str = "ppo_clip"
    steps: int = 20
    target: float = 0.01
    """Mean KL per token and batch at which arms aim; the linear schedule takes it down as (1 − k/K)²."""
    eval_every: int = 4
    eval_size: int = 512

    @property
    def key(self) -> str:
        """A name that no other run has."""
        return f"{self.objective}-{self.arm}-{self.rate:g}-{self.schedule}-{self.target:g}-{self.steps}-{self.seed}"

    def aim(self, step: int) -> float:
        """The mean KL that step 0, 1, … is meant to have."""
        return self.target * ((1 - step / self.steps) ** 2 if self.schedule == "linear" else 1.0)
