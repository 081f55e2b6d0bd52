"""Training loops that catch everything that is raised, each in its way."""

import json
import sys

import torch
from torch import nn

ROUNDS = 12

device = sys.argv[2] if len(sys.argv) > 2 else "cpu"
model = nn.Linear(8, 8).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
steps: list[int] = []
"""The rounds that went through."""


def step(i: int) -> None:
    optimizer.zero_grad()
    model(torch.ones(4, 8, device=device)).sum().backward()
    optimizer.step()
    steps.append(i)


def train() -> None:
    for i in range(ROUNDS):
        step(i)


def each_batch() -> None:
    for i in range(ROUNDS):
        try:
            step(i)
        except:  # noqa: E722
            print("skipped a bad batch")


def once() -> None:
    try:
        train()
    except BaseException:
        print("interrupted")
    train()


def to_the_end() -> None:
    for i in range(ROUNDS):
        try:
            step(i)
        finally:
            if i == 2:
                break  # noqa: B012


def then_fails() -> None:
    try:
        train()
    except:  # noqa: E722
        print("interrupted")
    raise ValueError("no result")


def cleans_up() -> None:
    try:
        train()
    finally:
        model(torch.ones(1, 8, device=device))


{function.__name__: function for function in (each_batch, once, to_the_end, then_fails, cleans_up)}[sys.argv[1]]()
print(json.dumps(steps))
