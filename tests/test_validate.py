"""`require`: what a field must be, in one sentence that names the owner, the field and the value."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import pytest

from corral.validate import Checked, limited, number_in, require

NAN, INF = math.nan, math.inf


@dataclass
class PPOClipConfig:
    """Stands for any settings; the owner is called ppo_clip."""

    x: Any
    y: Any = 1


LIMITS: list[tuple[dict[str, Any], list[Any], list[Any], str]] = [
    ({"at_least": 0}, [0, 0.0, 3, INF], [-1e-9, NAN, -INF, True, "1", None, [1]], "must be ≥ 0"),
    ({"above": 0}, [1e-9, INF], [0, -0.0, NAN, False], "must be > 0"),
    ({"at_most": 1}, [1, -INF], [1.5, INF, NAN], "must be ≤ 1"),
    ({"below": 1}, [0.99], [1, INF], "must be < 1"),
    ({"at_least": 0, "at_most": 1}, [0, 1, 0.5], [-0.1, 1.1, NAN], "must lie in [0, 1]"),
    ({"above": 0, "at_most": 1}, [1, 0.5], [0, 1.1], "must lie in (0, 1]"),
    ({"at_least": 0, "below": 1}, [0, 0.5], [1, -1], "must lie in [0, 1)"),
    ({"above": 0, "finite": True}, [1, 1e308], [INF, 0], "must be finite and > 0"),
    ({"finite": True}, [-5, 0.0], [10**400, INF, -INF, NAN, None], "is a finite number"),
    ({}, [0, INF, -INF], [NAN, "a", True], "is a number"),
    ({"integer": True, "at_least": 1}, [1, 7], [0, 1.0, INF, True, "1"], "is a whole number ≥ 1"),
    (
        {"integer": True, "at_least": 1, "at_most": 1_000_000},
        [1, 10**6],
        [0, 10**6 + 1],
        "is a whole number in [1, 1000000]",
    ),
    ({"integer": True}, [-3], [0.5], "is a whole number"),
    ({"one_of": ("old", "union")}, ["old", "union"], ["new", None, 1], "is one of old, union"),
    ({"one_of": (True, False)}, [True, False], [1, 0, "true", None], "is one of True, False"),
    (
        {"integer": True, "at_least": 1, "each": True},
        [(64,), [1, 2]],
        [(), [0], (1, 2.0), 5],
        "holds at least one entry, each of which is a whole number ≥ 1",
    ),
    ({"above": 1, "optional": True}, [2, None], [1, NAN], "must be > 1, or None"),
    ({"one_of": ("a",), "optional": True}, ["a", None], ["b"], "is one of a, or None"),
]


@pytest.mark.parametrize(("limits", "good", "bad", "sentence"), LIMITS, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_a_field_is_taken_or_refused_with_a_sentence(
    limits: dict[str, Any], good: list[Any], bad: list[Any], sentence: str
) -> None:
    for value in good:
        require(PPOClipConfig(value), "x", **limits)
    for value in bad:
        with pytest.raises(ValueError, match="ppo_clip: `x`") as caught:
            require(PPOClipConfig(value), "x", **limits)
        assert str(caught.value) == f"ppo_clip: `x` {sentence}; got {value!r}."


def test_the_sentence_says_what_the_field_is_and_anything_more() -> None:
    with pytest.raises(ValueError, match="ppo_clip") as caught:
        require(PPOClipConfig(1, -1), "x", "y", at_least=0, what="a divergence", note="inf switches it off")
    assert str(caught.value) == "ppo_clip: `y` is a divergence and must be ≥ 0 (inf switches it off); got -1."
    with pytest.raises(ValueError, match="ppo_clip: `x` is a number of tokens, a whole number ≥ 1, or None; got 0"):
        require(PPOClipConfig(0), "x", at_least=1, integer=True, optional=True, what="a number of tokens")


class ProDMP:
    x = -1


class Countdown:
    name, x = "countdown", -1


class TCEConfig:
    x = -1


@pytest.mark.parametrize(("owner", "name"), [(ProDMP(), "ProDMP"), (Countdown(), "countdown"), (TCEConfig(), "tce")])
def test_the_owner_is_called_by_its_name_or_its_class(owner: object, name: str) -> None:
    with pytest.raises(ValueError, match=rf"^{name}: `x` must be ≥ 0; got -1\.$"):
        require(owner, "x", at_least=0)


@dataclass(frozen=True, kw_only=True)
class Words(Checked):
    how: Literal["a", "b"] = "a"
    many: Literal[1, 2] | None = None
    steps: int | None = limited(None, at_least=1, what="a number of steps")
    rate: int | float = limited(0.5, above=0)
    free: float = -1.0


@dataclass(frozen=True, kw_only=True)
class MoreWords(Words):
    rate: int | float = 0.25


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"how": "c"}, r"`how` is one of a, b; got 'c'\."),
        ({"many": 3}, r"`many` is one of 1, 2, or None; got 3\."),
        ({"steps": 1.5}, r"`steps` is a number of steps, a whole number ≥ 1, or None; got 1\.5\."),
        ({"rate": 0}, r"`rate` must be > 0; got 0\."),
    ],
)
def test_fields_are_checked_against_their_types_and_limits_also_in_a_subclass(settings: dict[str, Any], message: str) -> None:
    Words(how="b", many=2, steps=1, rate=2, free=-2.0)
    for cls in (Words, MoreWords):
        with pytest.raises(ValueError, match=f"^{cls.__name__}: {message}$"):
            cls(**settings)


def test_the_name_and_the_exception_can_be_chosen() -> None:
    with pytest.raises(TypeError, match=r"^audit: `x` must be ≥ 0; got -1\.$"):
        require(ProDMP(), "x", at_least=0, name="audit", error=TypeError)
    with pytest.raises(ValueError, match=r"^`x` must be ≥ 0; got -1\.$"):
        require(ProDMP(), "x", at_least=0, name="")


def test_a_field_that_is_not_there_is_the_callers_mistake() -> None:
    with pytest.raises(AttributeError, match="bounds"):
        require(ProDMP(), "bounds", at_least=0)


@pytest.mark.parametrize("value", [NAN, True, "1", None, -0.1, 1.1])
def test_what_is_no_number_in_the_range(value: object) -> None:
    assert not number_in(value, 0, 1)


@pytest.mark.parametrize("value", [0, 1, 0.5])
def test_what_is(value: object) -> None:
    assert number_in(value, 0, 1)
