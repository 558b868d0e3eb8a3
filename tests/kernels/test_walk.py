"""Walks: what is usual, what is remembered, and a file that is none."""

import pytest
import torch

from corral.kernels import walk
from corral.kernels.walk import Walk


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    walk._remembered.cache_clear()
    yield tmp_path / "corral" / "walks.json"
    walk._remembered.cache_clear()


class _SaysGpu(torch.Tensor):
    is_cuda = True


def on_gpu(width):
    """A tensor that says it is on a GPU, as far as a walk asks."""
    return torch.zeros(8, width, dtype=torch.bfloat16).as_subclass(_SaysGpu)


def test_the_usual_walk_leaves_room_for_what_is_stored():
    assert walk.usual_walk(896, 4, stored=False) == Walk(32, 4)
    assert walk.usual_walk(4096, 4, stored=True) == Walk(16, 3)
    assert walk.usual_walk(4096, 2, stored=True) == Walk(16, 2)


def test_a_walk_is_remembered_for_its_own_width_and_kind(own_cache):
    rows = on_gpu(896)
    assert walk.remember(rows, Walk(8, 2), stored=True) == own_cache
    assert walk.walk_of(rows, 4, stored=True) == Walk(8, 2)
    assert walk.walk_of(rows, 4, stored=False) == walk.usual_walk(896, 4, stored=False)
    assert walk.walk_of(on_gpu(1024), 4, stored=True) == walk.usual_walk(1024, 4, stored=True)


def test_remembering_one_keeps_the_others():
    walk.remember(on_gpu(896), Walk(8, 2), stored=True)
    walk.remember(on_gpu(4096), Walk(64, 3), stored=False)
    assert walk.walk_of(on_gpu(896), 4, stored=True) == Walk(8, 2)
    assert walk.walk_of(on_gpu(4096), 4, stored=False) == Walk(64, 3)


def test_nothing_is_looked_up_on_a_cpu(own_cache):
    own_cache.parent.mkdir()
    own_cache.write_text("not JSON")
    assert walk.walk_of(torch.zeros(2, 64), 3, stored=False) == walk.usual_walk(64, 3, stored=False)


@pytest.mark.parametrize("text", ["not JSON", "[]", '{"a": 1}', '{"a": {"group": 8}}'])
def test_a_file_that_is_no_list_of_walks_is_refused_with_its_name(own_cache, text):
    own_cache.parent.mkdir()
    own_cache.write_text(text)
    with pytest.raises(ValueError, match=r"walks\.json is no list of walks .* Delete it"):
        walk.walk_of(on_gpu(896), 4, stored=False)
