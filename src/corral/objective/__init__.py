"""Objectives: per-token losses for reinforcement learning in a trust region. Importing this package does not import torch."""

import dataclasses
from collections.abc import Mapping
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from corral.objective.config import OBJECTIVES, ObjectiveConfig, ObjectiveFunction, ProjectionRule, TokenRule
from corral.validate import build_config, nearest

if TYPE_CHECKING:
    from corral.tensors import ObjectiveOutput, TokenBatch

__all__ = [
    "OBJECTIVES", "Objective", "ObjectiveConfig", "ObjectiveFunction", "make_config", "make_objective", "objective_function",
    "objective_names", "plain_objective", "register_objective", "unknown_objective",
]  # fmt: skip

_BUILT_IN = frozenset(OBJECTIVES)


@dataclasses.dataclass(frozen=True)
class Objective:
    """Objective with a name and settings. A call checks a TokenBatch and computes an ObjectiveOutput."""

    name: str
    function: ObjectiveFunction
    config: ObjectiveConfig
    check: bool = True
    """If True, a batch with values that cannot be log-probabilities, such as logits, is refused."""

    @property
    def needs(self) -> frozenset[str]:
        """Names of the TokenBatch fields that the objective requires."""
        return self.config.needs

    @property
    def kernel(self) -> TokenRule | ProjectionRule | None:
        """Rule for the fused kernel that computes this objective. None if there is no such kernel, as for custom functions."""
        return self.config.kernel if self.name in _BUILT_IN else None

    @property
    def plain_on_policy(self) -> bool:
        """True if the objective certainly equals the plain policy gradient at π = π_old, for any choice of support tokens."""
        return self.name in _BUILT_IN and self.config.plain_on_policy

    def __call__(self, batch: "TokenBatch") -> "ObjectiveOutput":
        from corral.objective.check import check_batch  # imports torch, which settings alone do not need

        check_batch(self.name, batch, self.needs, check=self.check)
        return self.function(batch, self.config)


def make_objective(name: str, /, *, check: bool = True, **config: Any) -> Objective:
    """Build the objective `name` with the given settings. `objective_names()` lists all names.

    Args:
        name: a registered name.
        check: refuse numbers that are no log-probabilities: above 0, or a support and its tail that do not sum to 1. False
            takes them as they are.
        config: settings of the objective.
    """
    settings = make_config(name, config)
    if not isinstance(check, bool):
        raise ValueError(f"make_objective: `check` is True or False; got {check!r}.")
    return Objective(name, objective_function(name), settings, check)


def make_config(name: str, settings: Mapping[str, Any]) -> ObjectiveConfig:
    """Build the validated settings of the objective `name` without importing torch."""
    if not isinstance(name, str) or name not in OBJECTIVES:
        raise ValueError(f"make_objective: {unknown_objective(name)}")
    config: ObjectiveConfig = build_config(name, OBJECTIVES[name][1], settings)
    return config


def objective_function(name: str) -> ObjectiveFunction:
    """Return the function of a registered objective, importing its module on first use."""
    function: str | ObjectiveFunction = OBJECTIVES[name][0]
    return resolve_name(f"{__name__}.{function}") if isinstance(function, str) else function


def plain_objective() -> Objective:
    """Build the plain policy gradient without a trust region. Most objectives equal it at π = π_old."""
    return make_objective("reinforce")


def objective_names() -> list[str]:
    """Return the names of all registered objectives, in alphabetical order."""
    return sorted(OBJECTIVES)


def unknown_objective(name: object) -> str:
    """Return the error message for an unknown objective name, with the nearest name and all registered names."""
    return f"there is no objective {name!r}.{nearest(name, OBJECTIVES)}"


def register_objective(name: str, function: ObjectiveFunction, config_cls: type[ObjectiveConfig]) -> None:
    """Register a custom objective, so that trainers, engines and reports find it by its name.

    Args:
        name: what `make_objective` will call it; a name that is taken is refused.
        function: (TokenBatch, config) → ObjectiveOutput, with the loss unreduced and 0 where masked out.
        config_cls: its settings, a frozen dataclass derived from ObjectiveConfig.
    """
    if not isinstance(name, str) or not name or not callable(function):
        raise ValueError(f"register_objective: takes a name and a function of (batch, config); got {name!r} and {function!r}.")
    if name in OBJECTIVES:
        raise ValueError(f"register_objective: {name!r} is taken. Choose another name; objectives are never replaced.")
    # A subclass that is not decorated itself still counts as a dataclass, but its own settings are none.
    decorated = isinstance(config_cls, type) and "__dataclass_fields__" in vars(config_cls)
    if not (decorated and issubclass(config_cls, ObjectiveConfig)):
        raise ValueError(f"register_objective: settings are a dataclass derived from ObjectiveConfig; got {config_cls!r}.")
    if "check" in (field.name for field in dataclasses.fields(config_cls)):
        raise ValueError(f"register_objective: `check` is make_objective's own argument; rename that setting of {name!r}.")
    OBJECTIVES[name] = (function, config_cls)
