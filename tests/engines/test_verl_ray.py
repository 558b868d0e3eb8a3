"""verl's trainer, queue and workers on a Ray of its own: driver to two workers and back. `make test-verl` brings verl."""

import functools
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl (make test-verl)")

import ray
import torch
import transfer_queue as tq
import verl
import verl_fixture as fixture
from cpu_platform_environment import ENVIRONMENT
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.workers.engine_workers import ActorRolloutRefWorker

from corral import make_objective
from corral.engines.verl.loss import corral_ppo_loss
from corral.engines.verl.settings import CONFIG, MODEL_TYPE
from corral.engines.verl.trainer import RegionTrainerSync, check_config
from corral.lab.models.tiny import TINY_FOLDER

pytestmark = pytest.mark.verl

TROLL = {"bound": 0.01, "regression": 0.5}


@ray.remote(num_cpus=0)
def read_plug_in() -> tuple[list[str], dict[str, str]]:
    """What a process knows that has imported verl alone."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY

    from corral.engines.verl.plugin import FAILED

    return sorted(POLICY_LOSS_REGISTRY), FAILED


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    variables = {**ENVIRONMENT, "PYTHONPATH": path, "TRANSFER_QUEUE_ENABLE": "1"}
    del variables["MASTER_ADDR"], variables["MASTER_PORT"]  # verl's workers find each other
    ray.init(
        num_cpus=8, include_dashboard=False, log_to_driver=False, logging_level="ERROR", runtime_env={"env_vars": variables}
    )
    tq.init()
    yield
    tq.close()
    ray.shutdown()


@pytest.fixture(scope="module")
def trainer(cluster: None) -> RegionTrainerSync:
    """corral's trainer with two workers of verl's; everything that needs a sampler is left out."""
    config = ppo_config("corral_troll")
    worker = RayClassWithInitArgs(ray.remote(ActorRolloutRefWorker), config=config.actor_rollout_ref, role="actor")
    group = RayWorkerGroup(RayResourcePool([2], use_gpu=False, max_colocate_count=1), worker, device_name="cpu")
    group.init_model()
    made = object.__new__(RegionTrainerSync)
    made.config, made.actor_rollout_wg = config, group
    made.local_trigger_step, made.parameter_sync_step = 0, 1  # as verl's trainer has them where every step is one batch
    group.set_loss_fn(functools.partial(corral_ppo_loss, config=check_config(config)))  # as _setup does
    return made


def ppo_config(loss_mode: str) -> Any:
    """verl's own configuration with the lines that docs/verl.md asks for, and a model that a CPU can train."""
    config = OmegaConf.load(Path(verl.__file__).parent / "trainer/config/_generated_ppo_trainer.yaml")
    given = {
        "policy_loss": {
            "_target_": CONFIG, "loss_mode": loss_mode, "objective": TROLL, "support_size": fixture.TOP_K, "support_mass": 1.0,
            "bypass_mode": "${algorithm.rollout_correction.bypass_mode}", "deployed_bound": math.inf,
        },
        "strategy": "fsdp2", "ppo_mini_batch_size": fixture.SEQUENCES, "ppo_epochs": 2, "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": 20, "use_torch_compile": False,
        "optim": {
            "lr": fixture.RATES["token-mean"], "optimizer": "SGD", "weight_decay": 0.0, "clip_grad": 1e9,
            "total_training_steps": 9,
        },
        "fsdp_config": {
            "strategy": "fsdp2", "use_torch_compile": False,
            "mixed_precision": {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        },
    }  # fmt: skip
    config.actor_rollout_ref.actor = OmegaConf.merge(config.actor_rollout_ref.actor, given)
    model = {"path": str(TINY_FOLDER), "model_type": MODEL_TYPE, "override_config": {"attn_implementation": "sdpa"}}
    config.actor_rollout_ref.model = OmegaConf.merge(config.actor_rollout_ref.model, model)
    rollout = {
        "temperature": fixture.TEMPERATURE,
        "n": 1,
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": 20,
    }
    config.actor_rollout_ref.rollout = OmegaConf.merge(config.actor_rollout_ref.rollout, rollout)
    OmegaConf.resolve(config)
    return config


@pytest.mark.usefixtures("cluster")
def test_workers_load_the_plug_in_by_importing_verl() -> None:
    known, failed = ray.get(read_plug_in.remote())
    assert {"corral_troll", "corral_dppo", "vanilla"} <= set(known)
    assert failed == {}


@pytest.mark.supports("scale: two Ray workers", door="verl")
def test_a_support_goes_from_the_old_pass_over_the_queue_to_the_update(trainer: RegionTrainerSync) -> None:
    fields = fixture.batch_of()
    names = [name for name in fields.keys() if isinstance(fields[name], torch.Tensor)]  # noqa: SIM118 - a TensorDict is no dict
    keys = [f"{index}_0_0" for index in range(fixture.SEQUENCES)]
    rows = TensorDict({name: fields[name] for name in names if name != "advantages"}, batch_size=[fixture.SEQUENCES])
    rows["rollout_log_probs"] = fixture.jagged([logp - 0.01 for logp in fixture.log_probs()])  # a sampler that is a little off
    batch = tq.kv_batch_put(keys=keys, partition_id="train", fields=rows, tags=[{}] * len(keys))
    batch.extra_info["temperature"] = fixture.TEMPERATURE
    metrics: dict[str, Any] = {}
    batch = trainer._compute_old_log_prob(batch, metrics)
    stored = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["corral_old_ids", "old_log_probs"])
    lengths = [len(response) for response in fixture.sequences()[1]]
    for ids, length in zip(stored["corral_old_ids"].unbind(), lengths, strict=True):
        assert length < len(ids) <= length * (fixture.TOP_K + 1)  # of response tokens alone
    assert not {"corral_top_k", "corral_mass"} & set(batch.extra_info)
    credit = TensorDict({"advantages": fields["advantages"]}, batch_size=[fixture.SEQUENCES])
    batch = tq.kv_batch_put(keys=keys, partition_id="train", fields=credit)  # as _compute_advantage does
    trainer._update_actor(batch, metrics)
    assert metrics["actor/tr/kl_before"] > 0
    assert metrics["actor/tr/active_frac"] > 0
    assert 0 < metrics["actor/tr/mismatch"] < 0.01
    assert metrics["actor/tr/step_share"] == 1  # an infinite bound measures the network after the updates, and undoes nothing
    assert metrics["actor/tr/deployed_kl_mean"] > 0

    after = trainer._compute_old_log_prob(batch, {})
    found = tq.kv_batch_get(keys=after.keys, partition_id="train", select_fields=["old_log_probs"])["old_log_probs"]
    weights, _ = fixture.two_updates_by_corral(make_objective("troll", **TROLL), "token-mean")
    for logp, expected in zip(found.unbind(), fixture.log_probs(weights), strict=True):
        torch.testing.assert_close(logp, expected, atol=2e-3, rtol=0)
    moved = stored["old_log_probs"].values() - found.values()
    assert moved.abs().max() > 0.1
