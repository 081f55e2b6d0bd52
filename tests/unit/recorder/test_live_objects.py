"""Looking at all objects, beside other threads."""

from __future__ import annotations

import sys
import threading

import torch
from torch import nn

from ampmem.recorder.models.live import live_objects

ROUNDS = 20


def test_modules_optimizers_and_tensors_are_found() -> None:
    class Own(nn.Linear):
        pass

    model = Own(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    found = live_objects()
    assert any(each is model for each in found.modules)
    assert any(each is optimizer for each in found.optimizers)
    assert any(each is model.weight for each in found.tensors)


def test_a_tuple_that_another_thread_is_making_is_not_held() -> None:
    errors: list[BaseException] = []
    over = threading.Event()

    def make_tuples() -> None:
        try:
            while not over.is_set():
                # Of unknown length: it is enlarged, which only its one owner can do.
                assert len(tuple(each for each in range(20))) == 20
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    threads = [threading.Thread(target=make_tuples) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for _ in range(ROUNDS):
            live_objects()
    finally:
        over.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert errors == []
