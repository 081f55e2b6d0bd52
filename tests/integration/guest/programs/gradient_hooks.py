"""Looks at the hooks of its parameters, some of which have hooks of the script's own."""

import torch
from _training import small_model, train

model = small_model()
said: list[str] = []
first, second, *_ = model.parameters()
handle = first.register_post_accumulate_grad_hook(lambda parameter: said.append("early"))
train(model, steps=1)
first.register_post_accumulate_grad_hook(lambda parameter: said.append("late"))
first.register_hook(lambda gradient: said.append("gradient"))
handle.remove()
train(model, steps=1)
train(model)
print(said)
for parameter in model.parameters():
    hooks = parameter._post_accumulate_grad_hooks
    print(None if hooks is None else len(hooks), len(parameter._backward_hooks or ()), sorted(vars(parameter)))
second.register_post_accumulate_grad_hook(lambda parameter: said.append("second"))
train(model)
print(said[-8:], len(second._post_accumulate_grad_hooks))
print(torch.equal(second.grad, second.grad))
