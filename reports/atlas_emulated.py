"""Runs points of the atlas with PyTorch's own CUDA build on the emulated CUDA runtime, and says what they allocated.

    python tests/emulated/run.py --torch 2.13.0 --set "NAME=NVIDIA H100 80GB HBM3" \\
        --python reports/atlas_emulated.py --out emulated-points.json
    python reports/make_atlas.py --emulated emulated-points.json --page-only

The first needs transformers in that environment, or in a folder that PYTHONPATH names; the second puts the peaks into
atlas.json, beside those of the simulation. A peak is ``torch.cuda.max_memory_allocated()``: ampmem takes no part.
"""

from __future__ import annotations

import argparse
import json
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from atlas_train import ADAMW, AMP, FP32, Setting, train

MODELS = (
    "BERT base",
    "GPT-2",
    "T5 base",
    "ViT B/16",
    "nn.Transformer base",
    "ResNet-50",
    "VGG-16",
    "U-Net",
    "LSTM",
    "MLP-Mixer B/16",
)


def main() -> None:
    """Parse the command line and run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", metavar="NAME,...", default=",".join(MODELS))
    parser.add_argument("--batch", type=int, default=16, metavar="N")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    options = parser.parse_args()
    points = []
    for name in options.models.split(","):
        for precision in (FP32, AMP):
            setting = Setting(
                model=name, optimizer=ADAMW, checkpointing=False, precision=precision, batch=options.batch
            )
            points.append(in_own_process(setting))
            print(f"{name}, {precision}: {points[-1]['peak']} bytes", flush=True)
            options.out.write_text(json.dumps(points), encoding="utf-8")


def in_own_process(setting: Setting) -> dict[str, Any]:
    """The point of ``setting``, made in a process of its own, as libraries keep memory of models run before."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(made, setting).result()


def made(setting: Setting) -> dict[str, Any]:
    """The setting with the peak of two steps in bytes."""
    train(setting)
    return asdict(setting) | {"peak": torch.cuda.max_memory_allocated(), "torch": torch.__version__}


if __name__ == "__main__":
    main()
