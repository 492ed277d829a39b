"""What makes Spark's Python workers quicker between tasks.

Two things happen in a worker before each task, and each took a tenth of a second of computing, as
much as reading a hundred thousand records:

- Python is told to forget what it knows of the import path. Spark's own Python lies in a zip file
  on that path, and forgetting means to read its table of contents again, once for each of its
  packages. That file does not change while Spark runs, so its importers keep what they know.
- Garbage is collected, by looking at every object there is. Those of the modules that reading needs
  (numba, pyarrow, pandas) never become garbage, so they are put out of the collector's sight.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from pathlib import PurePath
from typing import Final
from zipimport import zipimporter

# Some modules are loaded only by the first task.
_TASKS_THAT_LOAD: Final = 2


# By what the tasks do.
_tasks: Final[Counter[str]] = Counter()


def settle(kind: str = "source") -> None:
    """To be called by every task; costs next to nothing from the third of a kind on."""
    for finder in list(sys.path_importer_cache.values()):
        if isinstance(finder, zipimporter) and _is_sparks(finder.archive):
            finder.invalidate_caches = _nothing  # type: ignore[method-assign]
    if _tasks[kind] < _TASKS_THAT_LOAD:
        _tasks[kind] += 1
        gc.collect()
        gc.freeze()


def _is_sparks(archive: str) -> bool:
    name = PurePath(archive).name
    return name == "pyspark.zip" or (name.startswith("py4j-") and name.endswith("-src.zip"))


def _nothing() -> None:
    pass
