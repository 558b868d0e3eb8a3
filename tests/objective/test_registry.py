"""Every objective is found by its name, configured by what it declares, and says what it needs."""

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from batches import inputs

from corral import (
    ObjectiveConfig,
    ObjectiveOutput,
    TokenBatch,
    make_correction,
    make_objective,
    objective_names,
    register_objective,
)
from corral.objective import OBJECTIVES
from corral.objective.correction import CORRECTIONS

DEFAULTS = {
    "reinforce": {"ratio_cap": None},
    "ppo_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    "clip_higher": {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": None},
    "dual_clip": {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 3.0},
    "gspo": {"clip_low": 3e-4, "clip_high": 4e-4},
    "cispo": {"cap_low": 0.0, "cap_high": 5.0},
    "sapo": {"tau_positive": 1.0, "tau_negative": 1.05},
    "gmpo": {"clip": 0.4},
    "spo": {"epsilon": 0.2},
    "m2po": {"bound": 0.04},
    "drpo": {"bound": 0.2},
    "dppo": {
        "divergence": "tv",
        "estimator": "binary",
        "bound": None,
        "bound_low": None,
        "bound_high": None,
        "mask": "outward",
        "ratio_cap": None,
    },
    "troll": {
        "bound": 0.05,
        "regression": 1.0,
        "tail": "bucket",
        "vocab_size": None,
        "level": "token",
        "gradient": "exact",
        "project": "all",
        "centre": "old",
        "ratio_cap": None,
    },
}
"""Names and defaults that stay; an objective that is added has its defaults on its page, which a test compares too."""

CORRECTION_DEFAULTS = {
    "tis": {"cap": 2.0},
    "seq_tis": {"cap": 2.0},
    "icepop": {"low": 0.5, "high": 5.0},
    "trm": {"bound": 0.05},
}

TOKENS = {"logp_new", "logp_old", "advantages", "mask"}
SUPPORT = {"dist_new", "dist_old"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScaledConfig(ObjectiveConfig):
    scale: float = 2.0


def scaled(batch: TokenBatch, config: ScaledConfig) -> ObjectiveOutput:
    return ObjectiveOutput(torch.where(batch.mask, -config.scale * batch.logp_new * batch.advantages, 0.0), {})


@pytest.fixture
def clean_registry() -> Iterator[None]:
    """What a test registers is gone after it."""
    before = dict(OBJECTIVES)
    yield
    OBJECTIVES.clear()
    OBJECTIVES.update(before)


# -------------------------------------------------------------------------------------------------- names and settings


def test_these_names_stay_and_all_are_in_alphabetical_order():
    assert set(DEFAULTS) <= set(objective_names())
    assert objective_names() == sorted(OBJECTIVES)


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults(name):
    objective = make_objective(name)
    assert objective.name == name
    assert dataclasses.asdict(objective.config) == DEFAULTS[name]


def test_every_correction_and_its_defaults():
    assert {name: dataclasses.asdict(make_correction(name).config) for name in CORRECTIONS} == CORRECTION_DEFAULTS


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_setting_reaches_the_config(name):
    other = {key: 0.25 for key, value in DEFAULTS[name].items() if isinstance(value, float)} | (
        {"dual_clip": 7.0} if "dual_clip" in DEFAULTS[name] else {}
    )
    assert dataclasses.asdict(make_objective(name, **other).config) == DEFAULTS[name] | other


@pytest.mark.parametrize(("divergence", "bound"), [("tv", 0.2), ("kl", 0.05), ("ratio", 0.2)])
def test_dppos_bound_follows_its_divergence_unless_it_is_set(divergence, bound):
    assert make_objective("dppo", divergence=divergence).config.bounds == (bound, bound)
    assert make_objective("dppo", divergence=divergence, bound=0.7).config.bounds == (0.7, 0.7)
    assert make_objective("dppo", divergence=divergence, bound_low=0.3).config.bounds == (0.3, bound)
    assert make_objective("dppo", divergence=divergence, bound=0.7, bound_high=0.0).config.bounds == (0.7, 0.0)


@pytest.mark.parametrize("config_cls", dict.fromkeys(cls for _, cls in [*OBJECTIVES.values(), *CORRECTIONS.values()]))
def test_configs_are_frozen_and_keyword_only(config_cls):
    config = config_cls()
    for field in dataclasses.fields(config):
        assert field.kw_only
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, None)
    with pytest.raises(TypeError, match="positional argument"):
        config_cls(0.1)


@pytest.mark.parametrize("name", DEFAULTS)
def test_objectives_with_the_same_settings_are_equal(name):
    assert make_objective(name) == make_objective(name)


# ------------------------------------------------------------------------------------------------------ near matches


NEAR = [
    ("dpo", "dppo"),
    ("ppo-clip", "ppo_clip"),
    ("PPO-Clip", "ppo_clip"),
    ("TROLL", "troll"),
    ("trol", "troll"),
    ("ppo", "ppo_clip"),  # and not dppo, which is nearer in letters
    ("GRPO", "ppo_clip"),  # and not gspo
    ("dapo", "clip_higher"),  # and not dppo
]


@pytest.mark.parametrize(("typed", "meant"), NEAR)
def test_a_misspelt_name_is_answered_with_the_nearest_and_with_all(typed, meant):
    with pytest.raises(ValueError, match="there is no objective") as error:
        make_objective(typed)
    assert str(error.value) == (
        f"make_objective: there is no objective '{typed}'. Did you mean '{meant}'? There are: {', '.join(sorted(OBJECTIVES))}."
    )


def test_a_name_like_no_other_gets_the_list_alone():
    with pytest.raises(ValueError, match=r"there is no objective 'xyz'\. There are: aspo, "):
        make_objective("xyz")


@pytest.mark.parametrize(
    ("name", "typed", "meant"),
    [
        ("dppo", "bounds", "bound"),
        ("troll", "regresion", "regression"),
        ("ppo_clip", "clip_hi", "clip_high"),
        ("spo", "eps", "epsilon"),
        ("troll", "epsilon", "bound"),
        ("dppo", "delta", "bound"),
        ("gmpo", "epsilon", None),  # which has no bound
        ("spo", "xyz", None),
    ],
)
def test_a_misspelt_setting_is_answered_with_the_nearest_and_with_all(name, typed, meant):
    guess = f" Did you mean '{meant}'?" if meant else ""
    with pytest.raises(ValueError, match="there is no setting") as error:
        make_objective(name, **{typed: 0.1})
    assert str(error.value) == f"{name}: there is no setting `{typed}`.{guess} There are: {', '.join(sorted(DEFAULTS[name]))}."


def test_corrections_answer_in_the_same_way():
    with pytest.raises(ValueError, match=r"make_correction: there is no correction 'ice_pop'\. Did you mean 'icepop'\?"):
        make_correction("ice_pop")
    with pytest.raises(ValueError, match=r"tis: there is no setting `caps`\. Did you mean 'cap'\? There are: cap\."):
        make_correction("tis", caps=2.0)


# ------------------------------------------------------------------------------------------------- needs and anchors


@pytest.mark.parametrize("name", [name for name in DEFAULTS if name != "troll"])
def test_most_objectives_need_sampled_tokens_alone(name):
    assert make_objective(name).needs == TOKENS


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("troll", {}),
        ("troll", {"tail": "fill", "vocab_size": 9}),
        ("dppo", {"estimator": "topk"}),
        ("dppo", {"estimator": "full"}),
        ("cppo", {"estimator": "topk"}),
    ],
)
def test_what_looks_at_the_whole_distribution_needs_both_supports(name, settings):
    assert make_objective(name, **settings).needs == TOKENS | SUPPORT


@pytest.mark.parametrize("name", DEFAULTS)
def test_only_some_are_anchored_to_the_rollout(name):
    assert make_objective(name).config.anchor == ("rollout" if name in ("dppo", "drpo", "m2po") else "old")


# ------------------------------------------------------------------------------------------------------- registration


def test_a_registered_objective_is_like_any_other(clean_registry):
    register_objective("scaled", scaled, ScaledConfig)
    assert "scaled" in objective_names()
    assert make_objective("scaled").needs == TOKENS
    batch = inputs([0.5], [0.5], [1.0])
    assert torch.equal(make_objective("scaled", scale=3.0)(batch).loss, -3.0 * batch.logp_new)
    with pytest.raises(ValueError, match=r"scaled: there is no setting `scal`\. Did you mean 'scale'\?"):
        make_objective("scaled", scal=3.0)


def test_a_registered_objective_is_given_checked_batches(clean_registry):
    register_objective("scaled", scaled, ScaledConfig)
    with pytest.raises(ValueError, match="scaled: logp_new is not finite at an unmasked token"):
        make_objective("scaled")(inputs([float("nan")], [0.5], [1.0]))


def test_a_function_under_the_settings_of_another_objective_has_neither_its_kernel_nor_its_gradient(clean_registry):
    register_objective("mine", scaled, type(make_objective("troll").config))
    mine, troll = make_objective("mine"), make_objective("troll")
    assert mine.config == troll.config
    assert (mine.kernel, mine.plain_on_policy) == (None, False)
    assert troll.kernel is not None
    assert troll.plain_on_policy


@pytest.mark.parametrize(
    ("name", "settings", "declared"),
    [
        ("dppo", {}, ("none", None, None, None)),
        ("dppo", {"estimator": "full", "divergence": "kl", "bound": 0.1}, ("full", None, None, 0.1)),
        ("troll", {}, ("topk", None, None, 0.05)),
        ("troll", {"tail": "fill", "vocab_size": 9, "centre": "reference"}, ("topk", "reference", 1e-12, 0.05)),
        ("distill", {}, ("topk", "teacher", None, None)),
    ],
)
def test_settings_declare_what_the_loss_reads(name, settings, declared):
    config = make_objective(name, **settings).config
    assert (config.support, config.third_policy, config.filled_tail, config.kl_bound) == declared
    assert ("dist_old" in config.needs) == (config.support != "none")
    assert ("dist_teacher" in config.needs) == (config.third_policy is not None)


@pytest.mark.parametrize("name", ["dppo", "scaled"])
def test_a_name_that_is_taken_is_refused(name, clean_registry):
    register_objective("scaled", scaled, ScaledConfig)
    before = dict(OBJECTIVES)
    with pytest.raises(ValueError, match=f"register_objective: '{name}' is taken. Choose another name"):
        register_objective(name, scaled, ScaledConfig)
    assert before == OBJECTIVES


class NotADataclass:
    scale = 2.0


@dataclasses.dataclass(frozen=True)
class NotAnObjectiveConfig:
    scale: float = 2.0


class NotDecorated(ObjectiveConfig):
    """Inherits a dataclass without being one: `scale` would be no setting."""

    scale: float = 2.0


@pytest.mark.parametrize(
    "config_cls",
    [
        NotADataclass,
        NotAnObjectiveConfig,
        ScaledConfig(),
        {"scale": 2.0},
        None,
        NotDecorated,
    ],
)
def test_settings_that_are_no_config_dataclass_are_refused(config_cls, clean_registry, unchecked_shapes):
    with pytest.raises(ValueError, match="register_objective: settings are a dataclass derived from ObjectiveConfig; got"):
        register_objective("scaled", scaled, config_cls)
    assert "scaled" not in objective_names()
