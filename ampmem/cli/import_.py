"""``ampmem import``: a memory snapshot of PyTorch's as a recording."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import click

from ampmem.importer.recording import import_snapshot
from ampmem.output import Terminal, say_written
from ampmem.units import counted


@click.command("import", short_help="Convert a PyTorch memory snapshot into a recording.")
@click.argument("snapshot", metavar="SNAPSHOT.pickle", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    required=True,
    metavar="FILE.ampmem",
    type=click.Path(path_type=Path),
    help="The recording to write.",
)
@click.option(
    "--device",
    type=click.IntRange(min=0),
    metavar="N",
    help="The number of the GPU to import.  [default: the only one with a trace]",
)
@click.option("--force", is_flag=True, help="Replace the recording if it exists.")
def import_(snapshot: Path, output: Path, device: int | None, force: bool) -> None:
    """Convert a snapshot written by torch.cuda.memory._dump_snapshot into a recording.

    The import needs neither torch nor a GPU, and runs no code from the file. A snapshot does not name its blocks, so
    ampmem recognizes them by C++ frames if the snapshot has them (stacks="all"), and otherwise infers them from Python
    frames, sizes and lifetimes; the summary shows how much was inferred. A snapshot written by ampmem export becomes
    the original recording again.
    """
    gc.disable()  # importing makes no cycles, and looking for them takes a sixth of the time
    try:
        recording = import_snapshot(snapshot, output, device=device, force=force)
    finally:
        gc.enable()
    say_written(output)
    said = [f"{output}: {len(recording.events):,} events, {counted(len(recording.steps), 'step')}"]
    screen = Terminal(sys.stdout)
    for line in (*said, *(f"note: {note}" for note in recording.notes)):
        click.echo("\n".join(screen.broken(line)))
