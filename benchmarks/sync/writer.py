"""Steady changes in a SQLite file: `python -m benchmarks.sync.writer FILE RATE SECONDS FIRST`.

Ten rows per transaction; `written_us` is the moment before the transaction. How many rows it were
is printed at the end.
"""

from __future__ import annotations

import sqlite3
import sys
from pathlib import Path
from typing import Any

from benchmarks.capture.databases import Sqlite


class File(Sqlite):
    """The table in a file that is there."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def connect(self) -> Any:
        found = sqlite3.connect(self._path, timeout=60)
        # In WAL mode: the changes survive a crash of the process, and no commit waits for the disk.
        found.execute("PRAGMA synchronous=NORMAL")
        return found

    def stop(self) -> None:
        return


def main() -> None:
    path, rate, seconds, first = sys.argv[1:5]
    print(File(Path(path)).steadily(int(rate), float(seconds), int(first)), flush=True)


if __name__ == "__main__":
    main()
