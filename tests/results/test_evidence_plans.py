"""The plans of the evidence: every run resolves to what its name says, has a key of its own, and shares the study's."""

from dataclasses import asdict, replace

import pytest

from corral.lab.jobs.llm.prepare import trainer_config
from corral.lab.jobs.llm.settings import Settings, read_recipe, resolve
from corral.objective import OBJECTIVES
from results.deployed.plans import PLANS as STUDY
from results.evidence.claims import CLAIMS
from results.evidence.plans import ABLATIONS, FRESH, PLANS, SEEDS
from results.evidence.spec import COMPLETIONS, OWN_OBJECTIVES, VARIANTS, Pretrained, Run


@pytest.fixture(autouse=True)
def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """The study's own objectives, as in a process that trains, for as long as a test lasts."""
    for name, objective in OWN_OBJECTIVES.items():
        monkeypatch.setitem(OBJECTIVES, name, objective)


def resolved(spec: Run) -> Settings:
    return resolve([read_recipe(spec.recipe), spec.layer()])


@pytest.mark.parametrize("name", PLANS)
def test_runs_of_a_plan_have_keys_of_their_own(name: str) -> None:
    runs = PLANS[name]()
    assert len({spec.key for spec in runs}) == len(set(runs))


def test_every_variant_resolves_and_changes_something() -> None:
    seen = {(spec.objective, spec.variant): spec for name in PLANS for spec in PLANS[name]()}
    assert {variant for _, variant in seen} == set(VARIANTS)
    for (_, variant), spec in seen.items():
        plain = resolved(replace(spec, variant=""))
        settings = resolved(spec)
        config = trainer_config(settings, max_completion_length=8)  # refuses what cannot run
        assert config.generation_batch_size == (256 if isinstance(spec, Pretrained) else COMPLETIONS)
        changed = (settings.objective_config, settings.trainer) != (plain.objective_config, plain.trainer)
        assert changed == bool(variant), variant


def test_a_plain_run_counts_for_the_study_of_deployed_networks_too() -> None:
    ours = {spec.key: spec for spec in PLANS["a"]()}
    theirs = {spec.key: spec for spec in STUDY["confirm-rates"]()}
    shared = ours.keys() & theirs.keys()
    assert len(shared) == 5 * 3 * 2  # seeds × rates × objectives
    for key in shared:
        assert resolved(ours[key]) == resolve([read_recipe("demo"), theirs[key].layer()])


def test_the_common_form_is_common() -> None:
    reductions = {trainer_config(resolved(spec), max_completion_length=8).loss_type for spec in PLANS["a"]()}
    assert reductions == {"dr_grpo"}


def test_one_update_per_batch_is_one() -> None:
    config = trainer_config(resolved(PLANS["a-floor"]()[0]), max_completion_length=8)
    assert (config.steps_per_generation, config.per_device_train_batch_size) == (1, COMPLETIONS)


def test_the_plan_of_claims_has_what_every_claim_compares() -> None:
    planned = [
        {"base": "", **asdict(spec), "arm": spec.arm, "device": "cpu"}
        for name in ("claims", "b-confirm", "b-gemma-confirm", "f-rare")
        for spec in PLANS[name]()
    ]
    for claim in CLAIMS:
        for cell in (claim.ours, claim.theirs):
            found = {seed for seed, *_ in cell.runs(planned)}
            fresh = list(FRESH.get(cell.others.get("base", ""), SEEDS))
            assert found == set(fresh[:5] if cell.passes == 4 else fresh), claim.name


def test_long_runs_have_thousands_of_updates_from_a_coarse_sampler() -> None:
    for spec in PLANS["f-stability"]():
        config = trainer_config(resolved(spec), max_completion_length=8)
        assert spec.steps * config.steps_per_generation * config.num_iterations == 2048
        assert (spec.sampler, config.lr_scheduler_type, config.anchor) == ("fp8", "constant", spec.anchor)


def test_a_mixture_of_experts_has_a_coarse_sampler_and_both_anchors() -> None:
    runs = PLANS["f-moe"]()
    assert {(spec.model, spec.sampler, spec.rate, spec.steps) for spec in runs} == {("runs/starts/moe-1", "fp8", 2e-4, 15)}
    assert len(runs) == 3 * 2 * 3  # seeds × anchors × objectives
    assert PLANS["f-moe"]()[0].key == "shipped-dppo-off-0.0002-linear-x1-15-401-moe-1-fp8-rollout"


def test_ablations_change_one_thing_each() -> None:
    assert all(len(VARIANTS[name]) == 1 for name in ABLATIONS if not name.startswith("K="))
