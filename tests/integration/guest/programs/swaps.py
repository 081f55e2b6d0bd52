"""Swaps tensors, which torch refuses where anybody has a weak reference to one: weights, results, casts, copies."""

from collections.abc import Callable, Iterable

import torch
from _training import small_model, train
from torch import Tensor, nn
from torch.utils import swap_tensors


def attempt(what: str, call: Callable[[], object]) -> None:
    """Print how ``call`` ends."""
    try:
        call()
    except RuntimeError as error:
        print(what, error, flush=True)
    else:
        print(what, "done", flush=True)


def swap(tensors: Iterable[Tensor]) -> None:
    """Each for another like it."""
    for tensor in tensors:
        other = torch.full_like(tensor.detach(), 0.125)
        swap_tensors(tensor, nn.Parameter(other) if isinstance(tensor, nn.Parameter) else other)


class Swapping(nn.Module):
    """Swaps what comes up in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_model()

    def forward(self, batch: Tensor) -> Tensor:
        """What its body says."""
        result = self.body(batch)
        attempt("a result", lambda: swap([result]))
        for what, source in (("batch", batch), ("weight", self.body[0].weight), ("data", self.body[0].weight.data)):
            cast = source.to(torch.bfloat16)
            attempt(f"a cast of the {what}", lambda cast=cast: swap([cast]))
            torch.relu(cast)
        with torch.no_grad():
            doubled = batch * 2
        attempt("without gradients", lambda: swap([doubled]))
        attempt("the batch", lambda: swap([batch]))
        return self.body(batch)


model = small_model()
attempt("before", lambda: swap(model.parameters()))
train(model)
attempt("between steps", lambda: swap(model.parameters()))
optimizer = torch.optim.AdamW(model.parameters())
train(model, optimizer)
attempt("the state", lambda: swap(state["exp_avg"] for state in optimizer.state.values()))
output = model(torch.ones(4, 8))
attempt("after a forward", lambda: swap(model.parameters()))
attempt("what it returned", lambda: swap([output]))
model(torch.ones(4, 8))
attempt("after a forward whose result is gone", lambda: swap(model.parameters()))
train(model, optimizer)
train(Swapping())

half = small_model().bfloat16()
masters = [parameter.detach().float().requires_grad_() for parameter in half.parameters()]
optimizer = torch.optim.SGD(masters, lr=0.1)
for _ in range(3):
    half(torch.ones(4, 8, dtype=torch.bfloat16)).square().mean().backward()
    for parameter, master in zip(half.parameters(), masters, strict=True):
        master.grad, parameter.grad = parameter.grad.float(), None
    optimizer.step()
    attempt("master copies", lambda: [swap_tensors(each, each.detach().clone().requires_grad_()) for each in masters])
    with torch.no_grad():
        for parameter, master in zip(half.parameters(), masters, strict=True):
            parameter.copy_(master)
print(half(torch.ones(4, 8, dtype=torch.bfloat16)).sum().item())

state = {name: value.clone() for name, value in model.state_dict().items()}
attempt("assign", lambda: model.load_state_dict(state, assign=True))
torch.__future__.set_swap_module_params_on_conversion(True)
attempt("to double and back", lambda: model.double().float())
train(model)
with torch.autocast("cpu", torch.bfloat16):
    kept = model(torch.ones(4, 8))
    attempt("to double in autocast", model.double)
attempt("to double after autocast", model.double)
kept = None
attempt("load", lambda: model.float().load_state_dict(state))
train(model)
print(sorted({name for parameter in model.parameters() for name in vars(parameter)}))
