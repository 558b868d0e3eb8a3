"""verl's FSDP2 engine with corral's head: two processes on gloo against corral alone. `make test-verl` brings verl."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl (make test-verl)")

import torch
import verl_fixture as fixture

import corral
from corral import make_objective
from two_processes import run_two

pytestmark = pytest.mark.verl

TROLL = {"bound": 0.01, "regression": 0.5}
HELD = 1e-3
"""A bound on the deployed network's mean KL that two updates leave."""
CASES: dict[str, tuple[str, dict[str, Any], str]] = {
    **{f"troll {agg}": ("troll", TROLL, agg) for agg in fixture.RATES},
    "dppo": ("dppo", {"estimator": "topk", "bound": 0.01}, "token-mean"),
    "full": ("dppo", {"estimator": "full", "divergence": "kl", "bound": 0.001}, "token-mean"),
}


def train(rank: int, folder: Path) -> None:
    """Each case from the same weights: the old pass, then two updates; what comes out is saved."""
    torch.set_num_threads(1)
    mine = slice(rank, None, 2)
    stock = fixture.make_worker("language_model").infer_batch(fixture.batch_of(mine, calculate_entropy=True))
    found: dict[str, Any] = {"stock": (stock["log_probs"].values(), stock["entropy"].values())}
    worker = fixture.make_worker("corral_language_model")
    for name, (objective, settings, agg) in CASES.items():
        found[name] = run_case(worker, mine, fixture.actor_config(f"corral_{objective}", agg, objective=settings), agg)
    padded = fixture.make_worker("corral_language_model", remove_padding=False)
    found["padded"] = run_case(padded, mine, fixture.actor_config("corral_troll", objective=TROLL), "token-mean")
    lora = fixture.make_worker("corral_language_model", lora_rank=4, target_modules=["q_proj", "v_proj"])
    found["lora"] = run_case(lora, mine, fixture.actor_config("corral_troll", objective=TROLL), "token-mean")
    half = fixture.make_worker("corral_language_model", dtype="bf16")
    found["half"] = run_case(half, mine, fixture.actor_config("corral_troll", objective=TROLL), "token-mean")
    tie = {"tie_word_embeddings": True}
    own = fixture.make_worker("language_model", config=tie).infer_batch(fixture.batch_of(mine))
    tied = fixture.make_worker("corral_language_model", config=tie)
    found["tied"] = run_case(tied, mine, fixture.actor_config("corral_troll", objective=TROLL), "token-mean")
    found["tied"]["own"] = own["log_probs"].values()
    shared = {"ulysses_sequence_parallel_size": 2, "pad_to_length": True, "pad_to_length_bucket": fixture.BUCKET}
    shared |= {"max_token_len_per_gpu": 64, "infer_max_token_len_per_gpu": 64}
    ulysses = fixture.make_worker("corral_language_model", engine=shared)
    found["ulysses"] = run_case(ulysses, slice(None), fixture.actor_config("corral_troll", objective=TROLL), "token-mean")
    held = {"deployed_bound": HELD}
    for name, more in (("deployed", {}), ("deployed half", {"dtype": "bf16"}), ("deployed padded", {"remove_padding": False})):
        some = worker if name == "deployed" else fixture.make_worker("corral_language_model", **more)
        config = fixture.actor_config("corral_troll", objective=TROLL, **held)
        found[name] = run_case(some, mine, config, "token-mean")
    config = fixture.actor_config("corral_troll", objective=TROLL, **held)
    found["deployed, two batches"] = run_case(worker, mine, config, "token-mean", batches=2)
    config = fixture.actor_config("corral_spo", deployed_bound=torch.inf)
    found["deployed, measured alone"] = run_case(worker, mine, config, "token-mean")
    torch.save(found, folder / f"{rank}.pt")


def run_case(worker: Any, mine: slice, config: Any, agg: str, *, batches: int = 1) -> dict[str, Any]:
    """The old pass, then two updates: of one batch, or one each of two, after which the sampler gets the weights."""
    worker.reset()
    old = worker.infer_batch(fixture.batch_of(mine, calculate_entropy=True, **config.policy_loss.support_request()))
    if worker.engine.use_ulysses_sp:  # of ranks that share sequences one reports, and the driver hands it to all
        box = [old]
        torch.distributed.broadcast_object_list(box, src=0)
        (old,) = box
    worker.set_loss_fn(fixture.loss_of(config))
    for index in range(batches):
        for group in worker.engine.optimizer.param_groups:  # verl's schedule sets it after every batch
            group["lr"] = fixture.RATES[agg]
        batch = fixture.with_old(fixture.batch_of(mine), old)
        settings = config.policy_loss
        request = settings.deployed_request(sync=index == batches - 1) | settings.support_request()
        fixture.tensordict_utils.assign_non_tensor(batch, **request, epochs=2 // batches)
        out = worker.train_mini_batch(batch)
        metrics = None if out is None else fixture.tensordict_utils.get(out, "metrics")
        assert index == batches - 1 or not any("deployed" in name for name in metrics or ())
    return {
        "weights": fixture.weights_of(worker), "metrics": metrics, "logp": old["log_probs"].values(),
        "entropy": old["entropy"].values(),
        "support": {name: x.offsets() for name, x in old.items() if name.startswith("corral_old_")},
    }  # fmt: skip


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("verl")
    run_two(train, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]


def test_log_probs_and_entropy_are_those_of_verls_own_engine(results: list[dict[str, Any]]) -> None:
    for found in results:
        logp, entropy = found["stock"]
        torch.testing.assert_close(found["dppo"]["logp"], logp, atol=1e-5, rtol=0)
        torch.testing.assert_close(found["dppo"]["entropy"], entropy, atol=1e-5, rtol=0)


@pytest.mark.supports("reduction: token-mean", door="verl")
@pytest.mark.supports("reduction: seq-mean-token-mean", door="verl")
@pytest.mark.supports("reduction: seq-mean-token-sum", door="verl")
@pytest.mark.supports("reduction: seq-mean-token-sum-norm", door="verl")
@pytest.mark.supports("reduction: token-sum", door="verl")
@pytest.mark.supports("scale: FSDP2", door="verl")
@pytest.mark.supports("advantage: gae", door="verl")
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_and_micro_batches_have_the_updates_of_the_whole_batch(results: list[dict[str, Any]], name: str) -> None:
    objective, settings, agg = CASES[name]
    top_k = fixture.VOCABULARY if name == "full" else fixture.TOP_K
    expected, moved = fixture.two_updates_by_corral(make_objective(objective, **settings), agg, top_k)
    for found in results:
        fixture.assert_moved_alike(found[name]["weights"], expected)
    before = results[0][name]["metrics"]["tr/kl_before"]
    assert before[0] == 0  # one head, unchanged weights: every ratio is exactly 1
    assert moved[1] > 1e-3  # and in the second update the region has something to do
    assert results[0][name]["metrics"]["tr/active_frac"][1] > 0.1


def test_maxima_are_maxima_over_micro_batches_and_ranks(results: list[dict[str, Any]]) -> None:
    metrics = results[0]["troll token-mean"]["metrics"]
    assert metrics["tr/kl_max"][1] > metrics["tr/kl_before"][1]
    assert metrics["tr/unconverged"] == [0.0, 0.0]
    assert metrics["actor/pg_loss"][0] != 0


@pytest.mark.supports("scale: Ulysses, without flash attention", door="verl")
def test_sequence_parallel_ranks_gather_what_each_found_on_its_share(results: list[dict[str, Any]]) -> None:
    # 40 tokens and 8 of padding over two ranks: supports cut for the update, log-probs and supports gathered after each pass.
    expected, _ = fixture.two_updates_by_corral(make_objective("troll", **TROLL), "token-mean", halves=True)
    for found in results:
        fixture.assert_moved_alike(found["ulysses"]["weights"], expected)
    lengths = torch.tensor([len(response) for response in fixture.sequences()[1]])
    for name, offsets in results[0]["ulysses"]["support"].items():  # of the responses alone: 26 of 40 tokens
        slots = fixture.TOP_K + 1 if name.endswith(("ids", "logp")) else 1
        assert (offsets.diff() <= lengths * slots).all(), name
        assert offsets[-1] > 0.5 * lengths.sum() * slots, name
    assert results[0]["ulysses"]["metrics"]["tr/kl_before"][0] == 0


@pytest.mark.supports("model: tied embeddings", door="verl")
def test_a_head_that_is_sharded_with_the_root(results: list[dict[str, Any]]) -> None:
    # Where embeddings are tied, verl shards the head with the root, else by itself: its weight is whole at another time.
    for found in results:
        torch.testing.assert_close(found["tied"]["logp"], found["tied"]["own"], atol=1e-5, rtol=0)
    metrics = results[0]["tied"]["metrics"]
    assert metrics["tr/kl_before"][0] == 0
    assert metrics["tr/kl_before"][1] > 0


@pytest.mark.supports("model: with padding and without", door="verl")
def test_padding_changes_nothing(results: list[dict[str, Any]]) -> None:
    fixture.assert_moved_alike(results[0]["padded"]["weights"], results[0]["troll token-mean"]["weights"])


@pytest.mark.supports("model: LoRA", door="verl")
@pytest.mark.supports("model: bfloat16 autocast", door="verl")
def test_lora_and_bfloat16(results: list[dict[str, Any]]) -> None:
    for name in ("lora", "half"):
        metrics = results[0][name]["metrics"]
        assert metrics["tr/kl_before"][0] == 0
        assert metrics["tr/kl_before"][1] > 0
        assert all(torch.isfinite(weight).all() for weight in results[0][name]["weights"].values())
    adapters = [weight for key, weight in results[0]["lora"]["weights"].items() if "lora_B" in key]
    assert adapters
    assert all(weight.abs().sum() > 0 for weight in adapters)


@pytest.mark.supports("other: deployed network, bound held after every step", door="verl")
@pytest.mark.supports("other: deployed network, FSDP2", door="verl")
def test_the_deployed_network_is_held_as_corral_alone_holds_it(results: list[dict[str, Any]]) -> None:
    weights, _ = fixture.two_updates_by_corral(make_objective("troll", **TROLL), "token-mean")
    model = fixture.embedded_model()
    start = fixture.all_log_probs(model)
    old = corral.snapshot(model)
    model.load_state_dict(weights)
    certificate = corral.retract(
        model, old, lambda: corral.categorical_kl(fixture.all_log_probs(model), start), bound=HELD, statistic="mean"
    )
    assert certificate.share < 0.9, "the updates must go too far, or nothing is held"
    for found in results:
        fixture.assert_moved_alike(found["deployed"]["weights"], model.state_dict())
    metrics = results[0]["deployed"]["metrics"]
    for name, value in certificate.metrics().items():
        if "seq" not in name and "se" not in name.rpartition("_")[2]:  # corral alone was not told of sequences here
            assert metrics[name] == [pytest.approx(value, rel=1e-3)], name
    assert 0.8 * HELD <= metrics["tr/deployed_kl_mean"][0] <= HELD
    assert metrics["tr/deployed_seq_kl_max"][0] > metrics["tr/deployed_seq_kl_mean"][0] > 0


def test_the_bound_is_from_one_weight_synchronisation_to_the_next(results: list[dict[str, Any]]) -> None:
    # Two updates of one batch, or of two batches before the sampler gets the weights: the same network, held once.
    for found in results:
        fixture.assert_moved_alike(found["deployed, two batches"]["weights"], found["deployed"]["weights"])
    twice, once = (results[0][name]["metrics"] for name in ("deployed, two batches", "deployed"))
    for name in ("tr/deployed_kl_mean", "tr/step_share", "tr/deployed_probes"):
        assert twice[name] == [pytest.approx(once[name][0], rel=1e-5)]


@pytest.mark.supports("other: deployed network, bfloat16 autocast", door="verl")
def test_the_deployed_network_in_bfloat16_and_with_padding(results: list[dict[str, Any]]) -> None:
    fixture.assert_moved_alike(results[0]["deployed padded"]["weights"], results[0]["deployed"]["weights"])
    metrics = results[0]["deployed half"]["metrics"]
    assert 0 < metrics["tr/deployed_kl_mean"][0] <= HELD
    assert metrics["tr/step_share"][0] < 1


@pytest.mark.supports("other: deployed network, distance measured after every step", door="verl")
def test_an_infinite_bound_measures_alone(results: list[dict[str, Any]]) -> None:
    metrics = results[0]["deployed, measured alone"]["metrics"]
    assert metrics["tr/step_share"] == [1.0]
    assert metrics["tr/deployed_probes"] == [1.0]
    assert metrics["tr/deployed_kl_mean"][0] > 0
    assert "tr/step_share" not in results[0]["troll token-mean"]["metrics"]
