"""The language model of ``ampmem.workloads.lm`` in the sizes and loops of a course whose students published theirs.

    python course_lm.py --layers 12 --heads 12 --width 768 --hidden 3072 --context 128 --mode step --optimizer torch
                        --loss torch --autocast float16 --warmup 5 --steps 1

Peaks begin anew after the warm-up, as in the published runs.
"""

import argparse
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ampmem.workloads import lm
from ampmem.workloads.lm import LM, ROPE_BASE, AdamW, Config, cross_entropy

VOCABULARY, BATCH = 10_000, 4


def parsed() -> argparse.Namespace:
    """What to run."""
    parser = argparse.ArgumentParser()
    for name in ("layers", "heads", "width", "hidden", "context"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--mode", choices=["inference", "forward", "backward", "step"], default="step")
    parser.add_argument("--optimizer", choices=["torch", "own"], default="own")
    parser.add_argument("--loss", choices=["torch", "own"], default="own")
    parser.add_argument("--autocast", choices=["float16", "bfloat16"])
    parser.add_argument("--all-in-autocast", action="store_true", help="the loss and backward, too")
    parser.add_argument("--checkpoint", type=int, default=0, help="so many blocks at a time are computed twice")
    parser.add_argument("--positions", action="store_true", help="look the rotations up by position")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1)
    return parser.parse_args()


class Rotation(nn.Module):
    """As the course has it: one table of cosines and sines, of which every call picks the rows of its positions."""

    table: Tensor

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(context), ROPE_BASE ** (-torch.arange(0, width, 2) / width))
        self.register_buffer("table", torch.stack((angles.cos(), angles.sin())), persistent=False)
        self.positions: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """``(..., time, width)`` to the same shape."""
        # The query's call makes the positions, the key's uses them.
        positions = torch.arange(x.shape[-2], device=x.device) if self.positions is None else self.positions
        self.positions = positions if self.positions is None else None
        cos, sin = self.table[:, positions].unbind(0)
        even, odd = x.reshape(*x.shape[:-1], -1, 2).movedim(-1, 0).unbind(0)
        turned = cos * even - sin * odd
        other = sin * even + cos * odd
        return torch.cat((turned.unsqueeze(-1), other.unsqueeze(-1)), dim=-1).flatten(-2)


class Checkpointed(LM):
    """The same model, which keeps nothing inside of ``group`` blocks."""

    group = 1

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids to logits."""
        x = self.tokens(tokens)
        for start in range(0, len(self.blocks), self.group):
            part = nn.Sequential(*self.blocks[start : start + self.group])
            x = checkpoint(part, x, use_reentrant=False)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor, how: str) -> Tensor:
    """The mean over all tokens."""
    if how == "own":
        return cross_entropy(logits, targets)
    return F.cross_entropy(logits.reshape(-1, VOCABULARY), targets.reshape(-1))


def run(options: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> None:
    """One iteration."""
    inputs, targets = batch
    kind = nullcontext() if options.autocast is None else torch.autocast("cuda", getattr(torch, options.autocast))
    optimizer.zero_grad(set_to_none=True)
    with torch.inference_mode() if options.mode == "inference" else nullcontext():
        with kind:
            logits = model(inputs)
            if options.mode in ("inference", "forward"):
                return
            if options.all_in_autocast:
                loss = loss_of(logits, targets, options.loss)
        if not options.all_in_autocast:
            loss = loss_of(logits, targets, options.loss)
        loss.backward()
        if options.mode == "step":
            optimizer.step()


def main() -> None:
    """The warm-up, then what is measured."""
    options = parsed()
    nn.init.trunc_normal_ = lambda tensor, **_: tensor  # values are not needed, and billions of them take minutes
    config = Config(
        vocabulary=VOCABULARY,
        context=options.context,
        layers=options.layers,
        heads=options.heads,
        width=options.width,
        hidden=options.hidden,
        batch_size=options.batch,
    )
    if options.positions:
        lm.RoPE = Rotation
    Checkpointed.group = options.checkpoint
    model = (Checkpointed if options.checkpoint else LM)(config).to("cuda")
    model.train()
    batch = torch.randint(VOCABULARY, (2, options.batch, options.context), device="cuda")
    kind = torch.optim.AdamW if options.optimizer == "torch" else AdamW
    optimizer = kind(model.parameters(), lr=1e-3)
    for _ in range(options.warmup):
        run(options, model, optimizer, batch)
    torch.cuda.reset_peak_memory_stats()
    for _ in range(options.steps):
        run(options, model, optimizer, batch)


if __name__ == "__main__":
    main()
