"""Inference in float32, in bfloat16, or under autocast, opened once or for each forward.

Counts the bytes of the parameters, and of the copies that autocast makes of those of the linear layers.
"""

import contextlib
import json
import sys

import torch
from torch import nn

BATCHES, WIDTH = 3, 64


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.hidden = nn.Linear(WIDTH, 2 * WIDTH)
        self.out = nn.Linear(2 * WIDTH, 10)

    def forward(self, tokens):
        return self.out(self.hidden(self.norm(self.embedding(tokens))).relu())


def main(how):
    model = Classifier().eval()
    if how == "half":
        model = model.bfloat16()
    if how == "frozen":
        model.requires_grad_(False)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=how in ("once", "each", "frozen"))
    with torch.no_grad(), autocast if how == "once" else contextlib.nullcontext():
        for _ in range(BATCHES):
            with contextlib.nullcontext() if how == "once" else autocast:
                model(torch.randint(10, (4, 8)))
    linear = [parameter for layer in (model.hidden, model.out) for parameter in layer.parameters()]
    size = sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps({"parameters": size, "cast": sum(2 * parameter.numel() for parameter in linear)}))


main(sys.argv[1])
