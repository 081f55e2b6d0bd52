"""Optimizers whose state is quantized: those of bitsandbytes and of torchao."""

import argparse
from importlib import import_module

import torch
from sums import watch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("library", choices=("bitsandbytes", "torchao"))
parser.add_argument("optimizer")
parser.add_argument("--device", default="cuda")
given = parser.parse_args()
if given.device == "cpu":
    torch.compiler.set_stance("force_eager")  # as --assume compile=eager on a simulated GPU

torch.manual_seed(0)
layers = (nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 10))
model = nn.Sequential(*layers).to(given.device)
watch(model)
optimizer = getattr(import_module(f"{given.library}.optim"), given.optimizer)(model.parameters(), lr=1e-3)
for _ in range(2):
    with torch.autocast(given.device, dtype=torch.bfloat16):
        loss = model(torch.randn(8, 256, device=given.device)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
