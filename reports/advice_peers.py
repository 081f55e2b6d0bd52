"""What other tools choose to recompute in the models of advice_train.py, measured like ampmem's own choice."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from typing import Any
from unittest.mock import patch

import torch
from advice_train import SIZES, build, checkpoint_module, checkpointed, loss_of, tokens, train
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

import ampmem
from ampmem.workloads.gpt import GPT

EVERY = "every set of blocks"
BLOCKS = tuple(range(SIZES.layers))
_TRIFLE = 1e-4
"""GFLOPs of an op that counts none, such as a GELU, as recomputing it is not free. Without it the solver leaves such
ops out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A choice of what to recompute, its peak in a real run in bytes, and the FLOPs recomputed per step."""

    tool: str
    setting: str
    peak: int
    recomputed: int


def peak_of(make: Callable[[], nn.Module], forward: Callable[[Any], Any] | None = None) -> int:
    """The peak of all CPU tensors in bytes while the model from ``make`` is trained."""
    gc.collect()  # a checkpointed model refers to itself, so the one before would still count
    with ampmem.profile(device="cpu", stacks=False) as recorded:
        train(make(), forward)
    return recorded.summary().peak.said


def flops_of(make: Callable[[], nn.Module]) -> int:
    """The FLOPs of forward and backward of the model from ``make``, including recomputation."""
    with FakeTensorMode(), FlopCounterMode(display=False) as counted:
        loss_of(make(), tokens()).backward()
    return int(counted.get_total_flops())


def every_choice(name: str) -> Iterator[Choice]:
    """The choices that checkpoint each set of blocks."""
    plain = flops_of(partial(build, name))
    for count in range(len(BLOCKS) + 1):
        for blocks in combinations(BLOCKS, count):
            yield Choice(
                tool=EVERY,
                setting=", ".join(map(str, blocks)) or "none",
                peak=peak_of(partial(checkpointed, name, blocks)),
                recomputed=flops_of(partial(checkpointed, name, blocks)) - plain,
            )


def inductor(name: str, budgets: tuple[float, ...]) -> Iterator[Choice]:
    """The choices of ``torch.compile``'s partitioner for each ``activation_memory_budget``.

    The compiled graphs run op by op (``aot_eager_decomp_partition``), so only the partitioner's choice matters.
    """
    plain = flops_of(partial(build, name))
    for budget in budgets:
        peak, total = partitioned(name, budget)
        yield Choice(tool="activation_memory_budget", setting=str(budget), peak=peak, recomputed=total - plain)


def partitioned(name: str, budget: float) -> tuple[int, int]:
    """The peak in bytes of training a model compiled with ``budget``, and the FLOPs of its graphs."""
    counted: list[int] = []

    def kept(graph: fx.GraphModule, _: object) -> Any:
        counted.append(flops_of_graph(graph))
        return make_boxed_func(graph.forward)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=kept, bw_compiler=kept, partition_fn=min_cut_rematerialization_partition)
    with config.patch(activation_memory_budget=budget):
        model = build(name)
        forward = torch.compile(model, backend=backend)
        loss_of(forward, tokens()).backward()  # the peak must not contain the memory of compiling
        model.zero_grad()
        return peak_of(lambda: model, forward), sum(counted)


def flops_of_graph(graph: fx.GraphModule) -> int:
    """The FLOPs of all nodes of a traced graph."""
    total = 0
    for node in graph.graph.nodes:
        formula = flop_registry.get(getattr(node.target, "overloadpacket", None))
        if node.op == "call_function" and formula is not None:
            args, more = fx.node.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
            total += formula(*args, **more, out_val=node.meta["val"])
    return total


def sac_milp(name: str, shares: tuple[float, ...]) -> Iterator[Choice]:
    """The choices of ``torch.distributed._tools.sac_ilp`` for ``shares`` of its own estimate of the peak.

    Its cost model needs a GPU, so it gets FLOPs instead, which are compared here anyway.
    """
    from torch.distributed._tools import sac_ilp

    graph, estimator, peak = estimated(name)
    plain = flops_of(partial(build, name))
    for share in shares:
        chosen, _, estimate = sac_ilp.sac_milp(graph(), peak * share / 2**30)
        if estimate < 0:
            continue
        policies = {
            fqn: sac_ilp.get_optimal_checkpointing_policy_per_module(estimator.sac_mod_stats[fqn], 1 - discarded)
            for fqn, discarded in chosen.items()
        }
        yield Choice(
            tool="sac_milp",
            setting=f"{share:.0%} of its peak",
            peak=peak_of(partial(selectively, name, policies)),
            recomputed=flops_of(partial(selectively, name, policies)) - plain,
        )


def selectively(name: str, policies: Mapping[str, list[int]]) -> GPT:
    """One of the models, with the modules in ``policies`` checkpointed by their decisions."""
    model = build(name)
    for fqn, decisions in policies.items():
        checkpoint_module(model.get_submodule(fqn.removeprefix("GPT.")), context_fn=selective(decisions))
    return model


def estimated(name: str) -> tuple[Callable[[], Any], Any, int]:
    """A function that makes the graph for ``sac_milp``, the estimator with each module's ops, and the peak in bytes."""
    from torch.distributed._tools import ilp_utils
    from torch.distributed._tools.mem_tracker import MemTracker
    from torch.distributed._tools.runtime_estimator import RuntimeEstimator
    from torch.distributed._tools.sac_estimator import SACEstimator

    with patch.object(RuntimeEstimator, "_roofline_estimate", by_flops), FakeTensorMode():
        model = build(name)
        optimizer = torch.optim.AdamW(model.parameters())

        def step() -> None:
            loss_of(model, tokens()).backward()
            optimizer.step()
            optimizer.zero_grad()

        memory, runtime, estimator = MemTracker(), RuntimeEstimator(), SACEstimator()
        memory.track_external(model, optimizer)
        step()
        with memory:
            step()
        with runtime("operator-level-cost-model"):
            step()
        with estimator("operator-level-cost-model"):
            loss_of(model, tokens())
        info = ilp_utils.aggregate_stats(model, memory, runtime, estimator, torch.device("cpu"))
    peak, _ = ilp_utils.get_peak_memory_runtime_baseline(ilp_utils.parse_module_info(info))
    return lambda: ilp_utils.parse_module_info(info), estimator, peak


def by_flops(op: Any, args: Any, kwargs: Any) -> tuple[Any, float]:
    """The result of ``op``, and its GFLOPs in place of milliseconds, with a trifle for ops that count none."""
    result = op(*args, **(kwargs or {}))
    formula = flop_registry.get(op._overloadpacket)
    return result, _TRIFLE + (formula(*args, **(kwargs or {}), out_val=result) / 1e9 if formula else 0.0)


def selective(decisions: list[int]) -> Callable[[], Any]:
    """The checkpoint contexts of a block, which save the results of the ops whose decision is 1."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def contexts() -> Any:
        position = {False: 0, True: 0}

        def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
            again = context.is_recompute
            saved = decisions[position[again]]
            position[again] += 1
            return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    return contexts
