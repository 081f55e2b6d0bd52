"""``ampmem completion``: its script, run by a shell, completes what can be typed, and quickly."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import get_completion_class
from support.command_line import ampmem_here, refused

from ampmem.allocator.gpus import GPUS
from ampmem.cli.main import SUBCOMMANDS, group

BASH = shutil.which("bash")

ASK = """
eval "$(ampmem completion bash)"
complete -p ampmem
compopt() { COMPREPLY=("$2 names of files"); }
while read -r line; do
    read -ra COMP_WORDS <<< "$line"
    [[ $line == *" " ]] && COMP_WORDS+=("")
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
    _ampmem_completion ampmem
    echo "$line: ${COMPREPLY[*]}"
done
"""
"""Runs the script, and then what it has given bash to call, for each line of standard input."""

TYPED = {
    "ampmem pro": "profile",
    "ampmem co": "compare completion",
    "ampmem ch": "check",
    "ampmem check --all": "--allow",
    "ampmem nothing --d": "",
    "ampmem profile --d": "--dtype --device",
    "ampmem profile --device c": "cuda cpu",
    "ampmem fit --gpu h": " ".join(name for name in GPUS if name.startswith("h")),
    "ampmem profile tr": "default names of files",
    "ampmem profile -m tr": "",
    "ampmem profile train.py --d": "",
    "ampmem profile train.py da": "default names of files",
    "ampmem report --o": "--output --open",
    "ampmem report tr": "default names of files",
    "ampmem completion z": "zsh",
}


@pytest.mark.slow
def test_every_word_can_be_completed_in_bash(tmp_path: Path) -> None:
    if BASH is None:
        pytest.skip("there is no bash")
    command = tmp_path / "ampmem"
    # What a key press is to answer must not wait for torch.
    command.write_text(
        f"#!{sys.executable}\nimport sys\nfrom ampmem.cli.main import main\ntry:\n    main()\n"
        "finally:\n    assert not {'torch', 'plotly'} & set(sys.modules), 'slow'\n"
    )
    command.chmod(0o700)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [BASH, "--norc", "-c", ASK],
        input="".join(f"{line}\n" for line in TYPED),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.stderr == ""
    first, *rest = done.stdout.splitlines()
    assert first.endswith("-F _ampmem_completion ampmem")
    assert rest == [f"{line}: {words}" for line, words in TYPED.items()]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_the_one_that_click_makes(shell: str, tmp_path: Path) -> None:
    made = get_completion_class(shell)
    code, stdout, stderr = ampmem_here(tmp_path, "completion", shell)
    assert (code, stderr) == (0, "")
    assert stdout == made(group, {}, "ampmem", "_AMPMEM_COMPLETE").source()
    program = shutil.which(shell)
    if program is not None:
        subprocess.run([program, "-n"], input=stdout, text=True, check=True, timeout=60)


def test_another_shell_is_wrong_usage(tmp_path: Path) -> None:
    assert ampmem_here(tmp_path, "completion", "tcsh")[0] == 2


def test_without_a_shell_there_is_a_clean_list_of_them(tmp_path: Path) -> None:
    said = refused(tmp_path, "completion")
    assert said.endswith("Choose from:\n    bash,\n    zsh,\n    fish\n")


def test_commands_are_completed_without_importing_one() -> None:
    context = click.Context(group)
    assert [item.value for item in group.shell_complete(context, "")] == list(SUBCOMMANDS)
