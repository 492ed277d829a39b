"""Character sets: how a column's bytes become text.

Python knows most of them under other names. Where it does not, or not quite as the server does (its
latin1 is cp1252 with every byte assigned), the server itself is asked what each byte means.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping
from typing import Final

from penstock.capture.source import CaptureError

Decode = Callable[[bytes], str]

BINARY: Final = "binary"
UTF8: Final = frozenset({"utf8mb4", "utf8mb3", "utf8"})
# Of more than one byte for a character; the others are tables of 256.
MULTIBYTE: Final = {
    "ucs2": "utf-16-be",
    "utf16": "utf-16-be",
    "utf16le": "utf-16-le",
    "utf32": "utf-32-be",
    "big5": "big5",
    "gbk": "gbk",
    "gb2312": "gb2312",
    "gb18030": "gb18030",
    "sjis": "shift_jis",
    "cp932": "cp932",
    "ujis": "euc_jp",
    "eucjpms": "euc_jp",
    "euckr": "euc_kr",
}


class Charsets:
    """The character sets of one server: by collation number, and a decoder for each."""

    def __init__(
        self,
        collations: Mapping[int, str],
        tables: Callable[[str], Mapping[int, str]] | None = None,
    ) -> None:
        self._collations = collations
        self._ask = tables
        self._decoders: dict[str, Decode] = {}

    def name(self, collation: int) -> str:
        """The character set of a collation."""
        found = self._collations.get(collation)
        if found is None:
            raise CaptureError(
                f"the server does not know collation {collation}, which its binlog names",
                advice="Connect to a server of the version that wrote the binlog.",
            )
        return found

    def decoder(self, charset: str) -> Decode:
        """Bytes of this character set to text."""
        found = self._decoders.get(charset)
        if found is None:
            found = self._decoders[charset] = self._make(charset)
        return found

    def _make(self, charset: str) -> Decode:
        if charset in UTF8:
            return lambda raw: raw.decode("utf-8", "replace")
        codec = MULTIBYTE.get(charset)
        if codec is not None:
            decode = codecs.getdecoder(codec)
            return lambda raw: decode(raw, "replace")[0]
        if charset == "ascii":
            return lambda raw: raw.decode("ascii", "replace")
        if self._ask is None:
            raise CaptureError(f"character set {charset} is not known")
        found = self._ask(charset)
        table = "".join(found.get(i, "\ufffd") for i in range(256))
        mapped = codecs.charmap_decode
        return lambda raw: mapped(raw, "replace", table)[0]
