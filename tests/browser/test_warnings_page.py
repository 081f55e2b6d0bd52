"""What a page says of a run whose sums are not the allocator's, in a browser."""

from dataclasses import replace
from pathlib import Path

import pytest
from support.pages import Open, written
from support.story import long_run

from ampmem.events import UNKNOWN

pytestmark = pytest.mark.browser


def test_wrong_sums_are_said_at_the_head_and_nothing_holds(open_page: Open, tmp_path: Path) -> None:
    recording = long_run(steps=3, precision="fp32")
    allocated = recording.events.allocated.copy()
    allocated[-20:][allocated[-20:] != UNKNOWN] += 716_800
    page = open_page(written(tmp_path, replace(recording, events=replace(recording.events, allocated=allocated))).path)
    warning = page.get_by_role("alert")
    assert "the categories are up to 700.0 KiB (716,800 bytes) off" in warning.inner_text()
    assert page.locator("#findings [data-code=residual]").is_visible()
    assert page.locator(".verdict.bad").inner_text().startswith("The model does not hold")
    assert page.locator(".chip.good").count() == 0


def test_sums_that_are_right_give_no_warning(open_page: Open, tmp_path: Path) -> None:
    page = open_page(written(tmp_path, long_run(steps=3, precision="fp32")).path)
    assert page.get_by_role("alert").count() == 0
    assert page.locator("#findings [data-code=residual]").count() == 0
