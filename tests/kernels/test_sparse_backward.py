"""dW and db from single entries: lists of every length, pieces of long ones, a few dense rows; against sums in float64."""

import pytest
import torch
from torch import Tensor

from interpreted import DEVICE

from corral.kernels import sparse_backward  # isort: skip  # after `interpreted`
from corral.kernels.few_rows import FewRows  # isort: skip
from corral.kernels.triton.backward.route import FEW, Routes  # isort: skip
from corral.kernels.triton.backward.row_gradient import RowGradient  # isort: skip

ROWS, SLOTS, VOCABULARY, WIDTH = 40, 3, 10, 8  # 10 leaves two tokens in the last program


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sparse_backward, "PIECE", 4)


class Problem:
    """Token 1 is in every row, token 2 in every second, some in few, 7 in none; some entries do not count."""

    def __init__(self, dense: int) -> None:
        key = torch.full((ROWS, SLOTS), VOCABULARY, dtype=torch.int32)
        key[:, 1] = 1
        key[::2, 0] = 2
        key[1::2, 2] = torch.tensor([0, 3, 4, 5, 6, 8, 9, 10], dtype=torch.int32).repeat(3)[: ROWS // 2]
        self.value, self.hidden = torch.randn(ROWS, SLOTS), torch.randn(ROWS, WIDTH)
        self.key, self.dz = key, torch.randn(VOCABULARY, FEW)
        few = torch.full((FEW,), -1, dtype=torch.int32)
        self.few = torch.randperm(ROWS)[:dense].sort().values
        few[: min(dense, FEW)] = self.few[:FEW].int()
        counts = torch.tensor([ROWS, dense], dtype=torch.int32)
        parts = [x.to(DEVICE) for x in (torch.ones(ROWS, dtype=torch.int32), key, few, counts, torch.zeros(2))]
        self.routes = Routes(*parts)

    def run(self, few: bool, weight: Tensor | None, bias: Tensor | None) -> None:
        value, none = self.value.to(DEVICE), torch.empty(0, device=DEVICE)
        gradient = RowGradient(none, value, none, none, none, none)
        by_token = sparse_backward.sort_by_token(self.routes, VOCABULARY)
        leaves = FewRows(self.dz.to(DEVICE), None) if few else None
        sparse_backward.sparse_weight(self.hidden.to(DEVICE), gradient, self.routes, by_token, leaves, weight, bias)

    def sums(self, few: bool) -> tuple[Tensor, Tensor]:
        dz = torch.zeros(ROWS, VOCABULARY + 1, dtype=torch.float64)
        dz.scatter_add_(1, self.key.long(), self.value.double())
        if few:
            dz[self.few, :-1] += self.dz[:, : len(self.few)].T.double()
        dz = dz[:, :-1]
        return dz.T @ self.hidden.double(), dz.sum(0)


# Pieces of 4 entries; or as many as it takes for all sums to fit into so many bytes.
@pytest.mark.parametrize("room", [sparse_backward.PIECE_BYTES, 5 * 4 * WIDTH])
@pytest.mark.parametrize("dense", [0, 2, FEW])
def test_every_row_is_written(dense, room, monkeypatch):
    monkeypatch.setattr(sparse_backward, "PIECE_BYTES", room)
    problem = Problem(dense)
    weight, bias = (torch.full(shape, torch.nan, device=DEVICE) for shape in ((VOCABULARY, WIDTH), (VOCABULARY,)))
    problem.run(True, weight, bias)
    for actual, expected in zip((weight, bias), problem.sums(True), strict=True):
        torch.testing.assert_close(actual.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    assert dense or weight[7].abs().sum() == 0


@pytest.mark.parametrize("alone", ["weight", "bias", None])
def test_the_sparse_part_is_added_to_what_is_there(alone):
    problem = Problem(FEW + 1)
    before = torch.randn(VOCABULARY, WIDTH, device=DEVICE), torch.randn(VOCABULARY, device=DEVICE)
    weight, bias = (x.clone() for x in before)
    problem.run(False, None if alone == "bias" else weight, None if alone == "weight" else bias)
    for actual, old, expected, kept in zip(
        (weight, bias), before, problem.sums(False), (alone == "bias", alone == "weight"), strict=True
    ):
        change = (actual - old).cpu().double()
        torch.testing.assert_close(change, torch.zeros_like(change) if kept else expected, atol=1e-5, rtol=1e-5)


def test_more_than_a_few_dense_rows_leave_everything_to_the_host():
    weight = torch.full((VOCABULARY, WIDTH), 3.0, device=DEVICE)
    Problem(FEW + 1).run(True, weight, None)
    assert (weight == 3).all()
