"""Functions and workloads profiled in this process, and what ampmem finds in them."""

import functools
import gc
import itertools
from collections.abc import Callable

import torch
from torch import nn

import ampmem
from ampmem.analysis.findings.base import Finding
from support import measure


def findings(profile: ampmem.Profile) -> dict[str, Finding]:
    found = profile.summary().findings
    assert len({finding.code for finding in found}) == len(found)
    for finding in found:
        assert finding.bytes is None or finding.bytes > 0
        assert finding.message.endswith(".") and finding.change and finding.evidence
    return {finding.code: finding for finding in found}


@functools.cache
def recorded(name: str, precision: str, **rest: int) -> ampmem.Profile:
    gc.collect()
    with ampmem.profile() as profile:
        measure.train(name, precision, **rest)
    return profile


def linears(*sizes: int) -> nn.Sequential:
    """Linear layers without bias between layers of these sizes."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(*pair, bias=False) for pair in itertools.pairwise(sizes)))


def profiled(step: Callable[[int], None], steps: int = 3) -> ampmem.Profile:
    gc.collect()
    with ampmem.profile() as profile:
        for index in range(steps):
            step(index)
    return profile
