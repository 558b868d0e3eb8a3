"""A stock trainer's clipping that no objective of corral's has."""

from pathlib import Path

import pytest
from tiny_models import even_words, prompts, settings, tiny_model, tiny_tokenizer
from trl import GRPOConfig, GRPOTrainer

from corral.llm import audit


def test_a_dual_clip_of_whole_completions_is_refused(tmp_path: Path) -> None:
    args = GRPOConfig(**settings(tmp_path, delta=2.0, importance_sampling_level="sequence"))
    trainer = GRPOTrainer(tiny_model(), even_words, args, prompts(), processing_class=tiny_tokenizer())
    with pytest.raises(ValueError, match=r"delta=2.0 together with importance_sampling_level='sequence'"):
        audit(trainer, tmp_path / "audit")
    assert not (tmp_path / "audit").exists()
