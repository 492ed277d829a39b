"""Puts the measured tables into `docs/benchmarks.md`, between two markers; the prose around them
is written by hand and stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from benchmarks.broker.clients import ROOT

DOCS: Final = ROOT / "docs" / "benchmarks.md"


def replace_section(path: Path, target: str, text: str) -> None:
    """Replace what is between a target's markers; without them, add the section at the end."""
    first, last = (
        f"<!-- {target}: begin (written by `make {target}`) -->",
        f"<!-- {target}: end -->",
    )
    page = path.read_text() if path.exists() else "# Benchmarks\n"
    section = f"{first}\n\n{text.strip()}\n\n{last}"
    before, begin, rest = page.partition(first)
    _, end, after = rest.partition(last)
    page = f"{before}{section}{after}" if begin and end else f"{page.rstrip()}\n\n{section}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
