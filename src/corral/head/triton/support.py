"""Find the top-k tokens from statistics of vocabulary tiles: recompute the logits of a few tiles, then rank them."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from corral.head.dispatch import tile_of
from corral.head.logits import slices
from corral.head.rows import AsyncCopy, HeadInput, HeadRows
from corral.head.torch.stream import Shard, head_forward
from corral.head.triton.gemm_stats import TileStatistics, finish_logits, gemm_stats, lanes, processors, spec_arguments
from corral.support import has_repeats, refuse_ids, refuse_repeats

WARPS = 4
"""Number of warps of a Triton program that processes one position."""
LOWEST: tl.constexpr = tl.constexpr(-0x7FFFFFFFFFFFFFFF)
NOTHING: tl.constexpr = tl.constexpr(0x7FFFFFFFFFFFFFFF)
LEFT_ALONE, LARGEST_TAKEN, RECOMPUTED = map(tl.constexpr, range(3))
"""States of a vocabulary tile at one position: no logit taken out, only the largest taken out, or logits recomputed."""

ROWS_AT_ONCE = 8192
"""Largest number of positions whose statistics of vocabulary tiles are in memory at once."""
ROOM = 4
"""Number of slots for candidates for the top-k tokens at each position, as a multiple of k.
Common tokens have neighbouring ids, so k slots are not enough."""
MORE_ROOM = 32
"""Number of candidate slots, as a multiple of k, at positions whose candidates did not fit in ROOM · k slots.
If they do not fit here either, as with equal logits, the PyTorch path is used."""
UNION_ROOM = 8
"""Number of candidate slots, as a multiple of k, if the host does not wait for the overflow flag.
A flagged batch is recomputed."""
MOST_LISTED = 8192
"""Largest number of candidate tokens that can be sorted in 64 KiB of shared memory, which every GPU has."""


@dataclass(frozen=True, eq=False)
class RecomputePlan:
    """Plan of the vocabulary tiles whose logits are recomputed, for N positions.

    Memory suffices for all tiles, so that the host need not wait.
    """

    state: Tensor
    """State of each vocabulary tile at each position: LEFT_ALONE, LARGEST_TAKEN or RECOMPUTED [N, tiles] uint8."""
    queue: Tensor
    length: Tensor
    """Number of positions for which each vocabulary tile is recomputed [tiles]; `queue` lists the positions [tiles, N]."""
    listed: Tensor
    """Candidate tokens at each position, as integers to be sorted.
    For given tokens: id · M + slot, ascending [N, M]. For top-k tokens: rank keys [N, room]."""
    filled: Tensor
    """Number of candidates for the top-k tokens at each position [N]; it exceeds `room` if the candidates did not fit."""
    floor: Tensor
    """Lower bound on the logits of the top-k tokens at each position [N], as an integer that sorts like the logit."""
    overflow: Tensor
    """Overflow flag [1]: it is 1 if the candidates for top-k tokens did not fit in memory at any position."""


def fits_at_once(count: int) -> bool:
    """True if the statistics of all vocabulary tiles for `count` tokens fit in memory at once.

    They can then be computed beforehand.
    """
    return count <= ROWS_AT_ONCE


def lm_head_forward(source: HeadInput) -> HeadRows:
    """Compute the results of `lm_head` in Triton: log-probs, entropy, and the distribution on the support.

    Ids are checked on the device, and refused once all kernels are queued.
    """
    return stream_head(source, queued=queue_id_check("lm_head", source.tokens, source.ids, len(source.weight)))


def queue_id_check(where: str, tokens: Tensor, ids: Tensor | None, vocabulary: int) -> Callable[[], None]:
    """Queue a check of token ids on the device, and return a function that waits for it and raises ValueError if it fails.

    Waiting at once would stop the host for as long as the device is behind. Kernels must therefore read no memory out of
    bounds, whatever the ids.
    """
    given = [(x, name, low) for x, name, low in ((tokens, "tokens", 0), (ids, "ids", -1)) if x is not None and x.numel()]
    found = [bound for x, _, _ in given for bound in x.aminmax()]
    if ids is not None and ids.numel():
        found.append(has_repeats(ids).long())
    copy = AsyncCopy(torch.stack(found)) if found else None

    def check() -> None:
        numbers = [] if copy is None else copy.wait()
        for i, (_, name, lowest) in enumerate(given):
            refuse_ids(where, name, *numbers[2 * i : 2 * i + 2], lowest=lowest, vocabulary=vocabulary)
        refuse_repeats(where, "ids", len(numbers) % 2 == 1 and bool(numbers[-1]))

    return check


def stream_head(
    whole: HeadInput,
    stats: TileStatistics | None = None,
    queued: Callable[[], None] = lambda: None,
    overflows: list[AsyncCopy] | None = None,
) -> HeadRows:
    """Compute the LM head's results for n tokens, from one GEMM and a few recomputed tiles of logits.

    Without `ids` and `top_k` the support is the sampled token; with both it is their union. `stats` are those of all n tokens,
    if they exist already. `queued` is called when all kernels are queued, before the host waits for a result. The ranking of a
    union waits too, unless there is a list for `overflows`: a flag in it that is not 0 means that rows are wrong.
    """
    assert stats is None or fits_at_once(len(whole.hidden))
    top_k, given = whole.top_k, whole.ids
    if top_k is not None and given is None:
        return _own_rows(whole, ROOM, stats, queued)
    parts = [support_rows(part, stats or gemm_stats(part), overflows) for part in _parts(whole)]
    queued()
    return HeadRows.cat(parts) if parts else _blank_rows(whole, 1 if given is None else given.shape[1] + (top_k or 0))


def _parts(whole: HeadInput) -> list[HeadInput]:
    """Split the LM head's inputs into even parts of at most ROWS_AT_ONCE tokens."""
    total = len(whole.hidden)
    return [whole[part] for part in slices(total, triton.cdiv(total, max(1, triton.cdiv(total, ROWS_AT_ONCE))))]


def support_rows(part: HeadInput, stats: TileStatistics, overflows: list[AsyncCopy] | None = None) -> HeadRows:
    """Compute the LM head's results on given tokens, on the union of given and top-k tokens, or on the sampled token.

    The tile statistics `stats` are overwritten.
    """
    top_k, given = part.top_k, part.ids
    if top_k is None:
        return _given_rows(part, stats)
    assert given is not None
    # A union: the policy's own support is found first, then both are given. Beside a given support, even an empty one, the
    # sampled token is a token like any other.
    own = replace(part, ids=given.new_full((len(given), 1), -1))
    kept = replace(stats, second=stats.second.clone(), others=stats.others.clone(), weighted=stats.weighted[:0])
    ranked = _own_rows(own, ROOM if overflows is None else UNION_ROOM, kept, overflows=overflows).ids
    ids = join_supports(given.contiguous(), ranked, top_k, part.joins)
    return _given_rows(replace(part, ids=ids, top_k=None), stats)


def _given_rows(part: HeadInput, stats: TileStatistics) -> HeadRows:
    """Compute the LM head's results on the given tokens `ids`, or on the sampled token alone."""
    given, marks = part.ids is not None, _marks(part)
    (count, tiles), slots = stats.peak.shape, marks.shape[1]
    out, plan = _blank_rows(part, slots), _blank_plan(stats, lanes(slots))
    _given_kernel[(count,)](
        stats.peak, stats.place, stats.second, stats.others, stats.weighted, marks, plan.state, plan.queue, plan.length,
        plan.listed, out.kept, out.lse, out.entropy, count, tiles, slots, GIVEN=given, ENTROPY=stats.weighted.numel() > 0,
        TILES=triton.next_power_of_2(tiles), SLOTS=lanes(slots), COLUMNS=tile_of(part.hidden).columns, num_warps=WARPS,
    )  # fmt: skip
    _recompute_tiles(part, stats, plan, marks, out, own=False)
    _finalize_given_kernel[(count,)](
        stats.peak, stats.second, stats.others, plan.state, marks, out.lse, out.rest, out.rest_max, out.kept, tiles, slots,
        GIVEN=given, TILES=triton.next_power_of_2(tiles), SLOTS=lanes(slots), num_warps=WARPS,
    )  # fmt: skip
    if part.ids is None:
        return replace(out, logp=out.kept[:, 0], ids=part.tokens[:, None])
    return replace(out, logp=out.kept[:, 0], ids=part.ids, kept=out.kept[:, 1:])


def _own_rows(
    whole: HeadInput,
    room: int,
    early: TileStatistics | None = None,
    queued: Callable[[], None] = lambda: None,
    overflows: list[AsyncCopy] | None = None,
) -> HeadRows:
    """Compute the LM head's results on the policy's own top-k tokens, as in `corral.top_k_support`.

    Slot 0 is the sampled token, or no token if `ids` is given.
    """
    top_k, mass = whole.top_k, whole.mass
    assert top_k is not None
    best, found = lanes(top_k), []
    for part in _parts(whole):
        stats = early or gemm_stats(part)
        marks = (part.tokens[:, None] if part.ids is None else part.ids[:, :1]).int()
        out, plan = _blank_rows(part, top_k + 1), _blank_plan(stats, room * best)
        count, tiles = stats.peak.shape
        _own_kernel[(count,)](
            stats.peak, stats.place, stats.second, stats.others, stats.weighted, marks, plan.state, plan.queue, plan.length,
            plan.listed, plan.filled, plan.floor, plan.overflow, out.lse, out.entropy, count, tiles, top_k,
            ENTROPY=stats.weighted.numel() > 0, TILES=triton.next_power_of_2(tiles), ROOM=room * best,
            COLUMNS=tile_of(part.hidden).columns, num_warps=WARPS,
        )  # fmt: skip
        _recompute_tiles(part, stats, plan, marks, out, own=True)
        overflow = AsyncCopy(plan.overflow)  # queued before the sort, so that the host has it sooner
        _finalize_own_kernel[(count,)](
            stats.peak, stats.second, stats.others, plan.state, plan.listed, plan.filled, marks, out.lse, out.logp, out.rest,
            out.rest_max, out.ids, out.kept, tiles, mass, top_k, THRESHOLD=mass < 1.0, TILES=triton.next_power_of_2(tiles),
            BEST=best, ROOM=room * best,
            num_warps=1 if room * best <= 512 else WARPS,  # a sort within a warp waits for no other
        )  # fmt: skip
        found.append((out, plan.filled, overflow))
    queued()
    if not found:
        return _blank_rows(whole, top_k + 1)
    parts, filled, copies = zip(*found, strict=True)
    rows = HeadRows.cat(parts)
    if overflows is not None:
        overflows += copies
    elif any(overflow.wait()[0] for overflow in copies):  # some rows once more, with more room, or by the torch path
        which = (torch.cat(filled) > room * best).nonzero().squeeze(-1)
        more = min(MORE_ROOM, MOST_LISTED // best)
        again = _own_rows(whole[which], more) if room < more else head_forward(whole[which], Shard.of(whole.weight, None))
        for name, x in vars(rows).items():
            x[which] = vars(again)[name]
    return rows


def _marks(part: HeadInput) -> Tensor:
    """Collect the token ids to evaluate at each position: the sampled token, then the given tokens [N, 1 + K] int32.

    Ids outside the vocabulary become −1.
    """
    marks = part.tokens[:, None] if part.ids is None else torch.cat([part.tokens[:, None], part.ids], 1)
    return torch.where((marks >= 0) & (marks < len(part.weight)), marks, -1).int()


def _blank_rows(part: HeadInput, slots: int) -> HeadRows:
    """Allocate uninitialised results of the LM head; the entropy is 0 unless requested."""
    count, device = len(part.tokens), part.tokens.device
    lse, logp, rest, rest_max = (torch.empty(count, device=device) for _ in range(4))
    entropy = (torch.empty if part.entropy else torch.zeros)(count, device=device)
    ids = torch.empty(count, slots, dtype=torch.int64, device=device)
    return HeadRows(lse, logp, ids, torch.empty(count, slots, device=device), rest, entropy, rest_max)


def _blank_plan(stats: TileStatistics, listed: int) -> RecomputePlan:
    """Allocate an empty plan of vocabulary tiles to recompute."""
    (count, tiles), like = stats.peak.shape, stats.peak
    zeros = torch.zeros(tiles + 1, dtype=torch.int32, device=like.device)
    length, overflow = zeros[:tiles], zeros[tiles:]
    filled, floor = (like.new_empty(count, dtype=torch.int32) for _ in range(2))
    return RecomputePlan(
        like.new_empty(count, tiles, dtype=torch.uint8), like.new_empty(tiles, count, dtype=torch.int32), length,
        like.new_empty(count, listed, dtype=torch.int64), filled, floor, overflow,
    )  # fmt: skip


def _recompute_tiles(
    part: HeadInput, stats: TileStatistics, plan: RecomputePlan, marks: Tensor, out: HeadRows, *, own: bool
) -> None:
    """Recompute the logits of queued vocabulary tiles, for given tokens or for the policy's own top-k tokens.

    Given tokens' log-probs go to `out.kept`; candidates for top-k tokens go to the plan's list.
    """
    hidden, weight, tile = part.hidden, part.weight, tile_of(part.hidden)
    (tiles, count), programs = plan.queue.shape, processors(hidden)
    _tile_kernel[(programs,)](
        hidden, TensorDescriptor.from_tensor(weight, [tile.columns, tile.depth]), part.bias, plan.queue, plan.length,
        plan.listed, plan.filled, plan.floor, plan.overflow, marks, out.lse, out.kept, stats.second, stats.others, count,
        *weight.shape, tiles, marks.shape[1], *spec_arguments(part.spec), OWN=own, GIVEN=not own and part.ids is not None,
        PROGRAMS=programs, TILES=triton.next_power_of_2(tiles), LISTED=plan.listed.shape[1], ROWS=tile.rows // 2,
        COLUMNS=tile.columns, DEPTH=tile.depth, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def join_supports(given: Tensor, ranked: Tensor, most: int, joins: Tensor | None = None) -> Tensor:
    """Join two lists of token ids at each position: all of `given`, then up to `most` other ids of `ranked`, then −1.

    `given` is [N, K], `ranked` is [N, M], and the result is [N, K + most]. Both may hold −1, for no token, anywhere. A row that
    does not join [N] gets no others. `support.choose_support` is the reference.
    """
    (count, slots), joined = given.shape, given.shape[1] + most
    out = torch.empty(count, joined, dtype=torch.int64, device=given.device)
    _join_kernel[(count,)](
        given, ranked, None if joins is None else joins.contiguous().view(torch.uint8), out, slots, ranked.shape[1], joined,
        GIVEN=lanes(slots), RANKED=lanes(ranked.shape[1]), SLOTS=lanes(joined), SOME=16, num_warps=1,
    )  # fmt: skip
    return out


@triton.jit
def rank_bits(z):
    """Map a logit to an integer, so that integers and logits have the same order."""
    bits = (z + 0.0).to(tl.int32, bitcast=True)  # + 0 turns −0 into 0, its equal
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def rank_key(z, ids):
    """Map a logit and its token id to one integer that sorts by logit, then by lower id."""
    return (rank_bits(z).to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)


@triton.jit
def _load_tiles(peak, second, others, row, tiles, TILES: tl.constexpr):
    """Load the statistics of all vocabulary tiles at one position.

    Returns indices, mask, addresses, the two largest logits, and the sum without the largest.
    """
    # One program holds all of a row's tiles in registers: 594 of them for a vocabulary of 152,000.
    tile = tl.arange(0, TILES)
    valid = tile < tiles
    here = row * tiles + tile
    top = tl.load(peak + here, mask=valid, other=-float("inf"))
    runner_up = tl.load(second + here, mask=valid, other=-float("inf"))
    return tile, valid, here, top, runner_up, tl.load(others + here, mask=valid, other=0.0)


@triton.jit
def log_sum(peak, total):
    """Compute log Σ total · e^peak over vocabulary tiles; −inf if there is nothing to sum."""
    top = tl.max(peak, 0)
    top = tl.where(top == -float("inf"), 0.0, top)
    return top + tl.log(tl.sum(total * tl.exp(peak - top), 0))


@triton.jit
def whole_tiles(top, runner_up, without):
    """Compute Σ e^(z − top) for each vocabulary tile with largest logit top, and second − top for its two largest logits."""
    # 1 for the largest itself, and the others brought from "relative to the second" to "relative to the largest".
    some = top > -float("inf")
    down = tl.where(runner_up > -float("inf"), runner_up - tl.where(some, top, 0.0), -float("inf"))
    return tl.where(some, 1.0, 0.0) + without * tl.exp(down), down


@triton.jit
def _normaliser(top, runner_up, without, weighted, lse, entropy, row, tiles, ENTROPY: tl.constexpr, TILES: tl.constexpr):
    """Write the log normaliser log Σ eᶻ of the softmax at one position, and its entropy if requested."""
    whole, down = whole_tiles(top, runner_up, without)
    total = log_sum(top, whole)
    tl.store(lse + row, total)
    if ENTROPY:
        # −H = Σ p log p; around its own largest logit a tile adds e^(top − lse) Σ e^(z − top) ((z − top) + (top − lse)).
        tile = tl.arange(0, TILES)
        some = top > -float("inf")
        u = tl.load(weighted + row * tiles + tile, mask=tile < tiles, other=0.0)
        around = tl.exp(down) * (u + tl.where(down > -float("inf"), down, 0.0) * without)
        high = tl.where(some, top - total, 0.0)
        tl.store(entropy + row, -tl.sum(tl.where(some, tl.exp(high) * (around + whole * high), 0.0), 0))
    return total


@triton.jit
def _given_kernel(
    peak, place, second, others, weighted, marks, state, queue, length, listed, values, lse, entropy, rows, tiles, slots,
    GIVEN: tl.constexpr, ENTROPY: tl.constexpr, TILES: tl.constexpr, SLOTS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute normaliser and entropy at one position, and queue the vocabulary tiles that its given tokens need.

    A given token that is its tile's largest is read off the statistics; the tiles of other given tokens are queued.
    """
    row = tl.program_id(0).to(tl.int64)
    _tile, valid, here, top, runner_up, without = _load_tiles(peak, second, others, row, tiles, TILES)
    total = _normaliser(top, runner_up, without, weighted, lse, entropy, row, tiles, ENTROPY, TILES)
    tl.store(state + here, tl.full((TILES,), LEFT_ALONE, tl.uint8), mask=valid)

    slot = tl.arange(0, SLOTS)
    mark = tl.load(marks + row * slots + slot, mask=slot < slots, other=-1)
    tl.store(values + row * slots + slot, tl.full((SLOTS,), -float("inf"), tl.float32), mask=slot < slots)
    if GIVEN:  # a sampled token that is in the support too is looked for there
        twice = tl.max(((mark == tl.load(marks + row * slots)) & (slot > 0)).to(tl.int32), 0) > 0
        mark = tl.where((slot == 0) & twice, -1, mark)
    # A token that is its tile's largest is read off the statistics; any other tile with a member is computed again, since its
    # remainder would else be a difference of two sums.
    # Sorted by token, all tokens of a tile stand together: a tile is queued once, and its recomputation reads a run of the
    # list.
    key = tl.sort(tl.where(mark >= 0, mark.to(tl.int64) * SLOTS + slot, NOTHING))
    tl.store(listed + row * SLOTS + slot, key)
    # Lanes read what their neighbours wrote. A row has one program, so that a barrier within it is enough.
    tl.debug_barrier()
    before = tl.load(listed + row * SLOTS + slot - 1, mask=slot > 0, other=-1)
    real = key != NOTHING
    if GIVEN:  # a token twice in a support: the whole row becomes NaN
        repeated = real & (before >= 0) & (before // SLOTS == key // SLOTS)
        total = tl.where(tl.max(repeated.to(tl.int32), 0) > 0, float("nan"), total)
        tl.store(lse + row, total)
    id = tl.where(real, key // SLOTS, 0).to(tl.int32)
    at = id // COLUMNS
    own_slot = (key % SLOTS).to(tl.int32)
    # If two logits tie at the top of a tile, `place` may be either: recompute.
    alone = tl.load(peak + row * tiles + at) > tl.load(second + row * tiles + at)
    known = real & alone & (tl.load(place + row * tiles + at).to(tl.int32) == id % COLUMNS)
    member = real
    if GIVEN:
        member = member & (own_slot > 0)
    # Several tokens may share a tile. If one of them is not its largest, the tile is recomputed for all: that store comes last.
    tl.store(state + row * tiles + at, tl.full((SLOTS,), LARGEST_TAKEN, tl.uint8), mask=member & known)
    tl.debug_barrier()
    tl.store(state + row * tiles + at, tl.full((SLOTS,), RECOMPUTED, tl.uint8), mask=real & ~known)
    tl.debug_barrier()
    again = real & (tl.load(state + row * tiles + at, mask=real, other=LEFT_ALONE) == RECOMPUTED)
    value = tl.load(peak + row * tiles + at, mask=real, other=0.0) - total
    tl.store(values + row * slots + own_slot, value, mask=real & ~again)
    first = again & ((before < 0) | (before // (SLOTS * COLUMNS) != at))
    # Programs append to one queue per tile. Their order there depends on timing, and no result depends on it: each row of a
    # block is computed by itself.
    position = tl.atomic_add(length + at, tl.full((SLOTS,), 1, tl.int32), mask=first, sem="relaxed")
    tl.store(queue + at.to(tl.int64) * rows + position, (row * SLOTS + slot).to(tl.int32), mask=first)


@triton.jit
def _own_kernel(
    peak, place, second, others, weighted, marks, state, queue, length, listed, filled, floors, overflow, lse, entropy, rows,
    tiles, top_k, ENTROPY: tl.constexpr, TILES: tl.constexpr, ROOM: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Compute normaliser and entropy at one position, a lower bound on its top k logits, and the tiles to recompute.

    The k-th largest among the two largest logits of every tile is such a floor. A tile whose second largest logit is below it
    holds one member at most, which is known. Bisection finds a floor that slightly more than k of these logits reach: exact
    enough, and sooner.
    """
    row = tl.program_id(0).to(tl.int64)
    tile, valid, here, top, runner_up, without = _load_tiles(peak, second, others, row, tiles, TILES)
    _normaliser(top, runner_up, without, weighted, lse, entropy, row, tiles, ENTROPY, TILES)

    bits = tl.where(valid, rank_bits(top), -0x80000000)
    next_bits = tl.where(valid, rank_bits(runner_up), -0x80000000)
    # Find a lower bound on the k-th largest logit from two logits per tile, by bisection over integers that order like floats:
    # at most 32 steps in registers, and no sort. A bound that lets through up to k/8 more will do, since they are ranked later.
    # With k tiles or more, at least k logits reach the least of the tiles' largest.
    floor = tl.where(tiles >= top_k, tl.min(tl.where(valid, bits, 0x7FFFFFFF), 0), -0x80000000)
    ceiling = tl.max(bits, 0)
    while floor < ceiling:
        trial = (floor >> 1) + (ceiling >> 1) + ((floor | ceiling) & 1)  # the middle, rounded up; a sum might overflow
        reach = tl.sum((bits >= trial).to(tl.int32) + (next_bits >= trial).to(tl.int32), 0)
        floor = tl.where(reach >= top_k, trial, floor)
        near = (reach >= top_k) & (reach <= top_k + top_k // 8)
        ceiling = tl.where(near, trial, tl.where(reach >= top_k, ceiling, trial - 1))
    tl.store(floors + row, floor)

    token = tl.load(marks + row)
    largest = tile * COLUMNS + tl.load(place + here, mask=valid, other=0).to(tl.int32)
    sampled_here = valid & (tile == token // COLUMNS) & (token >= 0)
    again = valid & ((next_bits >= floor) | (sampled_here & ((largest != token) | (bits == next_bits))))
    # With fewer than k finite logits, impossible tokens are members, and tile statistics do not say which: the torch path does.
    too_few_finite = floor <= -0x7F800001  # as −inf ranks
    again = again & ~too_few_finite

    # Slot 0 is the sampled token's, then come the largest logits of tiles that need no recomputing. The slots behind these are
    # for logits found in recomputed tiles.
    taken = valid & ~again & ~sampled_here & (bits >= floor)
    slot = tl.cumsum(taken.to(tl.int32), 0)
    tl.store(listed + row * ROOM + tl.arange(0, ROOM), tl.full((ROOM,), LOWEST, tl.int64))
    tl.debug_barrier()  # the list is empty before anything is put in; slots are a prefix sum, so that no two lanes share one
    tl.store(listed + row * ROOM + slot, rank_key(top, largest), mask=taken & (slot < ROOM))
    done = sampled_here & ~again
    tl.store(listed + row * ROOM + tl.zeros((TILES,), tl.int32), rank_key(top, largest), mask=done)
    full = tl.where(too_few_finite, ROOM + 1, 1 + tl.sum(taken.to(tl.int32), 0))
    tl.store(filled + row, full)
    tl.store(overflow, 1, mask=full > ROOM)
    tl.store(
        state + here, tl.where(again, RECOMPUTED, tl.where(taken | done, LARGEST_TAKEN, LEFT_ALONE)).to(tl.uint8), mask=valid
    )
    position = tl.atomic_add(length + tile, tl.full((TILES,), 1, tl.int32), mask=again, sem="relaxed")
    tl.store(queue + tile.to(tl.int64) * rows + position, (row + tl.zeros((TILES,), tl.int64)).to(tl.int32), mask=again)


@triton.jit
def _tile_kernel(
    hidden, weight, bias, queue, length, listed, filled, floors, overflow, marks, lse, values, second, others, rows, vocabulary,
    width, tiles, slots, before, cap, after, OWN: tl.constexpr, GIVEN: tl.constexpr, PROGRAMS: tl.constexpr,
    TILES: tl.constexpr, LISTED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Recompute the logits of queued vocabulary tiles, for up to ROWS positions that share a tile at once.

    Each program takes every PROGRAMS-th of these blocks.
    """
    # This is a GEMM of gathered rows with one tile of weights at a time: rows are sorted by tile, and not tiles by row, so that
    # a tile of W is read once for all rows that need it.
    # How many rows wait for which tile is known on the device alone. Every program finds its blocks from the queues' lengths by
    # a prefix sum in registers, so that the host need not wait to size the launch.
    each = tl.arange(0, TILES)
    blocks = tl.cdiv(tl.load(length + each, mask=each < tiles, other=0), ROWS)
    up_to = tl.cumsum(blocks, 0)
    local = tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    for index in range(tl.program_id(0), tl.sum(blocks, 0), PROGRAMS):
        tile = tl.sum((up_to <= index).to(tl.int32), 0)
        begin = (index - tl.max(tl.where(up_to <= index, up_to, 0), 0)) * ROWS
        waiting = tl.load(length + tile)
        columns = tile * COLUMNS + local
        item = begin + tl.arange(0, ROWS)
        valid = item < waiting
        entry = tl.load(queue + tile.to(tl.int64) * rows + item, mask=valid, other=0)
        row = entry.to(tl.int64) if OWN else (entry // LISTED).to(tl.int64)
        dots = tl.zeros((ROWS, COLUMNS), tl.float32)
        for k in range(0, width, DEPTH):
            # Waiting rows lie anywhere, and are gathered by pointers; the tile's weights come by descriptor, for all of them.
            # It adds up in the steps of `_multiply`, so that a recomputed logit is rounded as it was in the normaliser.
            within = (k + depth) < width
            h = tl.load(hidden + row[:, None] * width + (k + depth)[None, :], mask=valid[:, None] & within[None, :], other=0.0)
            dots = tl.dot(h, weight.load([tile * COLUMNS, k]).T, dots, input_precision="ieee")
        z = finish_logits(dots, columns, bias, vocabulary, before, cap, after)
        if OWN:  # list the candidates for top-k tokens: the sampled token first, then logits that reach the row's lower bound
            token = tl.load(marks + row, mask=valid, other=-1)
            mine = valid & (token // COLUMNS == tile) & (token >= 0)
            hit = (local[None, :] == (token % COLUMNS)[:, None]) & mine[:, None]
            own = tl.sum(tl.where(hit, z, 0.0), 1)
            tl.store(listed + row * LISTED, rank_key(own, token), mask=mine)
            z = tl.where(hit, -float("inf"), z)
            floor = tl.load(floors + row, mask=valid, other=0)
            largest = tl.max(z, 1)
            wanted = valid & (rank_bits(largest) >= floor) & (largest > -float("inf"))
            while tl.max(wanted.to(tl.int32), 0) > 0:
                at = tl.min(tl.where(z == largest[:, None], local[None, :], COLUMNS - 1), 1)
                # Other tiles of this row are in other programs, and append to the same list. It is sorted by (logit, id) later,
                # which makes the result independent of the order.
                place = tl.atomic_add(filled + row, tl.full(at.shape, 1, tl.int32), mask=wanted, sem="relaxed")
                fits = place < LISTED
                tl.store(listed + row * LISTED + place, rank_key(largest, tile * COLUMNS + at), mask=wanted & fits)
                tl.store(overflow + tl.zeros_like(at), tl.full(at.shape, 1, tl.int32), mask=wanted & ~fits)
                z = tl.where((local[None, :] == at[:, None]) & wanted[:, None], -float("inf"), z)
                largest = tl.max(z, 1)
                wanted = wanted & fits & (rank_bits(largest) >= floor) & (largest > -float("inf"))
        else:  # move the logits of listed tokens to their slots: members of the support no longer count in the tile
            place = entry % LISTED
            total = tl.load(lse + row, mask=valid, other=0.0)
            key = tl.load(listed + row * LISTED + place, mask=valid, other=NOTHING)
            here = valid & (key // (LISTED * COLUMNS) == tile)
            # One token of each row at a time, as long as any row of the block has one in this tile: rarely more than two.
            while tl.max(here.to(tl.int32), 0) > 0:
                column, slot = (key // LISTED % COLUMNS).to(tl.int32), (key % LISTED).to(tl.int32)
                hit = (local[None, :] == column[:, None]) & here[:, None]
                tl.store(values + row * slots + slot, tl.sum(tl.where(hit, z, 0.0), 1) - total, mask=here)
                if GIVEN:  # the sampled token, where it is no member, stays
                    hit = hit & (slot > 0)[:, None]
                z = tl.where(hit, -float("inf"), z)
                place += 1
                # NOTHING, behind a full list, is in no tile; −1 would be in the first, since division truncates.
                key = tl.load(listed + row * LISTED + place, mask=here & (place < LISTED), other=NOTHING)
                here = here & (key // (LISTED * COLUMNS) == tile)
        # What is left in the tile replaces its statistics. A row waits for a tile once, so that nobody else writes here.
        top = tl.max(z, 1)
        base = tl.where(top == -float("inf"), 0.0, top)
        tl.store(second + row * tiles + tile, top, mask=valid)
        tl.store(others + row * tiles + tile, tl.sum(tl.exp(z - base[:, None]), 1), mask=valid)


@triton.jit
def _left_in_tiles(peak, second, others, state, row, tiles, TILES: tl.constexpr):
    """Compute log Σ eᶻ over the logits that stayed in their vocabulary tiles, and the largest of these logits."""
    _tile, valid, here, top, runner_up, without = _load_tiles(peak, second, others, row, tiles, TILES)
    whole, _down = whole_tiles(top, runner_up, without)
    untouched = tl.load(state + here, mask=valid, other=RECOMPUTED) == LEFT_ALONE
    largest = tl.where(untouched, top, runner_up)
    return log_sum(largest, tl.where(untouched, whole, without)), tl.max(largest, 0)


@triton.jit
def _finalize_given_kernel(
    peak, second, others, state, marks, lse, rest, rest_max, values, tiles, slots, GIVEN: tl.constexpr, TILES: tl.constexpr,
    SLOTS: tl.constexpr,
):  # fmt: skip
    """Finalize one position with given tokens: write its tail mass, and the sampled token's log-prob if it is a given token."""
    row = tl.program_id(0).to(tl.int64)
    total = tl.load(lse + row)
    outside, largest = _left_in_tiles(peak, second, others, state, row, tiles, TILES)
    tl.store(rest + row, outside - total)
    tl.store(rest_max + row, largest - total)
    if GIVEN:
        slot = tl.arange(0, SLOTS)
        mark = tl.load(marks + row * slots + slot, mask=slot < slots, other=-1)
        same = (mark == tl.load(marks + row * slots)) & (slot > 0)
        value = tl.load(values + row * slots + slot, mask=same, other=-float("inf"))
        found = tl.max(same.to(tl.int32), 0) > 0
        tl.store(values + row * slots, tl.max(value, 0), mask=found)


@triton.jit
def _finalize_own_kernel(
    peak, second, others, state, listed, filled, marks, lse, logp, rest, rest_max, ids, kept, tiles, mass, top_k,
    THRESHOLD: tl.constexpr, TILES: tl.constexpr, BEST: tl.constexpr, ROOM: tl.constexpr,
):  # fmt: skip
    """Finalize the top-k tokens at one position: sort the listed candidates, and compute the tail mass that remains."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(filled + row) > ROOM:  # no token, until the row is computed again
        every = tl.arange(0, 2 * BEST)
        tl.store(ids + row * (top_k + 1) + every, tl.full((2 * BEST,), -1, tl.int64), mask=every <= top_k)
        return
    total = tl.load(lse + row)
    keys = tl.load(listed + row * ROOM + tl.arange(0, ROOM))
    # A sort of n keys takes log² n steps: with few candidates a list of 2k costs less than half of the whole one.
    if (tl.load(filled + row) <= 2 * BEST) & (2 * BEST < ROOM):  # the usual case: a shorter sort
        best = tl.topk(tl.load(listed + row * ROOM + tl.arange(0, 2 * BEST)), BEST)
    else:
        best = tl.topk(keys, BEST)
    rank = tl.arange(0, BEST)
    value = _value_of(best) - total
    token_id = 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32)
    chosen = (rank < top_k) & (best > LOWEST)  # of a row of NaN nothing was listed
    if THRESHOLD:  # in float64, as `support.choose_support` sums: in float32 the last token would depend on rounding
        p64 = tl.where(chosen, tl.exp(value.to(tl.float64)), 0.0)
        before = tl.cumsum(p64, 0) - p64
        chosen = chosen & ((before == 0.0) | (before < mass - 2.384185791015625e-07))  # 2 eps of float32
    bar = tl.min(tl.where(chosen, best, 0x7FFFFFFFFFFFFFFF), 0)

    # Slot 0 the sampled token, then the others chosen, then padding.
    sampled = tl.load(marks + row)
    own = _value_of(tl.load(listed + row * ROOM)) - total
    base = row * (top_k + 1)
    tl.store(logp + row, own)
    tl.store(ids + base, sampled.to(tl.int64))
    tl.store(kept + base, own)
    stays = chosen & (token_id != sampled)
    goes = (rank < top_k) & ~stays
    slot = tl.where(
        stays, tl.cumsum(stays.to(tl.int32), 0), tl.sum(stays.to(tl.int32), 0) + tl.cumsum(goes.to(tl.int32), 0)
    )  # fmt: skip
    tl.store(ids + base + slot, tl.where(stays, token_id, -1).to(tl.int64), mask=rank < top_k)
    tl.store(kept + base + slot, tl.where(stays, value, -float("inf")), mask=rank < top_k)

    # The tail: logits that stayed in their tiles, and those of the list that were not chosen. They are added up, since 1 − Σ p
    # would lose the digits of a peaked policy's tail.
    outside, largest = _left_in_tiles(peak, second, others, state, row, tiles, TILES)
    free = (keys < bar) & (0x7FFFFFFF - (keys & 0x7FFFFFFF).to(tl.int32) != sampled) & (keys > LOWEST)
    others_listed = tl.where(free, _value_of(keys), -float("inf"))
    more = log_sum(others_listed, tl.full((ROOM,), 1.0, tl.float32))
    tl.store(rest_max + row, tl.maximum(largest, tl.max(others_listed, 0)) - total)
    high = tl.maximum(outside, more)
    high = tl.where(high == -float("inf"), 0.0, high)
    tl.store(rest + row, high + tl.log(tl.exp(outside - high) + tl.exp(more - high)) - total)


@triton.jit
def _value_of(key):
    """Convert an integer made by `rank_key` back to its logit."""
    bits = (key >> 32).to(tl.int32)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _join_kernel(
    ids, ranked, joins, out_joined, slots, slots_in, joined, GIVEN: tl.constexpr, RANKED: tl.constexpr, SLOTS: tl.constexpr,
    SOME: tl.constexpr,
):  # fmt: skip
    """Join the given and the ranked token ids at one position, for `join_supports`."""
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, GIVEN)
    first = tl.load(ids + row * slots + place, mask=place < slots, other=-1)
    rank = tl.arange(0, RANKED)
    id = tl.load(ranked + row * slots_in + rank, mask=rank < slots_in, other=-1)
    if joins is not None:
        id = tl.where(tl.load(joins + row) != 0, id, -1)
    # All pairs are compared, SOME at a time: a block of RANKED × K would not fit in registers.
    known = tl.zeros((RANKED,), tl.int32)
    for begin in range(0, slots, SOME):
        some = begin + tl.arange(0, SOME)
        other = tl.load(ids + row * slots + some, mask=some < slots, other=-1)
        known = tl.maximum(known, tl.max((id[:, None] == other[None, :]).to(tl.int32), 1))
    member, new = first >= 0, (id >= 0) & (known == 0)
    members = tl.sum(member.to(tl.int32), 0)
    here = out_joined + row * joined
    tl.store(here + tl.cumsum(member.to(tl.int32), 0) - 1, first, mask=member)
    tl.store(here + members + tl.cumsum(new.to(tl.int32), 0) - 1, id, mask=new)
    slot = tl.arange(0, SLOTS)
    padding = (slot >= members + tl.sum(new.to(tl.int32), 0)) & (slot < joined)
    tl.store(here + slot, tl.full((SLOTS,), -1, tl.int64), mask=padding)
