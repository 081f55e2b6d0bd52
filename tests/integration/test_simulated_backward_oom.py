"""A simulated GPU that is full in backward: the script gets torch's error, from ``backward``, and can go on."""

from pathlib import Path

from support.commands import ampmem

from ampmem.recording import read

TRAINING = """
import torch
elements = 1 << 28  # 1 GiB each
a, b = (torch.nn.Parameter(torch.zeros(elements, device="cuda")) for _ in range(2))
loss = (a * b).sum()
print("forward", torch.cuda.max_memory_allocated() >> 30)
for attempt in range(2):
    try:
        loss.backward(retain_graph=True)
    except torch.cuda.OutOfMemoryError as error:
        print("caught", str(error).split(";")[0])
    a.grad = b.grad = None
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(torch.zeros(4, 8, device="cuda")).sum().backward()
    optimizer.step()
"""


def test_running_out_of_memory_in_backward_is_an_error_of_backward(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINING, encoding="utf-8")
    done = ampmem(tmp_path, "profile", "--device", "sim", "--gpu", "4GiB", "--quiet", "train.py")
    assert done.returncode == 0, done.stderr
    failure = "caught CUDA out of memory. Tried to allocate 1.0 GiB. The device has 4.0 GiB, of which "
    lines = done.stdout.splitlines()
    assert lines[0] == "forward 3"
    assert len(lines) == 3 and all(line.startswith(failure) for line in lines[1:])
    recording = read(tmp_path / "train.ampmem")
    assert [(oom.asked, oom.op) for oom in recording.ooms] == [(1 << 30, recording.ooms[0].op)] * 2
    assert sum(step.finished for step in recording.steps) == 3
