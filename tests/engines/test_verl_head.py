"""corral's head at the end of a plain model: as verl's engine calls it, without verl."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GraniteConfig,
    GraniteForCausalLM,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
)

import corral
from corral.engines.verl.head import (
    OLD,
    HeadCall,
    SupportHead,
    local_rows,
    response_positions,
    take_dists,
    write_new,
    write_support,
)
from tolerance import assert_close

SIZES: dict[str, Any] = {
    "vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SEES: dict[str, Any] = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip
"""Sizes of the part that sees images, which text does not pass through."""
PIXTRAL = {"model_type": "pixtral", "head_dim": 8}
QWEN3_5: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5,
        "mrope_interleaved": True,
    },
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "plain": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0)),
    "scaled": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
    "Gemma 3 with vision": lambda: Gemma3ForConditionalGeneration(Gemma3Config(text_config=dict(SIZES), vision_config=SEES)),
    "Mistral 3 with vision": lambda: Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=SIZES | {"model_type": "mistral"}, vision_config=SEES | PIXTRAL)
    ),
    "Qwen3.5 with vision": lambda: Qwen3_5ForConditionalGeneration(
        Qwen3_5Config(text_config=SIZES | QWEN3_5, vision_config={**SEES, "depth": 1, "num_heads": 2, "out_hidden_size": 16})
    ),
}


class _Squashed(Qwen2ForCausalLM):
    """A family that does something of its own to its logits."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        output.logits = 15 * torch.tanh(output.logits * 3)
        return output


def sharp(model: Any) -> Any:
    """Weights far enough from 0 that a wrong scale shows."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(40)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_entropy_and_supports_are_those_of_the_models_own_logits(family: str) -> None:
    model = sharp(FAMILIES[family]())
    ids, tokens = torch.randint(3, 48, (1, 9)), torch.randint(3, 48, (9,))
    logp = (model(ids).logits[0].float() / 0.7).log_softmax(-1)
    head = SupportHead(model)
    with torch.no_grad():
        head.expect(HeadCall(tokens, temperature=0.7, top_k=5, entropy=True, compare=True))
        old = head.read(model(input_ids=ids, use_cache=False))
    own = corral.top_k_support(logp, tokens, 5)
    assert_close(old.logp, logp.gather(-1, tokens[:, None])[:, 0], atol=1e-5)
    assert_close(old.entropy, -(logp.exp() * logp).sum(-1), atol=1e-5)
    assert old.dist is not None
    assert torch.equal(old.dist.ids, own.ids)
    assert_close(old.dist.with_rest(), own.with_rest(), atol=1e-4)


@pytest.mark.refuses("model: images, on a support", door="verl")
def test_images_are_refused() -> None:
    model = FAMILIES["Gemma 3 with vision"]()
    head = SupportHead(model)
    head.expect(HeadCall(torch.zeros(9, dtype=torch.int64)))
    with pytest.raises(ValueError, match=r"a support is kept of text alone, and this batch has pixel_values"):
        model(input_ids=torch.zeros(1, 9, dtype=torch.int64), pixel_values=torch.zeros(1, 3, 28, 28))


class _Packed(Qwen2ForCausalLM):
    """A family that reads where packed sequences begin, as layers with a state do."""

    def forward(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, **kwargs: Any) -> Any:
        assert int(cu_seqlens[-1]) == input_ids.shape[1] == position_ids.shape[-1], "borders of other tokens"
        assert (cu_seqlens.diff() > 0).all()
        self.borders = cu_seqlens.tolist()
        return super().forward(input_ids=input_ids, position_ids=position_ids[0], use_cache=False)


@pytest.mark.parametrize(("borders", "cut"), [([0, 5, 12, 20], [0, 5, 8]), ([0, 8, 20], [0, 8]), ([0, 20], [0, 8])])
def test_borders_of_packed_sequences_are_cut_with_the_tokens(borders: list[int], cut: list[int]) -> None:
    model = _Packed(Qwen2Config(**SIZES)).eval()
    base = model.model.forward
    model.model.forward = lambda *_, position_ids, cu_seqlens=None, cu_seqlens_cpu=None, **given: base(  # type: ignore[method-assign]
        position_ids=position_ids[0] if position_ids.ndim == 3 else position_ids, **given
    )
    head = SupportHead(model)
    head.expect(HeadCall(torch.randint(3, 48, (20,)), compare=True))
    with torch.no_grad():
        model(
            input_ids=torch.randint(3, 48, (1, 20)), cu_seqlens=torch.tensor(borders), cu_seqlens_cpu=torch.tensor(borders),
            position_ids=torch.arange(20).expand(4, 1, 20),  # coordinates in front, as verl has them for models that see images
        )  # fmt: skip
    assert model.borders == cut


def test_a_gradient_through_the_head_is_that_of_the_logits() -> None:
    model, twin = FAMILIES["plain"](), FAMILIES["plain"]()
    twin.load_state_dict(model.state_dict())
    ids, tokens = torch.randint(3, 48, (1, 9)), torch.randint(3, 48, (9,))
    support = corral.top_k_support(model(ids).logits[0].detach().log_softmax(-1), tokens, 5).ids
    head = SupportHead(model)
    head.expect(HeadCall(tokens, ids=support))
    rows = head.read(model(input_ids=ids))
    logp = twin(ids).logits[0].log_softmax(-1)
    expected = corral.gather_support(logp, support)
    weights = torch.randn(9, 7)
    assert rows.dist is not None
    for dist in (rows.dist, expected):
        (dist.with_rest() * weights).sum().backward()
    for mine, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert_close(mine.grad, theirs.grad, atol=1e-4)


def test_padded_sequences_are_packed() -> None:
    model = FAMILIES["plain"]().eval()
    ids, attention = torch.randint(3, 48, (2, 5)), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
    logp = model(ids, attention_mask=attention).logits.float().log_softmax(-1)[attention.bool()]
    tokens = torch.randint(3, 48, (8,))
    head = SupportHead(model)
    with torch.no_grad():
        head.expect(HeadCall(tokens, compare=True))
        found = head.read(model(input_ids=ids, attention_mask=attention))
    assert_close(found.logp, logp.gather(-1, tokens[:, None])[:, 0].detach(), atol=1e-5)
    assert found.dist is None


def test_what_a_family_does_to_its_logits_unbeknown_to_corral_is_found_out() -> None:
    model = sharp(_Squashed(Qwen2Config(**SIZES)))
    head = SupportHead(model)
    head.expect(HeadCall(torch.randint(3, 48, (9,)), compare=True))
    with torch.no_grad(), pytest.raises(ValueError, match=r"differ by .* nats from those of _Squashed's own logits"):
        model(input_ids=torch.randint(3, 48, (1, 9)))


def test_a_head_that_is_none_is_refused() -> None:
    model = FAMILIES["plain"]()
    head = SupportHead(model)
    with pytest.raises(RuntimeError, match="outside a scoring pass"):
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    head.expect(HeadCall(torch.zeros(2, dtype=torch.int64)))
    model.lm_head = nn.Sequential(model.lm_head)  # as LoRA wraps it
    with pytest.raises(ValueError, match=r"the head has become a Sequential\. Leave it out of LoRA"):
        model(input_ids=torch.zeros(1, 2, dtype=torch.int64))
    model.lm_head = nn.Identity()
    with pytest.raises(ValueError, match="Qwen2ForCausalLM has no linear head; got Identity"):
        SupportHead(model)


def test_bfloat16_goes_in_and_float32_comes_out() -> None:
    model = FAMILIES["plain"]().bfloat16()
    ids = torch.randint(3, 48, (1, 9))
    head = SupportHead(model)
    call = HeadCall(ids[0], top_k=5)
    with torch.no_grad():
        head.expect(call)
        first = head.read(model(input_ids=ids))
    assert first.dist is not None
    head.expect(HeadCall(ids[0], ids=first.dist.ids))
    second = head.read(model(input_ids=ids))
    assert second.logp.dtype == torch.float32
    assert torch.equal(first.logp, second.logp)  # whichever support is asked for


def micro_batch(mask: list[list[int]]) -> dict[str, Any]:
    """Two sequences: prompts of 2 and 1 tokens, responses of 2 and 4."""
    return {
        "input_ids": jagged(torch.arange(9), [0, 4, 9]), "responses": jagged(torch.arange(6), [0, 2, 6]),
        "response_mask": jagged(torch.tensor([*mask[0], *mask[1]]), [0, 2, 6]),
    }  # fmt: skip


def jagged(values: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor(offsets))


def test_response_tokens_are_predicted_one_position_earlier() -> None:
    # Tokens 2, 3 and 5 … 8 are of responses; the positions before them are 1, 2 and 4 … 7.
    assert response_positions(micro_batch([[1, 1], [1] * 4])).tolist() == [1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("mask", [[[1, 1], [1] * 4], [[0, 1], [1, 0, 0, 1]], [[0, 0], [1] * 4], [[0, 0], [0] * 4]])
def test_a_support_comes_back_from_jagged_fields(mask: list[list[int]]) -> None:
    tokens = torch.arange(9) % 5
    dist = corral.lm_head(torch.randn(9, 4), torch.randn(48, 4), tokens, top_k=5, mass=0.4).dist
    assert dist is not None
    data = micro_batch(mask)
    expected = dist[torch.tensor([1, 2, 4, 5, 6, 7])][data["response_mask"].values().bool()]
    output = write_new(dist, data)
    data |= write_support(dist, data)
    stored = sum(x.values().numel() * x.values().element_size() for name, x in data.items() if name.startswith(OLD))
    assert stored == 8 * int((expected.ids >= 0).sum()) + 12 * 6
    found = take_dists(output, data)
    assert output == {}
    assert found is not None
    for made in found:
        for name in ("ids", "logp", "rest", "rest_max"):
            assert torch.equal(getattr(made, name), getattr(expected, name)), name
    assert take_dists({}, data) is None


def test_a_token_that_the_old_pass_kept_no_support_for_is_refused() -> None:
    dist = corral.lm_head(torch.randn(9, 4), torch.randn(48, 4), torch.arange(9), top_k=5).dist
    assert dist is not None
    data = micro_batch([[0, 1], [1] * 4])
    data |= write_support(dist, data) | micro_batch([[1, 1], [1] * 4])
    with pytest.raises(ValueError, match="1 unmasked tokens have no support"):
        take_dists(write_new(dist, data), data)


def test_rows_are_split_as_sequence_parallel_ranks_split_tokens() -> None:
    packed = torch.arange(10).view(5, 2)
    parts = [local_rows(packed, 1, rank, 2) for rank in range(2)]
    assert torch.equal(torch.cat(parts), torch.cat([packed, torch.full((1, 2), -1)]))
    assert torch.equal(local_rows(packed, 0, 0, 1), packed)
    with pytest.raises(ValueError, match="5 packed tokens do not split over 2"):
        local_rows(packed, 0, 0, 2)
