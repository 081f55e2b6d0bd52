"""Cells as a script: what the parent writes, and what runs them in the child."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

from ampmem.errors import UsageError
from ampmem.integrations.notebook.magics import without_magics

_SCRIPT = """\
__import__({module!r}, fromlist=["run_cells"]).run_cells({cells!r}, {failed!r}, {reached!r})
"""


def script_of(code: str, name: str, before: Mapping[int, str], reached: Path, failed: Collection[int] = ()) -> str:
    """The script that stands for the cell ``name``: the cells ``before`` it, without their magics, then its ``code``.

    Of the cells that ``failed`` in the notebook, it runs what there is to run. Into the file ``reached`` it writes how
    many steps the cells before have made. Raises :class:`UsageError` where the cell itself has magics, and
    ``SyntaxError`` where it awaits.
    """
    if without_magics(code).code != code:
        raise UsageError("%%ampmem --compare runs the cell as a script, which has no magics: leave them out")
    cells = {f"In [{number}]": without_magics(cell).code for number, cell in before.items()}
    cells[name] = "\n" + code  # below the line of the magic
    for each, text in cells.items():
        compile(text, each, "exec", dont_inherit=True)
    return _SCRIPT.format(
        module=__name__, cells=cells, failed=[f"In [{number}]" for number in sorted(failed)], reached=str(reached)
    )


def run_cells(cells: Mapping[str, str], failed: Collection[str], reached: str) -> None:
    """Run ``cells`` (code by name) in ``__main__``; a line of one is named as in the notebook."""
    from ampmem.recorder.script import execute

    main = sys.modules["__main__"]
    vars(main)["display"] = print
    *_, last = cells
    for name, code in cells.items():
        # Python itself looks for the lines of a traceback below sys.path, where the script is; others ask linecache.
        (Path(reached).parent / name).write_text(code, encoding="utf-8")
        linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
        if name == last:
            Path(reached).write_text(str(_steps()), encoding="ascii")
        try:
            execute(compile(code, name, "exec", dont_inherit=True), main)
        except Exception:
            if name not in failed:
                raise


def _steps() -> int:
    """How many steps have ended so far."""
    from ampmem.recorder.process.active import active
    from ampmem.recorder.session import Session

    session = active()
    return session.outcome.steps if isinstance(session, Session) else 0
