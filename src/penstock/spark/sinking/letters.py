"""What could not be read or taken, to the dead-letter topic, with where it stood and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.client.writer import LogWriter
from penstock.sinks.contract import Changes, Refused

HEADER_PREFIX: Final = "penstock.error."
MAX_REASON_CHARACTERS: Final = 1000

Header = tuple[str, bytes | None]


class Letters:
    """Writes to one dead-letter topic, which is made when the first is written."""

    def __init__(self, cluster: Cluster, topic: str, sink: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._sink = sink
        self._is_made = False
        self.written = 0

    def unread(self, letters: pa.Table) -> None:
        """Records that could not be read, as they were."""
        rows = letters.to_pylist()
        self._write([row["key"] for row in rows], [row["value"] for row in rows], rows)

    def refused(self, refused: Sequence[Refused], changes: Changes) -> None:
        """Rows that the store could not take: key and row as JSON."""
        keys, values, places = [], [], []
        at = changes.upserted_at
        for each in refused:
            mine = pc.and_(
                pc.equal(at.column("offset"), each.offset),
                pc.equal(at.column("partition"), each.partition),
            )
            row: Mapping[str, Any] = (changes.upserts.filter(mine).to_pylist() or [{}])[0]
            names = changes.deletes.column_names
            keys.append(_json(dict(zip(names, each.key, strict=True))))
            values.append(_json(row))
            places.append({"topic": each.topic, "partition": each.partition, "offset": each.offset,
                           "timestamp": None, "reason": each.reason})  # fmt: skip
        self._write(keys, values, places)

    def _write(
        self,
        keys: Sequence[bytes | None],
        values: Sequence[bytes | None],
        places: Sequence[Mapping[str, Any]],
    ) -> None:
        if not keys:
            return
        if not self._is_made:
            create(self._cluster, self._topic, exists_ok=True)
            self._is_made = True
        with LogWriter(self._cluster) as writer:
            writer.write(
                self._topic, list(keys), list(values), headers=[self._headers(p) for p in places]
            )
            writer.flush()
        self.written += len(keys)

    def _headers(self, place: Mapping[str, Any]) -> list[Header]:
        moment = place["timestamp"]
        told = {
            "topic": place["topic"],
            "partition": place["partition"],
            "offset": place["offset"],
            "timestamp": None if moment is None else round(moment.timestamp() * 1000),
            "reason": str(place["reason"])[:MAX_REASON_CHARACTERS],
            "sink": self._sink,
        }
        return [
            (f"{HEADER_PREFIX}{name}", str(value).encode())
            for name, value in told.items()
            if value is not None
        ]


def _json(value: Mapping[str, Any]) -> bytes:
    return orjson.dumps(
        {name: item.hex() if isinstance(item, bytes) else item for name, item in value.items()},
        default=str,
        option=orjson.OPT_NON_STR_KEYS,
    )
