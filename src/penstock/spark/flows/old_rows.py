"""Whether change events hold the old row, for flows that read `_before`.

PostgreSQL logs the old row of an update only of tables with a full replica identity. Without it
`_before` is null, and what a flow computes from it is wrong without an error. So it is looked at
the newest updates in the log when a flow starts that uses `_before`, and again until there is one.
Where there are no updates yet, `ask` may know more: whoever can reach the database.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson

from penstock.client.metadata import EARLIEST, LATEST, Metadata, offsets
from penstock.client.reading import read_batches
from penstock.errors import PenstockError
from penstock.spark.flows.inputs import Place

log = logging.getLogger(__name__)

# Records of each partition that are looked at, from its end.
MOST_RECORDS: Final = 500
LOOK_S: Final = 10.0
_JOIN_S: Final = 1.0

Ask = Callable[[Sequence[str]], Mapping[str, Sequence[str]]]
"""Tables without old rows by topic, as the database says; topics that nobody knows are left out."""


@dataclass(frozen=True, slots=True)
class OldRows:
    """What the newest updates of a topic say, by table: whether they hold the old row."""

    tables: Mapping[str, bool]
    # The kinds of database, by table.
    connectors: Mapping[str, str]

    @property
    def missing(self) -> list[str]:
        return sorted(table for table, held in self.tables.items() if not held)

    @classmethod
    def of(cls, values: Iterable[bytes | None]) -> OldRows:
        """From change events in the order of the log: the last update of each table decides."""
        tables, connectors = dict[str, bool](), dict[str, str]()
        for value in values:
            event = _event(value)
            if event.get("op") != "u":
                continue
            source = event.get("source")
            source = source if isinstance(source, dict) else {}
            names = [source.get("schema") or source.get("db"), source.get("table")]
            table = ".".join(str(name) for name in names if name)
            tables[table] = event.get("before") is not None
            connectors[table] = str(source.get("connector", ""))
        return cls(tables, connectors)


def _event(value: bytes | None) -> dict[str, Any]:
    if not value:
        return {}
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:
        return {}
    inner = found.get("payload", found) if isinstance(found, dict) else None
    return inner if isinstance(inner, dict) else {}


def look(place: Place, topic: str) -> OldRows:
    """What the end of a topic says."""
    with place.cluster() as cluster:
        metadata = Metadata(cluster)
        places = [(topic, number) for number in metadata.partitions(topic)]
        first, ends = (
            offsets(cluster, dict.fromkeys(places, which), metadata=metadata,
                    isolation="read_committed")
            for which in (EARLIEST, LATEST)
        )  # fmt: skip
        start = {at[1]: max(first[at], ends[at] - MOST_RECORDS) for at in places}
        values: list[bytes | None] = []
        for _, batch in read_batches(cluster, topic, start=start, timeout_s=LOOK_S):
            values += batch.column("value").to_pylist()
    return OldRows.of(values)


def warning(flow: str, topic: str, tables: Sequence[str], connector: str = "") -> tuple[str, str]:
    """What is said, and what helps."""
    names = ", ".join(filter(None, tables)) or topic
    told = (
        f"flow {flow!r} uses _before of {topic}, and updates of {names} come without the old row: "
        "_before is null in them"
    )
    if connector not in {"", "postgresql"}:
        return told, "Let the database log whole rows (binlog_row_image=FULL)."
    commands = "; ".join(f"ALTER TABLE {each} REPLICA IDENTITY FULL" for each in tables if each)
    commands = commands or "ALTER TABLE ... REPLICA IDENTITY FULL"
    return told, f"In the database: {commands}. It holds for updates from then on."


class OldRowsWatch:
    """Looks at topics until each has an update, and tells of those without the old row."""

    def __init__(
        self,
        place: Place,
        flow: str,
        topics: Sequence[str],
        ask: Ask | None,
        look_s: float = LOOK_S,
    ) -> None:
        """`topics` as they are declared."""
        self._place, self._flow, self._ask, self._look_s = place, flow, ask, look_s
        self._left = list(topics)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="old-rows", daemon=True)
        # What was found: message and advice.
        self.found: tuple[str, str] | None = None

    def start(self) -> None:
        """Look once, and go on looking on a thread if there was nothing to see yet."""
        self._look()
        if self._left and self._ask is not None:
            for topic, tables in self._ask(tuple(self._left)).items():
                if tables:
                    self._tell(*warning(self._flow, topic, tables))
        if self._left:
            self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        while self._left and not self._closed.wait(self._look_s):
            self._look()

    def _look(self) -> None:
        for topic in list(self._left):
            try:
                seen = look(self._place, self._place.resolve(topic))
            except (PenstockError, OSError) as error:
                log.debug("topic %s cannot be looked at: %s", topic, error)
                continue
            if seen.missing:
                kind = seen.connectors[seen.missing[0]]
                self._tell(*warning(self._flow, topic, seen.missing, kind))
            if seen.tables:
                self._left.remove(topic)

    def _tell(self, told: str, advice: str) -> None:
        if self.found is None or self.found[0] != told:
            log.warning("%s. %s", told, advice)
        self.found = told, advice
