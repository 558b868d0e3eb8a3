"""Critic of TOP-ERL: a causal transformer that estimates the value of a state followed by any number of actions."""

from copy import deepcopy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from corral.numerics import at_least_float32
from corral.robot.policy import Normaliser

_FIRST_STD = 0.02
"""Standard deviation of the transformer's positional encodings at initialisation."""


class CausalTransformer(nn.Module):
    """Causal transformer over a state and the actions after it, with one value estimate per token.

        x_0 = E_s s + p_0,   x_n = E_a a_n + p_n,   output_n = head(norm(blocks(x_0 … x_n)))

    E_s and E_a are linear, and the encodings p of the place within a segment are learned. Blocks normalise before attention
    and before the feed-forward layer, which is twice as wide; there is no dropout.
    """

    def __init__(self, observation: int, dof: int, longest: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.state, self.action = nn.Linear(observation, width), nn.Linear(dof, width)
        self.place = nn.Parameter(_FIRST_STD * torch.randn(longest + 1, width))
        block = nn.TransformerEncoderLayer(
            width, heads, 2 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        for parameter in self.blocks.parameters():  # torch copies one block, weights and all
            if parameter.ndim > 1:
                nn.init.xavier_uniform_(parameter)
        self.head = nn.Linear(width, 1)

    def forward(self, state: Float[Tensor, "N O"], actions: Float[Tensor, "N L D"]) -> Float[Tensor, "N S"]:
        """Compute values of the state alone and of the state with its first 1 … L actions, S = L + 1 in all."""
        tokens = torch.cat([self.state(state)[:, None], self.action(actions)], 1)
        tokens = tokens + self.place[: tokens.shape[1]].to(tokens)
        later = torch.ones(2 * tokens.shape[1:2], dtype=torch.bool, device=tokens.device).triu(1)
        return self.head(self.blocks(tokens, mask=later, is_causal=True)).squeeze(-1)


class SequenceCritic(nn.Module):
    """Critic with values V of a state and Q of a state with its next n actions, and a slowly updated target network.

        (V, Q_1, …, Q_L) = σ · transformer((s − m_s)/σ_s, (a − m_a)/σ_a)

    σ is the root mean square of the first rewards-to-go, fixed from then on. Their mean is not subtracted: V is 0 after the
    end, and a network that begins near 0 is right there. Inputs are normalised by running statistics. Both networks share them.

    Ref:
        Li et al. 2025, arXiv:2410.09536, Sec. 4. Invariant: a value never depends on a later action.
    """

    scale: Tensor

    def __init__(self, observation: int, dof: int, longest: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.states, self.actions = Normaliser(observation), Normaliser(dof)
        self.register_buffer("scale", torch.ones((), dtype=torch.float64))
        self.value = CausalTransformer(observation, dof, longest, width, layers, heads)
        self.target = deepcopy(self.value).requires_grad_(False)

    def forward(
        self, state: Float[Tensor, "*b O"], actions: Float[Tensor, "*b L D"] | None = None, *, target: bool = False
    ) -> Float[Tensor, "*b S"]:
        """Compute values of states [*, 1], or of states with 0 … L actions [*, L + 1]. `target` selects the target network."""
        if actions is None:
            actions = state.new_zeros(*state.shape[:-1], 0, len(self.actions.mean))
        weight, shape = self.value.head.weight, state.shape[:-1]
        state, actions = self.states(state).to(weight), self.actions(actions).to(weight)
        network = self.target if target else self.value
        values = network(state.flatten(0, -2), actions.flatten(0, -3)).unflatten(0, shape)
        return self.scale.to(weight) * at_least_float32(values)

    @torch.no_grad()
    def set_scale(self, values: Float[Tensor, " N"]) -> None:
        """Set the scale σ of the critic's outputs to the root mean square of `values`. If all are 0, σ stays 1."""
        scale = values.square().mean().sqrt()
        self.scale.copy_(torch.where(scale > 0, scale, 1.0))

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Move the target network's weights towards the critic network's weights, by the share `rate` of the distance."""
        for slow, fast in zip(self.target.parameters(), self.value.parameters(), strict=True):
            slow.lerp_(fast, rate)
