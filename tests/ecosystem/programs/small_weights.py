"""A frozen layer whose weight is quantized, by bitsandbytes or by torchao, with a trained adapter beside it."""

import argparse

import torch
from sums import watch
from torch import Tensor, nn


class Adapted(nn.Module):
    """``base`` with an adapter of low rank, and a head."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base, self.head = base, nn.Linear(512, 10)
        self.down, self.up = nn.Linear(256, 8, bias=False), nn.Linear(8, 512, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.base(x) + self.up(self.down(x)))
        return out


def quantized(kind: str, device: str) -> nn.Module:
    if kind in ("4bit", "8bit"):
        from bitsandbytes.nn import Linear4bit, Linear8bitLt

        if kind == "4bit":
            layer = Linear4bit(256, 512, compute_dtype=torch.bfloat16, quant_type="nf4")
        else:
            layer = Linear8bitLt(256, 512, has_fp16_weights=False)
        return Adapted(layer.requires_grad_(False)).to(device)
    model = Adapted(nn.Linear(256, 512)).to(device)
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        model.base.requires_grad_(False)
        quantize_(model.base, Int8WeightOnlyConfig())
    else:
        from torchao.float8 import convert_to_float8_training

        convert_to_float8_training(model, module_filter_fn=lambda _, name: name == "base")
    return model


parser = argparse.ArgumentParser()
parser.add_argument("kind", choices=("4bit", "8bit", "int8", "float8"))
parser.add_argument("--device", default="cuda")
given = parser.parse_args()

torch.manual_seed(0)
model = quantized(given.kind, given.device)
watch(model)
optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)
for _ in range(2):
    with torch.autocast(given.device, dtype=torch.bfloat16):
        loss = model(torch.randn(16, 256, device=given.device)).float().square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print("loss", loss.item())
