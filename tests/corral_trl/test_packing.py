"""Packed rows: the same log-probs, losses and gradients as padded batches, for every family of models and every precision."""

import copy
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from tiny_models import SIZES, loss_and_gradient, make_trainer, measured, nudge, rollouts, tiny_model
from torch import Tensor
from transformers import (
    FalconMambaConfig,
    Gemma3TextConfig,
    LlavaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

from corral.trl import packing
from corral.trl.api import FUSED
from corral.trl.packing import (
    ORDER,
    PackedRow,
    bytes_per_token,
    can_pack,
    cut,
    fit_tokens,
    halve,
    in_order,
    packed_mask,
    why_padded,
)
from device import DEVICE
from tolerance import assert_close

pytestmark = pytest.mark.skipif(not FUSED, reason="this TRL computes all logits, and its batches stay padded")

WINDOW = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
FURTHER: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen2, window": (Qwen2Config, {"use_sliding_window": True, "max_window_layers": 1, **WINDOW}),
    "qwen3": (Qwen3Config, {}),
    "gemma2, window": ("gemma2", {"attn_logit_softcapping": 2.0, **WINDOW}),  # type: ignore[dict-item]
    "gemma3": (Gemma3TextConfig, WINDOW),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "sliding_window": 3}),
}
FAMILIES = ["llama", "gemma2", "cohere", "granite", "qwen3_moe", *FURTHER]
"""Heads, attention and layers that differ: windows, soft caps of attention and head, experts, heads that share keys."""


def family(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Tiny model of a family, with weights large enough for attention to matter."""
    if name not in FURTHER:
        return tiny_model(name).to(dtype)
    config_cls, settings = FURTHER[name]
    if isinstance(config_cls, str):
        return tiny_model(config_cls, **settings).to(dtype)
    torch.manual_seed(0)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[config_cls](config_cls(**{**SIZES, **settings}))
    model.generation_config.eos_token_id = tiny_model().generation_config.eos_token_id
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(12.0)
    return model.to(dtype)


@contextmanager
def without_mask() -> Iterator[None]:
    """Packed rows inside: transformers builds no mask for them."""
    packed_mask.active = True
    try:
        yield
    finally:
        packed_mask.active = False


def padded_and_packed(model: PreTrainedModel, mask: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, PackedRow]:
    """Hidden states of the unmasked tokens of random sequences: from the padded batch, and from one row."""
    ids = torch.randint(2, 40, mask.shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    model, mask = model.to(DEVICE).eval(), mask.to(DEVICE)
    row = PackedRow.of(mask)
    padded = model.base_model(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state
    inputs = row.pack({"input_ids": ids, "labels": ids})
    del inputs["labels"]
    with without_mask():
        packed = model.base_model(**inputs, use_cache=False).last_hidden_state
    return padded.flatten(0, 1)[row.places], packed[0], row


class TestHiddenStates:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bf16"])
    @pytest.mark.parametrize("name", FAMILIES)
    def test_are_those_of_the_padded_batch(self, name: str, dtype: torch.dtype) -> None:
        model = family(name, dtype)
        assert can_pack(model, None, verify=False)
        mask = torch.arange(9) >= torch.tensor([3, 0, 8, 2, 5])[:, None]
        padded, packed, _ = padded_and_packed(model, mask)
        assert packed.dtype == dtype
        assert_close(packed, padded, atol=5e-6 if dtype == torch.float32 else 0.15)

    @given(
        lengths=st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=1, max_size=5).filter(
            lambda rows: any(map(any, rows))
        ),
        name=st.sampled_from(["llama", "qwen2, window"]),
    )
    def test_whatever_is_masked(self, lengths: list[list[bool]], name: str) -> None:
        # Masked anywhere: on the left as prompts are, on the right as completions are, whole sequences, and in between.
        model = family(name)
        assert can_pack(model, None, verify=False)
        mask = torch.tensor(lengths)
        _, packed, row = padded_and_packed(model, mask)
        for sequence, own in enumerate(mask):
            if own.any():  # each sequence by itself, as if it had never been padded
                ids = torch.randint(2, 40, mask.shape, generator=torch.Generator().manual_seed(0))[sequence][own].to(DEVICE)
                alone = model.base_model(input_ids=ids[None], use_cache=False).last_hidden_state[0]
                begin, end = row.borders[sequence : sequence + 2].tolist()
                assert_close(packed[begin:end], alone, atol=5e-6)

    @pytest.mark.parametrize("name", FAMILIES)
    def test_of_a_sequence_do_not_depend_on_the_one_before_it(self, name: str) -> None:
        model, mask = family(name), torch.ones(2, 5, dtype=torch.bool)
        assert can_pack(model, None, verify=False)
        model, row = model.to(DEVICE).eval(), PackedRow.of(mask.to(DEVICE))
        found = []
        for first in (2, 20):
            ids = torch.cat([torch.arange(first, first + 5), torch.arange(7, 12)]).view(2, 5).to(DEVICE)
            inputs = row.pack({"input_ids": ids, "labels": ids})
            del inputs["labels"]
            with without_mask():
                found.append(model.base_model(**inputs, use_cache=False).last_hidden_state[0])
        assert not torch.equal(found[0][:5], found[1][:5])
        # Experts take their tokens together, and round by how many there are.
        atol = 1e-6 if name in ("qwen3_moe", "mixtral") or DEVICE == "cuda" else 0.0
        assert_close(found[0][5:], found[1][5:], atol=atol, rtol=0.0)


class TestModel:
    """A model that is prepared for packed rows is the same model for everything else."""

    def test_padded_batches_and_generation_stay_the_same_bit_for_bit(self) -> None:
        ids, mask = (
            torch.randint(2, 40, (3, 7)).to(DEVICE),
            (torch.arange(7) >= torch.tensor([[0], [2], [5]])).long().to(DEVICE),
        )
        found = []
        for prepared in (False, True):
            model = tiny_model().to(DEVICE).eval()
            assert not prepared or can_pack(model, None, verify=True)
            tokens = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=8)
            found.append((model(input_ids=ids, attention_mask=mask).logits, tokens))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])

    def test_a_saved_one_has_no_trace_of_it(self, tmp_path: Path) -> None:
        model = tiny_model()
        assert can_pack(model, None, verify=True)
        model.save_pretrained(tmp_path)
        assert "corral" not in json.dumps(json.loads((tmp_path / "config.json").read_text()))


class TestPadded:
    """What stays padded, and the sentence that says why."""

    @staticmethod
    def flex() -> PreTrainedModel:
        model = tiny_model()
        model.config._attn_implementation = "flex_attention"
        return model

    @staticmethod
    def mamba() -> PreTrainedModel:
        config = FalconMambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=1, state_size=4)
        return MODEL_FOR_CAUSAL_LM_MAPPING[FalconMambaConfig](config)

    @staticmethod
    def images() -> PreTrainedModel:
        vision = {
            "hidden_size": 16,
            "intermediate_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
        }
        config = LlavaConfig(text_config=Qwen3Config(**SIZES), vision_config={"model_type": "clip_vision_model", **vision})
        return MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[LlavaConfig](config)

    @pytest.mark.parametrize(
        ("build", "why"),
        [
            pytest.param("mamba", "FalconMambaForCausalLM has layers with a state", id="state"),
            pytest.param("flex", "attn_implementation='flex_attention' cannot be given the borders of sequences", id="flex"),
            pytest.param("images", "LlavaForConditionalGeneration reads more than text", id="images"),
        ],
    )
    def test_says_why(self, build: str, why: str, caplog: pytest.LogCaptureFixture) -> None:
        model = getattr(self, build)()
        before = model.config._attn_implementation
        assert not can_pack(model, None, verify=True)
        assert [record.message for record in caplog.records if why in record.message]
        assert model.config._attn_implementation == before

    def test_so_does_a_model_whose_sequences_read_one_another(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def without_borders(function: Any, module: Any, heads: Any, settings: Any, *_: Any) -> Tensor:
            found: Tensor = function(module, *heads, None, **settings)[0]
            return found

        monkeypatch.setattr(packing, "_by_padding", without_borders)
        monkeypatch.setattr(packing, "_fits_kernel", lambda *_: False)
        model = tiny_model().to(DEVICE)
        assert why_padded(model) is None
        assert not can_pack(model, None, verify=True)
        assert "packed and padded hidden states of LlamaForCausalLM differ" in caplog.text
        assert model.config._attn_implementation == "sdpa"

    def test_it_is_said_by_the_trainer_and_can_be_asked_for(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.WARNING)
        assert make_trainer(tmp_path, "ppo_clip").packs
        assert not make_trainer(tmp_path, "ppo_clip", packed_batches="off").packs
        assert "padded" not in caplog.text
        assert not make_trainer(tmp_path, "ppo_clip", model=self.flex()).packs
        assert "Batches are padded, not packed" in caplog.text


PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {}, "bf16 autocast": {"bf16": True}, "bf16 weights": {"dtype": torch.bfloat16},
}  # fmt: skip


@pytest.mark.supports("scale: batches without padding", door="TRL")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", FAMILIES)
def test_log_probs_loss_and_gradient_are_those_of_padded_batches(tmp_path: Path, name: str, precision: str) -> None:
    dtype, bf16 = PRECISIONS[precision].get("dtype", torch.float32), PRECISIONS[precision].get("bf16", False)
    found, inputs = {}, None
    for how in ("off", "auto"):
        trainer = make_trainer(tmp_path, "troll", model=family(name, dtype), packed_batches=how, bf16=bf16)
        assert trainer.packs == (how == "auto")
        inputs = inputs or rollouts(trainer)[0]
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        nudge(trainer.model)
        loss, gradient = loss_and_gradient(trainer, inputs)
        found[how] = loss, torch.cat([x.flatten().float() for x in gradient.values()])
    assert not torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1).all(), "there is padding to leave out"
    (loss, gradient), (expected, expected_gradient) = found["auto"], found["off"]
    exact = precision == "float32"
    assert_close(loss.float(), expected.float(), rtol=1e-4 if exact else 0.1, atol=1e-6 if exact else 2e-2)
    error = (gradient - expected_gradient).norm() / expected_gradient.norm()
    assert float(error) < (1e-4 if exact else 0.15)


def test_checkpointed_layers_recompute_the_packed_row(tmp_path: Path) -> None:
    found, inputs = [], None
    for checkpointing in (False, True):
        trainer = make_trainer(tmp_path, "ppo_clip", gradient_checkpointing=checkpointing)
        if checkpointing:
            trainer.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        inputs = inputs or rollouts(trainer)[0]
        trainer.model.train()
        trainer.current_gradient_accumulation_steps = 1
        found.append(loss_and_gradient(trainer, inputs)[1])
    for name, gradient in found[0].items():
        assert_close(found[1][name], gradient, atol=0.0, rtol=0.0) if DEVICE == "cpu" else assert_close(
            found[1][name], gradient
        )


class TestOrder:
    def test_updates_have_the_sequences_that_were_packed_together(self) -> None:
        # Packed in the order 2 0 3 1, so sequence 0 is the second one. TRL then shuffles all four, here to 3 1 0 2.
        rows = {"x": torch.arange(4) * 10, "text": list("abcd"), ORDER: torch.tensor([1, 3, 0, 2]), "total": torch.tensor(9.0)}
        shuffled = [3, 1, 0, 2]
        batches = [
            {"x": rows["x"][part], "text": [rows["text"][i] for i in part], ORDER: rows[ORDER][part], "total": rows["total"]}
            for part in (shuffled[:2], shuffled[2:])
        ]
        first, second = in_order(batches)
        assert (first["x"].tolist(), second["x"].tolist()) == ([20, 0], [30, 10])
        assert (first["text"], second["text"]) == (["c", "a"], ["d", "b"])
        assert first.keys() == second.keys() == {"x", "text", "total"}

    @pytest.mark.parametrize("draws", [False, True], ids=["TRL's own order", "a reward draws random numbers"])
    def test_the_order_of_the_old_pass_is_that_of_the_updates(self, tmp_path: Path, draws: bool) -> None:
        def reward(completions: list[str], **_: Any) -> list[float]:
            if draws:  # after the old pass, and before TRL shuffles
                torch.rand(1)
            return [float(i) for i in range(len(completions))]

        found = {}
        for how in ("off", "auto"):
            trainer = make_trainer(tmp_path, "ppo_clip", rewards=reward, packed_batches=how)
            found[how] = [x["completion_ids"].tolist() for x in rollouts(trainer)]
        assert sorted(chain(*found["auto"])) == sorted(chain(*found["off"]))
        assert (found["auto"] == found["off"]) == (not draws)


class TestCut:
    @pytest.mark.parametrize(
        ("most", "expected"),
        [(None, [[3, 4, 9, 1, 1]]), (10, [[3, 4], [9, 1], [1]]), (7, [[3, 4], [9], [1, 1]]), (1, [[3], [4], [9], [1], [1]])],
    )
    def test_golden(self, most: int | None, expected: list[list[int]]) -> None:
        lengths = [3, 4, 9, 1, 1]
        assert [lengths[piece] for piece in cut(lengths, most)] == expected

    @given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=12), most=st.integers(1, 30))
    def test_every_sequence_is_in_one_piece_and_no_piece_is_too_long(self, lengths: list[int], most: int) -> None:
        pieces = [lengths[piece] for piece in cut(lengths, most)]
        assert list(chain(*pieces)) == lengths
        assert all(piece and (sum(piece) <= most or len(piece) == 1) for piece in pieces)
        for one, two in pairwise(pieces):
            assert sum(one) + two[0] > most, "the next one would not have fitted"

    def test_all_processes_have_equally_many(self) -> None:
        # 5 sequences become 2 and 3, then those 3 become 1 and 2.
        found = halve([slice(0, 1), slice(1, 6)], 4)
        assert found == [slice(0, 1), slice(1, 3), slice(3, 4), slice(4, 6)]
        assert halve(found, 2) == found


OBJECTIVES: dict[str, dict[str, Any]] = {
    "ppo_clip": {}, "troll": {}, "troll on a union": {"objective": "troll", "support": "union"},
    "grpo": {"objective": "ppo_clip", "loss_type": "grpo"}, "bnpo": {"objective": "ppo_clip", "loss_type": "bnpo"},
}  # fmt: skip


class TestPieces:
    """A micro-batch in pieces has the loss, the gradient and the metrics of the whole one."""

    @pytest.mark.supports("scale: micro-batches cut by tokens", door="TRL")
    @pytest.mark.parametrize("given", OBJECTIVES.values(), ids=OBJECTIVES)
    def test_loss_and_gradient_are_those_of_the_whole(self, tmp_path: Path, given: dict[str, Any]) -> None:
        found = {}
        for most in (None, 12, 1):
            name = given.get("objective", next(key for key, value in OBJECTIVES.items() if value is given))
            trainer = make_trainer(tmp_path, name, tokens_per_pass=most, **{k: v for k, v in given.items() if k != "objective"})
            inputs = rollouts(trainer)[0]
            nudge(trainer.model)
            found[most] = (*loss_and_gradient(trainer, inputs), measured(trainer))
        loss, gradient, metrics = found[None]
        assert float(loss) != 0
        for most in (12, 1):
            assert_close(found[most][0], loss, rtol=1e-5, atol=1e-7)
            for key, value in gradient.items():
                assert_close(found[most][1][key], value, rtol=1e-3, atol=1e-5 * float(value.abs().max()))
            for key, values in metrics.items():
                if key in ("tr/active_frac", "tr/ratio_max", "tr/ess", "tr/kl_max"):
                    assert found[most][2][key] == pytest.approx(values, rel=1e-4, abs=1e-6), key

    def test_every_ratio_is_one_before_the_first_update(self, tmp_path: Path) -> None:
        trainer = make_trainer(tmp_path, "ppo_clip", tokens_per_pass=12, bf16=True)
        for inputs in rollouts(trainer):
            trainer.compute_loss(trainer.model, inputs)
        assert set(measured(trainer)["tr/drift_max"]) == {0.0}

    def test_a_loss_of_several_tokens_is_not_cut(self, tmp_path: Path) -> None:
        assert make_trainer(tmp_path, "ppo_clip", tokens_per_pass=12).splits
        assert not make_trainer(tmp_path, "gspo", tokens_per_pass=12).splits
        assert not make_trainer(tmp_path, "ppo_clip", tokens_per_pass=12, packed_batches="off").splits
        assert not make_trainer(tmp_path, "ppo_clip").splits


class TestMemory:
    def test_golden_size_of_a_pass(self) -> None:
        # 10 bytes a token, 1000 bytes of room: 100 tokens, rounded down to 64.
        assert fit_tokens(1000.0, 10.0, 1.0, 2, longest=9, needed=50) == (64, False)
        # 200 tokens are needed: with two layers of 1 byte a token keeps 10 / 2 + 2 · 1 = 7 bytes, 142 tokens fit.
        assert fit_tokens(1000.0, 10.0, 1.0, 2, longest=9, needed=200) == (128, True)
        assert fit_tokens(1.0, 10.0, 1.0, 2, longest=9, needed=50) == (9, True)

    def test_golden_bytes_of_a_token(self) -> None:
        weight = torch.ones(4, 4, requires_grad=True)
        # x [n 4] is kept for the weight's gradient, and exp keeps its result: 2 · 4 · 4 bytes a token; the sum keeps nothing.
        assert bytes_per_token(lambda n: (torch.ones(n, 4) @ weight).exp().sum(), tokens=8) == 32

    @pytest.mark.supports("scale: gradient checkpointing only where memory asks for it", door="TRL")
    @pytest.mark.parametrize("free", [0, 2**34])
    def test_layers_are_checkpointed_where_memory_asks_for_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, free: int
    ) -> None:
        caplog.set_level(logging.INFO)
        monkeypatch.setattr("corral.trl.packing.free_bytes", lambda device: free)
        trainer = make_trainer(tmp_path, "troll", gradient_checkpointing=None)
        trainer.train()
        assert trainer.model.is_gradient_checkpointing == (free == 0)
        assert f"with{'' if free == 0 else 'out'} gradient checkpointing" in caplog.text
        drift = [line["tr/drift_max"] for line in trainer.state.log_history if "tr/drift_max" in line]
        assert drift == [0.0]

    @pytest.mark.parametrize("asked", [True, False])
    def test_what_is_asked_for_is_kept(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asked: bool) -> None:
        monkeypatch.setattr("corral.trl.packing.free_bytes", lambda device: 2**34 if asked else 0)
        trainer = make_trainer(tmp_path, "ppo_clip", gradient_checkpointing=asked, max_steps=1)
        trainer.train()
        assert trainer.model.is_gradient_checkpointing == asked


class TestCompiled:
    """Layers that are compiled for packed rows. A backend that compiles no kernels traces like one that does."""

    @pytest.fixture
    def graphs(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """Length of each graph that is compiled."""
        found, original = list[int](), torch.compile

        def trace(graph: Any, inputs: Any) -> Any:
            found.append(len(graph.graph.nodes))
            return graph.forward

        torch._dynamo.reset()
        monkeypatch.setattr(torch, "compile", lambda function, dynamic: original(function, backend=trace, dynamic=dynamic))
        return found

    @pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, while it traces
    @pytest.mark.supports("scale: compiled layers", door="TRL")
    @pytest.mark.parametrize("lora", [False, True], ids=["", "LoRA"])
    def test_the_gradient_is_the_same_and_no_length_compiles_anew(
        self, tmp_path: Path, graphs: list[int], caplog: pytest.LogCaptureFixture, lora: bool
    ) -> None:
        caplog.set_level(logging.INFO)
        found = {}
        adapter = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
        for compiles in (False, True):
            torch.manual_seed(0)
            kwargs = {"peft_config": adapter} if lora else {}
            trainer = make_trainer(tmp_path, "ppo_clip", compile_layers=compiles, trainer_kwargs=kwargs, tokens_per_pass=14)
            batches = rollouts(trainer)
            found[compiles] = loss_and_gradient(trainer, batches[0])
            assert bool(graphs) == compiles
        assert_close(found[True][0], found[False][0])
        for name, gradient in found[False][1].items():
            assert_close(found[True][1][name], gradient, atol=1e-5, rtol=1e-3)
        compiled = len(graphs)
        for inputs in batches:
            trainer.compute_loss(trainer.model, inputs)
        rollouts(trainer)
        assert len(graphs) == compiled
        assert set(measured(trainer)["tr/drift_max"]) == {0.0}
        assert "Compiling LlamaDecoderLayer for updates, whose backward pass follows took" in caplog.text

    def test_what_cannot_be_compiled_runs_as_it_is(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: Any, **__: Any) -> Any:
            raise RuntimeError("no compiler here\nand a traceback")

        found = []
        for compiles in (False, True):
            monkeypatch.setattr(torch, "compile", lambda function, dynamic: fail)
            trainer = make_trainer(tmp_path, "ppo_clip", compile_layers=compiles)
            found.append(loss_and_gradient(trainer, rollouts(trainer)[0])[0])
        assert torch.equal(found[0], found[1])
        told = [record.message for record in caplog.records if "not compiled" in record.message]
        assert told == ["Layers are not compiled, because that failed: no compiler here."]

    def test_a_copy_of_a_model_has_layers_of_its_own(self, graphs: list[int]) -> None:
        model = tiny_model()
        packing.compile_layers(model)
        copied = copy.deepcopy(model)
        assert copied.model.layers[0].forward.__self__ is copied.model.layers[0]

    def test_padded_batches_say_that_nothing_is(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        make_trainer(tmp_path, "ppo_clip", compile_layers=True, packed_batches="off")
        assert "these are padded: nothing is compiled" in caplog.text


class TestKernel:
    """torch's variable-length attention, called as its documentation says."""

    @pytest.mark.parametrize("shares", [True, False], ids=["shared keys", "torch before 2.12"])
    @pytest.mark.parametrize("window", [None, 2])
    def test_is_given_borders_scale_and_window(self, monkeypatch: pytest.MonkeyPatch, window: int | None, shares: bool) -> None:
        def reference(
            q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, most_q: int, most_k: int, **how: Any
        ) -> Tensor:
            # As documented: (T, heads, size); a window of (w, 0) is causal, with w tokens before the token itself.
            left, right = how["window_size"]
            assert (right, most_q, most_k) == (0, 5, 5)
            assert cu_q.dtype == torch.int32
            assert how.get("enable_gqa", False) == (q.shape[1] != k.shape[1])
            out = torch.zeros_like(q)
            for a, b in zip(cu_q.tolist(), cu_k.tolist()[1:], strict=False):
                keys, values = (x[a:b].repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
                scores = torch.einsum("qhd,khd->hqk", q[a:b], keys) * how["scale"]
                step = torch.arange(b - a)
                near = (step[:, None] >= step) & (True if left < 0 else step[:, None] - step <= left)
                out[a:b] = torch.einsum("hqk,khd->qhd", scores.masked_fill(~near, -torch.inf).softmax(-1), values)
            return out

        monkeypatch.setattr(packing, "varlen_attn", reference)
        monkeypatch.setattr(packing, "_KERNEL", {"window_size", *(["enable_gqa"] if shares else [])})
        torch.manual_seed(0)
        q, k, v = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
        borders = torch.tensor([0, 3, 3, 8, 9], dtype=torch.int32)
        module = tiny_model().model.layers[0].self_attn
        module.num_key_value_groups = 2
        found = packing._by_kernel(q, k, v, 0.3, window, borders, 5)
        settings = {"dropout": 0.0, "scaling": 0.3, "sliding_window": window}
        expected = packing._by_padding(packing.sdpa_attention_forward, module, (q, k, v), settings, borders, 5)
        assert_close(found, expected)

    def test_is_used_on_cuda_in_half_precision_alone(self) -> None:
        half, whole = torch.zeros(1, 2, 3, 8, dtype=torch.bfloat16), torch.zeros(1, 2, 3, 8)
        assert not packing._fits_kernel(half, half)
        assert not packing._fits_kernel(whole, whole)

    @pytest.mark.gpu
    @pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
    @pytest.mark.parametrize("window", [None, 3])
    def test_on_a_gpu(self, window: int | None) -> None:
        torch.manual_seed(0)
        heads = [torch.randn(1, n, 90, 64, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) for n in (4, 2, 2)]
        assert packing._fits_kernel(heads[0], heads[2])
        borders = torch.tensor([0, 30, 31, 90], dtype=torch.int32, device=DEVICE)
        module = tiny_model().model.layers[0].self_attn
        module.num_key_value_groups = 2
        settings = {"dropout": 0.0, "scaling": 0.3, "sliding_window": window}
        found = packing._by_kernel(*heads, 0.3, window, borders, 59)
        expected = packing._by_padding(packing.sdpa_attention_forward, module, tuple(heads), settings, borders, 59)
        assert_close(found, expected, atol=2e-2)
        upstream = torch.randn_like(found)
        for mine, theirs in zip(
            torch.autograd.grad(found, heads, upstream), torch.autograd.grad(expected, heads, upstream), strict=True
        ):
            assert_close(mine, theirs, atol=5e-2)
