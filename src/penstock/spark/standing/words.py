"""Words of texts: the same for queries and for documents.

A word is letters, digits and _, in lower case. What is plain ASCII is taken byte by byte; other
text is first brought to one form (NFKC), with everything that is no letter, mark or digit blanked
out, after which all bytes beyond ASCII belong to words.
"""

from __future__ import annotations

import re
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_ASCII: Final = re.compile(r"[a-z0-9_]+")
_OTHERS: Final = r"[^\p{L}\p{M}\p{N}_]+"


def words(text: str) -> list[str]:
    """The words of one text."""
    if text.isascii():
        return _ASCII.findall(text.lower())
    return str(plain(pa.array([text]))[0].as_py()).split()


def plain(texts: pa.Array) -> pa.Array:
    """Texts in lower case, of which all bytes beyond ASCII belong to words."""
    if _is_ascii(texts):
        return pc.ascii_lower(texts)
    normal = pc.utf8_lower(pc.utf8_normalize(texts, form="NFKC"))
    return pc.replace_substring_regex(normal, _OTHERS, " ")


def _is_ascii(texts: pa.Array) -> bool:
    data = texts.buffers()[2]
    if data is None:
        return True
    content: Any = np.frombuffer(data, np.uint8)
    return not len(content) or int(content.max()) < 0x80
