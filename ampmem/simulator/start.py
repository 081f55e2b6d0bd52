"""Installs the simulated device in this process, and removes it.

Everything that the device needs of torch is tested first, in a few milliseconds, before the script starts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from ampmem.allocator.gpus import GpuSpec
from ampmem.allocator.settings import GIB, settings_of_environment
from ampmem.errors import AmpmemError, UsageError
from ampmem.events import PredictionRecord
from ampmem.patching import SIMULATED_MODE, added, is_simulating
from ampmem.signals import SIGNALS
from ampmem.simulator.assumed import NOTHING, Assumed
from ampmem.simulator.device import DeviceEvent, SimulatedDevice
from ampmem.simulator.mode import SimulatedMode
from ampmem.simulator.private import general
from ampmem.simulator.private.general import holders, kernels_of_cuda, running_node
from ampmem.simulator.refusal import our_fault, refusal
from ampmem.simulator.scratch import convolutions
from ampmem.simulator.torch_cuda import attention, cuda, files, recurrent
from ampmem.simulator.where import stop, take_stops
from ampmem.simulator.world import World, enter

_HELD = (
    "a parameter cannot be moved to a simulated device while a scripted module has it; move the module to the device "
    "first, then call torch.jit.script"
)


class Simulation:
    """One simulated GPU until :meth:`end`, on this thread; one at a time.

    ``label`` is the simulated type of torch device. ``assumed`` are the user's assumptions about data. ``world`` is the
    rank and number of ranks of the script; without it there is no communication. ``saves`` says that the user's files
    are protected, so tensors without values can be saved; otherwise saving them is an error. ``cache`` is the folder
    for what ``torch.compile`` keeps, the user's own by default. Raises ``UsageError`` if torch lacks something, if it
    uses a real GPU already, or if a device is being simulated already.
    """

    def __init__(
        self,
        gpu: GpuSpec,
        *,
        label: str = "cuda",
        assumed: Assumed = NOTHING,
        world: World | None = None,
        saves: bool = False,
        cache: Path | None = None,
    ) -> None:
        _check_process()
        settings = settings_of_environment(os.environ)
        roomy = replace(gpu, total_memory=gpu.total_memory + GIB)  # the self-test must not run out of memory
        ungate = SIGNALS.hold()  # before the block that turns errors into refusals
        try:
            with ExitStack() as undo:
                undo.callback(ungate)
                general.load_compilers()
                undo.callback(_answer_for_cuda())
                with ExitStack() as trial:  # on a separate device: its allocations are not the script's
                    trial.callback(torch.set_rng_state, torch.get_rng_state())  # its layer draws random weights
                    tried = _install(SimulatedMode(SimulatedDevice(roomy, settings)), trial)
                    self_test(tried)
                self.device = SimulatedDevice(gpu, settings, label=label, environment=os.environ)
                if world is not None:
                    undo.callback(enter(world))
                take_stops()  # forget stops of an earlier block
                mode = _install(SimulatedMode(self.device, assumed, saves=saves), undo, world, cache)
                if label == "cuda":
                    undo.callback(files.install(mode))
                mode.accumulation.alone = tried.accumulation.alone
                self.work = mode.work
                self._undo = undo.pop_all()
        except AmpmemError:
            raise
        except (ImportError, AttributeError, KeyError) as error:  # torch has moved or removed a part
            raise refusal(error) from error
        except Exception as error:
            raise our_fault(error) from error

    def end(self) -> tuple[PredictionRecord, str]:
        """Remove the device; returns the prediction, and the last failed request in half a sentence.

        Tensors left on it cannot be used any longer: they have no values, and an op on one raises an error.
        """
        self._undo.close()
        failure = self.device.out_of_memory
        return self.device.prediction(), "" if failure is None else failure.report.in_short


def _check_process() -> None:
    if is_simulating():
        raise UsageError("a device is already simulated: leave that block first")
    if torch.cuda.is_initialized():
        raise UsageError(
            "this process already uses a real GPU, so it cannot simulate one: simulate in a separate process (ampmem "
            "profile --device sim SCRIPT), or hide the GPU with CUDA_VISIBLE_DEVICES="
        )


def _answer_for_cuda() -> Callable[[], None]:
    """Make torch's engine see a CUDA device; an error is blamed on this build of torch."""
    try:
        return general.install_cuda_device()
    except Exception as error:
        raise refusal(error) from error


def _install(
    mode: SimulatedMode, undo: ExitStack, world: World | None = None, cache: Path | None = None
) -> SimulatedMode:
    """Install everything that belongs to ``mode`` and its device."""
    device = mode.device_model
    undo.callback(general.keep_rules_of_dynamo())
    undo.callback(general.accept_foreach())
    undo.callback(attention.install(mode))
    if device.label == "cuda":
        undo.callback(kernels_of_cuda())
        undo.callback(cuda.install(mode, alone=world is None, cache=cache))
        undo.callback(recurrent.install(mode))
        undo.callback(general.convolutions_in_format(convolutions.memory_format))
    if world is not None:
        from ampmem.simulator.communication import install

        undo.callback(install(mode, world))
    undo.callback(general.without_device_context())
    undo.callback(general.nothing_runs_on_the_device())
    undo.callback(general.run_backward_here())
    undo.callback(general.swap_on_conversion(functools.partial(stop, _HELD)))
    undo.callback(general.keep_names_in_torchscript())
    mode.__enter__()
    undo.callback(added(*SIMULATED_MODE, functools.partial(_leave, mode)))
    return mode


def _leave(mode: SimulatedMode) -> None:
    mode.__exit__(None, None, None)
    mode.ended = True


def self_test(mode: SimulatedMode) -> None:
    """One step of training on fake tensors. Raises :class:`UsageError` if anything differs from a GPU.

    Also finds the reference counts of a gradient that only the engine holds.
    """
    try:
        _calibrate(mode)
        _name_node()
        _follow_stream(mode.device_model)
        _train()
    except UsageError:
        raise
    except Exception as error:
        raise refusal(error) from error


def _calibrate(mode: SimulatedMode) -> None:
    """Sum two gradients that only the engine holds, and two of which a hook keeps the first; compare the counts."""
    counts = mode.accumulation.seen = []
    try:
        x = torch.ones(8, device="cuda", requires_grad=True)
        holders(x)  # tested before backward, where the engine could not propagate the error
        (x * 2 + x * 3).backward(torch.ones(8, device="cuda"))
        kept: list[torch.Tensor] = []
        y = torch.ones(8, device="cuda", requires_grad=True)
        product = y * 2
        last = y * 3  # its gradient is computed first
        last.grad_fn.register_hook(lambda grads, _: kept.append(grads[0]))  # type: ignore[union-attr]
        (product + last).backward(torch.ones(8, device="cuda"))
    finally:
        mode.accumulation.seen = None
    if len(counts) != 2 or counts[1] == counts[0] or any(b < a for a, b in zip(*counts, strict=True)):
        raise refusal(f"the engine's sums of gradients cannot be told apart ({counts})")
    mode.accumulation.alone = counts[0]


def _name_node() -> None:
    """Test that a backward knows the running node."""
    seen: list[str] = []
    x = torch.ones(8, device="cuda", requires_grad=True)
    x.register_hook(lambda _: seen.append(running_node()[0]))
    (x * 2).sum().backward()
    if not seen or not seen[0]:
        raise refusal("the engine does not say which node runs")


def _follow_stream(device: SimulatedDevice) -> None:
    """Test that backward runs on the stream of its forward."""
    events: list[DeviceEvent] = []
    x = torch.ones(8, device="cuda", requires_grad=True)
    _ = x + 1  # a node before the change of stream, so that sequence numbers differ
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        product = x * 2
    total = product.sum()
    device.recorder = events.append
    total.backward()
    device.recorder = None
    streams = {event.stream for event in events if event.node.startswith("Mul")}
    if streams != {side.stream_id}:
        raise refusal("the engine does not say on which stream a node's forward ran")


def _train() -> None:
    model = nn.Linear(4, 4).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda")
    with torch.autocast("cuda", dtype=torch.float16):
        out = model(torch.ones(2, 4, device="cuda"))
        loss = out.float().sum()
    if out.dtype != torch.float16 or out.device.type != "cuda":
        raise refusal("autocast does not see the fake device")
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    if not optimizer.state:
        raise refusal("a GradScaler does not let its optimizer step")
