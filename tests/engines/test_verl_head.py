"""corral's head at the end of a plain model: as verl's engine calls it, without verl."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM, Qwen2Config, Qwen2ForCausalLM

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
FAMILIES: dict[str, Any] = {
    "plain": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "tied": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
    "softcap": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, final_logit_softcapping=2.0)),
    "scaled": lambda: GraniteForCausalLM(GraniteConfig(**SIZES, logits_scaling=4.0)),
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
