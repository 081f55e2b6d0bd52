"""Formats its own stack and tracebacks wherever torch calls it, and where it calls torch: all frames are its own."""

import sys
import traceback
from typing import Any

import torch
from _training import small_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset


def frames(found: traceback.StackSummary, past: str) -> list[str]:
    """File and function of each frame below the function ``past``; of torch's own the hooks of modules left out.

    With a global hook torch calls a module by one more function, and under a dispatch mode an op.
    """
    names = [(frame.filename.rpartition("/")[2], frame.name) for frame in found]
    start = max(place for place, (_, name) in enumerate(names) if name == past) if past else 0
    torchs = {("module.py", "inner"), ("module.py", "_call_impl"), ("_ops.py", "__call__")}
    return [":".join(name) for name in names[start:] if name not in torchs]


def here(where: str, past: str = "step") -> None:
    """Print where this is called."""
    print(where, frames(traceback.extract_stack(sys._getframe(1)), past))


def failed(where: str, past: str = "step") -> None:
    """Print the traceback of the exception that is handled."""
    error = sys.exception()
    assert error is not None
    found: list[str] = []
    for each in (error, error.__context__):
        if each is not None:
            found += [type(each).__name__, *frames(traceback.extract_tb(each.__traceback__), "")]
    print(where, found, "ampmem" in traceback.format_exc())


class Looks(torch.autograd.Function):
    """A function that looks in both directions, and fails in backward once."""

    fails = False

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        here("forward of a function")
        context.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        here("backward of a function")
        if Looks.fails:
            raise ValueError("in backward")
        return gradient


class Module(nn.Module):
    """A module that fails once."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_model()

    def forward(self, x: Tensor, fails: bool = False) -> Tensor:
        here("forward of a module")
        if fails:
            return torch.zeros(2, 9) @ x  # shapes that do not go together
        return Looks.apply(self.inner(x))  # type: ignore[no-any-return]


class Samples(Dataset[Tensor]):
    """Three samples, and one that fails."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        here("a sample", "epoch")
        if index == 3:
            raise ValueError("no such sample")
        return torch.ones(8)


def step(x: Tensor) -> None:
    """Train once."""
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step(lambda: here("a closure") or loss)
    optimizer.zero_grad()


def epoch() -> None:
    """Train on all samples, to the one that fails."""
    for batch in DataLoader(Samples()):
        step(batch)


def attempt(where: str, function: Any, *arguments: Any, **named: Any) -> None:
    """Print the traceback with which ``function`` fails."""
    try:
        function(*arguments, **named)
    except Exception:
        failed(where)


model = Module()
optimizer = torch.optim.AdamW(model.parameters())
weight = model.inner[0].weight
weight.register_hook(lambda gradient: here("a tensor's hook"))
weight.register_post_accumulate_grad_hook(lambda parameter: here("a hook on a gradient"))
model.inner.register_forward_hook(lambda *_: here("a hook on a module"))
attempt("a data set", epoch)
attempt("a module", model, torch.ones(2, 8), fails=True)
Looks.fails = True
attempt("backward", step, torch.ones(2, 8))
attempt("a gradient", lambda: torch.autograd.grad(model(torch.ones(2, 8)).sum(), weight))
attempt("no graph", torch.ones(1).backward)
attempt("shapes", lambda: model(torch.ones(2, 8)).backward(torch.ones(3)))
overwritten = torch.ones(2, requires_grad=True) * 1
squared = overwritten.square()
overwritten.zero_()
attempt("overwritten", squared.sum().backward)
attempt("an optimizer", torch.optim.SGD, [])
attempt("an optimizer's step", optimizer.step, lambda: 1 / 0)
with torch.autocast("cpu", dtype=torch.bfloat16):
    attempt("autocast", model, torch.ones(2, 8), fails=True)
for _ in range(3):  # after the end of the recording
    Looks.fails = False
    step(torch.ones(2, 8))
