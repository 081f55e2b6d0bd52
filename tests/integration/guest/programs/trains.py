"""Nothing out of the ordinary: a model, an optimizer, three steps and what is left after them."""

import random

import torch
from _seen import digest, print_left_in_torch, print_random_state
from torch import nn

random.seed(0)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    loss = model(torch.randn(4, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
print("weights", digest([parameter.tolist() for parameter in model.parameters()]))
print_random_state()
print_left_in_torch(model)
