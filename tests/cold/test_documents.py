"""Every command line and every piece of Python in README.md and docs/ runs from the installed wheel.

What is new in a page is found and run without a line here. A page may take something for granted: a model, a name that
stands for a file. What that is stands in the tables below, and each of their entries has to occur in the pages. Each
subcommand is tried on the CPU, on a simulated GPU, with two ranks, and as one of eight simulated ranks, but for what a
command of the documents tries already.
"""

import functools
import itertools
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import click
import nbformat
import pytest
from support.cold import CHANGED, RANK_OF_8, SIM, TRAIN, Cold, outputs_of, way_of, words_of
from support.documents import PAGES, ROOT, Command, blocks, commands, name_of

from ampmem.cli.main import SUBCOMMANDS, group

pytestmark = pytest.mark.slow

TRIED = [page for page in PAGES if page == ROOT / "README.md" or page.parent == ROOT / "docs"]
NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


@dataclass(frozen=True, slots=True, kw_only=True)
class NotAsItStands:
    """A command that does not run as it stands, and why; ``instead`` is the nearest one that does."""

    why: str
    instead: str | None = None


_BF16 = "minutes on a CPU that has no instructions for bfloat16; the same with the smallest model and no timed runs"
_TIMES = "most of it is runs to time the steps; README.md's compares train.py with them"
_SEARCH = "most of it is runs of every change, which test_advise_command.py runs too; here of one kind"
_RANKS = "while files are protected each rank of each run is a bare interpreter, as in `check` with two ranks"
_OF_CHECKOUT = "made by .ci/run, which installs the wheel"
_WITH_PEFT = NotAsItStands(
    why="it needs transformers, peft and bitsandbytes, and minutes; test_estimate_command.py has small models"
)
EXCEPTIONS: Mapping[str, NotAsItStands] = {
    "python3 -m venv .venv": NotAsItStands(why=_OF_CHECKOUT),
    ".venv/bin/pip install -c constraints.txt .": NotAsItStands(why=_OF_CHECKOUT),
    "pip install memory/ampmem-*.whl": NotAsItStands(why=_OF_CHECKOUT),
    "ampmem compare -m ampmem.workloads.gpt": NotAsItStands(
        why=_BF16, instead="ampmem compare --no-times -m ampmem.workloads.gpt --preset tiny"
    ),
    "ampmem compare -m ampmem.workloads.reuse": NotAsItStands(
        why=_BF16, instead="ampmem compare --no-times -m ampmem.workloads.reuse --preset tiny"
    ),
    "ampmem fit --gpu 24GiB train.py --vary --batch-size=1:512": NotAsItStands(
        why="minutes for all precisions and the curve; here one precision and no curve",
        instead="ampmem fit --gpu 24GiB --precision amp --points 0 train.py --vary --batch-size=1:512",
    ),
    "ampmem fit --gpu h100 train.py --vary --batch-size=1:512": NotAsItStands(
        why="minutes for all precisions and the curve; here one precision and no curve",
        instead="ampmem fit --gpu h100 --precision as-is --points 0 train.py --vary --batch-size=1:64",
    ),
    "ampmem compare --nproc-per-node 2 train.py": NotAsItStands(
        why=f"{_TIMES}; {_RANKS}",
        instead="ampmem compare --no-times --files write --precision fp32,amp --nproc-per-node 2 train.py",
    ),
    "ampmem compare --precision fp32,amp --dtype fp16 -o run train.py": NotAsItStands(
        why=_TIMES, instead="ampmem compare --no-times --precision fp32,amp --dtype fp16 -o run train.py"
    ),
    "ampmem advise --gpu h100 --budget 10GiB -m ampmem.workloads.gpt --preset full --device cuda": NotAsItStands(
        why="minutes; with the smallest model, and changes of one kind",
        instead="ampmem advise --gpu h100 --budget 10GiB --allow checkpoint -m ampmem.workloads.gpt --preset tiny "
        "--device cuda",
    ),
    "ampmem advise --gpu 24GiB train.py": NotAsItStands(
        why=_SEARCH, instead="ampmem advise --gpu 24GiB --allow checkpoint,fused train.py"
    ),
    "ampmem advise --gpu h100 --budget 24GiB train.py": NotAsItStands(
        why=_SEARCH, instead="ampmem advise --gpu h100 --budget 24GiB --allow checkpoint train.py"
    ),
    "ampmem advise --gpu h100 --world-size 8 --budget 24GiB train.py": NotAsItStands(
        why=_SEARCH, instead="ampmem advise --gpu h100 --world-size 8 --budget 24GiB --allow fused train.py"
    ),
    "ampmem advise --device cpu --nproc-per-node 2 train.py": NotAsItStands(
        why=f"{_SEARCH}; {_RANKS}",
        instead="ampmem advise --device cpu --nproc-per-node 2 --files write --allow fused train.py",
    ),
    "ampmem profile --force-compile true": NotAsItStands(
        why="Inductor's C++ takes half a minute to compile, as in test_compiled.py; a simulated GPU's kernels do not",
        instead="ampmem profile --gpu h100 --force-compile true train.py",
    ),
    "ampmem advise --html advise.html train.py": NotAsItStands(
        why=_SEARCH, instead="ampmem advise --html advise.html --allow checkpoint train.py"
    ),
    "ampmem estimate llama-3.1-8b --gpu 24GiB --lora 16 --quantize nf4 --checkpointing --write train.py": _WITH_PEFT,
    "ampmem estimate llama-3.1-8b --gpu 24GiB --lora 16": _WITH_PEFT,
    "ampmem estimate --json": _WITH_PEFT,
    "ampmem report estimate.json": _WITH_PEFT,
    "ampmem profile --gpu 24GiB train.py --method nf4 --precision bf16 --batch 3": _WITH_PEFT,
    "ampmem fit --gpu 24GiB --precision as-is train.py --vary --seq=512:4096": _WITH_PEFT,
    "ampmem compare --gpu 80GiB --precision fp32,amp train.py --method lora --precision fp32": _WITH_PEFT,
    "ampmem extension": NotAsItStands(why="it needs a C++ compiler; test_extension runs it where there is one"),
    "ampmem show --ranks --json": NotAsItStands(
        why="a reader has a job's recordings", instead="ampmem show --ranks --json train.rank*"
    ),
    "ampmem check --device sim --gpu h100 train.py": NotAsItStands(
        why="it shows what is said of a misspelled table, and ends with 1",
        instead="printf '[tool.ampmem.budgets.\"trian.py\"]\npeak = 1\n' > pyproject.toml "
        "&& ! ampmem check --device sim --gpu h100 --budget peak=1GiB train.py",
    ),
    "ampmem profile --device sim --gpu h100 --world-size 64 --steps 2 tests/benchmarks/llama_70b.py": NotAsItStands(
        why="a minute; and the script is the checkout's, which an installed wheel has not"
    ),
}
"""The one table of what is not run as it stands. A part of a line, between ``&&``, may be left out too."""

STANDS_FOR: Mapping[str, str] = {
    "FILE": "train.ampmem",
    "FILE...": "train.ampmem",
    "BEFORE": "main.ampmem",
    "AFTER": "now.ampmem",
    "X.json": "summary.json",
}
"""What a reader puts in the place of a word in capitals."""

MENTIONS: Mapping[str, tuple[str, str]] = {
    "profile": ("", "train.py"),
    "compare": ("", "train.py --batch-size 8"),
    "check": ("", "train.ampmem"),
    "show": ("", "train.ampmem"),
    "diff": ("", "main.ampmem now.ampmem"),
    "fit": ("--gpu h100 --precision as-is --points 0 --vary --batch-size=4:8", "train.py"),
    "import": ("-o run.ampmem", "snapshot.pickle"),
    "export": ("--format csv -o run.out", "run.ampmem"),
    "watch": ("", "train.py"),
    "advise": ("--gpu h100 --allow checkpoint", "train.py"),
    "top": ("", "train-watch.ampmem"),
}
"""What a reader adds to a command that a sentence names without its files: options before, files behind."""

_OUT_OF_MEMORY = "ampmem profile --device sim --gpu 1GiB -m ampmem.workloads.gpt --device cuda --batch-size 24"
EXITS: Mapping[str, tuple[int, str]] = {
    _OUT_OF_MEMORY: (1, ""),
    "pytest --ampmem": (1, "1 failed, 3 passed"),
    "pytest --ampmem-baseline memory --ampmem-update": (1, "1 failed, 3 passed"),
    "pytest --ampmem-baseline memory": (1, "growth 256.0 KiB in each step"),
}
"""Commands that are not to end with 0, since a script or a test is to fail. Their exit code, and what they print."""

BARE = frozenset(
    {
        "ampmem profile train.py",
        "ampmem profile --gpu h100 train.py",
        "ampmem profile --nproc-per-node 2 train.py",
        "ampmem profile --device sim --gpu h100 --world-size 64 train.py",
        "ampmem compare --no-times --precision fp32,amp --dtype fp16 -o run train.py",
        "ampmem check --device sim --budget peak=20GiB train.py",
        "ampmem advise --gpu 24GiB --allow checkpoint,fused train.py",
        "ampmem watch train.py",
        "torchrun --nproc-per-node 2 -m ampmem profile train.py",
        "accelerate launch -m ampmem profile train.py",
        "pytest --ampmem",
    }
)
"""The commands that run a script, or tests, in a bare interpreter: the others repeat them. Of fit `RUNS` has one."""

_HOSTS = "accelerate,lightning,pytest,transformers tensorboard pandas"
"""One environment for all of them: making one takes as long as several commands."""
EXTRAS: Mapping[str, str] = {
    "accelerate launch": _HOSTS,
    "pytest": _HOSTS,
    "docs/pytest.md": _HOSTS,
    "docs/recording.md": _HOSTS,
    "docs/trainers.md": _HOSTS,
    "docs/notebooks.md": "notebook",
}
"""What is installed beside the wheel for a command that begins so, or for the Python of a page."""

_LOOP = """
import torch
from torch.nn import functional

model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
loader = torch.randn(4, 2, 8)


def train_on(batch):
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
BEFORE: Mapping[str, str] = {
    "README.md": _LOOP,
    "docs/watch.md": _LOOP,
    "docs/notebooks.md": """
import torch
from torch.nn import functional

network = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(network.parameters())
loader = [(torch.randn(2, 8), torch.tensor([0, 1])) for _ in range(4)]


def train(network, steps):
    optimizer = torch.optim.AdamW(network.parameters())
    for _ in range(steps):
        network(torch.randn(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "docs/pytest.md": """
import torch
from torch.utils.checkpoint import checkpoint


def train(checkpointing):
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    model = torch.nn.Sequential(*(each for layer in layers for each in (layer, torch.nn.GELU()))).cuda()
    optimizer = torch.optim.SGD(model.parameters())
    for _ in range(3):
        x = torch.randn(4096, 64, device="cuda")
        (checkpoint(model, x, use_reentrant=False) if checkpointing else model(x)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    "docs/simulation.md": """
import ampmem
import torch


class Model(torch.nn.Linear):
    def __init__(self):
        super().__init__(8, 8)


def train(model):
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.randn(2, 8, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
""",
}
"""The Python that a page takes for granted, put before what names what it does not make."""
ELLIPSIS: Mapping[str, str] = dict.fromkeys(("README.md", "docs/watch.md"), "train_on(batch)")
"""What stands for ``...`` in the Python of a page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """What is run of a command: ``line``, for all the ``places`` in the pages that have it; ``page`` is the first."""

    line: str
    page: str
    places: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.places[0]} {self.line.splitlines()[0]}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Snippet:
    """A block of Python, or the cells of a page as a notebook."""

    page: str
    line: int
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def parts_of_line(text: str) -> list[str]:
    """The commands that ``&&`` joins in a line, without the remark behind them."""
    return re.sub(r"  +# .*$", "", text).split(" && ")


def parts_of(command: Command) -> list[str]:
    """The parts of a line that run, one after another; of the exceptions their substitutes, or nothing."""
    kept = []
    for part in parts_of_line(command.text):
        exception = EXCEPTIONS.get(part)
        if exception is None or exception.instead is not None:
            kept.append(part if exception is None or exception.instead is None else exception.instead)
    return [completed(re.sub(r"^\S+/(?=ampmem )", "", part), mention=command.in_prose) for part in kept]


def completed(line: str, *, mention: bool) -> str:
    """``line`` with what a reader adds to a mention, and with names of files for words that stand for them."""
    line = re.sub(r"(?<!\S)[A-Z]+(?:\.\.\.|\.json)?(?!\S)", lambda word: STANDS_FOR.get(word[0], word[0]), line)
    head = re.match(r"ampmem ([a-z]+)", line)
    if head is None or not mention or head[1] not in MENTIONS or not lacks_files(line):
        return line
    first, last = MENTIONS[head[1]]
    return " ".join(filter(None, (head[0], first, line[head.end() :].strip(), last)))


def lacks_files(line: str) -> bool:
    """Whether a command of ampmem's names no script and no file, and no option that does without."""
    name, *arguments = words_of(line)[1:]
    command = group.get_command(click.Context(group), name)
    assert command is not None
    context = click.Context(command, info_name=name, **command.context_settings)
    given, rest, _ = command.make_parser(context).parse_args(arguments)
    positional = [given[each.name] for each in command.params if isinstance(each, click.Argument)]
    eager = any(each.is_eager and given.get(str(each.name)) for each in command.params)
    words = [word for each in positional for word in (each if isinstance(each, tuple) else (each,))]
    return not eager and not rest and not any(isinstance(word, str) for word in words)


def tried() -> Iterator[Tried]:
    """Each command of the pages once."""
    found: dict[str, list[str]] = {}
    for page in TRIED:
        for command in commands(page.read_text(encoding="utf-8")):
            line = " && ".join(parts_of(command))
            if line:
                found.setdefault(line, []).append(f"{name_of(page)}:{command.line}")
    for line, places in found.items():
        yield Tried(line=line, page=places[0].partition(":")[0], places=tuple(places))


_SCRIPT = re.compile(r"\bampmem (profile|compare|check|fit|advise|watch) .*(\.py\b|-m )|^pytest")
"""Commands that run a script, or tests."""


def is_bare(line: str) -> bool:
    """Whether a command has nothing imported before it: :data:`BARE`, and of each subcommand the first without one."""
    if _SCRIPT.search(line):
        return line in BARE
    return not line.startswith("ampmem ") or line in first_without_a_script()


@functools.cache
def first_without_a_script() -> frozenset[str]:
    """Of each subcommand the first command of the pages that runs no script."""
    lines = [each.line for each in tried() if each.line.startswith("ampmem ") and not _SCRIPT.search(each.line)]
    return frozenset({line.split()[1]: line for line in reversed(lines)}.values())


def snippets() -> Iterator[Snippet]:
    """Each block of Python that is run by itself; tests of pages are run by the commands of their page."""
    for page in TRIED:
        for block in blocks(page.read_text(encoding="utf-8")):
            if block.language == "python" and not block.text.startswith("%") and "def test_" not in block.text:
                yield Snippet(page=name_of(page), line=block.line, text=block.text)


def python_of(page: str) -> list[str]:
    return [block.text for block in blocks((ROOT / page).read_text(encoding="utf-8")) if block.language == "python"]


def trains_alone(text: str) -> bool:
    """Whether Python of a page is a training script that knows nothing of ampmem."""
    return "ampmem" not in text and "def test_" not in text and ".backward()" in text and not text.startswith("%")


def train_of(page: str) -> str:
    """The script that the commands of ``page`` call train.py: the page's own where it has one."""
    own = [text for text in python_of(page) if trains_alone(text)]
    return own[0] if own else TRAIN.read_text(encoding="utf-8")


def with_before(page: str, text: str) -> str:
    """Python of a page with what the page takes for granted."""
    text = re.sub(r"^( *)\.\.\.$", rf"\1{ELLIPSIS.get(page, '...')}", text, flags=re.MULTILINE)
    return text if re.match(r"(# .*\n)?import (torch|pytest|pandas)", text) else f"{BEFORE.get(page, '')}\n{text}"


def extras_for(begin: str) -> str:
    return next((extras for name, extras in EXTRAS.items() if begin.startswith(name)), "")


def check(done: subprocess.CompletedProcess[str], what: str, expected: tuple[int, str] = (0, "")) -> None:
    """It ended as it should, said something, and broke off nowhere."""
    printed = f"{what}\n{done.stdout}\n{done.stderr}"
    code, text = expected
    assert done.returncode == code, printed
    assert text in done.stdout, printed
    assert code or "Traceback (most recent call last)" not in done.stderr, printed


def transcript_of(page: str, line: str) -> list[str]:
    """What ``page`` shows below ``$ line``; ``…`` stands for lines that it leaves out."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = (block.text.partition(f"$ {line}\n")[2] for block in blocks(text) if not block.language)
    return [shown for each in found for shown in each.splitlines() if shown not in ("", "…")]


@pytest.mark.parametrize("command", list(tried()), ids=str)
def test_commands_of_the_pages(cold: Cold, tmp_path: Path, command: Tried) -> None:
    for tool in {"jq", "sqlite3"} & set(words_of(command.line)):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    cold.provide(tmp_path, command.line, train_of(command.page))
    if command.line.startswith("pytest"):
        for number, text in enumerate(python_of(command.page)):
            (tmp_path / f"test_{number}.py").write_text(with_before(command.page, text), encoding="utf-8")
        if "--ampmem-update" not in command.line and "--ampmem-baseline" in command.line:
            cold.run(tmp_path, f"{command.line} --ampmem-update", extras=extras_for("pytest"), ready=True)
    if "--advised runs.jsonl" in command.line:
        advised = "ampmem advise --gpu h100 --allow foreach,fused --resume runs.jsonl train.py"
        check(cold.run(tmp_path, advised, ready=True), advised)
    done = cold.run(tmp_path, command.line, extras=extras_for(command.line), ready=not is_bare(command.line))
    check(done, command.line, EXITS.get(command.line, (0, "")))
    if command.page == "README.md":
        printed = {each.rstrip() for each in (done.stdout + done.stderr).splitlines()}
        assert [shown for shown in transcript_of(command.page, command.line) if shown not in printed] == []
    if not command.line.startswith("eval"):
        assert done.stdout or done.stderr
    missing = [
        name for name in outputs_of(command.line) if not list(tmp_path.glob(f"{Path(name).stem}*{Path(name).suffix}"))
    ]
    assert missing == []


@pytest.mark.parametrize("snippet", list(snippets()), ids=str)
def test_python_of_the_pages(cold: Cold, tmp_path: Path, snippet: Snippet) -> None:
    named = re.match(r"# (\w+\.py)\n", snippet.text)
    name = named[1] if named else "snippet.py"
    cold.provide(tmp_path, " ".join(re.findall(r'"[^"\n]*"', snippet.text)), train_of(snippet.page))
    (tmp_path / name).write_text(with_before(snippet.page, snippet.text), encoding="utf-8")
    command = f"ampmem profile --device sim --gpu h100 {name}" if trains_alone(snippet.text) else f"python {name}"
    extras = extras_for(snippet.page)
    check(cold.run(tmp_path, command, extras=extras, ready=snippet.page != "README.md"), snippet.text)


def test_the_notebook_and_the_cells_of_a_page_run_with_their_extra_alone(cold: Cold, tmp_path: Path) -> None:
    page, path = "docs/notebooks.md", tmp_path / "notebook.ipynb"
    cells = [BEFORE[page], *(text for text in python_of(page) if text.startswith("%"))]
    book = nbformat.read(NOTEBOOK, as_version=4)
    book.cells += [nbformat.v4.new_code_cell(cell.strip()) for cell in cells]
    nbformat.write(book, path)
    done = cold.execute_notebook(path, extras=EXTRAS[page])
    assert done.returncode == 0, done.stderr
    outputs = [cell.get("outputs", []) for cell in nbformat.read(path, as_version=4).cells]
    assert [output for each in outputs for output in each if output["output_type"] == "error"] == []
    shown, of_page = (
        [output["data"]["text/plain"] for each in part for output in each if "data" in output]
        for part in (outputs[: -len(cells)], outputs[-len(cells) :])
    )
    assert shown[0] == "True" and len(of_page) == 2
    assert shown[1].startswith("ampmem: The first 3 steps of In [4] were recorded")
    assert "amp-nocache" in shown[3]
    assert "NVIDIA H100 80GB HBM3 (simulated): peak " in shown[4]


def all_text() -> str:
    return "\n".join(page.read_text(encoding="utf-8") for page in TRIED)


def test_each_exception_occurs_in_the_pages() -> None:
    parts = {
        part
        for page in TRIED
        for command in commands(page.read_text(encoding="utf-8"))
        for part in parts_of_line(command.text)
    }
    assert sorted(set(EXCEPTIONS) - parts) == []


def test_each_entry_of_the_other_tables_is_used() -> None:
    text, lines = all_text(), [command.line for command in tried()]
    pages = {name_of(page) for page in TRIED}
    assert [word for word in STANDS_FOR if not re.search(rf"ampmem [^`\n]*{re.escape(word)}", text)] == []
    assert [line for line in (*EXITS, *BARE) if line not in lines] == []
    assert [name for name in EXTRAS if name not in pages and not any(line.startswith(name) for line in lines)] == []
    assert set(BEFORE) | set(ELLIPSIS) <= pages
    mentioned = {line.split()[1] for line in re.findall(r"`(ampmem [a-z]+[^`\n]*)`", text)}
    assert set(MENTIONS) - mentioned == set()


def test_every_page_is_searched() -> None:
    """The extraction finds what the pages have: a page that has none by mistake would pass in silence."""
    assert len(TRIED) > 10
    assert len(list(tried())) > 50
    assert len(list(snippets())) > 6
    with_cells = {name_of(page) for page in TRIED if any(t.startswith("%") for t in python_of(name_of(page)))}
    assert with_cells == {"docs/notebooks.md"}


# -- each subcommand -----------------------------------------------------------------------------

WAYS: Mapping[str, str] = {"cpu": "", "simulated": SIM, "two ranks": "--nproc-per-node 2", "one of eight": RANK_OF_8}
"""How a script runs, and the options that say so."""
RECORDED: Mapping[str, tuple[str, str]] = {
    "cpu": ("train.ampmem", "ampmem profile train.py"),
    "simulated": ("train.ampmem", f"ampmem profile {SIM} train.py"),
    "two ranks": ("train.rank0-of-2.ampmem train.rank1-of-2.ampmem", "ampmem profile --nproc-per-node 2 train.py"),
    "one of eight": ("train.rank0-of-8.ampmem", f"ampmem profile {RANK_OF_8} train.py"),
}
"""The files that ``profile`` leaves in each way, and the command that made them."""

RUNS: Mapping[str, str] = {
    "compare": "ampmem compare --precision fp32,amp --no-times {options} train.py",
    "check": "ampmem check --budget peak=1GiB {options} train.py",
    "advise": "ampmem advise {options} train.py",
    "watch": "ampmem watch {options} train.py",
    "fit": "ampmem fit --precision as-is --points 0 --vary --batch-size=4:8 {options} train.py",
}
"""The subcommands that run a script, beside ``profile``."""
READS: Mapping[str, str] = {
    "show": "ampmem show --all {files}",
    "report": "ampmem report {files} -o page.html",
    "diff": "ampmem diff {job} changed.ampmem",
    "export": "ampmem export {first} --format snapshot -o out.pickle",
    "import": "ampmem import out.pickle -o imported.ampmem",
    "model": "ampmem model {first}",
}
"""The subcommands that read what ``profile`` left; ``export`` is before ``import``, whose file it writes."""

WITHOUT_MEANING: Mapping[tuple[str, str], str] = {
    ("fit", "cpu"): "every run of fit is on a simulated GPU, since it asks what fits on one",
    ("fit", "two ranks"): "fit simulates one rank (--world-size) and starts no others",
    ("advise", "two ranks"): "advise runs the script in one process, as one rank where it simulates (--world-size)",
    ("watch", "two ranks"): "watch runs in each process that a launcher starts, and starts none",
    **{("top", way): "it shows what watch has left, a file of one form in every way" for way in WAYS},
    **{("extension", way): "it compiles a file for every later recording" for way in WAYS if way != "cpu"},
    **{("estimate", way): "it writes its script, for simulated GPUs" for way in WAYS if way != "simulated"},
    **{("docs", way): "it prints text and runs no script" for way in WAYS if way != "cpu"},
    **{("completion", way): "it prints text for a shell and runs no script" for way in WAYS if way != "cpu"},
}
"""The combinations that are not tried, and why."""


OF_THE_DOCUMENTS = frozenset(
    (line.split()[1], way_of(line)) for line in (each.line for each in tried()) if line.startswith("ampmem ")
)
"""The subcommands, and the ways, of the commands that ``test_documents.py`` runs."""
LEFT_OUT = OF_THE_DOCUMENTS | set(WITHOUT_MEANING)


def test_each_subcommand_is_tried_in_each_way_that_has_a_meaning() -> None:
    assert {"profile", *RUNS, *READS, "estimate", "top", "docs", "extension", "completion"} == set(SUBCOMMANDS)
    assert all(name in SUBCOMMANDS and way in WAYS for name, way in LEFT_OUT)
    assert {way_of(command) for _, command in RECORDED.values()} == set(WAYS)
    assert {way_of(line) for line in BARE if line.startswith("ampmem profile")} == set(WAYS)
    assert {line.split()[1] for line in BARE if line.startswith("ampmem ")} == {"profile", *RUNS} - {"fit"}
    assert ("profile", "simulated") in OF_THE_DOCUMENTS and ("model", "one of eight") not in OF_THE_DOCUMENTS


def run(cold: Cold, folder: Path, command: str, *, ready: bool = False) -> str:
    """What a command that must end well says."""
    done = cold.run(folder, command, ready=ready)
    printed = f"{command}\n{done.stdout}\n{done.stderr}"
    assert done.returncode == 0, printed
    assert "Traceback (most recent call last)" not in done.stderr, printed
    assert done.stdout or done.stderr, command
    return done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "way"), [each for each in itertools.product(RUNS, WAYS) if each not in LEFT_OUT], ids=str
)
def test_scripts(cold: Cold, tmp_path: Path, name: str, way: str) -> None:
    (tmp_path / "train.py").write_bytes(TRAIN.read_bytes())
    options = WAYS[way]
    if name == "fit":
        options = options.replace("--device sim", "")
    if name == "advise" and way == "cpu":
        options = "--device cpu"  # without it a GPU is simulated
    # The other subcommands run bare once among the commands of the documents.
    run(cold, tmp_path, RUNS[name].format(options=options), ready=name != "fit")
    left = sorted(path.name for path in tmp_path.glob("*.ampmem"))
    files = {"compare": 2, "watch": 1}.get(name, 0)
    assert len(left) == files * len(RECORDED[way][0].split())


@pytest.mark.parametrize("way", WAYS)
def test_profile(cold: Cold, tmp_path: Path, way: str) -> None:
    files, command = RECORDED[way]
    cold.copy(tmp_path, command, "*")
    assert sorted(path.name for path in tmp_path.glob("*.ampmem")) == sorted(files.split())


@pytest.mark.parametrize(
    ("name", "way"),
    [each for each in itertools.product(READS, WAYS) if each not in LEFT_OUT and each[0] != "import"],
    ids=str,
)
def test_recordings(cold: Cold, tmp_path: Path, name: str, way: str) -> None:
    files, command = RECORDED[way]
    cold.copy(tmp_path, command, "*.ampmem")
    first = files.split()[0]
    job = f"{first.partition('.')[0]}.ampmem"
    if name == "diff":
        changed = command.replace("train.py", "-o changed.ampmem train.py")
        cold.copy(tmp_path, f"{CHANGED} && {changed}", "changed*")
    run(cold, tmp_path, READS[name].format(files=files, first=first, job=job), ready=True)
    if name == "export":
        run(cold, tmp_path, READS["import"], ready=True)
        assert "peak" in run(cold, tmp_path, "ampmem show imported.ampmem", ready=True)


def test_estimate(cold: Cold, tmp_path: Path) -> None:
    done = cold.run(tmp_path, "ampmem estimate gpt2 --write train.py")
    assert (done.returncode, done.stdout, list(tmp_path.iterdir())) == (1, "", [])
    assert "pip install 'transformers>=5'" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="needs a C++ compiler")
def test_extension(cold: Cold, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_bytes(TRAIN.read_bytes())
    said = run(cold, tmp_path, "XDG_CACHE_HOME=$PWD/cache ampmem extension")
    (library,) = tmp_path.glob("cache/ampmem/extension/*.so")
    assert str(library) in said.splitlines()
    assert "residual 0 B" in run(cold, tmp_path, "XDG_CACHE_HOME=$PWD/cache ampmem profile train.py", ready=True)
    run(cold, tmp_path, "XDG_CACHE_HOME=$PWD/cache ampmem extension --remove", ready=True)
    assert not library.exists()
