"""What every test shares: doctests of torch-free packages count as pure, the others as fake."""

from __future__ import annotations

from pathlib import Path

import pytest

from checks.imports import LEFT_OF_TORCH

PACKAGE = Path(__file__).resolve().parent.parent / "hyperparallel"
PURE = {name for row in LEFT_OF_TORCH for name in row}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.DoctestItem) and item.path.is_relative_to(PACKAGE):
            parts = item.path.relative_to(PACKAGE).with_suffix("").parts
            item.add_marker(pytest.mark.pure if parts[0] in PURE else pytest.mark.fake)
