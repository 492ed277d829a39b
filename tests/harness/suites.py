"""Small suites that are run through the harness, to see what it makes of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.harness.flaky import PAGE_VARIABLE

ROOT: Final = Path(__file__).resolve().parents[2]
CONFTEST: Final = (ROOT / "tests" / "conftest.py").read_text()
PAGE: Final = "| test | seen | commit | failure |\n|---|---|---|---|\n"
MARKS: Final = ("java", "databases", "processes", "independent", "proof")
ALONE: Final = ("--workers", "1")
WITH_WORKERS: Final = ("--workers", "2")


class Suite:
    """A suite in a folder of its own, with the harness and the fixtures of this one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.page = folder / "flaky.md"
        self.page.write_text(PAGE)
        # Where the run makes its folder; the path of a socket in it must be short.
        self.temporary = tempfile.gettempdir()
        marks = "".join(f"  {mark}\n" for mark in MARKS)
        (folder / "pytest.ini").write_text(f"[pytest]\nmarkers =\n{marks}")
        (folder / "conftest.py").write_text(
            f'{CONFTEST}\npytest_plugins = ["tests.harness.plugin"]\n'
        )

    def run(self, profile: str, body: str, *arguments: str) -> tuple[int, str]:
        """The exit code and the output of a run."""
        return self._run(["tests.harness", profile], body, *arguments)

    def run_plainly(self, body: str) -> tuple[int, str]:
        """The same of a plain pytest."""
        return self._run(["pytest"], body)

    def _run(self, program: list[str], body: str, *arguments: str) -> tuple[int, str]:
        (self.folder / "test_suite.py").write_text(body)
        done = subprocess.run(
            [sys.executable, "-m", *program, *(arguments or ALONE), "--rootdir",
             str(self.folder), "-c", str(self.folder / "pytest.ini"), "test_suite.py"],
            env={
                **os.environ, "PYTHONPATH": str(ROOT), PAGE_VARIABLE: str(self.page),
                "TMPDIR": self.temporary,
            },
            cwd=self.folder, capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def rows(self) -> list[str]:
        """The rows of the page of flaky tests."""
        return self.page.read_text().splitlines()[2:]
