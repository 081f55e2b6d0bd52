"""The static model against the bytes that torch's own optimizers keep."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn, optim

from ampmem.analysis.static_model.recipes import OPTIMIZERS, adafactor_state, optimizer_model

OptimizerFactory = Callable[[list[nn.Parameter]], optim.Optimizer]

CASES: dict[str, OptimizerFactory] = {
    "sgd": partial(optim.SGD, lr=0.1),
    "sgd-momentum": partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": optim.Adam,
    "adamw": optim.AdamW,
    "amsgrad": partial(optim.AdamW, amsgrad=True),
    "adagrad": optim.Adagrad,
    "rmsprop": optim.RMSprop,
    "rmsprop-momentum": partial(optim.RMSprop, momentum=0.9),
    "rmsprop-centered": partial(optim.RMSprop, centered=True),
    "rmsprop-centered-momentum": partial(optim.RMSprop, centered=True, momentum=0.9),
    "adadelta": optim.Adadelta,
    "adamax": optim.Adamax,
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "asgd": optim.ASGD,
    "rprop": optim.Rprop,
}


def stepped(factory: OptimizerFactory, shape: tuple[int, ...], dtype: torch.dtype) -> optim.Optimizer:
    """An optimizer of one parameter after one step."""
    parameter = nn.Parameter(torch.ones(shape, dtype=dtype))
    optimizer = factory([parameter])
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer.step()
    return optimizer


def state_of(optimizer: optim.Optimizer) -> dict[str, Tensor]:
    """The tensors in the state of the only parameter, without the scalars."""
    (state,) = optimizer.state.values() or [{}]
    return {name: value for name, value in state.items() if isinstance(value, Tensor) and value.dim()}


def model_of(optimizer: optim.Optimizer) -> str | None:
    names = [kind.__name__ for kind in type(optimizer).__mro__ if kind is not object]
    found = optimizer_model(names, optimizer.param_groups[0])
    return None if found is None else found.key


def test_every_optimizer_of_torch_in_the_model_is_tried() -> None:
    assert set(OPTIMIZERS) - set(CASES) == {"adafactor", "adam-8bit"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("key", CASES)
def test_the_state_is_what_the_model_says_to_the_byte(key: str, dtype: torch.dtype) -> None:
    optimizer = stepped(CASES[key], (12, 7), dtype)
    kept = state_of(optimizer)
    assert model_of(optimizer) == key
    assert set(kept) == {state.name for state in OPTIMIZERS[key].states}
    assert sum(tensor.nbytes for tensor in kept.values()) == OPTIMIZERS[key].bytes_per_element(dtype.itemsize) * 84


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(9,), (12, 7), (4, 3, 5), (4, 3, 2, 2)])
def test_adafactor_to_the_byte(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    optimizer = stepped(optim.Adafactor, shape, dtype)
    kept = state_of(optimizer)
    assert model_of(optimizer) == "adafactor"
    assert set(kept) <= {state.name for state in OPTIMIZERS["adafactor"].states}
    assert sum(tensor.nbytes for tensor in kept.values()) == adafactor_state(shape, dtype.itemsize)


def test_a_subclass_is_known_by_its_base() -> None:
    class MyAdamW(optim.AdamW):
        pass

    assert model_of(stepped(MyAdamW, (3, 3), torch.float32)) == "adamw"
    assert model_of(optim.LBFGS([nn.Parameter(torch.ones(3))])) is None
