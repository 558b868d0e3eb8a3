"""The benchmark of SAC's updates runs, and both contenders make the updates that they are timed for."""

import pytest
import sac_update
from stable_baselines3 import SAC

from corral.lab.baselines.sac import GraphedSAC


@pytest.mark.parametrize("kind", [SAC, GraphedSAC])
def test_an_update_is_timed(kind: type[SAC], monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    train = kind.train
    monkeypatch.setattr(sac_update, "ROWS", 4)
    monkeypatch.setattr(kind, "train", lambda self, count, size: (made.append(count), train(self, count, size))[1])
    assert sac_update.measure(kind, 2, "cpu", width=8) > 0
    assert made == [sac_update.WARM_UP, 2]
