"""What docs/ and the README say is so: generated parts are those of the code, links lead somewhere,
what is marked as runnable is run.

`tests/doc_pages.py` says how a block is marked.
"""

from __future__ import annotations

import os
import re
import sys
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from penstock.testing.broker import Broker
from penstock.testing.flows import FlowTester
from tests.cli.runner import share_session
from tests.doc_pages import Reader, blocks, is_run
from tools.generate_docs import DOCS, pages

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

ROOT = DOCS.parent
WRITTEN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
RUNNABLE = [page for page in WRITTEN if any(map(is_run, blocks(page.read_text())))]
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("path", pages(), ids=lambda path: path.name)
def test_the_page_is_up_to_date(path: Path) -> None:
    assert path.read_text() == pages()[path], "run: python -m tools.generate_docs"


@pytest.mark.parametrize("path", WRITTEN, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for link in _LINK.findall(_FENCED.sub("", path.read_text())):
        if re.match(r"\w+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = path.parent / name if name else path
        assert target.exists(), f"{path.name} links to {link}"
        if anchor:
            assert anchor in anchors(target), f"{path.name} links to {link}"


def anchors(page: Path) -> set[str]:
    """What a page's headings are called in links."""
    found = set()
    for heading in _HEADING.findall(_FENCED.sub("", page.read_text())):
        plain = re.sub(r"[^\w\- ]", "", heading.strip().lower())
        found.add(plain.replace(" ", "-"))
    return found


def test_the_index_has_every_page() -> None:
    listed = set(_LINK.findall((DOCS / "README.md").read_text()))
    assert {page.name for page in DOCS.glob("*.md")} - {"README.md"} <= listed


# Pages show patterns and views that keep something for ever, of which a warning tells.
@pytest.mark.filterwarnings("default::penstock.spark.UnboundedStateWarning")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("page", RUNNABLE, ids=lambda path: path.stem)
def test_what_the_page_says_works(
    page: Path, penstock_spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("PENSTOCK_FLOWS", "PENSTOCK_SINKS", "PENSTOCK_PROJECT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    share_session(penstock_spark, monkeypatch)
    with Broker() as broker:
        monkeypatch.setenv("PENSTOCK_BOOTSTRAP", broker.bootstrap)
        numbers = count()

        def tester() -> FlowTester:
            folder = tmp_path / f".penstock-test-{next(numbers)}"
            return FlowTester(penstock_spark, broker, folder)

        Reader(page, tmp_path, broker.bootstrap, tester).read()
