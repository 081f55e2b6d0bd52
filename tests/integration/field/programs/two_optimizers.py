"""Two models with an optimizer each, updated in the order that the argument says: ``AABB``.

With ``both`` as the second argument, both models run before every update, as in a GAN; with ``thread`` another
thread trains B once, while A trains here. Counts the updates that this thread makes.
"""

import json
import sys
import threading

import torch
from torch import nn


def main():
    order, how = sys.argv[1], sys.argv[2]
    models = {name: nn.Linear(16, 16) for name in "AB"}
    optimizers = {name: torch.optim.SGD(model.parameters(), lr=0.1) for name, model in models.items()}

    def train(name):
        x = torch.randn(4, 16)
        if how == "both":
            other = "B" if name == "A" else "A"
            x = models[other](x).detach()
        optimizers[name].zero_grad()
        models[name](x).square().mean().backward()
        optimizers[name].step()

    if how == "thread":
        worker = threading.Thread(target=train, args=("B",))
        worker.start()
        worker.join()
    for name in order:
        train(name)
    print(json.dumps({"updates": len(order)}))


main()
