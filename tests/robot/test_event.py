"""Rewards moved to the event that earned them: by hand, and returns that never change."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.robot.tce import rewards_at_event
from tolerance import assert_close


def test_golden_moved_rewards() -> None:
    # An event in step 1: 2 + 3 + 4 = 9 comes there and nothing after it. In step 0: everything. In the last: as it was.
    rewards = torch.tensor([[1.0, 2.0, 3.0, 4.0]] * 4, dtype=torch.float64)
    moved = rewards_at_event(rewards, torch.tensor([1.0, 0.0, 3.0, float("nan")], dtype=torch.float64))
    assert moved.tolist() == [[1, 9, 0, 0], [10, 0, 0, 0], [1, 2, 3, 4], [1, 2, 3, 4]]


@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 2**31))
def test_returns_stay(episodes: int, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rewards = torch.randn((episodes, steps), generator=generator, dtype=torch.float64)
    event = torch.randint(-1, steps, (episodes,), generator=generator).double()
    event = torch.where(event < 0, torch.nan, event)
    moved = rewards_at_event(rewards, event)
    assert_close(moved.sum(-1), rewards.sum(-1))
    assert_close(rewards_at_event(moved, event), moved)


@pytest.mark.parametrize("event", [-1.0, 2.0])
def test_an_event_outside_the_episode_is_refused(event: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1, or NaN"):
        rewards_at_event(torch.zeros(1, 2), torch.tensor([event]))
