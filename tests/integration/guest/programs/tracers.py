"""Traces modules with what torch has for it: FX, make_fx, export, fake tensors."""

import torch
from _training import small_model, train
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

model = small_model()
train(model)
graph = fx.symbolic_trace(model)
print(graph.code)
train(graph)
made = make_fx(lambda x: model(x).square().mean())(torch.ones(4, 8))
print(made.code)
exported = torch.export.export(model, (torch.ones(4, 8),))
print(exported.graph)
train(exported.module())
mode = FakeTensorMode(allow_non_fake_inputs=True)
with mode:
    print(type(model(torch.ones(4, 8))).__name__, mode.from_tensor(torch.ones(3)).shape)
train(model)
