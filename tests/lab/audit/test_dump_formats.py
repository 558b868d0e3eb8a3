"""Dumps of every engine → completions: which tokens count, what is old and what is new, and in which order."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from audit.dumps import EXPORT, LINE, write_exports, write_lines
from audit.four_tokens import EXPECTED, NEW, OLD

from corral.lab.audit.dump import Dump, DumpRecord, find_dump, read_completions
from corral.lab.audit.tokens import make_tokens
from corral.validate import RunError


def read(path: Path) -> tuple[Dump, list[pd.DataFrame], dict[str, int]]:
    """The dump, the tokens of each completion, and the number of things left out by reason."""
    dump, left_out = find_dump(path), Counter[str]()
    sizes: list[int] = []
    found = [*map(make_tokens, read_completions(dump, sizes.append, lambda reason, count=1: left_out.update({reason: count})))]
    assert sum(sizes) <= dump.bytes
    return dump, found, dict(left_out)


class TestOwn:
    def test_golden(self, tmp_path: Path) -> None:
        dump, (found,), left_out = read(write_lines(tmp_path / "run.jsonl", [LINE]))
        assert (dump.format, found.step.tolist(), left_out) == ("corral", [3, 3, 3], {})
        assert found.token.tolist() == [5, 6, 7], "the fourth is masked, and may hold null"
        assert found.advantage.tolist() == [1.0, 1.0, 1.0]
        assert (found.logp_new - found.logp_old).tolist() == [0.5, 0.0, -1.0]
        for column in (found.logp_rollout, found.support_tv, found.reward, found.age):
            assert np.isnan(column).all()

    def test_everything_optional(self, tmp_path: Path) -> None:
        line = {**LINE, "advantages": [1, -1, 0.5, 0], "logp_rollout": [-1.0, None, -0.5, None], "entropy": [0.1] * 4}
        line |= {"reward": 2, "sampled_at": 1, "answer": "a field of one's own"}
        del line["mask"]
        _, (found,), left_out = read(write_lines(tmp_path / "run.jsonl", [line]))
        assert found.advantage.tolist() == [1, -1, 0.5], "the fourth has no log-prob"
        assert left_out == {"tokens with a log-prob that is null or not finite": 1}
        assert np.isnan(found.logp_rollout).tolist() == [False, True, False]
        assert (found.reward.iloc[0], found.age.iloc[0]) == (2.0, 2)

    def test_numbers_that_are_not_finite_are_left_out(self, tmp_path: Path) -> None:
        path = tmp_path / "run.jsonl"
        line = '{"tokens": [1, 2, 3, 4], "advantages": 1, "logp_old": [NaN, -1, -1, -1e9], "logp_new": [-1, -Infinity, -1, -1]}'
        path.write_text(line + "\n")
        _, (found,), left_out = read(path)
        assert found.token.tolist() == [3], "−1e9 is what engines write for −inf"
        assert left_out["tokens with a log-prob that is null or not finite"] == 3

    @pytest.mark.parametrize("sampled_in_support", [True, False])
    def test_a_support_gives_its_divergences(self, tmp_path: Path, sampled_in_support: bool) -> None:
        # The four tokens of four_tokens.py, with both other tokens logged: nothing is left for the tail but its floor of 1e-8.
        columns = slice(0 if sampled_in_support else 1, 3)
        ids = list(range(3))[columns]
        line = {"tokens": [0] * 4, "advantages": [1, 1, -1, 1], "top_ids": [ids] * 4}
        line |= {"logp_old": OLD[:, 0].tolist(), "logp_new": NEW[:, 0].tolist()}
        line |= {"top_logp_old": OLD[:, columns].tolist(), "top_logp_new": NEW[:, columns].tolist()}
        _, (found,), _ = read(write_lines(tmp_path / "run.jsonl", [line]))
        assert found.kl.tolist() == pytest.approx(EXPECTED["kl"], abs=2e-6)
        assert found.support_tv.tolist() == pytest.approx(EXPECTED["tv"], abs=2e-6)
        reverse = (OLD.double().exp() * (OLD - NEW).double()).sum(-1)
        assert found.support_kl_old_new.tolist() == pytest.approx(reverse.tolist(), abs=2e-6)

    def test_the_tail_of_a_support_is_one_category(self, tmp_path: Path) -> None:
        # p = (.5, .3 | .2), q = (.4, .2 | .4): TV = ½ (.1 + .1 + .2) = .2. A null in either policy joins its tail.
        logs = {name: [[math.log(x), None]] for name, x in (("top_logp_old", 0.3), ("top_logp_new", 0.2))}
        line = {"tokens": [7], "advantages": 1, "logp_old": [math.log(0.5)], "logp_new": [math.log(0.4)], "top_ids": [[8, 9]]}
        _, (found,), _ = read(write_lines(tmp_path / "run.jsonl", [{**line, **logs}]))
        assert found.support_tv.tolist() == pytest.approx([0.2])

    def test_a_last_line_that_is_cut_off(self, tmp_path: Path) -> None:
        path = write_lines(tmp_path / "run.jsonl", [LINE, LINE])
        path.write_bytes(path.read_bytes()[:-9])
        _, found, left_out = read(path)
        assert len(found) == 1
        assert left_out == {"unfinished last lines": 1}

    def test_files_in_natural_order_and_links_left_alone(self, tmp_path: Path) -> None:
        for step in (10, 9, 1):
            write_lines(tmp_path / "dump" / f"step-{step}.jsonl", [{**LINE, "step": step}])
        write_lines(tmp_path / "elsewhere.jsonl", [{**LINE, "step": 99}])
        (tmp_path / "dump" / "link.jsonl").symlink_to(tmp_path / "elsewhere.jsonl")
        _, found, _ = read(tmp_path / "dump")
        assert [one.step.iloc[0] for one in found] == [1, 9, 10]


class TestPrimeRL:
    def test_golden(self, tmp_path: Path) -> None:
        dump, (found,), left_out = read(write_exports(tmp_path / "out", [4]))
        assert (dump.format, found.step.iloc[0]) == ("prime-rl", 4), "the run's own step, not the trainer's"
        assert "The old policy here is the sampler" in dump.remarks[0]
        assert found.token.tolist() == [2], "of the others one is a prompt's, one has a null log-prob, one no advantage"
        assert (found.logp_old.tolist(), found.logp_new.tolist()) == ([-1.0], [-1.5])
        assert left_out == {
            "tokens with a log-prob that is null or not finite": 1,
            "trained tokens without an advantage": 1,
        }
        assert found.reward.tolist() == [1.0]

    def test_tokens_of_other_losses_are_no_rl(self, tmp_path: Path) -> None:
        losses = [{}, {"ce": {"advantage": 1.0, "mask": True}}, {"rl": {"advantage": 0.5, "mask": True}}, {"rl": None}]
        line = {**EXPORT, "losses": losses, "inference_logprobs": [-1.0] * 4}
        _, (found,), _ = read(write_lines(tmp_path / "rank_0.jsonl", [line]))
        assert found.token.tolist() == [3]

    def test_steps_that_are_being_written_are_left_out(self, tmp_path: Path) -> None:
        write_exports(tmp_path, [1, 2])
        write_exports(tmp_path, [3], stable=False)
        dump, found, _ = read(tmp_path)
        assert [one.step.iloc[0] for one in found] == [1, 2]
        assert dump.remarks[-1] == "1 step without a file STABLE, still being written, left out."
        (tmp_path / "token_exports" / "step_1" / "STABLE").unlink()
        (tmp_path / "token_exports" / "step_2" / "STABLE").unlink()
        with pytest.raises(RunError, match="none has a file STABLE"):
            find_dump(tmp_path)

    def test_a_run_id_above_and_other_files_beside(self, tmp_path: Path) -> None:
        write_exports(tmp_path / "run_a", [1])
        write_lines(tmp_path / "logs" / "metrics.jsonl", [{"loss": 1}])
        assert len(read(tmp_path)[1]) == 1
        write_exports(tmp_path / "run_b", [1])
        with pytest.raises(RunError, match="exports of 2 runs"):
            find_dump(tmp_path)


def test_open_instruct(tmp_path: Path) -> None:
    line: dict[str, Any] = {
        "step": 2, "sample_idx": 0, "trainer_logprobs_shape": [1, 3], "trainer_logprobs": [-1.0, -2.0, -9.0],
        "response_mask": [False, True, True], "vllm_logprobs": [None, -1.0, -8.0], "token_ids": [4, 5, 6],
        "trainer_model_step": 7, "model_step": 5,
    }  # fmt: skip
    path = tmp_path / "run_trainer_logprobs_step000002_rank00000.jsonl"
    dump, (found,), _ = read(write_lines(path, [line]))
    assert (dump.format, found.step.iloc[0], found.age.iloc[0], found.token.tolist()) == ("open-instruct", 2, 2, [5, 6])
    assert found.advantage.tolist() == [-1.0, -1.0], "both fell: without advantages each is pushed the way it went"
    assert "upper bounds" in dump.remarks[0]
    _, (found,), _ = read(write_lines(path, [{**line, "advantages": [0.0, 2.0, 3.0]}]))
    assert found.advantage.tolist() == [2.0, 3.0]


SAMPLE = {
    "tokens": torch.tensor([9, 9, 1, 2]), "response_lengths": 2, "loss_masks": torch.tensor([1, 0]),
    "advantages": torch.tensor([0.5, 0.5]), "log_probs": torch.tensor([-1.0, -2.0]),
    "rollout_log_probs": torch.tensor([-1.5, -2.0]), "rewards": 1.0,
}  # fmt: skip


@pytest.mark.parametrize("version", [1, 2])
def test_slime(tmp_path: Path, version: int) -> None:
    columns = {"rollout_data": {name: [value] for name, value in SAMPLE.items()}}
    content = {"rollout_id": 6, "rank": 0, **({"format_version": 2, "samples": [SAMPLE]} if version == 2 else columns)}
    torch.save(content, tmp_path / "data_6.pt")
    dump, (found,), _ = read(tmp_path)
    assert (dump.format, found.step.iloc[0], found.token.tolist()) == ("slime", 6, [1])
    assert (found.logp_old.tolist(), found.logp_new.tolist(), found.advantage.tolist()) == ([-1.5], [-1.0], [0.5])


class Code:
    """What must never be made when a file is loaded."""

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return exec, ("raise SystemExit('it ran')",)


def test_code_in_a_tensor_file_does_not_run(tmp_path: Path) -> None:
    torch.save({"rollout_id": 1, "samples": [Code()]}, tmp_path / "bad.pt")
    with pytest.raises(RunError, match="cannot be loaded as tensors and plain values"):
        read(tmp_path)


def test_texts_are_found(tmp_path: Path) -> None:
    line = {"input": "1 + 1", "output": "2", "gts": "2", "score": 1.0, "step": 1}
    dump = find_dump(write_lines(tmp_path / "rollouts" / "1.jsonl", [line]))
    assert (dump.format, dump.form.texts) == ("verl", True)
    assert json.loads(dump.files[0].read_text())["output"] == "2"


def test_golden_numbers_beyond_1e100_are_missing() -> None:
    found = DumpRecord({"advantages": [1.0, 1e101, -1e101, None, 1e100]}, "line 1").numbers("advantages")
    np.testing.assert_array_equal(found, [1.0, np.nan, np.nan, np.nan, 1e100])
