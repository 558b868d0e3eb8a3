"""tokens.parquet: what the objective did to single tokens, by its own account, in runs whole, broken and gone on with."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from corral import TokenBatch, gather_support, make_objective, top_k_support
from corral.lab.jobs.llm.train import resume, train
from corral.lab.jobs.llm.trainer import CompletionSample, thin_rows, token_rows, token_texts
from corral.lab.models.tiny import tiny_tokenizer
from corral.lab.report.read import read_run
from corral.lab.run.folder import TOKENS, RunFolder
from policy_objectives import POLICY_OBJECTIVES
from small_runs import save_model, small

ACTIONS = {"troll": "projected", "dppo": "masked", "m2po": "masked", "cppo": "masked"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_model(tmp_path_factory.mktemp("model"))


def batch(moved: float = 1.0, count: int = 3, length: int = 4, vocabulary: int = 7) -> tuple[TokenBatch, torch.Tensor]:
    """Two policies on a support of three tokens and a rest; the last token of every completion is padding."""
    draw = torch.Generator().manual_seed(0)
    old = torch.randn(count, length, vocabulary, generator=draw).log_softmax(-1)
    new = (old + moved * torch.randn(count, length, vocabulary, generator=draw)).log_softmax(-1)
    tokens = torch.randint(vocabulary, (count, length), generator=draw)
    dist_old = top_k_support(old, tokens, 3)
    dist_new = gather_support(new, dist_old.ids)
    mask = torch.ones(count, length, dtype=torch.bool)
    mask[:, -1] = False
    advantages = torch.tensor([1.0, -1.0, 0.5])[:count]
    logp = [dist.logp[..., 0] for dist in (dist_new, dist_old)]
    return TokenBatch(logp[0].requires_grad_(), logp[1], advantages, mask, dist_new, dist_old), tokens


@pytest.mark.parametrize("name", POLICY_OBJECTIVES)
def test_every_objective_says_where_it_acted(name: str) -> None:
    """The tokens that `tr/active_frac` counts, and no padding among them."""
    given_batch, tokens = batch(0.5 if name == "vespo" else 3.0)  # whose weights vanish on whole sequences
    if name == "decoupled_ppo":
        given_batch = replace(given_batch, logp_rollout=given_batch.logp_old)
    objective = make_objective(name)
    out = objective(given_batch)
    assert out.acted is not None
    assert not (out.acted & ~given_batch.mask).any()
    assert float(out.metrics["tr/active_frac"]) == pytest.approx(out.acted.sum() / given_batch.mask.sum())
    rows = token_rows(CompletionSample.of(given_batch, tokens, None), objective, tiny_tokenizer(), step=1, update=8)
    acted = [action for row in rows for action in row["action"]]
    assert acted == [ACTIONS.get(name, "clipped") if here else "" for here in out.acted[given_batch.mask].tolist()]
    assert "" in acted
    assert name == "reinforce" or len(set(acted)) == 2


def test_golden_rows_of_a_projection() -> None:
    given_batch, tokens = batch(2.0)
    rows = token_rows(
        CompletionSample.of(given_batch, tokens, torch.tensor([1.0, 0.0, 0.25])), make_objective("troll"), tiny_tokenizer()
    )
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.25]
    assert [row["advantage"] for row in rows] == [1.0, -1.0, 0.5]
    for index, row in enumerate(rows):
        assert row["bound"] == 0.05
        for place in range(3):
            # Σ over the support and the rest of p_new (log p_new − log p_old).
            both = [dist.with_rest()[index, place].detach() for dist in (given_batch.dist_new, given_batch.dist_old)]
            kl = sum(math.exp(a) * (a - b) for a, b in zip(*(side[side > -math.inf].tolist() for side in both), strict=True))
            assert row["kl_before"][place] == pytest.approx(kl, abs=1e-5)
            assert row["action"][place] == ("projected" if kl > 0.05 else "")
            assert row["kl_after"][place] == pytest.approx(min(kl, 0.05), abs=1e-4)
            moved = given_batch.logp_new[index, place] - given_batch.logp_old[index, place]
            assert row["log_ratio"][place] == pytest.approx(moved.item(), abs=1e-6)


def test_what_is_kept_holds_on_to_nothing() -> None:
    """A copy of a few rows, not a view into a batch of thousands, and no graph behind it."""
    given_batch, tokens = batch()
    few = CompletionSample.of(given_batch, tokens, None, count=2)
    assert few.batch.mask.shape == (2, 4)
    assert few.batch.dist_new is not None
    assert few.batch.dist_new.logp.untyped_storage().size() < 2 * 4 * 4 * 4 + 1
    assert not few.batch.logp_new.requires_grad


def test_bounds_by_the_sign_of_the_advantage_and_objectives_without_any() -> None:
    given_batch, tokens = batch()
    few, tokenizer = CompletionSample.of(given_batch, tokens, None), tiny_tokenizer()
    assert [row["bound"] for row in token_rows(few, make_objective("clip_higher"), tokenizer)] == [0.28, 0.2, 0.28]
    assert [row["bound"] for row in token_rows(few, make_objective("dppo", bound_low=0.1), tokenizer)] == [0.2, 0.1, 0.2]
    (row, *_) = token_rows(few, make_objective("reinforce"), tokenizer)
    assert (row["bound"], row["kl_after"], row["reward"]) == (None, None, None)


def test_completions_without_live_tokens_have_no_row() -> None:
    given_batch, tokens = batch()
    given_batch.mask[1] = False
    assert len(token_rows(CompletionSample.of(given_batch, tokens, None), make_objective("dppo"), tiny_tokenizer())) == 2


class Pieces(PreTrainedTokenizerBase):
    """A SentencePiece tokenizer, as far as it matters: a lone word loses its blank."""

    def __init__(self) -> None:
        pass

    def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
        return [["▁the", "▁", "ing"][index] for index in ids]

    def batch_decode(self, ids: list[list[int]]) -> list[str]:
        return [["the", "", "ing"][index] for (index,) in ids]


def test_blanks_before_words_are_kept() -> None:
    assert token_texts(Pieces(), [0, 1, 2]) == [" the", " ", "ing"]


def rows_of(steps: list[int], tokens: int = 1) -> list[dict[str, Any]]:
    return [{"step": step, "token": ["x"] * tokens} for step in steps]


def test_golden_thinning() -> None:
    # Six steps of one token, room for four: every other step. Then every other new one comes in, until that is too many too.
    rows = thin_rows(rows_of([1, 2, 3, 4, 5]), rows_of([6]), budget=4)
    assert [row["step"] for row in rows] == [2, 4, 6]
    assert [row["step"] for row in thin_rows(rows, rows_of([7]), budget=4)] == [2, 4, 6]
    assert [row["step"] for row in thin_rows(rows, rows_of([8]), budget=4)] == [2, 4, 6, 8]
    assert [row["step"] for row in thin_rows(rows_of([2, 4, 6, 8]), rows_of([10]), budget=4)] == [4, 8]
    assert [row["step"] for row in thin_rows([], rows_of([3]), budget=4)] == [3]
    assert len(thin_rows([], rows_of([1], tokens=9), budget=4)) == 1  # one step always stays


@given(st.integers(1, 60), st.integers(1, 60), st.integers(2, 9))
def test_a_break_changes_nothing_that_is_kept(steps: int, cut: int, budget: int) -> None:
    """Cut back to an earlier step and gone on with: the same steps stay as without the break."""
    whole: list[dict[str, Any]] = []
    for step in range(1, steps + 1):
        whole = thin_rows(whole, rows_of([step]), budget)
    assert len(whole) <= budget
    resumed = [row for row in whole if row["step"] <= cut]
    assume(len(resumed) > 1)  # from one row alone nobody can tell; a real budget leaves dozens
    for step in range(min(cut, steps) + 1, steps + 1):
        resumed = thin_rows(resumed, rows_of([step]), budget)
    assert resumed == whole


@pytest.mark.parametrize("objective", ["troll", "ppo_clip"])
def test_a_run_writes_tokens_that_the_report_reads(model: str, tmp_path: Path, objective: str) -> None:
    train(small(model, objective=objective, steps=2), out=tmp_path / "run", quiet=True)
    table = pq.read_table(tmp_path / "run/tokens.parquet")
    assert table.schema.equals(TOKENS)
    rows = table.to_pylist()
    assert [row["step"] for row in rows] == [1] * 4 + [2] * 4
    assert [row["update"] for row in rows] == [2] * 4 + [4] * 4
    completions = pq.read_table(tmp_path / "run/completions.parquet").to_pylist()
    texts = {(row["step"], row["completion"], row["reward"], round(row["advantage"], 4)) for row in completions}
    for row in rows:
        text = "".join(token for token in row["token"] if token not in tiny_tokenizer().all_special_tokens)
        assert (row["step"], text, row["reward"], round(row["advantage"], 4)) in texts
        assert any(value > 0 for value in row["kl_before"])  # the second of two updates: the policy has moved
        assert (row["kl_after"] is not None) == (objective == "troll")
    assert any(action for row in rows for action in row["action"])
    found = read_run(tmp_path / "run")
    assert len(found.tokens) == 8
    assert found.notes == []


def test_resumed_runs_have_every_row_once(model: str, tmp_path: Path) -> None:
    train(small(model, steps=4, checkpoint_every=2), out=tmp_path / "whole", quiet=True)
    train(small(model, steps=4, checkpoint_every=2), out=tmp_path / "cut", quiet=True)
    cut, whole = (pq.read_table(tmp_path / name / "tokens.parquet") for name in ("cut", "whole"))
    assert cut.equals(whole)
    last = max((tmp_path / "cut/checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    (last / "manifest.json").unlink()  # as if the machine went down while it was written
    (tmp_path / "cut/summary.json").unlink()
    resume(tmp_path / "cut", quiet=True)
    assert pq.read_table(tmp_path / "cut/tokens.parquet").equals(whole)
    assert [json.loads(line)["step"] for line in (tmp_path / "cut/metrics.jsonl").read_text().splitlines()] == [0, 1, 2, 3, 4]


def test_no_completions_means_no_tokens(model: str, tmp_path: Path) -> None:
    train(small(model, steps=1, keep_completions=0), out=tmp_path / "run", quiet=True)
    assert not (tmp_path / "run/tokens.parquet").exists()


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", "x")
    folder.tokens.write_bytes(b"torn")
    assert folder.cut_back(3) == []
    assert folder.tokens_kept == []
    folder.write_completions()
    assert pq.read_table(folder.tokens).num_rows == 0
    folder.close()
