"""Seeding a script from outside, so that several runs of it start alike."""

from __future__ import annotations

import random

import numpy as np
import torch


def seed_everything(seed: int) -> None:
    """Seed the random numbers of Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def seed_anew() -> None:
    """Seed them from what the operating system has, as they are in a process that has just started."""
    random.seed()
    np.random.seed()
    torch.default_generator.seed()
