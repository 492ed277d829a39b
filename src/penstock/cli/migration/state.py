"""How far a partition has come, kept on the target: the position and a digest of what was copied.

The position is the committed offset of the migration group for the target's partition; it counts
in offsets of the *source*. The rest travels as the metadata of that offset. A *window* is what has
been copied since the last verification: it begins at an offset on each side, holds a number of
records, and has a digest that depends on every byte of them and on their order. In the target it
goes on to the end of the partition: nobody else may have written there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any, Final, NamedTuple

import orjson

from penstock.client.migration_map import Place
from penstock.errors import PenstockError

Header = tuple[str, bytes | None]

DIGEST_BYTES: Final = 16
EMPTY_DIGEST: Final = bytes(DIGEST_BYTES)
_VERSION: Final = 2
_HEAD: Final = struct.Struct(">qii")
_LENGTH: Final = struct.Struct(">i")


class Copied(NamedTuple):
    """A record as it is copied and compared."""

    key: bytes | None
    value: bytes | None
    timestamp_ms: int
    headers: tuple[Header, ...]
    # Whether the timestamp is not the source's, because it cannot be written.
    clamped: bool = False

    def size(self) -> int:
        return len(self.key or b"") + len(self.value or b"")


def absorb(digest: bytes, record: Copied) -> bytes:
    """The digest of what came before and this record."""
    key, value = record.key, record.value
    parts = [
        digest,
        _HEAD.pack(
            record.timestamp_ms,
            -1 if key is None else len(key),
            -1 if value is None else len(value),
        ),
        key or b"",
        value or b"",
    ]
    for name, content in record.headers:
        encoded = name.encode()
        parts += [
            _LENGTH.pack(len(encoded)),
            encoded,
            _LENGTH.pack(-1 if content is None else len(content)),
            content or b"",
        ]
    return blake2b(b"".join(parts), digest_size=DIGEST_BYTES).digest()


@dataclass(frozen=True, slots=True)
class Progress:
    """How far one partition has come."""

    # The source's topic: one that is made anew under the same name is another.
    topic_id: str
    # The next source offset to copy.
    position: int
    # The window: where it begins in the source and in the target.
    window_start: int
    window_target: int = 0
    # The last record that was written to the target, in this window or before; -1 without any.
    last_target: int = -1
    count: int = 0
    digest: bytes = EMPTY_DIGEST

    def metadata(self) -> str:
        """What is stored beside the position."""
        return orjson.dumps(
            {
                "version": _VERSION,
                "topic_id": self.topic_id,
                "window": self.window_start,
                "window_target": self.window_target,
                "last": self.last_target,
                "count": self.count,
                "digest": self.digest.hex(),
            }
        ).decode()

    def with_records(self, records: Iterable[tuple[int, Copied]], last_target: int) -> Progress:
        """After these source offsets and records, the last of which is there in the target."""
        digest, count, position = self.digest, self.count, self.position
        for offset, record in records:
            digest = absorb(digest, record)
            count += 1
            position = offset + 1
        return replace(
            self,
            position=position,
            last_target=last_target,
            count=count,
            digest=digest,
        )

    def moved_to(self, position: int) -> Progress:
        """Past offsets without records to copy: markers, aborted or compacted ones."""
        return replace(self, position=max(position, self.position))

    def verified(self) -> Progress:
        """With a new window that begins here."""
        return replace(
            self,
            window_start=self.position,
            window_target=self.last_target + 1,
            count=0,
            digest=EMPTY_DIGEST,
        )


def parse_progress(place: Place, position: int, metadata: str | None) -> Progress:
    """What was stored; an error if it is not ours."""
    try:
        found: dict[str, Any] = orjson.loads(metadata or "")
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']}")
        return Progress(
            topic_id=str(found["topic_id"]),
            position=position,
            window_start=int(found["window"]),
            window_target=int(found["window_target"]),
            last_target=int(found["last"]),
            count=int(found["count"]),
            digest=bytes.fromhex(found["digest"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PenstockError(
            f"{place}: what an earlier migration left on the target cannot be read ({error})",
            advice="It was written by another version. Delete the topic and the group "
            "penstock-migrate-... on the target, and migrate it from the beginning.",
        ) from None
