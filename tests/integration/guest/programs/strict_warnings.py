"""Every warning is an error, in the script and in what torch says of its objects."""

import copy
import warnings

import torch
from _training import small_model, train
from torch import nn
from torch._subclasses import FakeTensorMode

warnings.simplefilter("error")
model = small_model()
train(model)
with FakeTensorMode():
    fake = nn.Linear(8, 4)
    fake(torch.ones(2, 8)).sum().backward()
kept = [fake, fake.weight]


class NoLeaves(torch.optim.SGD):
    """Updates a tensor that was computed."""

    def step(self, closure=None):
        return super().step(closure)


optimizer = NoLeaves(model.parameters(), lr=0.1)
optimizer.state["computed"] = {"mean": model[0].weight.mean(), "of": model[0].weight * 2}
train(model, optimizer)
optimizer.param_groups[0]["params"].append(model[0].weight.detach().requires_grad_())
train(copy.deepcopy(model))
print("fine", len(kept))
