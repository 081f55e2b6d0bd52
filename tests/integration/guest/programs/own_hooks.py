"""Hooks of the script's own, of every kind, in the order in which they are called."""

import torch
from _training import small_model, train
from torch import nn
from torch.nn.modules import module as torch_module
from torch.optim import optimizer as torch_optimizer

said: list[str] = []


def says(text: str):
    """A hook that does nothing else."""

    def hook(*args, **kwargs):
        said.append(text)

    return hook


model = small_model()
handles = [
    torch_module.register_module_forward_pre_hook(says("global before")),
    torch_module.register_module_forward_hook(says("global after"), always_call=True),
    torch_module.register_module_full_backward_pre_hook(says("global backward before")),
    torch_module.register_module_full_backward_hook(says("global backward")),
    torch_module.register_module_parameter_registration_hook(says("parameter registered")),
    torch_optimizer.register_optimizer_step_pre_hook(says("global step before")),
    torch_optimizer.register_optimizer_step_post_hook(says("global step after")),
    model.register_forward_pre_hook(says("before")),
    model[0].register_forward_hook(says("after"), with_kwargs=True),
    model[0].register_full_backward_hook(says("backward")),
    model.register_state_dict_pre_hook(says("state dict before")),
    model[2].weight.register_hook(says("gradient")),
    model[2].weight.register_post_accumulate_grad_hook(says("accumulated")),
]
optimizer = torch.optim.AdamW(model.parameters())
handles += [
    optimizer.register_step_pre_hook(says("step before")),
    optimizer.register_step_post_hook(says("step after")),
    optimizer.register_state_dict_post_hook(says("optimizer state dict")),
]


def loss_of(batch):
    y = model(batch)
    y.register_hook(says("output gradient"))
    y.grad_fn.register_hook(says("node"))
    y.grad_fn.register_prehook(says("node before"))
    model.state_dict()
    optimizer.state_dict()
    model.late = nn.Parameter(torch.ones(1))
    return y.square().mean()


train(model, optimizer, loss_of=loss_of)
print(*said, sep="\n")


def failing(module, args):
    raise KeyError("a hook of the script's")


with model[2].register_forward_pre_hook(failing):
    try:
        train(model, optimizer)
    except KeyError as error:
        print(error)
train(model, optimizer)
for handle in handles:
    handle.remove()
print({name: len(value) for name, value in vars(torch_module).items() if name.endswith("_hooks") and value})
