"""How much of a policy's move does a top-K support see, the old policy's alone and its union with the new one's?

    make smollm2 && python benchmarks/support_tail.py

SmolLM2-135M answers short questions at temperature 1; then it takes eight updates towards answers chosen at random, the hardest
push that a batch of rollouts can give. Of every token the true KL(new‖old) over the vocabulary is compared with what each
support and its tail see of it, and the head's time with a union is given as a ratio to the one with the old support.
"""

import torch
from rows import arguments, finish
from timing import in_turns
from torch import Tensor

from corral import TokenBatch, categorical_kl, gather_support, lm_head, make_objective, reduce_loss, top_k_support
from corral.lab.models.load import load_model

QUESTIONS = [f"What is {a} plus {b} times {a + b}? Think step by step." for a in range(3, 19, 2) for b in (7, 12)]
K, MASS, UPDATES = 64, 1 - 1e-5, 8


def sample(length: int) -> tuple[torch.nn.Module, Tensor, Tensor, Tensor]:
    """The model, its prompts and completions [B S], the attention mask, and which positions predict a completion's tokens."""
    model, tokenizer = load_model("smollm2")
    tokenizer.padding_side = "left"
    questions = [[{"role": "user", "content": question}] for question in QUESTIONS]
    chats = tokenizer.apply_chat_template(questions, add_generation_prompt=True, tokenize=False)
    prompts = tokenizer(chats, return_tensors="pt", padding=True, add_special_tokens=False)
    torch.manual_seed(0)
    ids = model.generate(**prompts, max_new_tokens=length, do_sample=True, temperature=1.0, top_k=0, top_p=1.0)
    attention = torch.cat([prompts["attention_mask"], torch.ones_like(ids[:, prompts["input_ids"].shape[1] :])], 1)
    scored = torch.zeros_like(ids[:, 1:], dtype=torch.bool)
    scored[:, prompts["input_ids"].shape[1] - 1 :] = True
    return model, ids, attention, scored


def hidden_states(model: torch.nn.Module, ids: Tensor, attention: Tensor, scored: Tensor) -> Tensor:
    return model.model(input_ids=ids, attention_mask=attention).last_hidden_state[:, :-1][scored]


def measure(rate: float, length: int) -> dict[str, float]:
    """One batch of rollouts, eight updates at this learning rate, and what is seen of it."""
    model, ids, attention, scored = sample(length)
    tokens = ids[:, 1:][scored]
    with torch.no_grad():
        old_hidden = hidden_states(model, ids, attention, scored)
        logp_old = (old_hidden @ model.lm_head.weight.T).log_softmax(-1)
    old = top_k_support(logp_old, tokens, K, MASS)
    advantages = torch.randn(len(ids), generator=torch.Generator().manual_seed(1))
    per_token = advantages[:, None].expand(scored.shape)[scored][None]
    optimizer, objective = torch.optim.Adam(model.parameters(), lr=rate), make_objective("reinforce")
    for _ in range(UPDATES):
        logp = lm_head(hidden_states(model, ids, attention, scored), model.lm_head.weight, tokens).logp[None]
        mask = torch.ones_like(logp, dtype=torch.bool)
        out = objective(TokenBatch(logp, old.logp[None, :, 0], per_token, mask))
        optimizer.zero_grad()
        reduce_loss(out.loss, mask, "token-mean").backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    with torch.no_grad():
        new_hidden, weight = hidden_states(model, ids, attention, scored), model.lm_head.weight
        logp_new = (new_hidden @ weight.T).log_softmax(-1)
        true = categorical_kl(logp_new, logp_old)
        new = gather_support(logp_new, old.ids)
        union = top_k_support(logp_new, tokens, K, MASS, ids=old.ids)
        seen = categorical_kl(new.with_rest(), old.with_rest())
        seen_by_union = categorical_kl(union.with_rest(), gather_support(logp_old, union.ids).with_rest())
        ways = {
            "given": lambda: lm_head(new_hidden, weight, tokens, ids=old.ids),
            "both": lambda: lm_head(new_hidden, weight, tokens, ids=old.ids, top_k=K, mass=MASS),
        }
        given, both = in_turns(ways, rounds=3).values()
    assert new.rest_max is not None
    assert old.rest_max is not None
    outside = true > 0.05
    return {
        "learning_rate": rate, "tokens": len(tokens), "cut_off": float((old.rest.exp() > 1 - MASS).float().mean()),
        "tail": float(old.rest.exp().mean()), "kl": float(true.mean()), "kl_max": float(true.max()),
        "seen": float(seen.sum() / true.sum()), "seen_by_union": float(seen_by_union.sum() / true.sum()),
        "outside": int(outside.sum()), "missed": int((outside & (seen <= 0.05)).sum()),
        "missed_by_union": int((outside & (seen_by_union <= 0.05)).sum()),
        "worst_missed": float(torch.where(seen <= 0.05, true, 0.0).max()),
        "worst_missed_by_union": float(torch.where(seen_by_union <= 0.05, true, 0.0).max()),
        "rest_max_ratio": float((new.rest_max - old.rest_max).max().exp()), "union_time": both / given,
    }  # fmt: skip


def main() -> None:
    args = arguments(__doc__, rates=[1e-6, 1e-5, 1e-4], length=48).parse_args()
    finish("support_tail", [measure(rate, args.length) for rate in args.rates], args.save)


if __name__ == "__main__":
    main()
