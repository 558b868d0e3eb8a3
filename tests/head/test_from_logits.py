"""Logits that an engine has made, whole or split over two processes on gloo: what the full softmax says, and its gradient."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corral import gather_support, lm_head, top_k_support
from corral.head.from_logits import head_from_logits
from tolerance import assert_close
from two_processes import run_two

ROWS, VOCABULARY, TEMPERATURE = 7, 53, 0.8
SPLITS = {"even": 27, "uneven": 5, "none in the first": 0}
CASES: dict[str, dict[str, Any]] = {
    "log-probs alone": {},
    "top 4": {"top_k": 4},
    "top 6 of 70 %, with entropy": {"top_k": 6, "mass": 0.7, "entropy": True},
    "the whole vocabulary": {"top_k": VOCABULARY},
    "ids": {"ids": True, "entropy": True},
}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def problem(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Logits with ties across the processes, tokens on both sides of every split, and a support with padding."""
    draw = torch.Generator().manual_seed(1)
    logits = (torch.randn(ROWS, VOCABULARY, generator=draw) * 8).round() / 4
    tokens = torch.tensor([0, 4, 5, 26, 27, 52, 40])
    ids = torch.rand(ROWS, VOCABULARY, generator=draw).argsort(-1)[:, :5]
    ids[0, 3:] = ids[4, 1:] = -1
    return logits.to(dtype), tokens, ids


def fields(logp: Tensor, entropy: Tensor | None, dist: Any) -> tuple[list[Tensor], Tensor]:
    """Results to compare, and a weighting of those that have a gradient; row 2 has none."""
    weights = torch.linspace(-1, 2, ROWS, dtype=logp.dtype).index_fill(0, torch.tensor(2), 0.0)
    found, total = [logp], logp
    if entropy is not None:
        found, total = [*found, entropy], total - 0.4 * entropy
    if dist is not None:
        kept, rest = (torch.where(x > -torch.inf, x, 0.0) for x in (dist.logp, dist.rest))
        found, total = [*found, kept, rest, dist.rest_max], total + rest + 0.3 * kept.sum(-1)
    return [x.detach() for x in found], (total * weights).sum()


def from_logits(case: str, dtype: torch.dtype, mine: slice, group: Any = None) -> tuple[list[Tensor], Tensor | None, Tensor]:
    logits, tokens, ids = problem(dtype)
    options = dict(CASES[case])
    if options.pop("ids", False):
        options["ids"] = ids
    own = logits[:, mine].clone().requires_grad_()
    head = head_from_logits(own, tokens, temperature=TEMPERATURE, group=group, **options)
    found, total = fields(head.logp, head.entropy, head.dist)
    return found, None if head.dist is None else head.dist.ids, torch.autograd.grad(total, own)[0]


def from_softmax(case: str, dtype: torch.dtype) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """The same by autograd through the full softmax, in float64 or float32."""
    logits, tokens, ids = problem(dtype)
    whole = logits.to(torch.promote_types(dtype, torch.float32)).requires_grad_()
    logp, options = (whole / TEMPERATURE).log_softmax(-1), CASES[case]
    dist = None
    if "ids" in options:
        dist = gather_support(logp, ids)
    elif "top_k" in options:
        dist = top_k_support(logp, tokens, options["top_k"], options.get("mass", 1.0))
    entropy = -(logp.exp() * logp).sum(-1) if "entropy" in options else None
    found, total = fields(logp.gather(-1, tokens[:, None])[:, 0], entropy, dist)
    return found, None if dist is None else dist.ids, torch.autograd.grad(total, whole)[0]


def assert_same(got: Any, expected: Any, mine: slice, dtype: torch.dtype) -> None:
    for x, y in zip(got[0], expected[0], strict=True):
        finite = y > -torch.inf
        assert torch.equal(x > -torch.inf, finite)
        assert_close(x[finite], y[finite], torch.promote_types(dtype, torch.float32))
    assert got[1] is expected[1] or torch.equal(got[1], expected[1])
    assert got[2].dtype == dtype  # the gradient is rounded to the dtype of the logits, and nothing before it
    assert_close(got[2], expected[2][:, mine])


def work(rank: int, folder: Path) -> None:
    group = torch.distributed.group.WORLD
    found = {}
    for split, cut in SPLITS.items():
        mine = slice(0, cut) if rank == 0 else slice(cut, VOCABULARY)
        for case in CASES:
            for name, dtype in DTYPES.items():
                found[split, case, name] = from_logits(case, dtype, mine, group)
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    folder = tmp_path_factory.mktemp("logits")
    run_two(work, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_whole_logits_give_what_the_full_softmax_gives(case: str, dtype: str) -> None:
    everything = slice(0, VOCABULARY)
    assert_same(from_logits(case, DTYPES[dtype], everything), from_softmax(case, DTYPES[dtype]), everything, DTYPES[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_give_what_the_full_softmax_gives(found: list[dict[Any, Any]], split: str, case: str, dtype: str) -> None:
    cut = SPLITS[split]
    for rank, mine in enumerate((slice(0, cut), slice(cut, VOCABULARY))):
        assert_same(found[rank][split, case, dtype], from_softmax(case, DTYPES[dtype]), mine, DTYPES[dtype])


def test_gradcheck() -> None:
    logits, tokens, ids = problem(torch.float64)

    def results(z: Tensor) -> Tensor:
        head = head_from_logits(z, tokens, temperature=TEMPERATURE, ids=ids, entropy=True)
        assert head.dist is not None
        return torch.cat([head.logp, head.entropy, head.dist.logp[head.dist.ids >= 0], head.dist.rest])

    torch.autograd.gradcheck(results, logits.requires_grad_())


def test_equals_the_head_on_hidden_states() -> None:
    draw = torch.Generator().manual_seed(2)
    hidden, weight = torch.randn(ROWS, 8, generator=draw), torch.randn(VOCABULARY, 8, generator=draw)
    _, tokens, _ = problem(torch.float32)
    by_head = lm_head(hidden, weight, tokens, top_k=4, temperature=TEMPERATURE)
    by_logits = head_from_logits(hidden @ weight.T, tokens, top_k=4, temperature=TEMPERATURE)
    assert by_head.dist is not None
    assert by_logits.dist is not None
    assert torch.equal(by_head.dist.ids, by_logits.dist.ids)
    assert_close(by_logits.dist.with_rest(), by_head.dist.with_rest())


def test_an_empty_batch_has_an_empty_gradient() -> None:
    logits = torch.zeros(0, VOCABULARY, requires_grad=True)
    head = head_from_logits(logits, torch.zeros(0, dtype=torch.long), top_k=3)
    head.logp.sum().backward()
    assert head.dist is not None
    assert head.dist.ids.shape == (0, 4)
    assert logits.grad is not None
    assert logits.grad.shape == (0, VOCABULARY)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"top_k": 99}, "`top_k` must lie in 1 … V = 53"),
        ({"top_k": 3, "ids": torch.zeros(ROWS, 1, dtype=torch.long)}, "Pass one of them"),
        ({"ids": torch.zeros(ROWS, 2, dtype=torch.long)}, "a token twice"),
        ({"ids": torch.full((ROWS, 1), 53)}, "must lie in -1 … 52"),
    ],
)
def test_refuses(given: dict[str, Any], says: str) -> None:
    logits, tokens, _ = problem(torch.float32)
    with pytest.raises(ValueError, match=says):
        head_from_logits(logits, tokens, **given)
