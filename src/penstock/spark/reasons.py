"""What Spark says is wrong with an expression or a type, in a line for people."""

from __future__ import annotations

import difflib
import re
from typing import Final

from sqlglot import exp

# Where the plan, the text once more, or the stack begins.
_REST: Final = re.compile(r"\n\n==|;\s+line \d+|\(line \d+|;\n|\n\nJVM")
_CODES: Final = re.compile(r"^\s*\[[A-Z0-9_.]+\]\s*|\s*SQLSTATE: \w+")
_LINK: Final = re.compile(r"\s*Please, refer to .*")
_FUNCTION: Final = re.compile(r"Cannot resolve routine `([^`]+)`")
_MISMATCH: Final = "due to data type mismatch: "


def remedy(error: Exception, otherwise: str = "") -> str:
    """What to do about it: of a function that is not known, which one may have been meant."""
    unknown = _FUNCTION.search(str(error))
    if unknown is None:
        return otherwise
    near = difflib.get_close_matches(unknown[1].upper(), exp.FUNCTION_BY_NAME, 1, 0.7)
    return f"Is it {near[0].lower()}?" if near else "Spark's functions can be used."


def reason(error: Exception) -> str:
    """Without codes, plans, places and links."""
    message = str(getattr(error, "desc", None) or error)
    if unknown := _FUNCTION.search(message):
        return f"there is no function {unknown[1].lower()}"
    text = _CODES.sub("", _REST.split(message, maxsplit=1)[0])
    text = _LINK.sub("", text.split(_MISMATCH, 1)[-1])
    return " ".join(text.split()).removesuffix(".") or type(error).__name__
