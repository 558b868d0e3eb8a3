"""SparseDist says no to what it cannot hold, and comes back from storage exactly as it went in."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import gradcheck

from corral.head import UnionSupport
from corral.tensors import PackedSparseDist, SparseDist, TokenBatch
from tolerance import assert_close

INF = math.inf


def example(dtype: torch.dtype = torch.float32) -> SparseDist:
    """Three positions of 4 slots: full, half padding, all padding."""
    p = torch.tensor([[0.4, 0.3, 0.1, 0.1], [0.5, 0.25, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]], dtype=dtype)
    ids = torch.tensor([[7, 0, 2, 9], [0, 5, -1, -1], [-1, -1, -1, -1]])
    return SparseDist(ids, p.log(), torch.tensor([0.1, 0.25, 1.0], dtype=dtype).log())


def assert_same(a: SparseDist, b: SparseDist) -> None:
    """Bit for bit, dtypes included."""
    for name in ("ids", "logp", "rest"):
        x, y = getattr(a, name), getattr(b, name)
        assert x.dtype == y.dtype, name
        assert torch.equal(x, y), name


# ---------------------------------------------------------------------------------------------------- validation


@pytest.mark.parametrize("dtype", [torch.float32, torch.int16, torch.uint8, torch.bool])
def test_ids_that_are_not_int64_or_int32_are_refused(dtype, unchecked_shapes):
    ids = torch.ones(2, 3, dtype=dtype)
    with pytest.raises(ValueError, match=rf"`ids` holds token ids, int64 or int32; got {dtype}"):
        SparseDist(ids, torch.zeros(2, 3), torch.zeros(2))


@pytest.mark.parametrize("field", ["logp", "rest"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_log_probabilities_that_are_not_floating_point_are_refused(field, dtype, unchecked_shapes):
    fields = {"ids": torch.ones(2, 3, dtype=torch.int64), "logp": torch.zeros(2, 3), "rest": torch.zeros(2)}
    fields[field] = fields[field].to(dtype)
    with pytest.raises(ValueError, match=rf"`{field}` holds log-probabilities and must be floating point; got {dtype}"):
        SparseDist(**fields)


@pytest.mark.parametrize(
    ("ids", "logp", "rest"),
    [
        ([2, 3], [2, 4], [2]),  # another K
        ([2, 3], [3], [2]),  # a missing axis
        ([2, 3], [2, 3], [3]),  # another batch
        ([2, 3], [2, 3], [2, 1]),  # the rest keeps no slot axis
        ([2, 3], [2, 3], []),
    ],
)
def test_shapes_that_do_not_fit_are_refused(ids, logp, rest, unchecked_shapes):
    with pytest.raises(ValueError, match=r"ids and logp are \[\*, K\] and rest is \[\*\]") as error:
        SparseDist(torch.ones(ids, dtype=torch.int64), torch.zeros(logp), torch.zeros(rest))
    assert f"got ids {ids}, logp {logp}, rest {rest}." in str(error.value)


@pytest.mark.parametrize("ids_dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_id_and_float_dtype_that_is_stored_is_accepted(ids_dtype, dtype):
    dist = SparseDist(torch.tensor([4, -1], dtype=ids_dtype), torch.zeros(2, dtype=dtype), torch.zeros((), dtype=dtype))
    assert (dist.ids.dtype, dist.logp.dtype, dist.rest.dtype) == (ids_dtype, dtype, dtype)


def test_a_distribution_is_frozen():
    dist = example()
    with pytest.raises(FrozenInstanceError):
        dist.rest = torch.zeros(3)


# ---------------------------------------------------------------------------------------------------- with_rest


def test_golden_with_rest():
    # The rest becomes a fifth category after the padding: .4 + .3 + .1 + .1 + .1 = .5 + .25 + .25 = 1 = the rest alone.
    expected = torch.tensor([[0.4, 0.3, 0.1, 0.1, 0.1], [0.5, 0.25, 0.0, 0.0, 0.25], [0.0, 0.0, 0.0, 0.0, 1.0]])
    assert_close(example().with_rest(), expected.log())


@pytest.mark.parametrize(
    ("stored", "computed"),
    [(torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2],
)
def test_with_rest_is_float32_or_better(stored, computed):
    whole = example(stored).with_rest()
    assert whole.dtype == computed
    assert torch.equal(whole[..., -1], example(stored).rest.to(computed))


def test_with_rest_of_a_single_position():
    dist = SparseDist(torch.tensor([3]), torch.tensor([0.75]).log(), torch.tensor(0.25).log())
    assert_close(dist.with_rest(), torch.tensor([0.75, 0.25]).log())


def test_with_rest_gradcheck():
    logp, rest = torch.randn(2, 3, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    ids = torch.arange(6).view(2, 3)
    assert gradcheck(lambda a, b: SparseDist(ids, a, b).with_rest(), (logp.requires_grad_(), rest.requires_grad_()))


# ---------------------------------------------------------------------------------------------------- pack and unpack


def test_golden_pack():
    # Row by row without padding: 4 + 2 + 0 tokens.
    packed = example().pack()
    assert packed.ids.tolist() == [7, 0, 2, 9, 0, 5]
    assert packed.counts.tolist() == [4, 2, 0]
    assert packed.slots == 4
    assert_close(packed.logp, torch.tensor([0.4, 0.3, 0.1, 0.1, 0.5, 0.25]).log())
    assert_close(packed.rest, torch.tensor([0.1, 0.25, 1.0]).log())


def test_storage_is_int32_and_float32():
    packed = example(torch.float64).pack()
    assert (packed.ids.dtype, packed.counts.dtype) == (torch.int32, torch.int32)
    assert (packed.logp.dtype, packed.rest.dtype) == (torch.float32, torch.float32)


def test_golden_unpack():
    packed = PackedSparseDist(
        ids=torch.tensor([3, 8, 1], dtype=torch.int32),
        logp=torch.tensor([-1.0, -2.0, -3.0]),
        rest=torch.tensor([-4.0, -5.0]),
        counts=torch.tensor([2, 1], dtype=torch.int32),
        slots=3,
    )
    dist = packed.unpack()
    assert dist.ids.tolist() == [[3, 8, -1], [1, -1, -1]]
    assert dist.logp.tolist() == [[-1.0, -2.0, -INF], [-3.0, -INF, -INF]]
    assert dist.rest.tolist() == [-4.0, -5.0]


def test_float32_comes_back_bit_for_bit():
    assert_same(example().pack().unpack(), example())


def test_int32_ids_come_back_as_int64():
    dist = example()
    narrow = SparseDist(dist.ids.to(torch.int32), dist.logp, dist.rest)
    assert_same(narrow.pack().unpack(), dist)


def test_float64_comes_back_rounded_to_float32():
    # log .1 is no float32: what comes back is the nearest one.
    dist = example(torch.float64)
    assert_same(dist.pack().unpack(), SparseDist(dist.ids, dist.logp.float(), dist.rest.float()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_comes_back_with_the_same_values(dtype):
    dist = example(dtype)
    assert_same(dist.pack().unpack(), SparseDist(dist.ids, dist.logp.float(), dist.rest.float()))


def test_ids_beyond_the_integers_of_float32_survive():
    # 2²⁴ + 1 is the first integer that float32 cannot hold, 2³¹ − 1 the last of int32.
    ids = torch.tensor([2**24 + 1, 2**31 - 1, 0])
    dist = SparseDist(ids, torch.tensor([-1.0, -2.0, -3.0]), torch.tensor(-4.0))
    assert_same(dist.pack().unpack(), dist)


def test_kept_tokens_of_probability_0_and_an_empty_rest_survive():
    # −inf at a real id is not padding: a logit mask put it there.
    dist = SparseDist(torch.tensor([[4, 2, -1]]), torch.tensor([[0.0, -INF, -INF]]), torch.tensor([-INF]))
    assert dist.pack().counts.tolist() == [2]
    assert_same(dist.pack().unpack(), dist)


def test_slots_that_every_row_pads_come_back():
    dist = SparseDist(torch.tensor([[1, -1, -1], [2, -1, -1]]), torch.tensor([[-1.0, -INF, -INF]] * 2), torch.zeros(2))
    assert_same(dist.pack().unpack(), dist)


@st.composite
def distributions(draw) -> SparseDist:
    """Any leading axes, none and empty ones included; any number of kept tokens per row, from none to all."""
    shape = draw(st.sampled_from([(), (1,), (5,), (0,), (2, 3), (2, 1, 4)]))
    slots = draw(st.integers(1, 6))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    counts = torch.randint(0, slots + 1, shape, generator=generator)
    kept = torch.arange(slots) < counts.unsqueeze(-1)
    ids = torch.where(kept, torch.randint(0, 150_000, kept.shape, generator=generator), -1)
    logp = torch.where(kept, torch.randn(kept.shape, generator=generator) - 3, -INF)
    return SparseDist(ids, logp, torch.randn(shape, generator=generator) - 3)


@given(distributions())
def test_every_distribution_comes_back_bit_for_bit(dist):
    assert_same(dist.pack().unpack(), dist)


@given(distributions())
def test_storage_grows_with_what_is_kept_and_not_with_the_padding(dist):
    packed = dist.pack()
    kept = int((dist.ids >= 0).sum())
    positions = dist.rest.numel()
    assert packed.ids.numel() == packed.logp.numel() == kept
    assert packed.bytes_per_token * positions == pytest.approx(8 * kept + 8 * positions)


def test_a_transposed_distribution_comes_back_in_its_own_order():
    ids = torch.arange(24).view(2, 3, 4).transpose(0, 1)
    dist = SparseDist(ids, -ids.float(), -ids[..., 0].float())
    assert_same(dist.pack().unpack(), dist)


def test_golden_bytes_per_token():
    # 6 kept tokens · (4 id + 4 logp) = 48;  3 positions · (4 rest + 4 count) = 24;  72 bytes / 3 positions = 24.
    assert example().pack().bytes_per_token == 24


def test_golden_bytes_per_token_of_a_whole_batch():
    # [2 5] positions of 65 kept tokens each: 65 · 8 + 8 = 528 a position, float64 or not.
    ids = torch.arange(65).expand(2, 5, 65)
    dist = SparseDist(ids, torch.zeros(2, 5, 65, dtype=torch.float64), torch.zeros(2, 5, dtype=torch.float64))
    assert dist.pack().bytes_per_token == 528


def test_an_empty_batch_takes_no_bytes():
    dist = SparseDist(torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, 4), torch.zeros(0))
    assert dist.pack().bytes_per_token == 0


def test_a_packed_distribution_is_detached():
    logp, rest = torch.randn(2, 3, requires_grad=True), torch.randn(2, requires_grad=True)
    dist = SparseDist(torch.arange(6).view(2, 3), logp, rest)
    packed = dist.pack()
    assert not packed.logp.requires_grad
    assert not packed.rest.requires_grad
    assert not packed.unpack().with_rest().requires_grad
    assert dist.with_rest().requires_grad  # the original is not


def test_storage_goes_where_it_is_told_to():
    packed = example().pack("meta")
    assert {x.device.type for x in (packed.ids, packed.logp, packed.rest, packed.counts)} == {"meta"}
    assert example().pack().ids.device.type == "cpu"


# ------------------------------------------------------------------------------------------------------------- records


def batch_of(dist: SparseDist) -> TokenBatch:
    return TokenBatch.on_support(dist, dist, torch.ones(len(dist.rest), 1), torch.ones(len(dist.rest), 1) > 0)


def test_a_change_reaches_every_field_and_the_records_in_it():
    dist = replace(example(), rest_max=torch.tensor([-3.0, -INF, -1.0]))
    batch = batch_of(dist.map(lambda x: x[:, None]))
    picked = batch[1:]
    assert picked.advantages.shape == (2, 1)
    assert picked.logp_rollout is None
    assert_same(picked.dist_old, dist.map(lambda x: x[1:, None]))
    assert torch.equal(picked.dist_old.rest_max, dist.rest_max[1:, None])
    whole = TokenBatch.cat([batch[:1], batch[1:]])
    assert_same(whole.dist_new, batch.dist_new)
    assert torch.equal(whole.mask, batch.mask)


def test_a_batch_on_a_support_takes_its_log_probs_from_slot_0():
    new, old = (example().map(lambda x: x[:, None]) for _ in range(2))
    new = replace(new, logp=new.logp + 0.1)
    rollout = torch.zeros(3, 1)
    batch = TokenBatch.on_support(new, old, torch.ones(3), torch.ones(3, 1) > 0, rollout)
    assert torch.equal(batch.logp_new, new.logp[..., 0])
    assert torch.equal(batch.logp_old, old.logp[..., 0])
    assert batch.dist_new is new
    assert batch.dist_old is old
    assert batch.logp_rollout is rollout


def test_moving_a_record_keeps_integers_and_detaching_it_detaches_all():
    dist = example()
    half = dist.to(dtype=torch.float16)
    assert (half.ids.dtype, half.logp.dtype, half.rest.dtype) == (torch.int64, torch.float16, torch.float16)
    live = replace(dist, logp=dist.logp.clone().requires_grad_())
    assert live.logp.requires_grad
    assert not live.detach().logp.requires_grad


def test_shared_fields_move_and_are_not_indexed():
    hidden, weight = torch.randn(2, 3, 4), torch.randn(5, 4)
    union = UnionSupport.of_batch(hidden, weight, top_k=2)
    assert torch.equal(union[:, 1:].place, union.place[:, 1:])
    assert union[:, 1:].weight is union.weight
    assert union.to(dtype=torch.float64).weight.dtype == torch.float64
