"""A warning that is to name the caller of the program, which has none."""

import warnings

import torch
from _training import small_model

small_model()(torch.ones(2, 8)).sum().backward()  # an optimizer would import half of torch
warnings.warn("for the caller", stacklevel=2)
warnings.filterwarnings("error", module="sys")
try:
    warnings.warn("as an error", stacklevel=2)
except UserWarning as warning:
    print("raised", warning)
