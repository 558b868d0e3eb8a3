"""Loading of a user's objective by path (`file.py:function` or `module:function`), with its settings dataclass."""

import functools
import inspect
from typing import TYPE_CHECKING, Any, get_type_hints

from corral.lab.tasks.imports import by_path
from corral.objective import OBJECTIVES, Objective, ObjectiveConfig, register_objective, unknown_objective
from corral.validate import RunError, UserCodeError, run_errors

if TYPE_CHECKING:
    from corral.tensors import TokenBatch

HOW = "an objective of your own is file.py:function or module:function, a function of (batch, config) or (batch)"


def find_objective(name: str) -> type[ObjectiveConfig]:
    """Find an objective's settings class by name. An objective given as a path is imported and registered under that path.

    So everything that takes a registered name takes the path too, as long as this was called first in the process.
    """
    if name in OBJECTIVES:
        return OBJECTIVES[name][1]
    if ":" not in name:
        raise RunError(f"{unknown_objective(name)} Or your own: file.py:function.")
    with run_errors():
        function = by_path(name, HOW)
        config_cls = _config_of(name, function)
        if config_cls is not None:
            register_objective(name, function, config_cls)
            return config_cls

        @functools.wraps(function)
        def call(batch: "TokenBatch", config: ObjectiveConfig) -> Any:
            return function(batch)

        register_objective(name, call, ObjectiveConfig)
    return ObjectiveConfig


def _config_of(name: str, function: Any) -> type[ObjectiveConfig] | None:
    """Read a user objective's settings dataclass from the type of its second argument. Returns None without such argument."""
    if isinstance(function, type):
        raise ValueError(f"{HOW}; {name!r} is {type(function).__name__}.")
    try:
        parameters = [one for one in inspect.signature(function).parameters.values() if one.default is one.empty]
        hints = get_type_hints(function)
    except (NameError, TypeError, ValueError) as error:  # a hint without its import, or a function without a signature
        raise ValueError(f"{HOW}; the arguments of {name!r} cannot be read: {error}.") from error
    if len(parameters) == 1:
        return None
    if len(parameters) != 2 or any(one.kind not in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD) for one in parameters):
        raise ValueError(f"{HOW}; {name!r} takes ({', '.join(one.name for one in parameters)}).")
    config_cls = hints.get(parameters[1].name)
    if not (isinstance(config_cls, type) and issubclass(config_cls, ObjectiveConfig)):
        raise ValueError(
            f"{name}: `{parameters[1].name}` has no type, or one that is not derived from corral.ObjectiveConfig; got "
            f"{config_cls!r}. Annotate it with the dataclass of its settings: docs/tutorials/own-objective.md."
        )
    return config_cls


def try_objective(objective: Objective) -> None:
    """Try a user objective on two short completions, so that mistakes show before a model is loaded."""
    import torch

    from corral.support import gather_support, top_k_support
    from corral.tensors import ObjectiveOutput, TokenBatch

    tokens = torch.tensor([[0, 1, 2], [3, 0, 1]])
    logits = torch.linspace(-1, 1, 24).sin().view(2, 3, 4).requires_grad_()
    old = top_k_support(torch.zeros(2, 3, 4).log_softmax(-1), tokens, 4)  # all four tokens, in case it reads every one
    new = gather_support(logits.log_softmax(-1), old.ids)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    for advantages in (torch.tensor([1.0, -1.0]), torch.tensor([[1.0], [-1.0]]).expand(2, 3)):  # a trainer has either
        batch = TokenBatch.on_support(new, old, advantages, mask, old.logp[..., 0])
        if "dist_teacher" in objective.needs:
            batch = TokenBatch(**{**vars(batch), "dist_teacher": old})
        try:
            out: object = objective(batch)
        except Exception as error:  # whatever a user's function raises
            hint = ""
            if isinstance(error, RuntimeError):  # torch's, for tensors whose shapes do not fit
                hint = " `batch.advantages` is [B] or [B T], and corral.objective.ratio.credit(batch) reads either."
            raise UserCodeError(f"the objective {objective.name} raised {type(error).__name__}: {error}.{hint}") from error
        if not isinstance(out, ObjectiveOutput):
            raise RunError(
                f"the objective {objective.name} returned {type(out).__name__}. Return corral.ObjectiveOutput(loss, {{}})."
            )
        loss = out.loss
        if loss.shape != mask.shape:
            raise RunError(
                f"the objective {objective.name} returned a loss of shape {list(loss.shape)} for a batch of shape "
                f"{list(mask.shape)}. Return the loss of each token, unreduced; `batch.advantages` is [B] or [B T], and "
                f"corral.objective.ratio.credit(batch) reads either."
            )
        if not loss.requires_grad:
            raise RunError(
                f"the objective {objective.name} returned a loss without a gradient. Compute it from `batch.logp_new`."
            )
        if not bool(loss.isfinite().all()) or bool((loss[~mask] != 0).any()):
            raise RunError(
                f"the objective {objective.name} returned a loss that is not finite, or not 0 at a masked token: "
                f"{loss.tolist()}. End with torch.where(batch.mask, loss, 0.0)."
            )
