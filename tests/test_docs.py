"""The generated parts of docs/ are what the code says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.generate_docs import pages


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_the_page_is_up_to_date(path: Path) -> None:
    assert path.read_text() == pages()[path], "run: python -m tools.generate_docs"
