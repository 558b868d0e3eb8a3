"""`corral doctor --model`: a padded batch against float32 alone, and the tokenizer against itself, right and wrong ones."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend

from corral.lab.cli import main
from corral.lab.jobs.llm import model_check
from corral.lab.models.load import load_model
from corral.lab.models.smoke import build_byte_tokenizer
from corral.lab.tasks.procedural import Countdown

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
exact = torch.nn.functional.scaled_dot_product_attention


def corrupt(query: Any, key: Any, value: Any, **more: Any) -> Any:
    """Attention that forgets the mask of a batch: padding is read like any other token."""
    more["attn_mask"] = more["attn_mask"] if len(query) == 1 else None
    more["is_causal"] = more.get("is_causal", False) or (len(query) > 1 and query.shape[2] > 1)
    return exact(query, key, value, **more)


@pytest.mark.parametrize("device", DEVICES)
def test_a_padded_batch_is_near_float32_and_nearer_without_rounding(device: str) -> None:
    model, tokenizer = load_model("tiny")
    model.to(device).eval()
    asked = model_check.prompts(Countdown(), tokenizer)
    assert len({len(row) for row in asked}) > 1, "nothing would be padded"
    whole = model_check.distances(model, tokenizer, asked, None, None)
    half = model_check.distances(model, tokenizer, asked, torch.bfloat16, None)
    for without, rounded in zip(whole, half, strict=True):
        assert 0 <= without.mean <= without.largest < 1e-6
        assert 1e-6 < rounded.mean < model_check.TOLERANCE


def test_golden_distance() -> None:
    # Two tokens of one answer: equal distributions, then KL((½, ½) ‖ (¾, ¼)) = ½ ln(⅔) + ½ ln 2 = .1438.
    exact = [torch.tensor([[0.5, 0.5], [0.5, 0.5]]).log()]
    ours = torch.tensor([[[0.5, 0.5], [0.75, 0.25], [0.9, 0.1]]]).log()
    found = model_check._distance(exact, ours)
    assert (found.mean, found.largest) == (pytest.approx(0.0719, abs=1e-4), pytest.approx(0.1438, abs=1e-4))


def test_a_kernel_that_forgets_padding_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", corrupt)
    monkeypatch.setattr(model_check, "KERNELS", {"as in training": None, "cudnn": SDPBackend.CUDNN_ATTENTION})
    assert main(["doctor", "--model", "tiny"]) == 1
    shown = capsys.readouterr().out
    assert "wrong: tiny computes something else here than in float32" in shown


def test_a_tokenizer_that_saving_changes_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    again = build_byte_tokenizer()
    monkeypatch.setattr(model_check, "AutoTokenizer", SimpleNamespace(from_pretrained=lambda folder: again))
    monkeypatch.setattr(model_check, "KERNELS", {"as in training": None})
    assert main(["doctor", "--model", "tiny"]) == 1
    shown = capsys.readouterr().out
    assert "8 of 8 problems have other tokens" in shown
    assert "wrong: tiny's tokenizer is not what it was once it is saved and loaded" in shown


def test_right_kernels_are_told_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "tiny"]) == 0
    rows = dict(
        line.split(maxsplit=1)
        for line in capsys.readouterr().out.splitlines()
        if line.startswith(("math", "cudnn", "tokenizer"))
    )
    assert rows["tokenizer"].startswith("0 of 8 problems")
    assert rows["math"].startswith("sampling: KL ")
    if not torch.cuda.is_available():
        assert rows["cudnn"] == "not for this model and device"


def test_what_cannot_be_checked_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--model", "./nowhere"]) == 2
    assert "there is no run or model folder ./nowhere" in capsys.readouterr().err


def test_a_run_and_a_folder_without_a_padding_token_are_models_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, tokenizer = load_model("tiny")
    tokenizer.pad_token = None
    model.save_pretrained(tmp_path / "folder")
    tokenizer.save_pretrained(tmp_path / "folder")
    run = ["train", "--model", "smoke", "--steps", "1", "--out", str(tmp_path / "run"), "--quiet", "--device", "cpu"]
    assert main(run) == 0
    for name in ("folder", "run"):
        assert main(["doctor", "--model", str(tmp_path / name)]) == 0
        assert "Padded batches give what float32 gives" in capsys.readouterr().out
