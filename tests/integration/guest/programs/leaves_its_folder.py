"""Works in a folder that is gone by the end."""

import os
import tempfile

from _training import train_alone

train_alone(1)
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    train_alone(2)
