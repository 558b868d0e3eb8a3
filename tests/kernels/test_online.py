"""Running sums and marks on their own: what the head is made of."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.kernels.logits import Scratch, slices
from corral.kernels.online import LogMass, Marks
from tolerance import assert_close

F64 = torch.float64


def test_entropy_survives_a_rising_maximum():
    # Four logits, one block each, each larger by 800: the first would overflow or vanish against the last.
    mass = LogMass(torch.zeros(1, dtype=F64), entropy=True)
    for z in (0.0, 800.0, 1600.0, 1600.0):
        mass.fold(torch.tensor([[z]], dtype=F64))
    assert_close(mass.log(), torch.tensor([1600 + math.log(2)], dtype=F64))
    assert_close(mass.surprise(mass.log()), torch.tensor([math.log(2)], dtype=F64))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 1000))
def test_mass_and_entropy_are_those_of_all_logits_at_once(sizes, seed):
    torch.manual_seed(seed)
    z = 50 * torch.randn(4, sum(sizes), dtype=F64)
    z[z < -60] = -torch.inf
    mass = LogMass(torch.zeros(4, dtype=F64), entropy=True)
    for block in z.split(sizes, -1):
        mass.fold(block.clone())
    possible = (z > -torch.inf).any(-1)
    lse = z.logsumexp(-1)
    p = (z - lse[:, None]).exp()
    expected = -torch.where(p > 0, p * (z - lse[:, None]), 0.0).sum(-1)
    assert_close(mass.log()[possible], lse[possible])
    assert_close(mass.surprise(mass.log())[possible], expected[possible])
    assert (mass.log()[~possible] == -torch.inf).all()


def test_nothing_folded_in_has_no_mass_and_no_entropy():
    mass = LogMass(torch.zeros(2), entropy=True)
    mass.fold(torch.full((2, 3), -torch.inf))
    assert mass.log().tolist() == [-torch.inf] * 2
    assert mass.surprise(torch.zeros(2)).tolist() == [0.0, 0.0]


@pytest.mark.parametrize("first", [0, 10])
def test_marks_find_each_id_in_its_block_once(first):
    # Ids 10 … 29 in blocks of 8, 8 and 4 where `first` is 10; with `first` 0 they are 0 … 19.
    ids = torch.tensor([[first + 3, -1, first + 19], [first + 8, first + 3, first + 20]])
    marks = Marks(ids, list(slices(20, 8)), first)
    found = {
        (slot, row, block, column) for block in range(3) for slot, row, column in zip(*map(list, marks[block]), strict=True)
    }
    found = {tuple(map(int, each)) for each in found}
    assert found == {(0, 0, 0, 3), (4, 1, 0, 3), (3, 1, 1, 0), (2, 0, 2, 3)}  # −1 and `first` + 20 lie nowhere


def test_where_there_is_no_block_nothing_is_found():
    # A process that holds no part of the vocabulary.
    assert Marks(torch.tensor([[3, -1]]), [], 3).starts == []


@given(st.integers(0, 50), st.integers(1, 20), st.none() | st.integers(1, 30))
def test_slices_cover_everything_once(total, size, first):
    pieces = list(slices(total, size, first))
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(total))
    assert all(0 < piece.stop - piece.start <= size for piece in pieces)
    if first is not None and pieces:
        assert pieces[0].stop <= first


def test_scratch_memory_is_the_same_again():
    scratch = Scratch(torch.device("cpu"))
    big = scratch("z", (4, 6), F64)
    assert scratch("z", (2, 5), F64).data_ptr() == big.data_ptr()
    assert scratch("z", (2, 5), torch.float32).dtype == torch.float32
    assert scratch("p", (4, 6), F64).data_ptr() != big.data_ptr()
