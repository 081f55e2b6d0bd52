"""Runs a script as it is, and writes down what torch.cuda says that it took; nothing of ampmem's recorder is there.

python tests/gpu/measured/plain.py RESULT.json SCRIPT [ARGS...]
"""

import json
import runpy
import sys
from pathlib import Path
from typing import Any

import torch


def main() -> None:
    """The script's own exit code, and the figures where it got to its end."""
    result, script, *arguments = sys.argv[1:]
    torch.cuda.init()
    free, total = torch.cuda.mem_get_info()
    figures: dict[str, Any] = {"at_start": total - free}
    sys.argv = [script, *arguments]
    try:
        runpy.run_path(script, run_name="__main__")
    except torch.cuda.OutOfMemoryError as error:
        figures["ran_out"] = " ".join(str(error).split())[:300]
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    figures |= {
        "allocated": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
        "outside": total - free - torch.cuda.memory_reserved(),
        "recorder": "ampmem.recorder.session" in sys.modules,
    }
    Path(result).write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
