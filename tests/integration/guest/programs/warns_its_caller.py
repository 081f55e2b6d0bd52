"""A warning that is to name the caller of the program, which has none."""

from __future__ import annotations

import warnings

from _training import train_alone

train_alone(1)
warnings.warn("for the caller", stacklevel=2)
warnings.filterwarnings("error", module="sys")
try:
    warnings.warn("as an error", stacklevel=2)
except UserWarning as warning:
    print("raised", warning)
