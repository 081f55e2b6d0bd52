"""A script that uses the GPU only when it is told to, by an option that people forget."""

import argparse
import json

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--accel", action="store_true", help="enables accelerator")
parser.add_argument("--ngpu", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--half-way", action="store_true", help="the batch visits the GPU, the model does not")
options = parser.parse_args()

model = nn.Linear(64, 64).to("cuda" if options.accel else "cpu")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    batch = torch.randn(options.batch_size, 64)
    if options.half_way:
        batch = batch.cuda().cpu()
    optimizer.zero_grad()
    model(batch.to(model.weight.device)).sum().backward()
    optimizer.step()
print(json.dumps([str(parameter.device) for parameter in model.parameters()]))
