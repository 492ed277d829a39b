"""The rows of a view as they are now, read from its topic: by key, or those that fit a condition.

    from penstock.spark.views.current import rows

    for row in rows("revenue", where=["total > 100"]):
        print(row["country"], row["total"])

What is read is one moment: committed records, up to the ends that the partitions had when it began.
A partition is read twice: first for which record is the last of each key, then for those. So what
is kept is the keys of one partition, and never its rows. No Spark is started; conditions are simple
comparisons (`comparison`), everything else is SQL's: a view over the view.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.client.connection import Cluster
from penstock.client.fetching import Fetched, Fetcher
from penstock.client.metadata import EARLIEST, LATEST, Isolation, Metadata, Place, offsets
from penstock.client.reading import walk
from penstock.client.security import Security
from penstock.errors import PenstockError
from penstock.records.columns.decode import decode
from penstock.spark.flows.folder import DEFAULT_DATA, Folder
from penstock.spark.flows.versions import physical
from penstock.spark.views import definitions
from penstock.spark.views.comparison import Comparison, Types, comparison, loads, text_of
from penstock.spark.views.definitions import Definition

# Keys are brought together whenever so many more records were read.
_TOGETHER: Final = 1_000_000
# How often it is looked for a moment at which no transaction is open, and how long that may take.
_LOOKS: Final = 40
_LOOK_EVERY_S: Final = 0.025
_KEY, _LAST, _IS_ROW = "key", "last", "is_row"

Row = dict[str, Any]


class NoSuchViewError(PenstockError):
    """There is no topic of a view."""

    advice = "`penstock run --views` makes it when the view first runs."


class NoSuchColumnError(PenstockError):
    """A view has no such column."""


@dataclass(frozen=True, slots=True)
class Found:
    """A row of a view: its value as it stands in the topic, and its columns with their types."""

    value: bytes
    types: Types
    read: Row | None = None

    @property
    def row(self) -> Row:
        return self.read if self.read is not None else self.types.typed(loads(self.value))


def rows(
    view: str,
    *,
    bootstrap: str = "localhost:9092",
    project: str | Path = ".",
    data: str | Path | None = None,
    key: Mapping[str, Any] | None = None,
    where: Sequence[str] = (),
    limit: int | None = None,
    options: Mapping[str, str] | None = None,
) -> Iterator[Row]:
    """The rows of a view of a project, one after the other, with the types that it last had.

    `key` are values of columns of the view's key, and `where` conditions that all hold, such as
    "total > 100". `data` is where `penstock run` keeps flows, `.penstock/flows` in the folder
    `project`; `options` are settings of clients, for a log that asks who is there.
    """
    folder = Path(project)
    there = {each.stem: each for each in definitions.files(folder)}
    if view not in there:
        raise NoSuchViewError(
            f"the project has no view {view!r}", advice=f"It has {', '.join(there) or 'none'}."
        )
    kept = Folder(Path(data) if data is not None else folder / DEFAULT_DATA)
    topic, columns = stored(definitions.read(there[view]), kept)
    security = Security.from_options(dict(options or {}))
    with Cluster(bootstrap, client_id="penstock-view-rows", security=security) as cluster:
        found = find(cluster, topic, columns=columns, key=key, where=where, limit=limit)
        yield from (each.row for each in found)


def stored(view: Definition, folder: Folder) -> tuple[str, Mapping[str, str] | None]:
    """The topic that has a view's rows now, and its columns with their types where it has run."""
    record = folder.find(view.name)
    topic = physical(view.topic, record.generation if record is not None else 1)
    return topic, record.columns.get(topic) if record is not None else None


def find(
    cluster: Cluster,
    topic: str,
    *,
    columns: Mapping[str, str] | None = None,
    key: Mapping[str, Any] | None = None,
    where: Sequence[str] = (),
    limit: int | None = None,
) -> Iterator[Found]:
    """The rows of a topic, with what stands in it; without types values are as JSON has them."""
    types = Types(columns or {})
    by_key = [Comparison(name, "=", text_of(value)) for name, value in (key or {}).items()]
    by_value = [comparison(each) for each in where]
    for each in (*by_key, *by_value):
        if columns and each.column not in columns:
            raise NoSuchColumnError(
                f"the view has no column {each.column!r}", advice=f"It has {', '.join(columns)}."
            )
        each.check(types)
    reader = _Reader(cluster, topic)
    left = limit
    for found_key, value in reader.read():
        if by_key and not _fits(loads(found_key), by_key, types, is_key=True):
            continue
        found = Found(value, types)
        if by_value:
            found = Found(value, types, found.row)
            if not _fits(found.row, by_value, types):
                continue
        yield found
        if left is not None:
            left -= 1
            if left <= 0:
                return


def _fits(row: Any, asked: Sequence[Comparison], types: Types, *, is_key: bool = False) -> bool:
    if not asked:
        return True
    if not isinstance(row, dict):
        row = {}
    row = types.typed(row) if is_key else row
    for each in asked:
        if each.column not in row:
            what = "is no column of the view's key" if is_key else "is no column of the view"
            raise NoSuchColumnError(f"{each.column!r} {what}",
                                    advice=f"There are {', '.join(row) or 'none'}.")  # fmt: skip
    return all(each.holds(row, types) for each in asked)


class _Reader:
    """The last records of all keys of a topic."""

    def __init__(self, cluster: Cluster, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._metadata = Metadata(cluster)
        if topic not in self._metadata.topics([topic]):
            raise NoSuchViewError(f"there is no topic {topic!r}, which is to have the view's rows")
        self._places: list[Place] = [(topic, at) for at in self._metadata.partitions(topic)]

    def read(self) -> Iterator[tuple[bytes, bytes]]:
        """Keys and values."""
        starts, ends = self._offsets(EARLIEST), self._ends()
        with Fetcher(self._cluster, isolation="read_committed", metadata=self._metadata) as fetcher:
            for place in self._places:
                yield from self._of_partition(fetcher, place, starts[place], ends[place])

    def _ends(self) -> dict[Place, int]:
        """Where committed records end, if possible at a moment when no transaction is open.

        A micro-batch is one transaction over all partitions, which are told one after the other
        that it is committed.
        """
        ends = self._offsets(LATEST)
        for _ in range(_LOOKS):
            if ends == self._offsets(LATEST, "read_uncommitted"):
                break
            time.sleep(_LOOK_EVERY_S)
            ends = self._offsets(LATEST)
        return ends

    def _offsets(self, which: int, isolation: Isolation = "read_committed") -> dict[Place, int]:
        wanted = dict.fromkeys(self._places, which)
        found = offsets(self._cluster, wanted, isolation=isolation, metadata=self._metadata)
        return dict(found)

    def _of_partition(
        self, fetcher: Fetcher, place: Place, start: int, end: int
    ) -> Iterator[tuple[bytes, bytes]]:
        last = self._last(self._records(fetcher, place, start, end))
        wanted = np.sort(last[_LAST].to_numpy()[last[_IS_ROW].to_numpy()])
        seen = np.zeros(len(wanted), np.bool_)
        for batch in self._records(fetcher, place, start, end):
            at, there = _among(wanted, batch["offset"].to_numpy())
            seen[at[there]] = True
            yield from _pairs(batch.filter(pa.array(there)))
        if seen.all():
            return
        # Newer records have come meanwhile, and compaction has removed the older ones.
        gone = wanted[~seen]
        _, there = _among(gone, last[_LAST].to_numpy())
        keys = last.filter(pa.array(there))[_KEY]
        now = self._offsets(LATEST)[place]
        fresh = self._last(self._records(fetcher, place, end, now))
        fresh = fresh.filter(pc.is_in(fresh[_KEY], keys))
        wanted = np.sort(fresh[_LAST].to_numpy()[fresh[_IS_ROW].to_numpy()])
        for batch in self._records(fetcher, place, end, now):
            _, there = _among(wanted, batch["offset"].to_numpy())
            yield from _pairs(batch.filter(pa.array(there)))

    def _last(self, batches: Iterator[pa.Table]) -> pa.Table:
        """The offset of the last record of each key, and whether it is a row."""
        parts: list[pa.Table] = [_keys(_EMPTY)]
        count = 0
        for batch in batches:
            parts.append(_keys(batch))
            count += len(batch)
            if count > _TOGETHER:
                parts, count = [_last_of(parts)], 0
        return _last_of(parts).combine_chunks()

    def _records(self, fetcher: Fetcher, place: Place, start: int, end: int) -> Iterator[pa.Table]:
        left = {place: start} if start < end else {}

        def look(place: Place, fetched: Fetched) -> tuple[int, pa.RecordBatch | None]:
            decoded = decode(
                fetched.data,
                first_offset=left[place],
                end_offset=end,
                aborted=fetched.aborted,
            )
            return decoded.next_offset, decoded.batch if decoded.batch.num_rows else None

        for _, batch in walk(fetcher, left, {place: end}, look):
            table = pa.Table.from_batches([batch]).select(_EMPTY.column_names)
            yield table.filter(pc.is_valid(table["key"]))


_EMPTY: Final = pa.schema(
    [("key", pa.binary()), ("value", pa.binary()), ("offset", pa.int64())]
).empty_table()


def _keys(batch: pa.Table) -> pa.Table:
    return pa.table(
        [batch["key"].cast(pa.large_binary()), batch["offset"], pc.is_valid(batch["value"])],
        names=[_KEY, _LAST, _IS_ROW],
    )


def _last_of(parts: Sequence[pa.Table]) -> pa.Table:
    whole = pa.concat_tables(parts)
    last = whole.group_by(_KEY).aggregate([(_LAST, "max")])
    _, is_last = _among(np.sort(last[f"{_LAST}_max"].to_numpy()), whole[_LAST].to_numpy())
    return whole.filter(pa.array(is_last))


def _among(wanted: Any, values: Any) -> tuple[Any, Any]:
    """Where values stand among sorted ones, and which are there."""
    at = np.searchsorted(wanted, values)
    at = np.minimum(at, max(len(wanted) - 1, 0))
    there = wanted[at] == values if len(wanted) else np.zeros(len(values), np.bool_)
    return at, there


def _pairs(batch: pa.Table) -> Iterator[tuple[bytes, bytes]]:
    for part in batch.to_batches(max_chunksize=10_000):
        yield from zip(part["key"].to_pylist(), part["value"].to_pylist(), strict=True)
