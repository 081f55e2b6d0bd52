"""Compiles a module, its call and a function; counts the graphs."""

import logging
import warnings

import torch
from _training import small_model, train

torch._logging.set_logs(all=logging.ERROR)
graphs: list[int] = []


def backend(graph, inputs):
    """Runs the graph as it is."""
    graphs.append(len(list(graph.graph.nodes)))
    return graph.forward


with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    train(torch.compile(small_model(), backend=backend))
    model = small_model()
    model.compile(backend=backend)
    train(model)
    whole = torch.compile(small_model(), backend=backend, fullgraph=True)
    train(whole)
    model = small_model()
    step = torch.compile(lambda batch: model(batch).square().mean(), backend=backend)
    train(model, loss_of=step)
    train(torch.compile(small_model(), backend="aot_eager"))
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    update = torch.compile(optimizer.step, backend="eager")
    for _ in range(3):
        model(torch.ones(2, 8)).sum().backward()
        update()
print("graphs", sorted(set(graphs)))
print([str(each.message)[:80] for each in warned])
print(sorted(str(key) for key in whole._modules), model[0].weight.sum().item())
