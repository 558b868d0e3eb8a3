"""verl's Megatron engine with supports: two tensor-parallel processes on gloo against the full softmax. `make test-verl`.

Megatron-core's own process groups and parallel regions, and verl's own packing of sequences. The model is a bigram, and the
schedule is that of Megatron without pipelining: Megatron's layers and its schedules need a GPU.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl (make test-verl)")
pytest.importorskip("megatron.core", reason="needs megatron-core (make test-verl)")

import torch
import verl_fixture as fixture
from megatron.core import parallel_state, tensor_parallel
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from verl.workers.config import McoreEngineConfig
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.megatron import MegatronEngineWithLMHead, transformer_impl

import corral
from corral import make_objective
from corral.engines.verl.megatron import SupportMegatronEngine
from corral.engines.verl.settings import DEPLOYED_BOUND, MODEL_TYPE
from tolerance import TOLERANCE
from two_processes import run_two

pytestmark = pytest.mark.verl

HIDDEN, PADDED = 6, 104
"""Hidden size, and rows of the head with Megatron's padding: 52 a process for a vocabulary of 100."""
TROLL = {"bound": 0.01, "regression": 0.5}
CASES: dict[str, tuple[torch.dtype, bool, str, dict[str, Any]]] = {
    "float32, packed": (torch.float32, True, "troll", TROLL),
    "float32, padded": (torch.float32, False, "troll", TROLL),
    "bfloat16, packed": (torch.bfloat16, True, "troll", TROLL),
    "dppo": (torch.float32, True, "dppo", {"estimator": "topk", "bound": 0.01}),
    "full": (torch.float32, True, "dppo", {"estimator": "full", "divergence": "kl", "bound": 0.001}),
}


def weights(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Embedding, head, and the step away from it after which the policy is updated. The head's padding is large."""
    draw = torch.Generator().manual_seed(3)
    embedding, head = (torch.randn(n, HIDDEN, generator=draw) for n in (fixture.VOCABULARY, PADDED))
    head[fixture.VOCABULARY :] = 30.0
    return embedding.to(dtype), head.to(dtype), (0.2 * torch.randn(PADDED, HIDDEN, generator=draw)).to(dtype)


class Bigram(nn.Module):
    """A model as verl's forward function wants it: token ids in, this rank's logits out."""

    pre_process = post_process = True
    vp_stage = 0

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.config = TransformerConfig(
            num_layers=1, hidden_size=HIDDEN, num_attention_heads=2, tensor_model_parallel_size=2, use_cpu_initialization=True
        )
        embedding, head, _ = weights(dtype)
        self.embedding = nn.Parameter(embedding)
        self.head = nn.Parameter(head.chunk(2)[torch.distributed.get_rank()].clone())

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        hidden = tensor_parallel.copy_to_tensor_model_parallel_region(self.embedding[input_ids].tanh())
        return hidden @ self.head.T


def make_engine(dtype: torch.dtype, *, packed: bool) -> SupportMegatronEngine:
    """verl's engine around the bigram, without the bridge that would build a model of Megatron's."""
    engine = object.__new__(SupportMegatronEngine)
    engine.engine_config = McoreEngineConfig(
        tensor_model_parallel_size=2, use_remove_padding=packed, use_mbridge=True, forward_only=False
    )
    config = SimpleNamespace(architectures=["Bigram"], vocab_size=fixture.VOCABULARY)
    config.get_text_config = lambda: config
    engine.model_config = SimpleNamespace(
        hf_config=config, mtp=SimpleNamespace(enable=False, enable_train=False), tokenizer=SimpleNamespace(pad_token_id=0)
    )
    engine.enable_routing_replay, engine.mode = False, "train"
    engine.module = [Bigram(dtype)]
    engine.tf_config = engine.module[0].config
    engine.optimizer_zero_grad, engine.optimizer_step = engine.module[0].zero_grad, lambda: 0.0
    return engine


def schedule(
    *, forward_step_func: Any, data_iterator: Any, model: Any, num_microbatches: int, forward_only: bool, **_: Any
) -> list[Any]:
    """One micro-batch after another, as Megatron's schedule without pipelining."""
    reports, batches = [], data_iterator if hasattr(data_iterator, "__next__") else data_iterator[0]
    for _index in range(num_microbatches):
        output, loss_of = forward_step_func(batches, model[0])
        loss, report = loss_of(output)
        if not forward_only:
            (loss / num_microbatches).backward()
        reports.append(report)
    return reports


def batch_of(**extra: Any) -> Any:
    return fixture.batch_of(use_dynamic_bsz=True, max_token_len_per_gpu=20, global_batch_size=fixture.SEQUENCES, **extra)


def train(rank: int, folder: Path) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    transformer_impl.get_forward_backward_func = lambda: schedule
    found: dict[str, Any] = {}
    for name, (dtype, packed, objective, settings) in CASES.items():
        engine = make_engine(dtype, packed=packed)
        config = fixture.actor_config(f"corral_{objective}", objective=settings)
        request = config.policy_loss.support_request()
        old = engine.infer_batch(batch_of(calculate_entropy=True, **request))["model_output"]
        moved = []
        for step in (0.0, 1.0):  # at unchanged weights, and away from them
            with torch.no_grad():
                engine.module[0].head += step * weights(dtype)[2].chunk(2)[rank]
            out = engine.train_batch(fixture.with_old(batch_of(**request), old), fixture.loss_of(config))
            metrics = {key: x.values for key, x in out["metrics"].items() if key.startswith("tr/")}
            moved.append({"metrics": metrics, "grads": [x.grad.clone() for x in engine.module[0].parameters()]})
        found[name] = {
            "moved": moved, "log_probs": old["log_probs"].values(), "entropy": old["entropy"].values(),
            "counts": old["corral_old_counts"].values(), "stock": stock(engine, dtype),
        }  # fmt: skip
    engine = make_engine(torch.float32, packed=True)
    for key, value in {"calculate_sum_pi_squared": True, DEPLOYED_BOUND: 0.1}.items():
        try:
            engine.train_batch(batch_of(**{key: value}), lambda **_: None)
        except ValueError as error:
            found[key] = str(error)
    torch.save(found, folder / f"{rank}.pt")


def stock(engine: SupportMegatronEngine, dtype: torch.dtype) -> Tensor:
    """Log-probs of verl's own method on the same logits, without the padded vocabulary's."""
    with torch.no_grad():
        engine.module[0].head.copy_(weights(dtype)[1].chunk(2)[torch.distributed.get_rank()])
        if torch.distributed.get_rank() == 1:
            engine.module[0].head[fixture.VOCABULARY - PADDED // 2 :] = 0  # below every logit, after the next line
            engine.module[0].embedding.data = weights(dtype)[0]
    engine._lm_head_logits_processor = lambda logits, label, temperature, **kwargs: own(
        engine, logits, label, temperature, **kwargs
    )
    return engine.infer_batch(batch_of())["model_output"]["log_probs"].values()


def own(engine: SupportMegatronEngine, logits: Tensor, *args: Any, **kwargs: Any) -> Any:
    if torch.distributed.get_rank() == 1:
        logits = logits.index_fill(-1, torch.arange(fixture.VOCABULARY - PADDED // 2, PADDED // 2), -1e4)
    return MegatronEngineWithLMHead._lm_head_logits_processor(engine, logits, *args, **kwargs)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("megatron")
    run_two(train, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def by_corral(name: str, step: float) -> tuple[list[Tensor], Tensor]:
    """Gradients of embedding and head, and old log-probs of all tokens, through the full softmax in one process."""
    dtype, _, objective, settings = CASES[name]
    embedding, head, away = weights(dtype)
    prompts, responses, advantages = fixture.sequences()
    whole = [torch.cat(pair) for pair in zip(prompts, responses, strict=True)]

    def policy(ids: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        logits = table[ids].tanh() @ rows[: fixture.VOCABULARY].T
        return (logits.float() / fixture.TEMPERATURE).log_softmax(-1)

    new = [embedding.clone().requires_grad_(), (head + step * away).requires_grad_()]
    losses, old_logp = [], []
    top_k = fixture.VOCABULARY if name == "full" else fixture.TOP_K
    for ids, response, credit in zip(whole, responses, advantages, strict=True):
        everywhere = policy(ids, embedding, head)
        old_logp.append(everywhere.gather(-1, ids.roll(-1)[:, None])[:, 0])
        here = slice(len(ids) - len(response) - 1, -1)
        old = corral.top_k_support(everywhere[None, here], response[None], top_k)
        batch = corral.TokenBatch.on_support(
            corral.gather_support(policy(ids, *new)[None, here], old.ids), old, credit[None],
            torch.ones(1, len(response), dtype=torch.bool),
        )  # fmt: skip
        losses.append(make_objective(objective, **settings)(batch).loss[0])
    torch.cat(losses).mean().backward()
    return [x.grad for x in new if x.grad is not None], torch.cat(old_logp)


@pytest.mark.supports("scale: Megatron, on a support, tensor parallelism", door="verl")
@pytest.mark.parametrize("step", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_two_tensor_parallel_ranks_have_the_gradients_of_the_full_softmax(
    results: list[dict[str, Any]], name: str, step: int
) -> None:
    (embedding, head), _ = by_corral(name, float(step))
    for rank, found in enumerate(results):
        got = found[name]["moved"][step]["grads"]
        for x, y in zip(got, (embedding, head.chunk(2)[rank]), strict=True):
            assert x.dtype == CASES[name][0]
            limit = TOLERANCE[x.dtype]
            torch.testing.assert_close(x, y, rtol=limit["rtol"], atol=limit["rtol"] * float(y.abs().max()))


@pytest.mark.parametrize("name", CASES)
def test_at_unchanged_weights_every_ratio_is_exactly_one(results: list[dict[str, Any]], name: str) -> None:
    for found in results:
        first, second = (found[name]["moved"][step]["metrics"] for step in (0, 1))
        assert set(first["tr/kl_before"]) == {0.0}
        assert max(first["tr/ratio_max"]) in (0.0, 1.0)
        assert max(second["tr/kl_before"]) > 1e-3
        assert max(second.get("tr/unconverged", [0])) == 0


@pytest.mark.parametrize("name", CASES)
def test_log_probs_are_those_of_verls_own_engine(results: list[dict[str, Any]], name: str) -> None:
    _, expected = by_corral(name, 0.0)
    ends = torch.tensor([len(row) for rows in zip(*fixture.sequences()[:2], strict=True) for row in (torch.cat(rows),)])
    within = torch.ones(len(expected), dtype=torch.bool).index_fill(0, ends.cumsum(0) - 1, False)  # no token follows the last
    for found in results:
        logp, stock_logp = (found[name][key].float()[within] for key in ("log_probs", "stock"))
        torch.testing.assert_close(logp, expected[within], **TOLERANCE[CASES[name][0]])
        torch.testing.assert_close(logp, stock_logp, rtol=2e-2, atol=5e-2)  # verl divides and sums in the model's precision
        assert (found[name]["entropy"] > 0).all()
        counts = found[name]["counts"]
        assert len(counts) == sum(map(len, fixture.sequences()[1]))
        assert int(counts.max()) <= (fixture.VOCABULARY if name == "full" else fixture.TOP_K + 1)


def test_both_ranks_store_the_same_old_policy(results: list[dict[str, Any]]) -> None:
    for name in CASES:
        assert torch.equal(results[0][name]["log_probs"], results[1][name]["log_probs"])
        assert torch.equal(results[0][name]["counts"], results[1][name]["counts"])


@pytest.mark.refuses("other: deployed network, Megatron", door="verl")
def test_what_reads_all_logits_or_holds_weights_is_refused(results: list[dict[str, Any]]) -> None:
    for found in results:
        assert "reads all logits" in found["calculate_sum_pi_squared"]
        assert "holds the weights of FSDP2, and this engine is Megatron's" in found[DEPLOYED_BOUND]


def test_the_engine_is_registered_for_megatron() -> None:
    assert EngineRegistry.get_engine_cls(MODEL_TYPE, "megatron") is SupportMegatronEngine
