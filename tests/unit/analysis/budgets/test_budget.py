"""How budgets are written, on the command line and in pyproject.toml."""

import sys
from pathlib import Path
from types import ModuleType

import pytest

from ampmem.analysis.budgets.budget import (
    KEYS,
    Allowance,
    Budget,
    BudgetFile,
    find_budgets,
    module_in,
    parse_allowance,
    parse_budget,
)
from ampmem.errors import UsageError

GIB = 1024**3


@pytest.mark.parametrize(
    ("text", "key", "limit"),
    [
        ("peak=20GiB", "peak", 20 * GIB),
        (" activations = 1.5 GiB", "activations", 3 * GIB // 2),
        ("growth=0", "growth", 0),
        ("modules.encoder.layers.0.cast_copies=2B", "modules.encoder.layers.0.cast_copies", 2),
        ("modules.(model).activations=1B", "modules.(model).activations", 1),
    ],
)
def test_a_budget_is_a_key_and_a_size(text: str, key: str, limit: int) -> None:
    assert parse_budget(text) == Budget(key=key, limit=limit)


def test_the_module_of_a_key() -> None:
    assert module_in(parse_budget("modules.a.b.gradients=1B").key) == ("a.b", "gradients")
    assert all(module_in(key) is None for key in KEYS)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("activation=1GiB", "unknown budget 'activation'; did you mean 'activations'?"),
        ("modules.encoder=1GiB", "such as modules.encoder.activations"),
        ("modules..peak=1GiB", "unknown budget 'modules..peak'"),
        ("modules.encoder.activation=1", "a module does not have a budget 'activation'; did you mean 'activations'?"),
        ("peak", "'peak' is not a budget; write KEY=SIZE"),
        ("peak=much", "peak: 'much' is not a size"),
        ("peak=20", "peak: 20 has no unit; write 20GiB, 20MiB or 20B"),
        ("peak=-1", "peak: '-1' is not a size"),
        ("peak=", "peak: '' is not a size"),
        (f"peak={'9' * 5000}", f"peak: '{'9' * 59} is not a size"),
        (f"peak={'9' * 400}GiB", f"peak: '{'9' * 59} is not a size"),
        ("peak=5000PiB", "peak: '5000PiB' is not a size"),
        ("k" * 10_000, f"'{'k' * 59} is not a budget"),
        (f"{'k' * 10_000}=1", f"unknown budget '{'k' * 99}. There are peak, "),
    ],
)
def test_what_is_no_budget_is_said_with_the_nearest(text: str, said: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_budget(text)
    assert said in str(error.value) and len(str(error.value)) < 500


@pytest.mark.parametrize(
    ("text", "before", "peak", "limit"),
    [
        ("1%", 1000, 1000, 1010),
        ("0.1 %", 1999, 1999, 2000),
        ("10 B", 5, 1000, 15),
        ("10 B", 0, 1000, 10),
        ("0", 7, 1000, 7),
        ("250%", 2, 2, 7),
        ("33%", 1, 1, 1),
        # What is little, or was not there at all, may grow by a tenth of what the peak may.
        ("1%", 0, 100_000, 100),
        ("1%", 500, 100_000, 600),
        ("1%", 10_000, 100_000, 10_100),
        ("1%", 20_000, 100_000, 20_200),
    ],
)
def test_what_is_allowed_beside_a_baseline(text: str, before: int, peak: int, limit: int) -> None:
    assert parse_allowance(text).limit(before, peak) == limit


@pytest.mark.parametrize(
    "text",
    [
        "a bit",
        "%",
        "1/0%",
        "-1%",
        "-5",
        "nan%",
        "inf%",
        "",
        "0.01",
        0.01,
        True,
        "1e999999999%",
        "9" * 4000,
        "9" * 5000 + "%",
    ],
)
def test_what_is_no_allowance(text: str | int) -> None:
    with pytest.raises(UsageError, match="--allow"):
        parse_allowance(text)


def test_an_allowance_of_bytes_is_said_with_its_unit() -> None:
    assert [parse_allowance(text).text for text in (1, "12", "10MiB", "1%")] == ["1 B", "12 B", "10MiB", "1%"]


def test_nothing_is_allowed_by_default() -> None:
    assert Allowance().limit(12, 1000) == 12


TABLES = """
[tool.ampmem.budgets]
peak = 1
[tool.ampmem.budgets."train.py"]
peak = 1
[tool.ampmem.budgets."small/eval.py"]
peak = 1
[tool.ampmem.budgets."-m package.main"]
peak = 1
[tool.ampmem.budgets."package"]
peak = 1
[tool.ampmem.budgets."-m json.tool"]
peak = 1
"""


def project(folder: Path) -> None:
    for name in (
        "train.py",
        "small/eval.py",
        "package/__main__.py",
        "package/main.py",
        "alone/__main__.py",
        ".venv/hidden.py",
        "env/far.py",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    (folder / "env" / "pyvenv.cfg").touch()


def test_tables_of_other_scripts_and_modules_that_are_there_are_well(tmp_path: Path) -> None:
    project(tmp_path)
    found = pyproject(tmp_path, TABLES)
    for script in (None, "-m package", "somewhere.py", str(tmp_path / "train.py")):
        assert list(found.misnamed_tables(script)) == []


@pytest.mark.parametrize(
    ("table", "meant"),
    [
        ("trian.py", "; did you mean 'train.py'?"),
        ("smal/eval.py", "; did you mean 'small/eval.py'?"),
        ("-m package.mian", "; did you mean '-m package.main'?"),
        ("package.mian", "; did you mean 'package.main'?"),
        ("-m alon", "; did you mean '-m alone'?"),
        ("-m smal", ""),  # a folder without a __main__.py is no module to start
        ("hidden.py", ""),
        ("test.py", ""),
        ("-m a/b", ""),
        ("far.py", ""),
        ("unheard_of/of.py", ""),
    ],
)
def test_a_table_misnamed_tables_and_of_no_module_is_said_with_the_nearest(
    table: str, meant: str, tmp_path: Path
) -> None:
    project(tmp_path)
    found = pyproject(tmp_path, f'[tool.ampmem.budgets."{table}"]\npeak = 1\n')
    assert list(found.misnamed_tables(str(tmp_path / "train.py"))) == [
        f'[tool.ampmem.budgets."{table}"] in {found.path} does not name a script or a module{meant}'
    ]


def test_a_module_from_elsewhere_need_not_be_imported_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project(tmp_path)
    (tmp_path / ".elsewhere").mkdir()
    (tmp_path / ".elsewhere" / "installed_of_old.py").touch()
    found = pyproject(tmp_path, '[tool.ampmem.budgets."-m installed_of_old"]\npeak = 1\n')
    assert len(list(found.misnamed_tables("train.py"))) == 1
    monkeypatch.syspath_prepend(tmp_path / ".elsewhere")
    assert list(found.misnamed_tables("train.py")) == []
    found = pyproject(tmp_path, '[tool.ampmem.budgets."-m made_at_run_time"]\npeak = 1\n')
    assert len(list(found.misnamed_tables("train.py"))) == 1
    monkeypatch.setitem(sys.modules, "made_at_run_time", ModuleType("made_at_run_time"))
    assert list(found.misnamed_tables("train.py")) == [], "it is there, though nothing says where from"


def test_in_a_folder_with_too_many_files_only_what_is_near_the_script_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampmem.analysis.budgets.budget._MOST_FILES", 1)
    project(tmp_path)
    tables = '[tool.ampmem.budgets."trian.py"]\npeak = 1\n[tool.ampmem.budgets."unheard_of/of.py"]\npeak = 1\n'
    (said,) = pyproject(tmp_path, tables).misnamed_tables(str(tmp_path / "train.py"))
    assert said.endswith("; did you mean 'train.py'?")


def pyproject(folder: Path, text: str) -> BudgetFile:
    (folder / "pyproject.toml").write_text(text, encoding="utf-8")
    return find_budgets(folder)


def limits(found: BudgetFile, script: str | None) -> dict[str, int]:
    return {budget.key: budget.limit for budget in found.budgets_of_script(script)}


FILE = """
[tool.ampmem.budgets]
peak = "20GiB"
growth = 0
modules.encoder.activations = "2GiB"
"modules.head.activations" = "1KiB"

[tool.ampmem.budgets."train.py"]
peak = "8GiB"
modules.encoder.gradients = "3 B"

[tool.ampmem.budgets."small/train.py"]
peak = "1GiB"

[tool.ampmem.budgets."-m package.train"]
inputs = 5
"""


def test_a_script_has_its_own_budgets_and_those_of_all(tmp_path: Path) -> None:
    found = pyproject(tmp_path, FILE)
    everyone = {
        "peak": 20 * GIB,
        "growth": 0,
        "modules.encoder.activations": 2 * GIB,
        "modules.head.activations": 1024,
    }
    assert limits(found, None) == limits(found, "other.py") == limits(found, "-m package.other") == everyone
    assert limits(found, "/home/me/train.py") == everyone | {"peak": 8 * GIB, "modules.encoder.gradients": 3}
    assert limits(found, "/home/me/small/train.py") == everyone | {"peak": GIB}
    assert limits(found, "/home/me/toosmall/train.py")["peak"] == 8 * GIB
    assert limits(found, "-m package.train") == everyone | {"inputs": 5}


def test_the_nearest_file_with_a_table_of_ampmem_counts(tmp_path: Path) -> None:
    found = pyproject(tmp_path, FILE)
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    (tmp_path / "a" / "pyproject.toml").write_text("[tool.ruff]\nline-length = 100\n", encoding="utf-8")
    assert find_budgets(below) == found
    assert pyproject(below, "[tool.ampmem.budgets]\n").budgets_of_script("train.py") == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("peak = [", "pyproject.toml is not a TOML file: "),
        ("tool = 3", "tool is not a table"),
        ("tool.ampmem = 3", "tool.ampmem is not a table"),
        ("tool.ampmem.budgets = 3", "budgets is not a table"),
        ('[tool.ampmem.budget]\npeak = "1"', "unknown table tool.ampmem.budget; did you mean 'budgets'?"),
        ('[tool.ampmem.budgets]\npaek = "1"', "[tool.ampmem.budgets] unknown budget 'paek'; did you mean 'peak'?"),
        ("[tool.ampmem.budgets]\npeak = true", "[tool.ampmem.budgets] peak: True is not a size"),
        ("[tool.ampmem.budgets]\npeak = 1.5", "[tool.ampmem.budgets] peak: 1.5 is not a size"),
        ("[tool.ampmem.budgets]\npeak = -1", "[tool.ampmem.budgets] peak: -1 is not a size"),
        ("[tool.ampmem.budgets.activation]\npeak = 1", '"activation"] would be the table of a script; did you mean'),
        ('[tool.ampmem.budgets."a.py"]\npeak = "x"', "[tool.ampmem.budgets.\"a.py\"] peak: 'x' is not a size"),
        (f"[tool.ampmem.budgets]\npeak = {'9' * 5000}", "pyproject.toml is not a TOML file: "),
        (f"[tool.ampmem.budgets]\npeak = 0x{'f' * 6000}", "peak: the limit is larger than any memory"),
        (f"[tool.ampmem.budgets]\npeak = '{'9' * 400}GiB'", f"peak: '{'9' * 59} is not a size"),
        (f"[tool.ampmem.budgets.{'.'.join('a' * 3000)}]\npeak = 1", '[tool.ampmem.budgets."a"] unknown budget '),
        (f"[tool.ampmem.budgets]\npeak = {'[' * 5000}", "pyproject.toml is not a TOML file: "),
        ("[tool.ampmem.budgets]\nmodules = 3", "[tool.ampmem.budgets] unknown budget 'modules'"),
    ],
)
def test_a_bad_file_is_one_line_with_its_path_and_key(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        pyproject(tmp_path, text)
    assert str(error.value).startswith(f"{tmp_path / 'pyproject.toml'}")
    assert said in str(error.value) and "\n" not in str(error.value)
