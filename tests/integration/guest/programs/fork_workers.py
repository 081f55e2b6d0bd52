"""Workers of ``multiprocessing`` and of a ``DataLoader``, all forked, between the steps."""

import multiprocessing
import sys

import torch
from _training import PATIENCE_S, Training
from torch.utils.data import DataLoader, TensorDataset

forking = multiprocessing.get_context("fork")


def square(number: int) -> float:
    """Runs in a worker."""
    return float(torch.full((3,), number).square().sum())


def leave(code: int) -> None:
    """Runs in a child."""
    training.step("loss of the child")
    sys.exit(code)


training = Training()
training.step()
with forking.Pool(2) as pool:
    print(pool.map(square, range(4)), flush=True)
process = forking.Process(target=leave, args=(11,))
process.start()
process.join(PATIENCE_S)
print("exit code", process.exitcode, flush=True)
data = TensorDataset(torch.arange(8.0).reshape(4, 2))
for (batch,) in DataLoader(data, batch_size=2, num_workers=2, multiprocessing_context="fork"):
    print(batch.tolist(), flush=True)
training.step()
training.step()
