"""Model cards: what a trained model says of itself, and how it is pushed to the hub, without a network."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import ModelCard

from corral.objective.config import OBJECTIVES
from corral.trl.card import model_card, settings_section
from corral_trl.tiny_models import make_trainer

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("objective", "cited"), [("troll", "becker2025troll"), ("dppo", "qi2026dppo"), ("ppo_clip", None)])
def test_a_trainers_card_names_objective_settings_and_paper(objective: str, cited: str | None, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, objective, objective_config={} if cited is None else {"bound": 0.07})
    trainer.create_model_card(model_name="mine")
    card = ModelCard.load(tmp_path / "README.md")  # its metadata are valid YAML
    assert {"trl", "corral"} <= set(card.data.tags)
    assert f"corral's objective `{objective}`" in card.content
    assert "| `learning_rate` | `0.01` |" in card.content
    assert ("| `objective_config.bound` | `0.07` |" in card.content) is (cited is not None)
    assert "GRPO" not in card.content, "not TRL's own method"
    assert not list(tmp_path.glob(".README*"))
    assert "This model is a fine-tuned version of a local model." in card.content, "it lives in memory, under no name"
    assert "[None]" not in card.content
    if cited is None:
        assert "trained with corral's ppo_clip." in card.content
        assert "arxiv" not in card.content.lower().replace("vonwerra", "")
    else:
        paper = OBJECTIVES[objective][1].paper
        assert paper is not None
        assert f"a method introduced in [{paper.plain_title}](https://huggingface.co/papers/{paper.arxiv})" in card.content
        assert paper.bibtex in card.content
        assert paper.bibtex in (ROOT / "docs" / "cite.md").read_text(), "as it is cited elsewhere"
        assert f"@misc{{{cited}," in card.content


def test_a_model_is_pushed_to_the_hub_with_its_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[dict[str, Any]] = []

    def upload_folder(**given: Any) -> str:
        folder = Path(given["folder_path"])
        pushed.append({**given, "files": {path.name for path in folder.iterdir()}, "card": (folder / "README.md").read_text()})
        return "pushed"

    repo = SimpleNamespace(repo_id="me/mine")
    stub = SimpleNamespace(create_repo=lambda *given, **more: repo, upload_folder=upload_folder)
    monkeypatch.setattr("transformers.trainer.hf_api", lambda: stub)
    trainer = make_trainer(tmp_path / "mine", push_to_hub=True, hub_model_id="me/mine", hub_token="secret-token")
    trainer.push_to_hub()
    (given,) = pushed
    assert given["repo_id"] == "me/mine"
    assert {"README.md", "config.json", "model.safetensors"} <= given["files"]
    assert "# Model Card for mine" in given["card"]
    assert "corral's objective `troll`" in given["card"]
    assert "secret-token" not in given["card"]


def test_texts_of_users_do_not_break_a_card() -> None:
    evil = "a|b\n# heading `code` <script>"
    row = settings_section("troll", {evil: evil}).splitlines()[-1]
    assert row == "| `a\\|b # heading 'code' <script>` | `a\\|b # heading 'code' <script>` |"
    card = model_card(evil, "mine.py:loss", {"seed": 0}, evil, base="me/base")
    assert "# a\\|b \\# heading \\`code\\` \\<script\\>\n" in card
    assert ModelCard(card).data.base_model == "me/base"
    assert "Citation" not in card
