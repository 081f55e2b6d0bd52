"""How many allocator events per second of CPU time the model replays, under several settings.

Run it: ``python tests/benchmarks/allocator.py``. It fails below 300,000 with the default settings.
"""

import sys
import time

import numpy as np

from ampmem.allocator.caching import DeviceCachingAllocator
from ampmem.allocator.settings import MIB, Settings, parse_settings
from ampmem.allocator.trace import CallTrace, Operation, make_calls

STEPS = 20
LAYERS = 48
EVENTS_PER_SECOND = 300_000
ROUNDS = 3

SETTINGS = {
    "defaults": Settings(),
    "expandable_segments": parse_settings("expandable_segments:True"),
    "max_split_size": parse_settings("max_split_size_mb:128"),
    "roundup": parse_settings("roundup_power2_divisions:8"),
    "garbage collection": parse_settings("garbage_collection_threshold:0.8,per_process_memory_fraction:0.9"),
}


def training(random: np.random.Generator) -> CallTrace:
    """Forward, backward and optimizer of a model with many layers; activations differ a little by step."""
    rows: list[tuple[int, int, int, int]] = []
    count = 0

    def malloc(size: int) -> int:
        nonlocal count
        rows.append((Operation.MALLOC, count, size, 0))
        count += 1
        return count - 1

    def free(allocation: int) -> None:
        rows.append((Operation.FREE, allocation, 0, 0))

    weights = [int(size) for size in random.choice([2048, 4096, 3 * MIB, 12 * MIB, 16 * MIB], LAYERS * 6)]
    for size in weights:
        malloc(size)
    for _ in range(STEPS):
        activation = int(random.integers(4, 9)) * MIB
        saved: list[list[int]] = []
        for _ in range(LAYERS):
            kept = [malloc(activation + int(extra) * 1024) for extra in random.integers(0, 64, 12)]
            for size in random.integers(256, 65536, 10):
                scratch = malloc(int(size))
                kept.append(malloc(int(size) // 2 + 1))
                free(scratch)
            saved.append(kept)
        gradients = []
        for layer in range(LAYERS - 1, -1, -1):
            for allocation in saved[layer]:
                temporary = malloc(activation)
                free(allocation)
                free(temporary)
            gradients += [malloc(size) for size in weights[layer * 6 : layer * 6 + 6]]
        for gradient in gradients:
            free(gradient)
    return CallTrace.of_rows(rows)


def measure(trace: CallTrace, settings: Settings) -> float:
    """Events per second of CPU time, the best of some rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        allocator = DeviceCachingAllocator(settings, total_memory=80 << 30)
        began = time.process_time()
        result = make_calls(trace, allocator)
        best = min(best, time.process_time() - began)
        if result.out_of_memory is not None:
            raise AssertionError(str(result.out_of_memory))
    return len(trace) / best


def main() -> None:
    """Print a line per setting."""
    trace = training(np.random.default_rng(0))
    print(f"{len(trace):,} events")
    rates = {}
    for name, settings in SETTINGS.items():
        rates[name] = measure(trace, settings)
        print(f"{name:20} {rates[name]:12,.0f} events per second")
    sys.exit(0 if rates["defaults"] >= EVENTS_PER_SECOND else 1)


if __name__ == "__main__":
    main()
