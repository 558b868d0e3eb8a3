"""The plans of the evidence: every run resolves to what its name says, has a key of its own, and shares the study's."""

from dataclasses import asdict, replace

import pytest

from corral.lab.jobs.llm.prepare import trainer_config
from corral.lab.jobs.llm.settings import Settings, resolve
from corral.lab.run.settings import read_recipe
from results.evidence.cells import read_runs
from results.evidence.claims import CLAIMS
from results.plans import ABLATIONS, PLANS, SEEDS, WORD_SEEDS
from results.spec import COMPLETIONS, VARIANTS, Run


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
        assert config.generation_batch_size == (256 if spec.base else COMPLETIONS)
        changed = (settings.objective_config, settings.trainer) != (plain.objective_config, plain.trainer)
        assert changed == bool(variant), variant


def test_a_plain_run_counts_for_the_study_of_deployed_networks_too() -> None:
    ours = {spec.key: spec for spec in PLANS["a"]()}
    theirs = {spec.key: spec for spec in PLANS["confirm-rates"]()}
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


def test_the_plans_and_the_raw_rows_have_what_every_claim_compares() -> None:
    gone = {"sampler": "", "anchor": "auto", "arm": "off"}  # fields of rows that no plan makes any more
    planned = [
        {**gone, **asdict(spec), "device": "cpu"}
        for name in ("claims", "b-confirm", "b-gemma-confirm")
        for spec in PLANS[name]()
        if spec.arm == "off"
    ]
    measured = read_runs()
    for claim in CLAIMS:
        for cell in (claim.ours, claim.theirs):
            fresh = list(WORD_SEEDS.get(cell.others.get("base", ""), SEEDS))
            wanted = set(fresh[:5] if cell.passes == 4 else fresh)
            if "sampler" not in cell.others and cell.arm[0] != "rare_clip":
                assert {seed for seed, *_ in cell.runs(planned)} == wanted, claim.name
            assert wanted <= {seed for seed, *_ in cell.runs(measured)}, claim.name


def test_ablations_change_one_thing_each() -> None:
    assert all(len(VARIANTS[name]) == 1 for name in ABLATIONS if not name.startswith("K="))
