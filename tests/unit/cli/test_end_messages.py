"""What is said once a script has ended."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

pytest.importorskip("torch")

from ampmem.cli.processes.end_messages import left_by_failure


@pytest.mark.parametrize("unfinished", [None, object()])
def test_a_command_with_a_path_can_be_copied(unfinished: object, tmp_path: Path) -> None:
    path = tmp_path / "my run.rank1-of-2.ampmem"
    path.touch()
    outcome = SimpleNamespace(unfinished=unfinished, recorded=1, failure=None, interrupted=False)
    session = cast(Any, SimpleNamespace(outcome=outcome, options=SimpleNamespace(path=path)))
    said = left_by_failure(session, path, cast(Any, SimpleNamespace(caught=0)))
    assert said.endswith(f"(ampmem show '{path}')")
