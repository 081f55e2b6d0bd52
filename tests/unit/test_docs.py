"""The documents are true where a machine can tell: links, commands, and the lists of what there is."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support.documents import PAGES, ROOT, code_in, commands, name_of, prose_of

from ampmem import __all__ as public_names
from ampmem import __version__, errors
from ampmem.allocator.gpus import GPUS
from ampmem.analysis.findings import CHECKS, OF_A_FAILURE, OF_INFERENCE, whole_run
from ampmem.analysis.timeline.categories import CATEGORIES
from ampmem.cli.main import SUBCOMMANDS, group

pytestmark = pytest.mark.skipif(not (ROOT / "reports").is_dir(), reason="no checkout: pages are missing")

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?) *$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to the headings of ``text``."""
    titles = (re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in _HEADING.findall(prose_of(text)))
    return set(titles)


def broken_links(page: Path) -> Iterator[str]:
    """Links within the project that lead nowhere."""
    for link in _LINK.findall(prose_of(page.read_text(encoding="utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (page.parent / file) if file else page
        if not target.exists():
            yield f"{link}: there is no such file"
        elif anchor and anchor not in anchors(target.read_text(encoding="utf-8")):
            yield f"{link}: there is no such heading"


def refused(line: str) -> str | None:
    """Why ``ampmem`` would not take the command ``line``; ``None`` when it would."""
    words = shlex.split(line, comments=True)[1:]
    name, *arguments = words
    if name.startswith("-"):
        return None
    if name not in SUBCOMMANDS:
        return f"there is no subcommand {name}"
    command = group.get_command(click.Context(group), name)
    context = click.Context(command, info_name=name, **command.context_settings)
    try:
        given, _, order = command.make_parser(context).parse_args(arguments)
        for parameter in order:
            if isinstance(parameter.type, (click.Choice, click.IntRange)):
                parameter.type_cast_value(context, given[parameter.name])
    except click.UsageError as error:
        return error.format_message()
    return None


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(broken_links(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_are_those_that_there_are(page: Path) -> None:
    lines = [line for command in commands(page.read_text(encoding="utf-8")) for line in command.of_ampmem]
    assert {line: why for line in lines if (why := refused(line))} == {}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_scripts_of_the_project_that_are_named_exist(page: Path) -> None:
    named = re.findall(r"\b(?:ampmem|tests|docs|reports|\.ci|\.github)/[\w./-]*\w", page.read_text(encoding="utf-8"))
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_checks_find_what_is_wrong(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](#a-title) [b](#b) [c](nowhere.md) [d](https://example.org)\n")
    assert list(broken_links(page)) == ["#b: there is no such heading", "nowhere.md: there is no such file"]
    assert refused("ampmem profile --steps 3 train.py --batch-size 8  # a remark") is None
    for wrong in (
        "ampmem prof x.py",
        "ampmem show --no-such x",
        "ampmem profile --precision half x.py",
        "ampmem report -o",
    ):
        assert refused(wrong)


def test_what_a_reader_types_is_found() -> None:
    text = """`ampmem show FILE` in a sentence, and `%ampmem` is a magic
```sh
python3 -m venv v && v/bin/ampmem show x | jq .
sqlite3 x.ampmem "
  SELECT 1"
ls
```
1. a list:

   ```
   $ ampmem fit
   ampmem says this
   ```

```yaml
  - run: cd base && ampmem check x.py
```
```python
import ampmem
```
`eval "$(ampmem completion bash)"`, `torchrun -m ampmem profile x.py`
"""
    found = [(command.line, command.text, command.of_ampmem) for command in commands(text)]
    assert found == [
        (3, "python3 -m venv v && v/bin/ampmem show x | jq .", ["ampmem show x"]),
        (4, 'sqlite3 x.ampmem "\n  SELECT 1"', []),
        (11, "ampmem fit", ["ampmem fit"]),
        (16, "cd base && ampmem check x.py", ["ampmem check x.py"]),
        (1, "ampmem show FILE", ["ampmem show FILE"]),
        (21, 'eval "$(ampmem completion bash)"', ["ampmem completion bash"]),
        (21, "torchrun -m ampmem profile x.py", ["ampmem profile x.py"]),
    ]
    assert [command.in_prose for command in commands(text)] == [False] * 4 + [True] * 3


def test_every_document_is_reached_from_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [page.name for page in ROOT.glob("docs/*.md") if f"(docs/{page.name}" not in readme] == []


def test_nothing_is_left_to_be_filled_in() -> None:
    gaps = {page.name: re.findall(r"\b[A-Z]{5,}$", prose_of(page.read_text()), re.MULTILINE) for page in PAGES}
    assert {name: words for name, words in gaps.items() if words} == {}


def test_the_page_of_the_python_api_is_as_the_docstrings_are() -> None:
    done = subprocess.run([sys.executable, "docs/make_api.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert done.stderr == ""


def test_the_page_of_the_python_api_has_every_public_name() -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    missing = [name for name in public_names if f"`ampmem.{name}" not in text]
    assert missing == ["__version__"]
    undocumented = [name for name in vars(errors) if name[0].isupper() and f"| `{name}` |" not in text]
    assert undocumented == []


def test_a_version_that_is_not_released_says_so() -> None:
    newest = re.findall(r"^## \[?([\w.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)[0]
    assert (".dev" in __version__) == (newest == "Unreleased")
    assert newest in ("Unreleased", __version__)


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_every_finding_is_explained() -> None:
    checks = (*CHECKS, *OF_INFERENCE, *OF_A_FAILURE, whole_run.out_of_memory, whole_run.residual)
    codes = {check.__name__.replace("_", "-") for check in checks} | {"amp-saves-nothing"}
    text = (ROOT / "docs" / "findings.md").read_text(encoding="utf-8")
    explained = {code for title in re.findall(r"^### (.+)$", text, re.MULTILINE) for code in code_in(title)}
    assert len(codes) > 10
    assert explained == codes


def test_every_category_is_named() -> None:
    words = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    assert [category for category in CATEGORIES if f"| `{category}` |" not in words] == []


def test_every_folder_is_on_the_map() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    folders = {
        path.parent.relative_to(ROOT / "ampmem").as_posix()
        for path in (ROOT / "ampmem").rglob("*")
        if path.suffix in (".py", ".js") and path.parent != ROOT / "ampmem"
    }
    assert len(folders) > 20
    assert [folder for folder in sorted(folders) if f"`{folder}/`" not in text] == []


def test_every_subcommand_and_every_simulated_gpu_is_in_a_document() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    assert [name for name in SUBCOMMANDS if f"ampmem {name}" not in pages] == []
    simulation = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
    assert [name for name in GPUS if f"`{name}`" not in simulation] == []
