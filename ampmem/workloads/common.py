"""Shared by the workloads: command-line options, the seed, autocast, the scaler and the optimizer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
import torch.nn.functional as F
from click import UsageError
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.utils.data import DataLoader, TensorDataset

PRESETS = ("tiny", "small", "full")
DEVICES = ("auto", "cpu", "cuda")
CPU = torch.device("cpu")
PRECISIONS = ("fp32", "amp", "amp-nocache")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

LEARNING_RATES = {
    "adamw": 3e-4,
    "adam": 1e-3,
    "sgd": 1e-2,
    "sgd-momentum": 1e-2,
    "rmsprop": 1e-3,
    "adagrad": 1e-2,
    "adafactor": 1e-2,
}
"""By name on the command line, the learning rate of each optimizer, unless the workload has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """The values of the command line; ``None`` means the workload's own default."""

    preset: str = "small"
    device: torch.device = CPU
    precision: str = "fp32"
    dtype: torch.dtype = torch.bfloat16
    optimizer: str | None = None
    batch_size: int | None = None
    steps: int = 5
    seed: int = 0

    def autocast(self) -> torch.autocast:
        """A new autocast region; it does nothing in fp32."""
        return torch.autocast(
            self.device.type,
            dtype=self.dtype,
            enabled=self.precision != "fp32",
            cache_enabled=self.precision != "amp-nocache",
        )

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients are computed in fp16, whose small values would vanish without loss scaling."""
        return self.precision != "fp32" and self.dtype == torch.float16

    def grad_scaler(self) -> torch.amp.GradScaler:
        """A scaler that scales in fp16, and else passes loss and step through."""
        return torch.amp.GradScaler(self.device.type, enabled=self.needs_scaler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Sizes of a transformer and of one batch, whose sequences have ``length`` elements."""

    length: int
    layers: int
    heads: int
    width: int
    batch_size: int
    vocabulary: int = 0


def make_optimizer(
    name: str, parameters: Iterable[nn.Parameter], *, lr: float | None = None, foreach: bool | None = None
) -> Optimizer:
    """The optimizer called ``name``; with ``foreach=None`` torch chooses the implementation."""
    rate = LEARNING_RATES[name] if lr is None else lr
    return _OPTIMIZERS[name](parameters, lr=rate, foreach=foreach)


_OPTIMIZERS: Mapping[str, Callable[..., Optimizer]] = {
    "adamw": AdamW,
    "adam": Adam,
    "sgd": SGD,
    "sgd-momentum": partial(SGD, momentum=0.9),
    "rmsprop": RMSprop,
    "adagrad": Adagrad,
    "adafactor": Adafactor,
}


def data_loader(*tensors: Tensor, batch_size: int, seed: int) -> DataLoader[tuple[Tensor, ...]]:
    """Shuffled batches of ``tensors`` (each of shape ``(samples, ...)``), in an order fixed by ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(TensorDataset(*tensors), batch_size, shuffle=True, drop_last=True, generator=generator)


def batches(loader: DataLoader[tuple[Tensor, ...]], steps: int) -> Iterator[tuple[int, list[Tensor]]]:
    """``(step, batch)`` for ``steps`` steps, over as many epochs as that takes."""
    step = 0
    while True:
        for batch in loader:
            if step == steps:
                return
            yield step, batch
            step += 1


def train_on_batch(
    options: WorkloadOptions, model: nn.Module, optimizer: Optimizer, batch: tuple[Tensor, Tensor]
) -> None:
    """Train on one ``batch``, inputs and targets of one shape, again and again, with the mean squared error."""
    inputs, targets = batch
    scaler = options.grad_scaler()
    model.train()
    for step in range(options.steps):
        optimizer.zero_grad()
        with options.autocast():
            loss = F.mse_loss(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        report_step(step, loss.item())


def report_step(step: int, loss: float) -> None:
    """Print one line for a finished step."""
    print(f"step {step} loss {loss:.6f}", flush=True)


def flag(name: str, help: str) -> click.Option:
    """An option that is off unless given."""
    return click.Option([name], is_flag=True, help=help)


def count(name: str, default: int | None, help: str, *, least: int = 1) -> click.Option:
    """An option that takes a whole number, ``least`` or more."""
    return click.Option([name], type=click.IntRange(min=least), default=default, show_default=True, help=help)


def choice(name: str, words: Iterable[str], default: str, help: str) -> click.Option:
    """An option that takes one of ``words``."""
    return click.Option([name], type=click.Choice(list(words)), default=default, show_default=True, help=help)


def _common_options(optimizer: str) -> list[click.Parameter]:
    return [
        choice("--preset", PRESETS, "small", "Size of the model and of its data."),
        choice("--device", DEVICES, "auto", "Where to train; auto is cuda if there is a GPU."),
        choice(
            "--precision",
            PRECISIONS,
            "fp32",
            "amp trains under autocast, amp-nocache under autocast without its weight cache.",
        ),
        choice("--dtype", DTYPES, "bf16", "The type that autocast casts to."),
        choice("--optimizer", LEARNING_RATES, optimizer, "Optimizer."),
        count("--batch-size", None, "Samples per forward; default: the preset's."),
        count("--steps", 5, "Steps to train."),
        count("--seed", 0, "Seed of the weights and of the data.", least=0),
    ]


def _find_device(name: str) -> torch.device:
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UsageError("--device cuda: no CUDA device is available; use --device cpu")
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def command(
    name: str, train: Callable[..., None], *, optimizer: str, extra: Sequence[click.Option] = ()
) -> Callable[..., None]:
    """The function ``main(argv=None)`` of the workload ``name``; ``optimizer`` is its default.

    It parses ``argv`` (``None``: the process's own) and calls ``train(WorkloadOptions(...), **extra options)``, and
    returns when training is done or help was shown. Invalid arguments give one line on stderr and ``SystemExit(2)``;
    errors of the training itself pass through.
    """

    def callback(*, device: str, dtype: str, **rest: Any) -> None:
        common = {key: rest.pop(key) for key in ("preset", "precision", "optimizer", "batch_size", "steps", "seed")}
        train(WorkloadOptions(device=_find_device(device), dtype=DTYPES[dtype], **common), **rest)

    parser = click.Command(name, callback=callback, params=[*extra, *_common_options(optimizer)], help=train.__doc__)

    def main(argv: Sequence[str] | None = None) -> None:
        try:
            arguments = None if argv is None else list(argv)
            parser.main(arguments, prog_name=f"python -m ampmem.workloads.{name}", standalone_mode=False)
        except click.ClickException as error:
            print(f"error: {error.format_message()}", file=sys.stderr)
            raise SystemExit(error.exit_code) from None
        except click.Abort:
            # click's exception for Ctrl-C; without click's standalone mode nobody else handles it.
            raise KeyboardInterrupt from None

    return main
