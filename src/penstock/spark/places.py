"""Where in the user's code something was declared or went wrong, as errors begin: `file:line`."""

from __future__ import annotations

import re
import sys
import sysconfig
import traceback
from pathlib import Path
from typing import Final

_PACKAGE: Final = str(Path(__file__).resolve().parents[1])
_STANDARD: Final = tuple(
    sysconfig.get_path(name) + "/" for name in ("stdlib", "platstdlib", "scripts")
)
# The standard library of a worker on another machine.
_STANDARD_ELSEWHERE: Final = re.compile(r"/lib(64)?/python3\.\d+t?/")
# Of Python, and of Spark where it was not installed by pip.
_LIBRARIES: Final = ("/site-packages/", "/dist-packages/", "/python/pyspark/", "pyspark.zip/",
                     "-src.zip/py4j")  # fmt: skip


def caller() -> str:
    """The innermost line of the user's code that is being run; "" if there is none."""
    frame = sys._getframe(1)
    while is_library(frame.f_code.co_filename):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return place(frame.f_code.co_filename, frame.f_lineno)


def before() -> str:
    """The same as errors begin, with a colon behind it."""
    where = caller()
    return f"{where}: " if where else ""


def raised_at(error: BaseException) -> str:
    """The innermost line of the user's code that an error came through; "" if there is none."""
    frames = [each for each in traceback.extract_tb(error.__traceback__)
              if not is_library(each.filename)]  # fmt: skip
    return place(frames[-1].filename, frames[-1].lineno or 0) if frames else ""


def place(filename: str, line: int) -> str:
    """A line of a file, as a person in the current folder would name it."""
    path = Path(filename)
    try:
        return f"{path.relative_to(Path.cwd())}:{line}"
    except (ValueError, OSError):
        return f"{filename}:{line}"


def told(where: str, message: str) -> str:
    """A message with its place before it, unless it has it already."""
    if not where or message.startswith(f"{where}: "):
        return message
    return f"{where}: {message}"


def is_library(filename: str) -> bool:
    """Whether code is ours, Spark's, Python's or any other that is installed."""
    if filename.startswith(("<", f"{_PACKAGE}/", *_STANDARD)) or _STANDARD_ELSEWHERE.search(
        filename
    ):
        return True
    return any(part in filename for part in _LIBRARIES)
