"""A vocabulary split over two processes on gloo: the result and the gradients of one process, whoever holds the token."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from corral.head import HeadOutput, lm_head
from device import CPU_ONLY
from tolerance import assert_close
from two_processes import run_two

F64 = torch.float64
VOCABULARY, HIDDEN = 61, 4
SPLITS = {
    "even": 31,
    "uneven": 7,
    "fewer than k in the first": 2,
    "all but two in the first": 59,
    "none in the first": 0,
    "all": 61,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "log-probs alone": {},
    "top 5": {"top_k": 5},
    "top 5 of 60 %, with entropy": {"top_k": 5, "mass": 0.6, "entropy": True},
    "the whole vocabulary": {"top_k": VOCABULARY, "entropy": True},
    "ids": {"ids": True, "entropy": True},
    "soft cap and temperature": {"top_k": 4, "softcap": 2.0, "temperature": 0.7, "scale": 1.3, "entropy": True},
    "impossible tokens": {"top_k": 6, "impossible": True, "entropy": True},
}
FIELDS = ("logp", "entropy", "ids", "kept", "rest", "hidden", "weight", "bias")


def problem() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, weight, bias, tokens on both sides of every split, and a support with padding."""
    draw = torch.Generator().manual_seed(0)
    # Products of a coarse grid are exact, and many are equal, across the processes too: ties go to the lower id.
    hidden = (torch.randn(2, 6, HIDDEN, generator=draw, dtype=F64) * 4).round() / 4
    weight = (torch.randn(VOCABULARY, HIDDEN, generator=draw, dtype=F64) * 2).round() / 2
    weight[VOCABULARY // 2 :] = weight[: VOCABULARY - VOCABULARY // 2].clone()
    tokens = torch.tensor([[0, 1, 2, 6, 7, 30], [31, 58, 59, 60, 3, 40]])
    ids = torch.rand(2, 6, VOCABULARY, generator=draw).argsort(-1)[..., :4]
    ids[0, 0, 2:] = ids[1, 3, 1:] = -1
    return hidden, weight, torch.zeros(VOCABULARY, dtype=F64), tokens, ids


def results(case: str, mine: slice, group: Any = None) -> dict[str, Tensor | None]:
    """Everything the head returns with some rows of the weight, and the gradients of a weighting of it."""
    hidden, weight, bias, tokens, ids = problem()
    options = dict(OPTIONS[case])
    if options.pop("impossible", False):
        bias[torch.arange(VOCABULARY) % 3 != 0] = -torch.inf
        tokens = tokens // 3 * 3
    if options.pop("ids", False):
        options["ids"] = ids
    inputs = [x.clone().requires_grad_() for x in (hidden, weight[mine], bias[mine])]
    out = lm_head(inputs[0], inputs[1], tokens, bias=inputs[2], group=group, **options)
    gradients = torch.autograd.grad(scalar(out), inputs)
    dist = (None, None, None) if out.dist is None else (out.dist.ids, out.dist.logp.detach(), out.dist.rest.detach())
    entropy = None if out.entropy is None else out.entropy.detach()
    return dict(zip(FIELDS, (out.logp.detach(), entropy, *dist, *gradients), strict=True))


def scalar(out: HeadOutput) -> Tensor:
    weights = torch.linspace(-1, 2, out.logp.numel(), dtype=F64).view(out.logp.shape)
    weights[1, 2] = 0.0  # a token without gradient
    total = out.logp
    if out.entropy is not None:
        total = total - 0.4 * out.entropy
    if out.dist is not None:
        total = total + torch.where(out.dist.rest > -torch.inf, out.dist.rest, 0.0)
        total = total + torch.where(out.dist.logp > -torch.inf, out.dist.logp, 0.0).sum(-1) * 0.3
    return (total * weights).sum()


def work(rank: int, folder: Path) -> None:
    assert CPU_ONLY.items() <= os.environ.items(), "a machine may have one GPU, and there are two processes"
    group = torch.distributed.group.WORLD
    found: dict[Any, Any] = {}
    for name, cut in SPLITS.items():
        mine = slice(0, cut) if rank == 0 else slice(cut, VOCABULARY)
        for case in OPTIONS:
            found[name, case] = results(case, mine, group)
    errors = {"`top_k` must lie in 1 … V = 61; got 62": {"top_k": 62}, "runs on the torch path": {"impl": "triton"}}
    hidden, weight, _, tokens, _ = problem()
    for says, options in errors.items():
        try:
            lm_head(hidden, weight[slice(0, 9) if rank == 0 else slice(9, None)], tokens, group=group, **options)
        except ValueError as error:
            found[says] = str(error)
    torch.save(found, folder / f"{rank}.pt")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of the two processes got, in every case."""
    folder = tmp_path_factory.mktemp("parallel")
    run_two(work, folder)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", OPTIONS)
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_get_what_one_does(found, split, case):
    expected = results(case, slice(0, VOCABULARY))
    cut = SPLITS[split]
    for rank, mine in enumerate((slice(0, cut), slice(cut, VOCABULARY))):
        got = found[rank][split, case]
        for field, want in expected.items():
            if want is None or field == "ids":
                assert got[field] is want or torch.equal(got[field], want), field
            else:
                assert_close(got[field], want[mine] if field in ("weight", "bias") else want)


def test_what_is_wrong_is_refused_by_every_process(found):
    for says in ("`top_k` must lie in 1 … V = 61; got 62", "runs on the torch path"):
        assert all(says in each[says] for each in found)
