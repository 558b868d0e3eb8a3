"""Marks, slices and scratch memory on their own: what the head is made of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from corral.head.logits import Scratch, slices
from corral.head.torch.stream import Marks

F64 = torch.float64


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


@given(st.integers(0, 50), st.integers(1, 20))
def test_slices_cover_everything_once(total, size):
    pieces = list(slices(total, size))
    assert [i for piece in pieces for i in range(piece.start, piece.stop)] == list(range(total))
    assert all(0 < piece.stop - piece.start <= size for piece in pieces)


def test_scratch_memory_is_the_same_again():
    scratch = Scratch(torch.device("cpu"))
    big = scratch("z", (4, 6), F64)
    assert scratch("z", (2, 5), F64).data_ptr() == big.data_ptr()
    assert scratch("z", (2, 5), torch.float32).dtype == torch.float32
    assert scratch("p", (4, 6), F64).data_ptr() != big.data_ptr()
