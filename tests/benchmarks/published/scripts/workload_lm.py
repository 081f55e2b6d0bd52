"""``ampmem.workloads.lm`` on a GPU, measured from one of its steps on.

python workload_lm.py STEPS-BEFORE STEPS [--forward] [ARGUMENTS]...
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

from ampmem.workloads import lm


def leave(module: nn.Module, inputs: Any, output: Any) -> None:
    """End when the whole model has run."""
    if isinstance(module, lm.LM):
        sys.exit()


def main() -> None:
    """Peaks begin anew after so many steps; where that is none, when the model is on the device."""
    before, steps, arguments = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    nn.init.trunc_normal_ = lambda tensor, **_: tensor  # values are not needed, and billions of them take minutes
    build = lm.build
    forwards = 0

    def build_then_reset(*args: Any, **sizes: Any) -> Any:
        built = build(*args, **sizes)
        if before == 0:
            torch.cuda.reset_peak_memory_stats()
        return built

    def reset(step: int, loss: float) -> None:
        if step + 1 == before:
            torch.cuda.reset_peak_memory_stats()

    def reset_after_forward(module: nn.Module, inputs: Any, output: Any) -> None:
        nonlocal forwards
        if isinstance(module, lm.LM):
            forwards += 1
            reset(forwards - 1, 0.0)
            if forwards == before + steps:
                sys.exit()

    lm.build, lm.report_step = build_then_reset, reset
    if "--forward" in arguments:
        arguments.remove("--forward")
        register_module_forward_hook(leave)
    if "--inference" in arguments:
        register_module_forward_hook(reset_after_forward)
    lm.main(["--preset", "full", "--device", "cuda", "--steps", str(before + steps), *arguments])


if __name__ == "__main__":
    main()
