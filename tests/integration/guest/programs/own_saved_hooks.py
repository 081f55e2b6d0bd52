"""Saved-tensor hooks of the script's own, of every kind that torch has."""

import torch
from _training import small_model, train
from torch.autograd.graph import (
    allow_mutation_on_saved_tensors,
    disable_saved_tensors_hooks,
    save_on_cpu,
    saved_tensors_hooks,
)

packed: list[tuple[int, ...]] = []


def pack(tensor: torch.Tensor) -> torch.Tensor:
    packed.append((*tensor.shape, tensor.is_leaf))
    return tensor.detach().clone()


model = small_model()


def under(context):
    """The loss, computed under ``context``."""

    def loss_of(batch):
        with context:
            return model(batch).square().mean()

    return loss_of


train(model, loss_of=under(saved_tensors_hooks(pack, lambda kept: kept)))
train(model, loss_of=under(save_on_cpu()))
print(packed)
with saved_tensors_hooks(pack, lambda kept: kept):
    train(model)
print(len(packed))


def refused(batch):
    with disable_saved_tensors_hooks("no hooks here"):
        loss = model(batch).sum()
        try:
            with saved_tensors_hooks(pack, lambda kept: kept):
                pass
        except RuntimeError as error:
            print(error)
        return loss


train(model, loss_of=refused)


def mutated(batch):
    with allow_mutation_on_saved_tensors():
        y = model(batch).exp()
        loss = y.square().sum()
        y.mul_(2)
        loss.backward()
        print("mutated", loss.item())
    return model(batch).sum()


train(model, loss_of=mutated)
with allow_mutation_on_saved_tensors() as context:
    train(model)
    print(len(context.cloned))
print(torch._C._autograd._top_saved_tensors_default_hooks(True))
