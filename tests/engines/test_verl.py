"""The verl door in verl: configuration, registries, a broken plug-in, and verl's own losses beside corral's."""

import inspect
import json
import re
import shlex
from importlib.metadata import requires
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl", reason="needs verl (make test-verl)")

import torch
import verl
import verl_fixture as fixture
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from tensordict import TensorDict
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1.trainer_base import PPOTrainer, get_trainer_cls
from verl.utils.config import validate_config
from verl.utils.metric import AggregationType
from verl.workers.engine.base import EngineRegistry

import corral
from corral.engines.adapter import sampled_token_names
from corral.engines.verl import plugin
from corral.engines.verl.checkup import LINES, SDPA, checkup
from corral.engines.verl.config import CorralPolicyLossConfig
from corral.engines.verl.engine import SupportFSDPEngine
from corral.engines.verl.loss import corral_ppo_loss
from corral.engines.verl.settings import DEPLOYED_BOUND, DEPLOYED_SYNC, MODEL_TYPE, TRAINERS
from corral.engines.verl.trainer import check_config

pytestmark = pytest.mark.verl

LOSS = "actor_rollout_ref.actor.policy_loss"
SIGNATURES = json.loads((Path(__file__).parent / "signatures" / "verl.json").read_text())


def composed(lines: str, *more: str) -> Any:
    """verl's configuration with overrides, as its main program makes it."""
    overrides = [line.strip("'") for line in lines.splitlines()]
    overrides += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", *more]
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        config = compose("ppo_trainer", overrides)
    OmegaConf.resolve(config)
    return config


@pytest.mark.parametrize("what", LINES)
def test_the_lines_that_doctor_prints_are_verls_configuration(what: str) -> None:
    actor = check_config(composed(LINES[what]))
    assert isinstance(actor.policy_loss, CorralPolicyLossConfig)
    assert actor.policy_loss.resolve().needs_support == (what in ("TROLL", "TROLL, with Megatron", "DPPO, on a support"))


PAGE = "".join((Path(__file__).parents[2] / "docs" / name).read_text() for name in ("verl.md", "verl-details.md"))
RECIPES = re.findall(r"<!-- recipe: (\w+) -->\n```bash\n(.*?)```", PAGE, re.DOTALL)


@pytest.mark.parametrize(("name", "command"), RECIPES)
def test_the_recipes_of_the_page_are_verls_configuration(name: str, command: str) -> None:
    overrides = shlex.split(command.partition("main_ppo")[2].replace("\\\n", " ").replace("$DATA", "/data"))
    config = composed("\n".join(overrides))
    actor = check_config(config)
    assert actor.policy_loss.resolve().name == ("troll" if name == "first" else name)
    assert config.trainer.nnodes == (1 if name == "first" else 2)
    validate_config(config, use_reference_policy=False, use_critic=False)


@pytest.mark.parametrize("name", ["first", "troll", "dppo"])
def test_the_recipes_run_without_flash_attention_where_doctors_line_is_added(name: str) -> None:
    command = dict(RECIPES)[name].partition("main_ppo")[2].replace("\\\n", " ").replace("$DATA", "/data")
    assert composed("\n".join([*shlex.split(command), SDPA])).actor_rollout_ref.model.override_config == {
        "attn_implementation": "sdpa"
    }


def test_extras_that_bring_flash_attention_are_those_that_were_committed() -> None:
    wanted = "".join(requires("verl") or ())
    through = re.findall(r'verl\[flash-attn-\w+\]; extra == "(\w+)"', wanted)
    assert sorted(through) == SIGNATURES["flash-attn comes with"]


def test_every_recipe_was_found() -> None:
    assert [name for name, _ in RECIPES] == ["first", "troll", "dppo"]


@pytest.mark.refuses("other: deployed network, FSDP 1 or sequence parallelism", door="verl")
@pytest.mark.refuses("kept: `use_fused_kernels`, on a support", door="verl")
@pytest.mark.parametrize(
    ("what", "override", "match"),
    [
        ("TROLL", "actor_rollout_ref.model.use_fused_kernels=true", "use_fused_kernels=false"),
        ("TROLL", "+actor_rollout_ref.model.model_type=language_model", r"Set \+actor_rollout_ref\.model\.model_type"),
        ("TROLL", "actor_rollout_ref.actor.strategy=veomni", r"engines alone have; got actor\.strategy=veomni"),
        ("TROLL", "algorithm.rollout_correction.bypass_mode=true", "bypass_mode makes no pass"),
        ("TROLL", f"+{LOSS}.objective.bund=1", "no setting `bund`"),
        ("DPPO, on the sampler's log-probs", "actor_rollout_ref.rollout.calculate_log_probs=false", "calculate_log_probs=true"),
        ("DPPO, on the sampler's log-probs", "actor_rollout_ref.rollout.top_p=0.9", "does not hand over the tokens"),
        ("DPPO, on the sampler's log-probs", "actor_rollout_ref.rollout.top_k=50", r"Use top_p=1 and top_k=-1"),
        ("DPPO, on the sampler's log-probs", "algorithm.rollout_correction.bypass_mode=false", "Set bypass_mode=true"),
        ("DPPO, on the sampler's log-probs", f"++{LOSS}.bypass_mode=false", "Set bypass_mode=true"),
        ("anything else, such as SPO", f"+{LOSS}.deployed_bound=0.02", r"needs hidden states\. Set \+actor_rollout_ref\.model"),
        ("TROLL, held", "actor_rollout_ref.actor.strategy=fsdp", r"weights of FSDP2; got actor\.strategy=fsdp"),
        ("TROLL, held", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2", "ulysses_sequence_parallel_size=1"),
        ("TROLL, held", f"+{LOSS}.deployed_bound=-1", "deployed_bound"),
        ("anything else, such as SPO", f"{LOSS}._target_=verl.workers.config.PolicyLossConfig", "_target_=corral"),
    ],
)  # fmt: skip
def test_what_cannot_work_is_refused_by_the_driver(what: str, override: str, match: str) -> None:
    known = LINES | {"TROLL, held": f"{LINES['TROLL']}\n+{LOSS}.deployed_bound=0.02"}
    lines = [line for line in known[what].splitlines() if not line.startswith(override.split("=")[0])]
    if "_target_=verl" in override:  # which does not know the other keys
        lines = [line for line in lines if "bypass_mode" not in line]
    with pytest.raises(Exception, match=match):
        check_config(composed("\n".join(lines), override))


def test_doctors_lines_for_megatron_choose_its_engine() -> None:
    lines = LINES["TROLL, with Megatron"]
    assert check_config(composed(lines, "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2")).strategy == "megatron"


@pytest.mark.refuses("scale: Megatron, on a support, context parallelism", door="verl")
@pytest.mark.parametrize(
    ("override", "match"),
    [
        ("actor_rollout_ref.actor.megatron.context_parallel_size=2", r"beside context_parallel_size > 1\. Leave that off"),
        ("++actor_rollout_ref.actor.megatron.pad_to_length=true", "beside pad_to_length"),
        ("++actor_rollout_ref.actor.megatron.use_megatron_fsdp=true", "beside use_megatron_fsdp"),
        ("actor_rollout_ref.model.mtp.enable=true", r"beside model\.mtp\.enable"),
        (f"+{LOSS}.deployed_bound=0.02", r"weights of FSDP2; got actor\.strategy=megatron"),
    ],
)
def test_what_megatron_supports_were_never_tried_beside_is_refused_by_the_driver(override: str, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        check_config(composed(LINES["TROLL, with Megatron"], override))


@pytest.mark.supports("anchor: `old` and `rollout`, compared with bypass_mode at start-up", door="verl")
def test_settings_are_checked_where_verl_makes_them_in_a_worker() -> None:
    made = fixture.actor_config("corral_dppo", bypass_mode=True, objective={"bound": 0.15})
    assert made.policy_loss.resolve().objective.config.bound == 0.15
    with pytest.raises(ValueError, match="Set bypass_mode=true"):
        fixture.actor_config("corral_dppo", bypass_mode=False)


def test_engine_and_trainers_are_found_by_their_names() -> None:
    assert EngineRegistry.get_engine_cls(MODEL_TYPE, "fsdp2") is SupportFSDPEngine
    for name in TRAINERS:
        assert issubclass(get_trainer_cls(f"corral_{name}"), get_trainer_cls(name))


def test_a_trainer_goes_by_the_name_of_verls_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # verl's trainers look at trainer_mode == "sync", and for settings under that name.
    monkeypatch.setattr(PPOTrainer, "__init__", lambda self, config: setattr(self, "config", config))
    made = get_trainer_cls("corral_sync")(composed(LINES["TROLL"]))
    assert made.config.trainer.v1.trainer_mode == "sync"


def test_a_trainer_refuses_before_anything_starts_and_then_sets_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    started, given = [], []
    monkeypatch.setattr(PPOTrainer, "_setup", lambda self: started.append(self))
    made = object.__new__(get_trainer_cls("corral_sync"))
    made.actor_rollout_wg = SimpleNamespace(set_loss_fn=given.append)
    made.config = composed(LINES["TROLL"], "actor_rollout_ref.model.use_fused_kernels=true")
    with pytest.raises(ValueError, match="use_fused_kernels=false"):
        made._setup()
    assert started == []
    made.config = composed(LINES["TROLL"])
    made._setup()
    assert started == [made]
    assert given[0].func is corral_ppo_loss
    assert given[0].keywords["config"].policy_loss.support_size == 64


@pytest.mark.parametrize(("name", "batches"), [("sync", 1), ("colocate_async", 1), ("separate_async", 4)])
def test_the_network_is_held_after_the_last_batch_before_the_sampler_gets_it(
    monkeypatch: pytest.MonkeyPatch, name: str, batches: int
) -> None:
    seen = []
    monkeypatch.setattr(PPOTrainer, "_update_actor", lambda self, batch, metrics: seen.append(batch.extra_info))
    made: Any = object.__new__(get_trainer_cls(f"corral_{name}"))
    made.config = composed(LINES["TROLL"], "+actor_rollout_ref.actor.policy_loss.deployed_bound=0.02")
    made.parameter_sync_step = made.config.trainer.v1.get(name, {}).get("parameter_sync_step", 1)  # as PPOTrainer reads it
    made.prepare_step = dict

    def update(metrics: dict[str, Any], *_: Any) -> Any:
        batch = SimpleNamespace(extra_info={}, keys=[], tags=[], partition_id="train")
        made._update_actor(batch, metrics)
        return batch

    made._step_once = update
    made.step({}, {})  # verl's, between two weight synchronisations
    assert [info[DEPLOYED_SYNC] for info in seen] == [False] * (batches - 1) + [True]
    assert {info[DEPLOYED_BOUND] for info in seen} == {0.02}


def test_doctor_finds_corral_active() -> None:
    found = checkup()
    assert found.trouble == []
    assert ("self-test", f"two sequences, {len(sampled_token_names())} objectives: gradients differ by 0.0e+00") in found.rows


def test_a_loss_that_another_plug_in_took_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(core_algos.POLICY_LOSS_REGISTRY, "corral_spo", lambda: None)
    with pytest.raises(RuntimeError, match=r"corral_spo is not registered: another plug-in has taken its name.*corral doctor"):
        fixture.actor_config("corral_spo")
    assert any("corral_spo is not registered" in line for line in checkup().trouble)


@pytest.mark.parametrize("found", ["0.10.1", "0.8.0", "1.0.0rc1", "unknown", None])
def test_another_release_of_verl_registers_nothing_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, found: str | None
) -> None:
    def version(package: str) -> str:
        if found is None:
            raise plugin.PackageNotFoundError(package)
        return found

    for mode in plugin.LOSSES:
        monkeypatch.delitem(core_algos.POLICY_LOSS_REGISTRY, mode)
    monkeypatch.setattr(plugin, "FAILED", {})
    monkeypatch.setattr(plugin, "version", version)
    plugin._register()
    assert f"policy losses not registered: corral works with verl >=0.9,<0.10; found {found or 'a source tree'}" in caplog.text
    with pytest.raises(RuntimeError, match=r"corral_troll is not registered: corral works with verl"):
        fixture.actor_config("corral_troll")


def test_doctor_sees_that_plug_ins_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "none")
    assert "VERL_USE_EXTERNAL_PLUGINS=none leaves corral out: use auto, or add corral" in checkup().trouble


@pytest.mark.parametrize("name", SIGNATURES["signatures"])
def test_signatures_are_those_that_were_committed(name: str) -> None:
    assert list(inspect.signature(resolve_name(name)).parameters) == SIGNATURES["signatures"][name]


# verl's own losses


def tokens(count: int = 200) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    old = -3 * torch.rand(4, count, generator=draw)
    log_prob = (old + 0.4 * torch.randn(4, count, generator=draw)).clamp(max=-1e-3).requires_grad_()
    mask = torch.rand(4, count, generator=draw) > 0.2
    return {
        "old_log_prob": old,
        "log_prob": log_prob,
        "advantages": torch.randn(4, count, generator=draw),
        "response_mask": mask,
    }


def gradient_of(loss_mode: str, config: Any, agg: str = "token-mean") -> torch.Tensor:
    given = tokens()
    loss, _ = core_algos.get_policy_loss_fn(loss_mode)(**given, loss_agg_mode=agg, config=config)
    (found,) = torch.autograd.grad(loss, given["log_prob"])
    return found


def _clip(low: float, high: float, cap: float = 3.0) -> dict[str, float]:
    return {"clip_ratio_low": low, "clip_ratio_high": high, "clip_ratio_c": cap}


THEIRS: dict[str, tuple[str, dict[str, Any], dict[str, float], str]] = {
    "dppo_tv": ("corral_dppo", {"bound": 0.15, "ratio_cap": 1.5}, _clip(0.15, 0.15, 1.5), "token-mean"),
    "dppo_kl": ("corral_dppo", {"divergence": "kl", "bound": 0.05, "ratio_cap": 20.0}, _clip(0.05, 0.05, 20.0), "token-mean"),
    "vanilla": ("corral_dual_clip", {}, {}, "token-mean"),
    "sapo": ("corral_sapo", {}, {}, "seq-mean-token-mean"),  # verl's own knows no other
    "gspo": ("corral_gspo", {"clip_low": 0.03, "clip_high": 0.04}, _clip(0.03, 0.04), "seq-mean-token-mean"),
    "cispo": ("corral_cispo", {"cap_low": 0.8, "cap_high": 1.2}, {}, "token-mean"),
}


@pytest.mark.parametrize("theirs", THEIRS)
def test_gradients_are_those_of_verls_own_losses(theirs: str) -> None:
    ours, settings, clip, agg = THEIRS[theirs]
    bypass = ours == "corral_dppo"
    config = fixture.actor_config(ours, agg, objective=settings, bypass_mode=bypass)
    stock = type(config)(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, **clip)
    for some in (config, stock):
        some.global_batch_info.update(dp_size=1, batch_num_tokens=None, global_batch_size=None, loss_scale_factor=None)
    expected = gradient_of(theirs, stock, agg)
    torch.testing.assert_close(gradient_of(ours, config, agg), expected, atol=1e-6, rtol=1e-4)
    assert expected.abs().max() > 0


def test_gae_has_verls_returns_and_its_advantages_before_whitening() -> None:
    draw = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, 7, generator=draw) for _ in range(2))
    mask = torch.arange(7) < torch.tensor([[7], [4], [1]])
    theirs, returns = core_algos.compute_gae_advantage_return(rewards * mask, values, mask.float(), gamma=0.9, lam=0.8)
    ours, own_returns = corral.gae(rewards, values, mask, gamma=0.9, lam=0.8)
    torch.testing.assert_close((own_returns * mask), returns * mask, atol=1e-5, rtol=1e-5)
    live = ours[mask]
    white = (live - live.mean()) / live.std(correction=1)
    torch.testing.assert_close(theirs[mask], white, atol=1e-4, rtol=1e-4)


# the anchor, by the numbers


def micro_batch(**fields: list[torch.Tensor]) -> tuple[dict[str, torch.Tensor], TensorDict]:
    batch = fixture.batch_of(slice(0, 2))
    lengths = [len(x) for x in batch["responses"].unbind()]
    for name, value in {"old_log_probs": -1.0, "rollout_log_probs": -1.0, **fields}.items():
        if value is not None:
            batch[name] = fixture.jagged([torch.full((length,), float(value)) for length in lengths])
    fixture.tensordict_utils.assign_non_tensor(batch, dp_size=1, batch_num_tokens=sum(lengths), global_batch_size=2)
    whole = [torch.full((len(x),), -1.0) for x in batch["input_ids"].unbind()]
    return {"log_probs": fixture.jagged(whole)}, batch


@pytest.mark.refuses("anchor: `rollout` where verl recomputes log-probs, or has none of the sampler", door="verl")
def test_an_anchor_that_verl_recomputed_is_refused_by_the_numbers() -> None:
    config = fixture.actor_config("corral_dppo", bypass_mode=True)
    loss, metrics = corral_ppo_loss(config, *micro_batch())
    assert torch.isfinite(loss)
    assert metrics["tr/ratio_max"].aggregation is AggregationType.MAX
    with pytest.raises(ValueError, match=r"differ from them by up to 0\.5 nats: verl has recomputed them"):
        corral_ppo_loss(config, *micro_batch(old_log_probs=-1.5))
    with pytest.raises(ValueError, match=r"the batch has none.*calculate_log_probs=true"):
        corral_ppo_loss(config, *micro_batch(rollout_log_probs=None))
