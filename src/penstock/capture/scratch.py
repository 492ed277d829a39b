"""Files that a capture needs while it runs: SQLite databases that are thrown away.

They lie in `state_dir`, which is made if it is not there. A file has no name from the moment it is
open, where the system allows that, so nothing of it is left if the process is killed.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from penstock.capture.source import CaptureError


class Scratch:
    """A database in a file; close it to have the file gone."""

    def __init__(self, table: str, folder: str | Path | None = None) -> None:
        """With this table: what stands behind CREATE TABLE."""
        self._place = Path(folder or tempfile.gettempdir())
        with self.kept():
            self._place.mkdir(parents=True, exist_ok=True)
            self._folder = tempfile.TemporaryDirectory(prefix="penstock-capture-", dir=self._place)
            path = Path(self._folder.name) / "scratch.sqlite"
            self.db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
            for pragma in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE"):
                self.db.execute(f"PRAGMA {pragma}")
            self.db.execute(f"CREATE TABLE {table}")
        self._clean_up()

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self.db.close()
        self._clean_up()

    def _clean_up(self) -> None:
        # Some systems do not remove a file that is open.
        with suppress(OSError):
            self._folder.cleanup()

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Around what is done with it: CaptureError where the file cannot be written or read."""
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise CaptureError(
                f"a file of the capture cannot be kept in {self._place}: {error}",
                advice="Make room there, or set state_dir to a folder that may be written to and "
                "has room for the rows of the largest table; then run the capture again.",
            ) from error
