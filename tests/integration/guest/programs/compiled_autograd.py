"""Compiles backward as one graph, with and without a hook of its own that frees a gradient; counts the graphs."""

import logging
import warnings

import torch
from _training import small_model
from torch._dynamo import compiled_autograd

torch._logging.set_logs(all=logging.ERROR)
graphs: list[int] = []


def backend(graph, inputs):
    """Runs the graph as it is."""
    graphs.append(len(list(graph.graph.nodes)))
    return graph.forward


def update(parameter):
    """Updates as soon as the gradient is there, and frees it."""
    with torch.no_grad():
        parameter.sub_(parameter.grad, alpha=0.1)
    parameter.grad = None


model = small_model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(4):
    if step == 2:
        model[0].weight.register_post_accumulate_grad_hook(update)
    optimizer.zero_grad()
    loss = model(torch.ones(2, 8)).square().mean()
    with compiled_autograd._enable(torch.compile(backend=backend, fullgraph=True)):
        loss.backward()
    optimizer.step()
    print("loss", loss.item(), model[0].weight.grad is None)
print("graphs", graphs)

# A backward inside compiled code breaks the graph there.
model = small_model()


@torch.compile(backend="eager")
def gradients(batch):
    """Runs forward and backward."""
    model(batch).square().mean().backward()


with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    gradients(torch.ones(2, 8))
print([str(each.message)[:80] for each in warned], model[0].weight.grad.sum().item())
