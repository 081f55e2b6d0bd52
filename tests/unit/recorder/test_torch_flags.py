import os
import subprocess
import sys
from pathlib import Path

import pytest

from ampmem.recorder.sources.torch_flags import log_level, without_warnings

LATE = """
import torch
import ampmem

model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
batch = torch.ones(2, 4)
with ampmem.profile(output={path!r}, steps=1, device="cpu"):
    model(batch).sum().backward()
    del batch
    optimizer.step()
"""


def test_the_level_is_restored_whatever_happens() -> None:
    level = log_level()
    if level is None:
        pytest.skip("this torch does not export it")
    before = level.value
    with pytest.raises(KeyError), without_warnings():
        assert level.value > 1
        raise KeyError
    assert level.value == before


@pytest.mark.slow
def test_a_late_start_prints_nothing_of_torchs(tmp_path: Path) -> None:
    script = LATE.format(path=f"{tmp_path}/run.ampmem")
    environment = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True)
    assert "CPUAllocator" not in ended.stderr
