"""Inference with a key-value cache: no gradient anywhere. Counts the bytes of the parameters and of the cache."""

import json

import torch
from torch import nn

TOKENS, WIDTH = 6, 64


class Cache:
    def __init__(self):
        self.keys = [torch.zeros(1, 32, WIDTH)]


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.key = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, token, cache):
        cache.keys[0] = torch.cat([cache.keys[0], self.key(token)], dim=1)
        return self.out(cache.keys[0].mean(dim=1, keepdim=True))


@torch.no_grad()
def main():
    model, cache, token, sizes = Decoder().eval(), Cache(), torch.randn(1, 1, WIDTH), []
    for _ in range(TOKENS):
        token = model(token, cache)
        sizes.append(cache.keys[0].nbytes)
    size = sum(parameter.nbytes for parameter in model.parameters())
    print(json.dumps({"parameters": size, "cache": sizes}))


main()
