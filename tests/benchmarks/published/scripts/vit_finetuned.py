"""ViT-L/16 with ten classes, three steps of fine-tuning on 64 images of 224x224, and an evaluation.

    python vit_finetuned.py full|mixed|bfloat16

Adam. ``mixed`` is float16 autocast with a gradient scaler, ``bfloat16`` has weights and images of that type.
"""

import sys

import torch
from torch import nn
from torch.nn import functional
from xmem_cnn import models  # torchvision's, also where its kernels are for another build of torch

BATCH, CLASSES = 64, 10


def images(dtype: torch.dtype) -> torch.Tensor:
    """A batch of them on the device."""
    return torch.zeros(BATCH, 3, 224, 224).cuda().to(dtype)


def main() -> None:
    """Train."""
    mode = sys.argv[1]
    dtype = torch.bfloat16 if mode == "bfloat16" else torch.float32
    nn.init.trunc_normal_ = nn.init.normal_ = lambda tensor, *_, **__: tensor  # values are not needed
    model = models.vit_l_16()
    model.heads.head = nn.Linear(1024, CLASSES)
    model = model.to(dtype).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5)
    scaler = torch.amp.GradScaler("cuda", enabled=mode == "mixed")
    for _ in range(3):
        model.train()
        features, targets = images(dtype), torch.randint(CLASSES, (BATCH,)).cuda()
        with torch.autocast("cuda", torch.float16, enabled=mode == "mixed"):
            logits = model(features)
        loss = functional.cross_entropy(logits.float() if mode == "mixed" else logits, targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        model.eval()
        with torch.no_grad():
            torch.argmax(logits, 1)
    with torch.no_grad(), torch.autocast("cuda", torch.float16, enabled=mode == "mixed"):
        torch.argmax(model(images(dtype)), 1)


if __name__ == "__main__":
    main()
