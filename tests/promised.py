"""Makes ``tests/data/VERSION``, what every later version must read: a recording, and JSON of each schema.

    python tests/promised.py VERSION

``tests/unit/test_promises.py`` reads the files, which never change once that version is released.
"""

import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory

SCRIPT = """
import argparse, torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
size = parser.parse_args().batch_size
device = "cuda" if torch.cuda.is_available() else "cpu"
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).to(device)
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(12):
    with torch.autocast(device, dtype=torch.bfloat16):
        loss = model(torch.ones(size, 64, device=device)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CONFIG = """
{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
 "vocab_size": 32000, "max_position_embeddings": 64}
"""
RECORDINGS = (
    "profile --gpu h100 --steps 2 -o run.ampmem train.py",
    "profile --gpu h100 --steps 2 -o large.ampmem train.py --batch-size 4096",
    "profile --gpu h100 --steps 2 --world-size 2 --rank 0 -o job.ampmem train.py",
    "watch --device cpu --every 10 -o watched.ampmem train.py",
)
DOCUMENTS = {
    "summary": "show --json run.ampmem",
    "ranks": "show --ranks --json job.rank0-of-2.ampmem",
    "watch": "show --json watched.ampmem",
    "diff": "diff --json run.ampmem large.ampmem",
    "check": "check --json --baseline run.ampmem --budget peak=1KiB large.ampmem",
    "fit": "fit --gpu h100 --points 2 --jobs 1 --precision fp32 --json train.py --vary --batch-size=4:8",
    "estimate": "estimate --gpu h100@600MiB --precision bf16 --batch 100 --jobs 1 --json config.json",
    "advise": "advise --gpu h100 --jobs 1 --json train.py",
}


def main(version: str) -> None:
    """Make the folder of ``version`` anew."""
    target = Path(__file__).parent / "data" / version
    target.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as name:
        folder = Path(name).resolve()
        (folder / "train.py").write_text(SCRIPT)
        (folder / "config.json").write_text(CONFIG)
        places = (f"{folder}/", *(f"{path}/" for path in sys.path if path.endswith("site-packages")))
        for command in RECORDINGS:
            _ampmem(folder, command)
        for document, command in DOCUMENTS.items():
            text = _ampmem(folder, command)
            for place in places:
                text = text.replace(place, "")
            (target / f"{document}.json").write_text(text)
        with closing(sqlite3.connect(folder / "run.ampmem", isolation_level=None)) as database:
            for place in places:
                database.execute("UPDATE text SET value = replace(value, ?, '')", (place,))
            database.execute("VACUUM")  # else the file keeps the places in its free pages
        shutil.copyfile(folder / "run.ampmem", target / "run.ampmem")


def _ampmem(folder: Path, command: str) -> str:
    """The standard output of ``ampmem`` with the words of ``command``, in ``folder``."""
    done = subprocess.run(
        [sys.executable, "-m", "ampmem", *command.split()], cwd=folder, capture_output=True, text=True
    )
    if done.returncode not in (0, 1):  # check exits with 1: the budget is broken
        sys.exit(f"ampmem {command}: {done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main(*sys.argv[1:])
