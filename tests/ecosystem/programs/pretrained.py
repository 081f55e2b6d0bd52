"""A model saved to a folder, and loaded from there: safetensors, in FP32 or bfloat16, onto the GPU by device_map."""

import argparse
import tempfile

import torch
from models import MODELS
from sums import watch
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--dtype", default="float32")
parser.add_argument("--device-map", action="store_true")
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

made, batch = MODELS["llama"]()
with tempfile.TemporaryDirectory() as folder:
    made.save_pretrained(folder)
    where = {"device_map": given.device} if given.device_map else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, given.dtype), **where)
if not given.device_map:
    model.to(given.device)
del made
model.train()
watch(model)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    loss = model(**{name: tensor.to(given.device) for name, tensor in batch().items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
