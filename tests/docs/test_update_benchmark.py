"""The benchmark of updates: every way runs on the same tokens, and the table says what was measured."""

from argparse import Namespace

import pytest
import update
from transformers import LlamaConfig, LlamaForCausalLM

SMALL = "--model smoke --completions 16 --prompt 2 5 --tokens 6 3 9 --rounds 1".split()  # noqa: SIM905


@pytest.mark.filterwarnings("ignore:.*rollout_func.*:UserWarning")
def test_it_compares_every_way(capsys: pytest.CaptureFixture[str]) -> None:
    assert update.main([*SMALL, "--rows", "8", "--ways", "0", "2", "3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("smoke, 16 completions, ")
    rows = [line for line in lines if "at a time" in line and not line.startswith("Ratios")]
    ways = list(update.WAYS)
    assert [row.rpartition(" at a time")[0] for row in rows] == [f"{ways[i]}, 8" for i in (0, 2, 3)]
    assert rows[0].split()[-4] == "1.000"


def test_tokens_are_counted() -> None:
    rollouts = update.make_rollouts(Namespace(completions=16, prompt=(2, 5), tokens=(6, 3, 9)))
    assert len(rollouts) == 16
    assert len({tuple(prompt) for prompt, _ in rollouts}) == 2
    assert all(2 <= len(prompt) <= 5 and 1 <= len(completion) <= 9 for prompt, completion in rollouts)


@pytest.mark.parametrize("tied", [True, False])
def test_work_is_that_of_the_gemms(tied: bool) -> None:
    # One token of a prompt, two of a completion; embeddings are looked up. Old pass 2, two passes 6 each: 14 for each weight.
    config = LlamaConfig(
        vocab_size=10, hidden_size=4, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, tie_word_embeddings=tied
    )
    model = LlamaForCausalLM(config)
    backbone = 4 * 4 * 4 + 3 * 4 * 8 + 3 * 4  # attention, the feed-forward layer, three norms
    assert update.work(model, [([2], [3, 4])], 2) == 14 * (3 * backbone + 2 * 10 * 4)


@pytest.mark.parametrize("wrong", ["--completions 12", "--rows 5", "--model nowhere"])
def test_what_does_not_fit_is_refused(wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        update.main([*SMALL, *wrong.split()])
    assert caught.value.code == 2
    assert "got" in capsys.readouterr().err
