"""Starts another program, with code of its own between fork and exec; once there is no such program."""

import os
import subprocess

from _training import Training

training = Training()
training.step()
command = ["sh", "-c", "echo from the shell; exit 2"]
print(subprocess.run(command, preexec_fn=os.setpgrp, check=False, timeout=60).returncode, flush=True)
try:
    subprocess.run(["/there/is/no/such/program"], preexec_fn=os.setpgrp, check=False, timeout=60)
except OSError as error:
    print(error)
training.step()
training.step()
