"""torch's optimizers, for ops.py: each implementation and the options that allocate, in its first two steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from ops import Case
from torch import nn, optim

KINDS: dict[str, tuple[type[optim.Optimizer], tuple[dict[str, Any], ...]]] = {
    "SGD": (optim.SGD, ({}, {"momentum": 0.9}, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1})),
    "Adam": (optim.Adam, ({}, {"amsgrad": True}, {"weight_decay": 0.1})),
    "AdamW": (optim.AdamW, ({}, {"amsgrad": True}, {"maximize": True})),
    "NAdam": (optim.NAdam, ({}, {"weight_decay": 0.1})),
    "RAdam": (optim.RAdam, ({}, {"weight_decay": 0.1})),
    "Adamax": (optim.Adamax, ({}, {"weight_decay": 0.1})),
    "Adadelta": (optim.Adadelta, ({}, {"weight_decay": 0.1})),
    "Adagrad": (optim.Adagrad, ({}, {"weight_decay": 0.1})),
    "RMSprop": (optim.RMSprop, ({}, {"momentum": 0.9, "centered": True}, {"weight_decay": 0.1})),
    "Rprop": (optim.Rprop, ({},)),
    "ASGD": (optim.ASGD, ({}, {"weight_decay": 0.1})),
    "Adafactor": (optim.Adafactor, ({}, {"weight_decay": 0.1})),
    "LBFGS": (optim.LBFGS, ({}, {"max_iter": 4, "history_size": 3, "line_search_fn": "strong_wolfe"})),
}
"""The class, and its options."""
FUSED = ("SGD", "Adam", "AdamW", "Adagrad")
CAPTURABLE = ("Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Rprop", "ASGD")
PRECISIONS = {"f32": torch.float32, "bf16": torch.bfloat16}


def cases() -> Iterable[Case]:
    """All of them, on parameters of both types; with a GradScaler on those in FP32."""
    for name, (kind, options) in KINDS.items():
        ways: list[dict[str, Any]] = [{}, {"foreach": False}]
        ways += [{"fused": True}] * (name in FUSED)
        if name in CAPTURABLE:
            ways += [{"capturable": True}, {"capturable": True, "foreach": False}]
        for way in ways if name != "LBFGS" else ways[:1]:
            for option in options:
                for precision, dtype in PRECISIONS.items():
                    how = option | way
                    title = " ".join([name, *(f"{key}={value}" for key, value in how.items())])
                    yield Case(name=title, precision=precision, run=partial(stepped, partial(kind, **how), dtype))
    for name in ("SGD", "AdamW"):
        for way in ({}, {"foreach": False}, {"fused": True}):
            title = " ".join(["GradScaler", name, *(f"{key}={value}" for key, value in way.items())])
            kind = partial(KINDS[name][0], **({"momentum": 0.9} if name == "SGD" else {}), **way)
            yield Case(name=title, precision="f32", run=partial(scaled, kind))
    for order in (2.0, float("inf")):
        for foreach in (None, False):
            yield Case(
                name=f"clip_grad_norm_ {order} foreach={foreach}", precision="f32", run=partial(clipped, order, foreach)
            )


def model(dtype: torch.dtype) -> nn.Module:
    return nn.Sequential(nn.Linear(300, 700), nn.LayerNorm(700), nn.Linear(700, 301)).to("cuda", dtype)


def with_gradients(made: nn.Module) -> None:
    for parameter in made.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)


def stepped(make: Callable[..., Any], dtype: torch.dtype) -> Iterator[str]:
    made = model(dtype)
    optimizer = make(made.parameters())
    with_gradients(made)
    closure = (lambda: torch.ones((), device="cuda"),) if isinstance(optimizer, optim.LBFGS) else ()
    for step in ("first step", "second step"):
        yield step
        optimizer.step(*closure)


def scaled(make: Callable[..., Any]) -> Iterator[str]:
    made = model(torch.float32)
    optimizer = make(made.parameters())
    scaler = torch.amp.GradScaler("cuda")
    scaler.scale(torch.ones(1, device="cuda"))
    with_gradients(made)
    for step in ("first step", "second step"):
        yield step
        scaler.step(optimizer)
        scaler.update()


def clipped(order: float, foreach: bool | None) -> Iterator[str]:
    made = model(torch.float32)
    with_gradients(made)
    yield "clip"
    nn.utils.clip_grad_norm_(made.parameters(), 1.0, order, foreach=foreach)
