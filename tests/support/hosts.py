"""The examples of docs/trainers.md, each with what is to hold of it, in a process and a folder of its own."""

import os
import re
import subprocess
from pathlib import Path

from support.ready_python import ready_python

HERE = Path(__file__).parents[1] / "integration" / "integrations"
DOCS = HERE.parents[2] / "docs" / "trainers.md"

OFFLINE = {
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_OFFLINE": "1",
    "MLFLOW_ALLOW_FILE_STORE": "true",
    "MLFLOW_ASYNC_LOGGING_THREADPOOL_SIZE": "1",  # threads of its own trip over a folder that both make
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "TQDM_DISABLE": "1",
    "WANDB_MODE": "offline",
    "WANDB_SILENT": "true",
}


def example(name: str) -> str:
    """The example whose first line is the comment ``# name``."""
    (found,) = re.findall(rf"```python\n# {re.escape(name)}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.DOTALL)
    return str(found)


def check(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Put the example ``train_NAME.py`` into ``folder`` and run ``check_NAME.py`` there, without a network."""
    (folder / f"train_{name}.py").write_text(example(f"train_{name}.py"), encoding="utf-8")
    own = {"HOME": str(folder), "MLFLOW_TRACKING_URI": (folder / "mlruns").as_uri()}
    own |= {f"WANDB_{kind}_DIR": str(folder / "wandb-own") for kind in ("CACHE", "CONFIG", "DATA", "ARTIFACT")}
    paths = os.pathsep.join((str(folder), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, **OFFLINE, **own, "PYTHONPATH": paths}
    command = [ready_python(), str(HERE / f"check_{name}.py")]
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
