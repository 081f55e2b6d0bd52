"""``ampmem extension``: compiles the C++ extension that makes recording cheaper."""

from __future__ import annotations

import sys

import click

from ampmem.output import Terminal
from ampmem.units import counted


@click.command("extension")
@click.option("--remove", is_flag=True, help="Delete the compiled extensions of all torch versions.")
@click.option("--status", is_flag=True, help="Say what is compiled, for which torch, and what it replaces.")
def extension(remove: bool, status: bool) -> None:
    """Compile a C++ extension for the installed torch, which makes recording cheaper.

    Without the extension ampmem reads the memory events from torch.profiler and the CUDA allocator's history, and sees
    the ops of forward by a dispatch mode, which costs more. The recording has the same content either way. Compiling
    needs a C++ compiler, for the CUDA part also CUDA's headers, and takes half a minute; the result is one file in the
    user's cache folder, which every later recording with this torch uses. AMPMEM_EXTENSION=off leaves it out.
    """
    from ampmem.recorder.sources import extension as compiled

    terminal = Terminal(sys.stderr)
    if status:
        click.echo("\n".join(compiled.status()))
        return
    if remove:
        terminal.say(f"removed {counted(compiled.remove(), 'compiled extension')} from {compiled.folder()}")
        return
    terminal.say("compiling the extension, which takes half a minute")
    library = compiled.build()
    for message in compiled.left_out(library):
        terminal.say(message)
    click.echo(library)
