"""A LoRA adapter of peft on a frozen model."""

import argparse

import torch
from models import MODELS
from peft import LoraConfig, get_peft_model
from sums import watch

parser = argparse.ArgumentParser()
parser.add_argument("--bf16", action="store_true")
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

base, batch = MODELS["llama"]()
if given.bf16:
    base.to(torch.bfloat16)
model = get_peft_model(base, LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
model.to(given.device)
model.print_trainable_parameters()
model.train()
watch(model)
optimizer = torch.optim.AdamW(parameter for parameter in model.parameters() if parameter.requires_grad)
for _ in range(2):
    loss = model(**{name: tensor.to(given.device) for name, tensor in batch().items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
