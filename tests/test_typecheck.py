"""The checks under which tests run: shapes that do not fit are refused, in arguments and in what is returned."""

from collections.abc import Callable

import jaxtyping
import pytest
import torch
from beartype.roar import BeartypeCallHintViolation
from jaxtyping import Float
from torch import Tensor

from typecheck import checked, light_jaxtyped

check = light_jaxtyped(typechecker=checked)


@check
def add(a: Float[Tensor, " B"], b: Float[Tensor, " B"], tail: int = 0) -> Float[Tensor, " B"]:
    return torch.cat([a + b, a[:tail]])


@check
def scale(factor: float, name: str) -> str:
    return name if factor else 0


@check
def make_adder(step: int) -> Callable[[int], int]:
    @check
    def add_step(x: int) -> int:
        return x + step

    return add_step


def test_arguments_and_results_share_their_axes() -> None:
    assert add(torch.ones(3), torch.ones(3)).sum() == 6
    with pytest.raises(BeartypeCallHintViolation):
        add(torch.ones(3), torch.ones(4))
    with pytest.raises(BeartypeCallHintViolation, match="return"):
        add(torch.ones(3), torch.ones(3), tail=1)
    assert add(torch.ones(5), torch.ones(5)).sum() == 10, "a call that was refused leaves no axis behind"


def test_functions_without_shapes_are_checked_too() -> None:
    assert scale(1, "a") == "a", "an int is a float"
    for wrong in ((1.0, 3), ("1", "a"), (0.0, "a")):
        with pytest.raises(BeartypeCallHintViolation):
            scale(*wrong)


@pytest.mark.usefixtures("unchecked_shapes")
def test_nothing_is_checked_where_it_is_switched_off() -> None:
    assert add(torch.ones(3), torch.ones(1)).sum() == 6
    assert scale(0.0, "a") == 0


def test_a_function_inside_another_is_checked_when_it_is_first_made() -> None:
    first, second = make_adder(1), make_adder(2)
    with pytest.raises(BeartypeCallHintViolation):
        first(0.5)
    assert (second(0.5), first(1)) == (2.5, 2)


def test_it_is_what_corral_is_imported_under() -> None:
    assert jaxtyping.jaxtyped is light_jaxtyped
