"""What is suggested and not run saves what is computed once it is written in the script."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.commands import ampmem
from torch.torch_version import TorchVersion

from ampmem.analysis.analyse import analyse
from ampmem.analysis.findings.base import TrainingRun
from ampmem.analysis.suggested import Suggestion, suggestions
from ampmem.events import Recording
from ampmem.recording import read

pytestmark = pytest.mark.slow

SCRIPT = """
import torch
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.head = nn.Embedding(5000, 64), nn.Linear(64, 5000, bias={bias})

model = Model().cuda()
optimizer = torch.optim.{optimizer}(model.parameters())
for _ in range(3):
    tokens = torch.randint(5000, (4, 512), device="cuda")
    x, target = model.tokens(tokens), tokens
    {loss}
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOGITS = "logits = model.head(x); loss = F.cross_entropy(logits.flatten(0, 1), target.flatten())"
ELEMENTS = 4 * 512 * 5000


def recorded(folder: Path, loss: str, *, optimizer: str = "SGD", bias: bool = False) -> Recording:
    (folder / "train.py").write_text(SCRIPT.format(loss=loss, optimizer=optimizer, bias=bias))
    command = ("profile", "--device", "sim", "--seed", "0", "--steps", "2", "--quiet", "--force", "-o", "run.ampmem")
    done = ampmem(folder, *command, "train.py")
    assert done.returncode == 0, done.stderr
    return read(folder / "run.ampmem")


def peak(recording: Recording) -> int:
    """The most bytes that were requested: rounding may take away or add some MiB."""
    return int(analyse(recording).timeline.total.max())


def suggested(recording: Recording) -> tuple[Suggestion, ...]:
    return suggestions(TrainingRun(analysis=analyse(recording)))


def test_logits_that_are_let_go_of_save_what_is_computed(tmp_path: Path) -> None:
    plain = recorded(tmp_path, LOGITS)
    (said,) = [each for each in suggested(plain) if each.change.startswith("del logits ")]
    assert said == Suggestion(change="del logits after the loss, if nothing reads it later", saved_bytes=4 * ELEMENTS)
    assert peak(plain) - peak(recorded(tmp_path, f"{LOGITS}; del logits")) == said.saved_bytes


@pytest.mark.skipif(TorchVersion(torch.__version__) < "2.13", reason="this torch has no F.linear_cross_entropy")
@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_loss_saves_what_is_computed(tmp_path: Path, bias: bool) -> None:
    plain = recorded(tmp_path, LOGITS, bias=bias)
    (said,) = [each for each in suggested(plain) if "linear_cross_entropy" in each.change]
    call, _, rest = said.change.partition(" in place of ")
    assert rest == "model.head(x) and F.cross_entropy"
    saved = peak(plain) - peak(recorded(tmp_path, f"loss = {call}", bias=bias))
    # of the step before the logits, and of this one logits, log-softmax and two gradients of those
    assert 0 < said.saved_bytes <= 5 * 4 * ELEMENTS
    assert saved > 0.95 * said.saved_bytes, "and what else backward of the linear layer takes, as for a bias"


def test_a_loss_without_a_linear_layer_before_it_has_none_to_be_fused_with(tmp_path: Path) -> None:
    plain = recorded(tmp_path, "loss = (x.square() @ model.head.weight.T).flatten(0, 1).log_softmax(1)[:, 3].mean()")
    assert suggested(plain) == ()


def test_eight_bits_of_adams_moments_are_a_quarter(tmp_path: Path) -> None:
    loss = "loss = (x * x).mean() + model.head.weight.square().mean()"
    (said,) = suggested(recorded(tmp_path, loss, optimizer="AdamW"))
    moments = 2 * 2 * 5000 * 64 * 4
    assert said.change == "bitsandbytes.optim.AdamW8bit, which rounds the optimizer's state to 8 bits"
    assert said.saved_bytes == moments * 3 // 4
