"""Networks of a robot learner: a Gaussian policy over trajectory parameters, and a critic that values states."""

import math
from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn

_CONSTANT = 1e-8
"""Standard deviation below which an entry of the contexts counts as constant, to allow for rounding."""

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"tanh": nn.Tanh, "relu": nn.ReLU, "leaky_relu": nn.LeakyReLU}


def mlp(inputs: int, hidden: Sequence[int], outputs: int, activation: str, gain: float) -> nn.Sequential:
    """Build a multilayer perceptron with orthogonal initialisation. `gain` scales the weights of the last layer."""
    layers: list[nn.Module] = []
    for width_in, width_out in zip([inputs, *hidden[:-1]], hidden, strict=True):
        layers += [nn.Linear(width_in, width_out), ACTIVATIONS[activation]()]
    layers.append(nn.Linear(hidden[-1], outputs))
    linear = [layer for layer in layers if isinstance(layer, nn.Linear)]
    for layer in linear:
        nn.init.orthogonal_(layer.weight, gain if layer is linear[-1] else math.sqrt(2))
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*layers)


class GaussianPolicy(nn.Module):
    """Gaussian policy N(μ(c), L Lᵀ) over trajectory parameters, given a context c. The covariance may also depend on c.

        L = strict lower part + diag(softplus(v) + min_std)          (v, lower part) + f(c) with `contextual_covariance`

    With one covariance for all contexts, the projection and the likelihoods of a whole batch need one matrix each, otherwise
    one per context. The network f is 0 at first, so both kinds begin as the same policy.

    With `normalised` both networks see (c − m) / s, with m and s from `set_contexts`.
    """

    _below: Tensor
    context_mean: Tensor
    context_std: Tensor

    def __init__(
        self,
        context: int,
        parameters: int,
        hidden: Sequence[int] = (64, 64),
        *,
        activation: str = "tanh",
        std: float = 1.0,
        min_std: float = 1e-4,
        contextual_covariance: bool = False,
        normalised: bool = False,
    ) -> None:
        super().__init__()
        if not std > min_std > 0:
            raise ValueError(f"GaussianPolicy: 0 < min_std < std; got min_std={min_std}, std={std}.")
        self.mean = mlp(context, hidden, parameters, activation, gain=0.01)
        self.min_std = min_std
        start = _inverse_softplus(torch.tensor(std - min_std, dtype=torch.float64))
        self.log_diagonal = nn.Parameter(torch.full((parameters,), start.item()))
        self.lower = nn.Parameter(torch.zeros(parameters * (parameters - 1) // 2))
        rows, columns = torch.tril_indices(parameters, parameters, -1)
        self.register_buffer("_below", rows * parameters + columns, persistent=False)
        entries = self.log_diagonal.numel() + self.lower.numel()
        self.covariance = mlp(context, hidden, entries, activation, gain=0.0) if contextual_covariance else None
        self.normalised = normalised
        if normalised:
            self.register_buffer("context_mean", torch.zeros(context))
            self.register_buffer("context_std", torch.ones(context))

    @torch.no_grad()
    def set_contexts(self, contexts: Float[Tensor, "N C"]) -> None:
        """Store the mean and standard deviation of contexts for their normalisation. Constant entries are not divided."""
        std, mean = torch.std_mean(contexts, 0, correction=0)
        self.context_mean.copy_(mean)
        self.context_std.copy_(torch.where(std > _CONSTANT, std, 1.0))

    def normalise(self, context: Float[Tensor, "*e C"]) -> Float[Tensor, "*e C"]:
        """Normalise contexts by their stored mean and standard deviation, if `normalised` is set."""
        return (context - self.context_mean) / self.context_std if self.normalised else context

    def cholesky(self, context: Float[Tensor, "*e C"] | None = None) -> Float[Tensor, "*c W W"]:
        """Return the Cholesky factor L of the covariance: one for all contexts [W W], or one per context [* W W]."""
        diagonal, lower, size = self.log_diagonal, self.lower, self.log_diagonal.numel()
        if self.covariance is not None:
            if context is None:
                raise ValueError("GaussianPolicy: this covariance depends on the context; cholesky() needs one.")
            added = self.covariance(self.normalise(context))
            diagonal, lower = diagonal + added[..., :size], lower + added[..., size:]
        below = lower.new_zeros(*lower.shape[:-1], size * size).index_copy(-1, self._below, lower)
        return below.unflatten(-1, (size, size)) + torch.diag_embed(nn.functional.softplus(diagonal) + self.min_std)

    @torch.no_grad()
    def set_cholesky(self, chol: Float[Tensor, "W W"]) -> None:
        """Set the covariance so that `cholesky()` returns the factor `chol`, as far as `min_std` allows.

        Only for a covariance common to all contexts.
        """
        if self.covariance is not None:
            raise ValueError("GaussianPolicy: a covariance that depends on the context cannot be set to one matrix.")
        excess = (chol.diagonal() - self.min_std).clamp(min=torch.finfo(chol.dtype).tiny)
        self.log_diagonal.copy_(_inverse_softplus(excess))
        self.lower.copy_(chol.flatten()[self._below])

    def forward(self, context: Float[Tensor, "*e C"]) -> tuple[Float[Tensor, "*e W"], Float[Tensor, "*c W W"]]:
        """Return the policy's mean for each context, and the Cholesky factor of its covariance.
        The factor is common to all contexts, or one per context."""
        return self.mean(self.normalise(context)), self.cholesky(context)


def _inverse_softplus(x: Tensor) -> Tensor:
    """Compute the inverse of softplus, log(eˣ − 1), without overflow."""
    return x + torch.log(-torch.expm1(-x))


class Normaliser(nn.Module):
    """Module that normalises each input entry by its running mean and standard deviation (Chan's parallel update).

    Statistics are float64 for inputs of any precision: a float32 count stops growing at 2²⁴, and rounding would turn constant
    inputs into varying ones.
    """

    count: Tensor
    mean: Tensor
    variance: Tensor

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("variance", torch.ones(size, dtype=torch.float64))

    @torch.no_grad()
    def update(self, values: Float[Tensor, "N S"]) -> None:
        """Add a batch of inputs to the running mean and standard deviation."""
        values = values.double()
        count, mean, variance = len(values), values.mean(0), values.var(0, unbiased=False)
        total = self.count + count
        shift = mean - self.mean
        spread = self.variance * self.count + variance * count + shift**2 * self.count * count / total
        self.mean += shift * count / total
        self.variance.copy_(spread / total)
        self.count.copy_(total)

    def forward(self, values: Float[Tensor, "*b S"]) -> Float[Tensor, "*b S"]:
        """Normalise inputs to (x − mean) / std. Entries that never changed become 0."""
        return (values - self.mean) / (self.variance.sqrt() + 1e-8)


class Critic(nn.Module):
    """Critic network V(s): the expected undiscounted sum of rewards from state s on. Observations include the time.

    `critic.value.to(dtype)` sets the network's precision; the normaliser keeps its own.
    """

    def __init__(self, observation: int, hidden: Sequence[int] = (64, 64), *, activation: str = "tanh") -> None:
        super().__init__()
        self.normaliser = Normaliser(observation)
        self.value = mlp(observation, hidden, 1, activation, gain=1.0)

    def normalise(self, observations: Float[Tensor, "*b O"]) -> Float[Tensor, "*b O"]:
        """Normalise observations for the critic network, in the network's precision."""
        return self.normaliser(observations).to(self.value[0].weight)

    def forward(self, observations: Float[Tensor, "*b O"]) -> Float[Tensor, "*b"]:
        """Compute the value V of each observed state."""
        return self.value(self.normalise(observations)).squeeze(-1)
