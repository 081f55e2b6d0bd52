"""The command line as a person meets it: in a process of its own."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
from support.command_line import ampmem_here, refused

from ampmem import __all__ as public_names
from ampmem import __version__
from ampmem.cli.main import SUBCOMMANDS, LazyGroup, group, main
from ampmem.errors import AmpmemError, RecordingError, UsageError


def ampmem(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ampmem", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


@pytest.mark.parametrize("name", ["profile", "check", "compare", "fit", "advise", "estimate"])
def test_every_command_calls_it_precision_and_nothing_else(name: str) -> None:
    command = group.get_command(click.Context(group), name)
    (option,) = [param for param in command.params if param.name in ("precision", "precisions")]
    assert option.opts == ["--precision"]


def test_help_lists_the_subcommands(tmp_path: Path) -> None:
    result = ampmem("--help", cwd=tmp_path)
    assert result.returncode == 0
    assert result.stderr == ""
    for name in SUBCOMMANDS:
        assert f"\n  {name} " in result.stdout


@pytest.mark.parametrize("name", SUBCOMMANDS)
def test_every_subcommand_has_help(name: str, tmp_path: Path) -> None:
    code, stdout, stderr = ampmem_here(tmp_path, name, "--help")
    assert (code, stderr) == (0, "")
    assert f"ampmem {name}" in stdout


@pytest.mark.parametrize("name", ["profile", "compare", "check", "fit"])
def test_help_groups_the_options_of_commands_that_run_a_script(name: str, tmp_path: Path) -> None:
    command = group.get_command(click.Context(group), name)
    (_, brief, _), (_, text, _) = (ampmem_here(tmp_path, name, option) for option in ("--help", "--help-all"))
    assert re.search(rf"ampmem {name} --help-all: (forced changes, )?files of the script\.", " ".join(brief.split()))
    assert "Files of the script:" in text and "Files of the script:" not in brief
    assert max(map(len, text.splitlines())) <= 80
    parts = re.split(r"^(\w[\w ]*):\n", text, flags=re.MULTILINE)
    sections = dict(zip(parts[1::2], parts[2::2], strict=True))
    assert set(sections) >= {"Script and precision", "GPU", "Steps", "Ranks", "Output", "Other"}
    assert {"--help", "--help-all"} <= set(sections.pop("Other").split())
    listed = re.findall(r"^  (-{1,2}[a-z][a-z-]*)", "".join(sections.values()), re.MULTILINE)
    options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
    assert sorted([*listed, "--help-all"]) == sorted(each.opts[0] for each in options)
    for section in sections.values():
        example = re.split(r"^  e\.g\. ampmem \w+ ", section, flags=re.MULTILINE)[1].partition("\n\n")[0]
        with command.make_context(name, shlex.split(example)) as context:
            assert context.params["script_or_module"] == "train.py"


def test_version(tmp_path: Path) -> None:
    code, stdout, stderr = ampmem_here(tmp_path, "--version")
    assert (code, stderr) == (0, "")
    assert __version__ in stdout


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["shwo", "x"], "No such command 'shwo'. Did you mean 'show'?"),
        (["profil"], "No such command 'profil'. Did you mean 'profile'?"),
        (["quantize"], "No such command 'quantize'."),
        (["train.py", "--x"], "No such command 'train.py'. Did you mean 'ampmem profile train.py'?"),
        (["gpt.ampmem"], "No such command 'gpt.ampmem'. Did you mean 'ampmem show gpt.ampmem'?"),
        (["profile", "--devise", "sim", "x.py"], "No such option '--devise'. Did you mean '--device'?"),
        (["profile", "--stpes", "3", "x.py"], "No such option '--stpes'. Did you mean '--steps'?"),
        (["show", "--moduels", "x"], "No such option '--moduels'. Did you mean '--modules'?"),
        (["show", "--qqqq", "x"], "No such option '--qqqq'."),
        (["report", "--opne", "x"], "No such option '--opne'. Did you mean '--open'?"),
    ],
)
def test_what_is_unknown_is_wrong_usage_and_the_nearest_is_named(
    arguments: list[str], meant: str, tmp_path: Path
) -> None:
    said = refused(tmp_path, *arguments).splitlines()[-1]
    assert said.startswith("Error: ") and said.endswith(meant)


@pytest.mark.parametrize("arguments", [("show", "gone.ampmem"), ("report", "gone.ampmem", "-o", "out.html")])
def test_a_missing_file_is_one_line_and_wrong_usage(arguments: tuple[str, ...], tmp_path: Path) -> None:
    assert refused(tmp_path, *arguments).splitlines() == ["ampmem: gone.ampmem does not exist"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["no-such-command"]])
def test_neither_torch_nor_plotly_is_imported_before_a_subcommand_is_chosen(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from ampmem.cli.main import main\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\n"
        "print('loaded:', *({'torch', 'plotly', 'numpy'} & set(sys.modules)))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert result.stdout.splitlines()[-1] == "loaded:"


def test_the_public_names_are_there_to_complete_before_they_are_imported() -> None:
    code = "import sys, ampmem\nprint(*dir(ampmem))\nprint('loaded:', *({'torch', 'ampmem.api'} & set(sys.modules)))\n"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    names, loaded = result.stdout.splitlines()
    assert {*public_names, "__name__"} <= set(names.split())
    assert loaded == "loaded:"


class Boom(Exception):
    """Not one of ampmem's errors: what a profiled script might raise."""


def exit_of(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> object:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(LazyGroup, "get_command", fail)
    monkeypatch.setattr(sys, "argv", ["ampmem", "show"])
    with pytest.raises(SystemExit) as caught:
        main()
    return caught.value.code


@pytest.mark.parametrize(("error", "code"), [(AmpmemError, 1), (RecordingError, 1), (UsageError, 2)])
def test_an_error_is_a_message_and_its_exit_code(
    error: type[AmpmemError], code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_of(error("what to do"), monkeypatch) == code
    assert capsys.readouterr().err == "ampmem: what to do\n"


def test_ctrl_c(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of(KeyboardInterrupt(), monkeypatch) == 130
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 3, "a message"])
def test_a_scripts_own_exit_goes_through(code: object, monkeypatch: pytest.MonkeyPatch) -> None:
    assert exit_of(SystemExit(code), monkeypatch) == code


@pytest.mark.parametrize("error", [Boom(), EOFError(), OSError("disk")])
def test_a_scripts_own_exception_goes_through(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(type(error)) as caught:
        exit_of(error, monkeypatch)
    assert caught.value is error


def test_a_reader_that_goes_away_is_no_error_message(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "ampmem", "--help"]
    with os.fdopen(writer, "wb") as stdout:
        result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, cwd=tmp_path, timeout=120)
    assert result.stderr == b""
    assert result.returncode == 1


def test_a_subcommand_that_is_none_is_not_found() -> None:
    with group.make_context("ampmem", ["show", "x"]) as context:
        assert group.get_command(context, "main") is None
        assert group.list_commands(context) == list(SUBCOMMANDS)
