"""A loop with accelerate."""

import argparse

import torch
from accelerate import Accelerator
from data import Rows
from models import MODELS
from sums import watch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

accelerator = Accelerator(mixed_precision="bf16" if given.bf16 else "no", cpu=given.device == "cpu")
model, _ = MODELS["bert"]()
model.train()
optimizer = torch.optim.AdamW(model.parameters())
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(Rows(8), batch_size=4, shuffle=True))
watch(model)
for batch in loader:
    loss = model(**batch).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print("loss", accelerator.gather(loss).mean().item())
