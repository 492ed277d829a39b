"""The Python that Spark's workers run: this one, but with pyspark as it is installed.

Spark puts the zip file of its Python package first on the path of every Python process. From a zip
file everything is compiled anew at each start, which takes a second of computing; installed, it is
compiled already, and takes a quarter of that. A stream has a Python process of its own, for which
Spark waits ten seconds: on a busy machine a flow with several streams would never come to start.

So workers are started by a little script that takes the zip files out of the path. It lies in the
user's cache folder. Where it cannot be written, or Spark is not the one of this Python's package,
the plain Python is used.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from pathlib import Path
from shlex import quote
from typing import Final

import pyspark

from penstock.spark.archive import cache_folder

_SCRIPT: Final = """\
#!/bin/sh
# Made by Penstock: Python without the zip files of Spark on its path, see penstock.spark.python.
kept=
IFS=:
for part in $PYTHONPATH; do
    case $part in
    */pyspark.zip | */py4j-*-src.zip) ;;
    *) kept=$kept:$part ;;
    esac
done
unset IFS
PYTHONPATH=${kept#:} exec %s "$@"
"""


def worker_python() -> str:
    """The program for workers on this machine."""
    if os.environ.get("SPARK_HOME") or not Path(pyspark.__file__).is_file():
        return sys.executable
    text = _SCRIPT % quote(sys.executable)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    script = cache_folder() / f"python-{digest}"
    try:
        if not (script.is_file() and os.access(script, os.X_OK)):
            _write(script, text)
    except OSError:
        return sys.executable
    return str(script)


def _write(script: Path, text: str) -> None:
    """As a whole: another process may be about to run it."""
    script.parent.mkdir(parents=True, exist_ok=True)
    handle, beside = tempfile.mkstemp(dir=script.parent, prefix=script.name)
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(text)
    os.chmod(beside, 0o755)
    os.replace(beside, script)
