"""corral's head at the end of a plain model: as verl's engine calls it, without verl."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import Gemma2Config, Gemma2ForCausalLM, GraniteConfig, GraniteForCausalLM, Qwen2Config, Qwen2ForCausalLM

import corral
from corral.engines.verl.head import NEW, OLD, HeadCall, SupportHead, local_rows, read_dists, write_dist
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


def test_a_support_comes_back_from_jagged_fields() -> None:
    dist = corral.lm_head(torch.randn(9, 4), torch.randn(48, 4), torch.zeros(9, dtype=torch.int64), top_k=5).dist
    assert dist is not None
    offsets = torch.tensor([0, 4, 9])
    fields = write_dist(OLD, dist, offsets)
    assert fields["corral_old_ids"].dtype == torch.int32
    assert fields["corral_old_ids"].size(-1) == 6

    def rows(field: Any) -> Any:
        return field.values()[None]

    found = read_dists(write_dist(NEW, dist, offsets), fields, rows)
    assert found is not None
    for made in found:
        assert torch.equal(made.ids[0], dist.ids)
        assert torch.equal(made.logp[0], dist.logp)
        assert torch.equal(made.rest[0], dist.rest)
    assert read_dists({}, fields, rows) is None


def test_rows_are_split_as_sequence_parallel_ranks_split_tokens() -> None:
    packed = torch.arange(10).view(5, 2)
    parts = [local_rows(packed, 1, rank, 2, fill=-1) for rank in range(2)]
    assert torch.equal(torch.cat(parts), torch.cat([packed, torch.full((1, 2), -1)]))
    assert torch.equal(local_rows(packed, 0, 0, 1, fill=-1), packed)
    with pytest.raises(ValueError, match="5 packed tokens do not split over 2"):
        local_rows(packed, 0, 0, 2, fill=-1)
