"""Modules become one script, or an error that says which line is in the way."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from ampmem.reporters.html.page import BundleError, bundle
from ampmem.reporters.html.safety import FOLDER

PAGE_MODULES = FOLDER.parent / "js"

FOLDERS = ("common", "data", "figures", "timeline", "sections", "")
"""Of the page's modules; each imports from itself and from those before it. The last one holds the entries."""


def modules(folder: Path, **sources: str) -> Path:
    """Write ``name.js`` for every source, in a folder where the name is ``folder__name``; the entry is ``main.js``."""
    for name, source in sources.items():
        path = folder / f"{name.replace('__', '/')}.js"
        path.parent.mkdir(exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return folder / "main.js"


def test_modules_come_after_those_that_they_import(tmp_path: Path) -> None:
    entry = modules(
        tmp_path,
        main='import { two } from "./two.js";\nimport { one, ONE } from "./one.js";\nout([two(), one(), ONE]);\n',
        two='import { one } from "./one.js";\nexport function two() {\n  return one() + 1;\n}\n',
        one="export const ONE = 1;\nexport async function later() {}\nexport function one() {\n  return ONE;\n}\n",
    )
    text = bundle(entry)
    assert text == (
        '(async () => {\n"use strict";\n'
        "// one.js\nconst ONE = 1;\nasync function later() {}\nfunction one() {\n  return ONE;\n}\n\n"
        "// two.js\nfunction two() {\n  return one() + 1;\n}\n\n"
        "// main.js\nout([two(), one(), ONE]);\n\n})();\n"
    )


def test_a_module_is_the_same_one_by_every_path(tmp_path: Path) -> None:
    entry = modules(
        tmp_path,
        main='import { two } from "./b/two.js";\nimport { one } from "./a/one.js";\nout(two, one);',
        b__two='import { one } from "../a/one.js";\nimport { three } from "./three.js";\nexport const two = three;',
        b__three='import { one } from "../a/one.js";\nexport const three = one + 2;',
        a__one="export const one = 1;",
    )
    assert re.findall("^// (.*)$", bundle(entry), re.MULTILINE) == ["a/one.js", "b/three.js", "b/two.js", "main.js"]


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("export default 1;", "main.js:1: this form"),
        ("export { a };", "main.js:1: this form"),
        ('export * from "./a.js";', "main.js:1: this form"),
        ("export const { a } = {};", "main.js:1: this form"),
        ('import a from "./a.js";', "main.js:1: this form"),
        ('import * as a from "./a.js";', "main.js:1: this form"),
        ('import "./a.js";', "main.js:1: this form"),
        ('import { a as b } from "./a.js";', "main.js:1: this form"),
        ('import { a } from "a.js";', "main.js:1: this form"),
        ('import { a } from "/a.js";', "main.js:1: this form"),
        ('import { a } from ".//a.js";', "main.js:1: this form"),
        ('import { a } from "./folder/../a.js";', "main.js:1: this form"),
        ('import { a } from "../a.js";', "main.js: ../a.js is outside of the folder"),
        ('import { out } from "./folder/out.js";', "folder/out.js: ../../a.js is outside of the folder"),
        ('import { c } from "./folder/circle.js";', "main.js -> folder/circle.js -> main.js: these modules import"),
        ('import { same } from "./folder/same.js";', "folder/same.js: the name a is in a.js already"),
        ('import {\n  a } from "./a.js";', "main.js:1: this form"),
        ('const a = await import("./a.js");', "import"),
        ("const a = import.meta.url;", "import.meta"),
        ('const a = "</SCRIPT>";', "</SCRIPT"),
        ('const a = "<!--";', "<!--"),
        ('import { b } from "./a.js";', "a.js does not export b"),
        ('import { hidden } from "./a.js";', "a.js does not export hidden"),
        ('import { b } from "./none.js";', "main.js -> none.js: no such module"),
        ('import { a } from "./a.js";\nfunction a() {}', "the name a is in a.js already"),
        ('import { c } from "./cycle.js";', "cycle.js -> main.js: these modules import each other"),
    ],
)
def test_other_forms_are_refused(tmp_path: Path, line: str, why: str) -> None:
    entry = modules(
        tmp_path,
        main=line,
        a="export const a = 1;\nconst hidden = 2;\n",
        cycle='import { d } from "./main.js";\nexport const c = 1;\n',
        folder__circle='import { d } from "../main.js";\nexport const c = 1;\n',
        folder__out='import { a } from "../../a.js";\nexport const out = 1;\n',
        folder__same='import { a } from "../a.js";\nconst a = 1;\nexport const same = a;\n',
    )
    with pytest.raises(BundleError) as caught:
        bundle(entry)
    assert why in str(caught.value)


def test_the_folders_of_the_page_import_one_way() -> None:
    found = [path for path in PAGE_MODULES.rglob("*") if path.is_file()]
    assert {path.parent for path in found} == {PAGE_MODULES / folder for folder in FOLDERS}
    for path in found:
        here = path.parent
        # Types are imported in comments.
        for imported in re.findall(r'\bfrom "(.+?)"', path.read_text(encoding="utf-8")):
            there = (here / imported).resolve().parent
            allowed = [PAGE_MODULES / folder for folder in FOLDERS]
            assert there in allowed[: allowed.index(here) + 1], f"{path.name} imports {imported}"


def test_the_modules_of_each_page_are_one_script(tmp_path: Path) -> None:
    names = {path.relative_to(PAGE_MODULES).as_posix() for path in PAGE_MODULES.rglob("*.js")}
    scripts = {
        entry: bundle(PAGE_MODULES / entry) for entry in ("main.js", "fit.js", "watched.js", "advise.js", "document.js")
    }
    lines = {line.removeprefix("// ") for text in scripts.values() for line in text.split("\n")}
    assert names <= lines
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    for entry, text in scripts.items():
        script = tmp_path / entry
        script.write_text(text, encoding="utf-8")
        subprocess.run([node, "--check", str(script)], check=True, timeout=60)
