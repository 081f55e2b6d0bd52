"""Overwrites what autograd saved, and prints what torch says of it, with anomaly mode and without."""

import sys
import warnings

import torch
from _training import small_model, train
from torch import Tensor, nn


class Overwriting(nn.Module):
    """Changes in place what an op keeps."""

    def __init__(self, change: str) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) + 1
        if self.change == "output":
            y = y.exp()
            y.add_(1)
        elif self.change == "input":
            z = y.square()
            y.mul_(2).add_(1)
            y = z
        elif self.change == "leaf":
            z = y @ self.linear.weight
            with torch.no_grad():
                self.linear.weight.zero_()
            y = z
        elif self.change == "view":
            z = y[:2].square()
            y.t().add_(1)
            y = z
        return y


torch.manual_seed(0)
train(small_model())
for anomaly in (False, True):
    for change in ("output", "input", "leaf", "view"):
        model = Overwriting(change)
        with torch.autograd.set_detect_anomaly(anomaly), warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                train(model)
            except RuntimeError as error:
                print(change, anomaly, error)
        for each in warned:
            print("warned", each.category.__name__, str(each.message).partition("\n")[0])
            print([line for line in str(each.message).splitlines() if "overwritten.py" in line])
print(file=sys.stderr)
