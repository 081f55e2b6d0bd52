"""The one comparison of torch's versions that tests use."""

import pytest
import torch
from support import torch_version


@pytest.mark.parametrize(
    ("running", "asked", "older"),
    [
        ("2.11.0+cu130", "2.12", True),
        ("2.12.1+cu130", "2.12", False),
        ("2.13.0+cpu", "2.12.1", False),
        ("2.9.1", "2.11", True),
        ("3.0.0", "2.15", False),
        ("2.16.0a0+git1234", "2.16", False),
    ],
)
def test_versions_are_compared_as_numbers(
    monkeypatch: pytest.MonkeyPatch, running: str, asked: str, older: bool
) -> None:
    monkeypatch.setattr(torch, "__version__", running)
    assert torch_version.older_than(asked) is older
