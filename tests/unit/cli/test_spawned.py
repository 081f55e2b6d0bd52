"""Scripts that start ranks themselves."""

import pytest

from ampmem.cli.processes.spawned import may_spawn


@pytest.mark.parametrize(
    ("source", "may"),
    [
        ("import torch.multiprocessing as mp\nmp.spawn(train, nprocs=2)", True),
        ("def main():\n    from torch.multiprocessing import start_processes\n    start_processes(train)", True),
        ("class Job:\n    def run(self):\n        return get_context('spawn').Process(target=train)", True),
        ("import multiprocessing\nmultiprocessing.Process(target=work).start()", False),
        ("print('nothing to spawn')", False),
    ],
)
def test_a_script_that_may_spawn_is_known_by_its_code(source: str, may: bool) -> None:
    assert may_spawn(compile(source, "train.py", "exec")) == may
