"""Families of warm starts: of the embedded model's size and tokenizer, loadable by name, different by seed."""

import json
from pathlib import Path

import pytest
import torch
from warm_start import FAMILIES, build, main

from corral.lab.models.load import load_model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_about_as_large_as_the_embedded_model(family: str) -> None:
    model, tokenizer = build(family, 1)
    assert 0.7e6 < sum(p.numel() for p in model.parameters()) < 2.1e6
    again, other = build(family, 1)[0], build(family, 2)[0]
    ids = tokenizer(["3 7 12>22:"], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        logits = [one(ids).logits for one in (model, again, other)]
    assert torch.equal(logits[0], logits[1])
    assert not torch.allclose(logits[0], logits[2])
    if family == "gemma":
        assert model.config.final_logit_softcapping == 30.0


@pytest.mark.filterwarnings("ignore")  # of two steps nothing is learned, and some of it is said
def test_a_start_is_a_folder_that_loads(tmp_path: Path) -> None:
    small = ["--steps", "2", "--batch", "64", "--demonstrations", "512", "--evaluate", "4"]
    main(["--family", "moe", "--seed", "1", "--out", str(tmp_path / "moe-1"), *small])
    model, tokenizer = load_model(str(tmp_path / "moe-1"))
    assert (type(model).__name__, len(tokenizer)) == ("Qwen3MoeForCausalLM", 100)
    card = json.loads((tmp_path / "moe-1" / "warm_start.json").read_text())
    assert (card["settings"]["family"], card["settings"]["seed"]) == ("moe", 1)
    assert set(card["held_out_success"]) == {"prompts", "temperature_1", "greedy"}
