"""Kafka's checkpoint files: a version, a count, then one line of fields an entry.

Text, replaced atomically. The small text files of a data directory end with a line that seals
what is above it, `# crc32c 1a2b3c4d`, so that a changed digit does not pass for another number.
A damaged file reads as None: each caller knows the safe assumption.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from crc32c import crc32c

from penstock.log.disk import Disk, read_whole, write_atomically

_VERSION: Final = "0"
_SEAL: Final = "# crc32c "


def seal(text: str) -> bytes:
    """The lines of `text` and the one that seals them."""
    body = text.encode()
    return body + f"{_SEAL}{crc32c(body):08x}\n".encode()


def unseal(data: bytes) -> str | None:
    """What was sealed, without the seal; None if a byte of it is not as it was."""
    body = data[: data.rfind(_SEAL.encode())]
    try:
        text = body.decode()
    except UnicodeDecodeError:
        return None
    return text if seal(text) == data else None


def write_checkpoint(disk: Disk, path: str, rows: Iterable[Sequence[object]]) -> None:
    """Replace the file, durable on return."""
    lines = [" ".join(map(str, row)) for row in rows]
    text = "\n".join([_VERSION, str(len(lines)), *lines, ""])
    write_atomically(disk, path, seal(text))


def read_checkpoint(disk: Disk, path: str, columns: int) -> list[list[str]] | None:
    """The rows; None if the file is absent or not whole."""
    return parse_checkpoint(read_whole(disk, path), columns) if disk.exists(path) else None


def parse_checkpoint(data: bytes, columns: int) -> list[list[str]] | None:
    """The rows in a checkpoint file's bytes; None if they are not whole."""
    text = unseal(data)
    lines = text.splitlines() if text is not None else []
    if len(lines) < 2 or lines[0] != _VERSION or lines[1] != str(len(lines) - 2):
        return None
    rows = [line.split(" ") for line in lines[2:]]
    return rows if all(len(row) == columns for row in rows) else None
