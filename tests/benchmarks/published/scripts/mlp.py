"""Three square layers and two ReLUs, trained by SGD on 50 batches that stay on the GPU, first in FP32, then otherwise.

    python mlp.py WIDTH full|half|mixed|scaled [--gradients-stay] [--after PRECISION,...]

``half`` are float16 weights, ``mixed`` is float16 autocast, ``scaled`` that with a gradient scaler. Each precision has
a model of its own, made while the one before, and the last loss with its graph, are still there: ``--after`` names what
ran before. ``--gradients-stay``: ``zero_grad`` fills with zeros, as it did before torch 2.0. The peak is that of the
last.
"""

import argparse
import gc

import torch
from torch import nn

BATCH, BATCHES = 512, 50
STEPS = 3
"""More take no more."""

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("width", type=int)
parser.add_argument("precision", choices=["full", "half", "mixed", "scaled"])
parser.add_argument("--gradients-stay", action="store_true")
parser.add_argument("--after", default="")
options = parser.parse_args()

gpu = torch.device("cuda")
size = (BATCH, options.width)
batches = [torch.randn(size, device=gpu) for _ in range(BATCHES)]
wanted = [torch.randn(size, device=gpu) for _ in range(BATCHES)]
distance = nn.MSELoss().to(gpu)


def layers() -> nn.Sequential:
    """The model, on the CPU."""
    linear = [nn.Linear(options.width, options.width) for _ in range(3)]
    return nn.Sequential(linear[0], nn.ReLU(), linear[1], nn.ReLU(), linear[2])


# At the top level, where names live on from one precision to the next.
for precision in [*filter(None, options.after.split(",")), options.precision]:
    if precision == "half":
        model = layers()
        model.half().to(gpu)
    else:
        model = layers().to(gpu)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    scaler = torch.amp.GradScaler("cuda", enabled=precision == "scaled")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for batch, target in list(zip(batches, wanted, strict=True))[:STEPS]:
        if precision == "half":
            output = model(batch.half())
            loss = distance(output, target.half())
        else:
            with torch.autocast("cuda", torch.float16, enabled=precision in ("mixed", "scaled")):
                output = model(batch)
                loss = distance(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=not options.gradients_stay)
