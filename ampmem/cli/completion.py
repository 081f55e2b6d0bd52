"""``ampmem completion``: the code with which a shell completes ampmem's command line."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

from ampmem.cli.main import COMPLETION, PROGRAM, group

SHELLS = ("bash", "zsh", "fish")


@click.command("completion")
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print a script that makes a shell complete ampmem's commands and options.

    \b
    eval "$(ampmem completion bash)"                                          # in ~/.bashrc
    eval "$(ampmem completion zsh)"                                           # in ~/.zshrc
    ampmem completion fish > ~/.config/fish/completions/ampmem.fish
    """
    kind = get_completion_class(shell)
    assert kind is not None
    click.echo(kind(group, {}, PROGRAM, COMPLETION).source(), nl=False)
