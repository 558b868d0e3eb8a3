"""Critic of TOP-ERL: a causal transformer that values a state followed by any number of actions."""

from copy import deepcopy

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from corral.numerics import at_least_float32
from corral.robot.policy import Normaliser

_FIRST_STD = 0.02
"""Standard deviation of the positional encodings at initialisation."""


class CausalTransformer(nn.Module):
    """Causal transformer over a state and the actions after it, with one value per token.

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
        """Values of the state alone and of its first 1 … L actions, S = L + 1 in all."""
        tokens = torch.cat([self.state(state)[:, None], self.action(actions)], 1)
        tokens = tokens + self.place[: tokens.shape[1]].to(tokens)
        later = torch.ones(2 * tokens.shape[1:2], dtype=torch.bool, device=tokens.device).triu(1)
        return self.head(self.blocks(tokens, mask=later, is_causal=True)).squeeze(-1)


class SequenceCritic(nn.Module):
    """Values V of a state and Q of a state with its next n actions, by a network and a slowly following target network.

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
        """Values of states alone [*, 1], or of states with 0 … L actions [*, L + 1]. `target` selects the target network."""
        if actions is None:
            actions = state.new_zeros(*state.shape[:-1], 0, len(self.actions.mean))
        weight, shape = self.value.head.weight, state.shape[:-1]
        state, actions = self.states(state).to(weight), self.actions(actions).to(weight)
        network = self.target if target else self.value
        values = network(state.flatten(0, -2), actions.flatten(0, -3)).unflatten(0, shape)
        return self.scale.to(weight) * at_least_float32(values)

    @torch.no_grad()
    def set_scale(self, values: Float[Tensor, " N"]) -> None:
        """Set the scale σ of values to their root mean square. If all values are 0, σ stays 1."""
        scale = values.square().mean().sqrt()
        self.scale.copy_(torch.where(scale > 0, scale, 1.0))

    @torch.no_grad()
    def follow(self, rate: float) -> None:
        """Move the target network's weights towards the network's, by this share of the distance."""
        for slow, fast in zip(self.target.parameters(), self.value.parameters(), strict=True):
            slow.lerp_(fast, rate)


def draw_segments(steps: int, most: int, generator: torch.Generator | None = None) -> tuple[Int[Tensor, "K"], int]:
    """Cut T steps into segments of one random length. Returns their first steps and the length.

        length L = ⌊T / k⌋,   k ~ U{1 … most},   starts 0, o, o + L, o + 2 L, … < T          o ~ U{0 … L − 1}

    The first two may overlap, and the last may reach beyond the end, so that every state begins some segment.

    Args:
        steps: T.
        most: largest number of segments that do not overlap, 1 ≤ most ≤ T.
        generator: on the CPU.
    """
    if not 1 <= most <= steps:
        raise ValueError(f"draw_segments: `most` is from 1 to the {steps} steps of an episode; got {most}.")
    length = steps // int(torch.randint(1, most + 1, (), generator=generator))
    first = int(torch.randint(length, (), generator=generator))
    return torch.cat([torch.tensor([0]), torch.arange(first, steps, length)]).unique(), length


def segment_returns(
    rewards: Float[Tensor, "B T"],
    values: Float[Tensor, "B S"],
    mask: Bool[Tensor, "B T"],
    rows: Int[Tensor, "K L"],
    gamma: float = 1.0,
) -> Float[Tensor, "B K L"]:
    """N-step returns of the first n = 1 … L actions of each segment, the critic's targets for Q.

        G_n = Σ_{i<n} γ^i r_{t+i} + γ^n V(s_{t+n})          V = 0 once the episode is over

    Nothing is weighted by how likely the current policy is to act so: Q is of these very actions.

    Args:
        rewards, mask: of every step; mask is True while an episode runs.
        values: V of every state s_0 … s_T, so S = T + 1.
        rows: steps of each segment. One that reaches beyond the end repeats T − 1, and its returns there mean nothing.
    Ref:
        Li et al. 2025, arXiv:2410.09536, Sec. 4.3. Invariant: with V the rewards-to-go, all G_n are the reward-to-go from t.
    """
    length = rows.shape[1]
    discount = gamma ** torch.arange(length + 1, dtype=rewards.dtype, device=rewards.device)
    earned = (torch.where(mask, rewards, 0.0)[:, rows] * discount[:-1]).cumsum(-1)
    ahead = torch.where(nn.functional.pad(mask, (0, 1))[:, 1:], values[:, 1:].to(rewards), 0.0)  # V(s_{t+1}) of each step
    return earned + discount[1:] * ahead[:, rows]
