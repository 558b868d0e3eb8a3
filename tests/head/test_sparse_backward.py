"""dW and db from single entries: lists of every length, pieces of long ones; against sums in float64."""

import pytest
import torch
from torch import Tensor

from corral.head.logits import LogitSpec
from corral.head.rows import Gradients, HeadInput
from interpreted import DEVICE

from corral.head.triton import backward as sparse  # isort: skip  # after `interpreted`
from corral.head.triton.backward import RowGradient  # isort: skip

ROWS, SLOTS, VOCABULARY, WIDTH = 40, 3, 10, 8  # 10 leaves two tokens in the last program


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse, "PIECE", 4)


class Problem:
    """Token 1 is in every row, token 2 in every second, some in few, 7 in none; some entries do not count."""

    def __init__(self) -> None:
        key = torch.full((ROWS, SLOTS), VOCABULARY, dtype=torch.int32)
        key[:, 1] = 1
        key[::2, 0] = 2
        key[1::2, 2] = torch.tensor([0, 3, 4, 5, 6, 8, 9, 10], dtype=torch.int32).repeat(3)[: ROWS // 2]
        self.key, self.value, self.hidden = key, torch.randn(ROWS, SLOTS), torch.randn(ROWS, WIDTH)

    def run(self, weight: Tensor | None, bias: Tensor | None, *, add: bool) -> None:
        none = torch.empty(0, device=DEVICE)
        gradient = RowGradient(none, self.value.to(DEVICE), none, none, none, none)
        head = torch.empty(VOCABULARY, WIDTH, device=DEVICE)
        source = HeadInput(self.hidden.to(DEVICE), head, None, none, None, LogitSpec())
        sparse.sparse_rows(source, gradient, self.key.to(DEVICE), Gradients(None, weight, bias), add=add)

    def sums(self) -> tuple[Tensor, Tensor]:
        dz = torch.zeros(ROWS, VOCABULARY + 1, dtype=torch.float64)
        dz = dz.scatter_add_(1, self.key.long(), self.value.double())[:, :-1]
        return dz.T @ self.hidden.double(), dz.sum(0)


# Pieces of 4 entries; or as many as it takes for all sums to fit into so many bytes.
@pytest.mark.parametrize("room", [sparse.PIECE_BYTES, 5 * 4 * WIDTH])
def test_every_row_is_written(room, monkeypatch):
    monkeypatch.setattr(sparse, "PIECE_BYTES", room)
    problem = Problem()
    weight, bias = (torch.full(shape, torch.nan, device=DEVICE) for shape in ((VOCABULARY, WIDTH), (VOCABULARY,)))
    problem.run(weight, bias, add=False)
    for actual, expected in zip((weight, bias), problem.sums(), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    assert weight[7].abs().sum() == 0


@pytest.mark.parametrize("alone", ["weight", "bias", None])
def test_the_sparse_part_is_added_to_what_is_there(alone):
    problem = Problem()
    before = torch.randn(VOCABULARY, WIDTH, device=DEVICE), torch.randn(VOCABULARY, device=DEVICE)
    weight, bias = (x.clone() for x in before)
    problem.run(None if alone == "bias" else weight, None if alone == "weight" else bias, add=True)
    for actual, old, expected, kept in zip(
        (weight, bias), before, problem.sums(), (alone == "bias", alone == "weight"), strict=True
    ):
        change = (actual - old).cpu().double()
        torch.testing.assert_close(change, torch.zeros_like(change) if kept else expected, atol=1e-5, rtol=1e-5)
