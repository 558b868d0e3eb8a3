"""The plans on language models: keys, variants, what the raw rows have of each claim, and runs that are made again."""

from dataclasses import replace

import pytest

from corral.lab.jobs.llm.prepare import trainer_config
from corral.lab.jobs.llm.settings import Settings, resolve
from corral.lab.run.settings import read_recipe
from results.evidence.cells import read_runs
from results.evidence.claims import CLAIMS
from results.plans import PLANS, SEEDS, WORD_SEEDS
from results.spec import COMPLETIONS, VARIANTS, Run
from results.table import ARMS, RIVALS


def resolved(spec: Run) -> Settings:
    return resolve([read_recipe(spec.recipe), spec.layer()])


@pytest.mark.parametrize("name", PLANS)
def test_runs_of_a_plan_have_keys_of_their_own(name: str) -> None:
    runs = PLANS[name]()
    assert len({spec.key for spec in runs}) == len(set(runs))


def test_every_variant_resolves_and_changes_something() -> None:
    seen = {(arm.objective, arm.variant): arm.run(2e-4, 1) for arm in (*ARMS, *RIVALS)}
    assert {variant for _, variant in seen} == set(VARIANTS)
    for (_, variant), spec in seen.items():
        plain = resolved(replace(spec, variant=""))
        settings = resolved(spec)
        config = trainer_config(settings, max_completion_length=8)  # refuses what cannot run
        assert config.generation_batch_size == COMPLETIONS
        changed = (settings.objective_config, settings.trainer) != (plain.objective_config, plain.trainer)
        assert changed == bool(variant), variant


def test_one_update_per_batch_is_one() -> None:
    config = trainer_config(resolved(Run(objective="troll", rate=1e-4, seed=1, updates=1)), max_completion_length=8)
    assert (config.steps_per_generation, config.per_device_train_batch_size) == (1, COMPLETIONS)


def test_the_raw_rows_have_what_every_claim_compares() -> None:
    measured = read_runs()
    for claim in CLAIMS:
        for cell in (claim.ours, claim.theirs):
            fresh = list(WORD_SEEDS.get(cell.others.get("base", ""), SEEDS))
            wanted = set(fresh[:5] if cell.passes == 4 else fresh)
            assert wanted <= {seed for seed, *_ in cell.runs(measured)}, claim.name


def test_runs_at_auto_are_made_again_with_what_they_were_made_with() -> None:
    plan = PLANS["auto-again"]()
    assert {spec.rate for spec in plan} == {"auto"}
    assert {spec.layer()["deployed_bound"] for spec in plan if spec.bound is None} == {0.02}
    assert Run(objective="troll", rate=1e-3, seed=3, bound=0.02).layer()["deployed_bound"] == 0.02
    for spec in plan[::10]:
        assert resolved(spec).trainer["learning_rate"] == "auto"
