"""A loop in plain PyTorch, written around models of transformers, with autocast of its own."""

import argparse

import torch
from models import MODELS
from sums import watch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("model", choices=sorted(MODELS))
parser.add_argument("--checkpointing", action="store_true")
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

torch.manual_seed(0)
model, batch = MODELS[given.model]()
model.to(given.device).train()
if given.checkpointing:
    model.gradient_checkpointing_enable()
watch(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(2):
    inputs = {name: tensor.to(given.device) for name, tensor in batch().items()}
    with torch.autocast(given.device, dtype=torch.bfloat16):
        loss = model(**inputs).loss
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
