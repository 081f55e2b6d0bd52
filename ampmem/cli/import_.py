"""``ampmem import``: a memory snapshot of PyTorch's as a recording."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import click

from ampmem.importer.recording import import_snapshot
from ampmem.output import Terminal, say_written


@click.command("import", short_help="Turn a memory snapshot of PyTorch's into a recording.")
@click.argument("snapshot", metavar="SNAPSHOT.pickle", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", required=True, metavar="FILE.ampmem", type=click.Path(path_type=Path), help="The recording."
)
@click.option(
    "--device", type=click.IntRange(min=0), metavar="N", help="Which GPU.  [default: the one that has a trace]"
)
@click.option("--force", is_flag=True, help="Replace the recording when it exists already.")
def import_(snapshot: Path, output: Path, device: int | None, force: bool) -> None:
    """Turn what torch.cuda.memory._dump_snapshot wrote into a recording.

    Needs neither torch nor a GPU, and runs nothing that the file holds. A snapshot names nothing, so what its
    blocks are is told by C++ frames where there are any (stacks="all"), and else concluded from Python frames,
    sizes and lifetimes; the summary says how much was concluded. A snapshot that ampmem export wrote gives back
    the recording that it was made from.
    """
    gc.disable()  # importing makes no cycles, and looking for them takes a sixth of the time
    try:
        recording = import_snapshot(snapshot, output, device=device, force=force)
    finally:
        gc.enable()
    say_written(output)
    steps = len(recording.steps)
    said = [f"{output}: {len(recording.events):,} events, {steps} step{'' if steps == 1 else 's'}"]
    screen = Terminal(sys.stdout)
    for line in (*said, *(f"note: {note}" for note in recording.notes)):
        click.echo("\n".join(screen.broken(line)))
