"""Reading topics from end to end: small ones, such as a job's own state.

The end is where the topic ended when the reading began; of records that belong to transactions,
with read_committed, those that were decided by then. Apache Kafka answers a commit a moment before
readers see it: whoever must see what was committed just now says `settled`, and waits for whatever
is open then; or takes the transactional id first (`LogWriter.init`), which waits for its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

import pyarrow as pa

from penstock.client.connection import Cluster
from penstock.client.errors import GaveUpError, OffsetGoneError
from penstock.client.fetching import Fetched, Fetcher
from penstock.client.metadata import EARLIEST, LATEST, Isolation, Metadata, Place, offsets
from penstock.records.columns.decode import decode

T = TypeVar("T")

TIMEOUT_S: Final = 60.0
_WAIT_MS: Final = 1_000


class Row(NamedTuple):
    """One record."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()


def read_batches(
    cluster: Cluster,
    topic: str,
    *,
    start: Mapping[int, int] | None = None,
    partitions: Sequence[int] | None = None,
    isolation: Isolation = "read_committed",
    settled: bool = False,
    headers: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Partitions' numbers and their records as columns (`records.columns.decode`), to the end.

    From the log's start, or from the offsets in `start`, which names partitions; each partition's
    records come in order. What is deleted while we read is passed over, but OffsetGoneError if an
    offset in `start` is gone. With `settled` it goes on to the records that are not decided yet,
    and waits until they are. GaveUpError if nothing more comes for the time limit.
    """
    metadata = Metadata(cluster, timeout_s=timeout_s)
    numbers = metadata.partitions(topic) if partitions is None else partitions
    places: list[Place] = [(topic, number) for number in numbers]
    wanted: dict[int, Isolation] = {
        LATEST: "read_uncommitted" if settled else isolation,
        EARLIEST: isolation,
    }
    ends, positions = (
        offsets(
            cluster,
            dict.fromkeys(places, which),
            isolation=kind,
            metadata=metadata,
            timeout_s=timeout_s,
        )
        for which, kind in wanted.items()
    )
    given = {(topic, number): offset for number, offset in (start or {}).items()}
    _check_start(cluster, metadata, given, ends, positions)
    positions |= given
    left = {place: positions[place] for place in places if positions[place] < ends[place]}

    def look(place: Place, fetched: Fetched) -> tuple[int, pa.RecordBatch | None]:
        decoded = decode(
            fetched.data,
            first_offset=left[place],
            end_offset=ends[place],
            aborted=fetched.aborted if isolation == "read_committed" else (),
            headers=headers,
        )
        return decoded.next_offset, decoded.batch if decoded.batch.num_rows else None

    with Fetcher(cluster, isolation=isolation, metadata=metadata, timeout_s=timeout_s) as fetcher:
        for place, batch in walk(fetcher, left, ends, look, start=start, timeout_s=timeout_s):
            yield place[1], batch


def walk(
    fetcher: Fetcher,
    left: dict[Place, int],
    ends: Mapping[Place, int],
    look: Callable[[Place, Fetched], tuple[int, T | None]],
    *,
    start: Mapping[int, int] | None = None,
    timeout_s: float = TIMEOUT_S,
) -> Iterator[tuple[Place, T]]:
    """Fetch partitions from the offsets in `left`, which moves on, up to their ends.

    `look` says how far what was fetched goes, and what it is, if it is anything.
    """
    progress = time.monotonic()
    while left:
        try:
            answers = fetcher.fetch(left, _WAIT_MS)
        except OffsetGoneError as error:
            _skip(error, left, ends, start or {})
            continue
        for place, fetched in answers.items():
            next_offset, found = look(place, fetched)
            if next_offset > left[place]:
                progress = time.monotonic()
            left[place] = next_offset
            if next_offset >= ends[place]:
                del left[place]
            if found is not None:
                yield place, found
                progress = time.monotonic()
        if time.monotonic() - progress > timeout_s:
            ((topic, number), offset) = next(iter(left.items()))
            raise GaveUpError(
                f"reading {topic}-{number}: nothing after offset {offset} for {timeout_s:.0f} s"
            )


def _check_start(
    cluster: Cluster,
    metadata: Metadata,
    given: Mapping[Place, int],
    ends: Mapping[Place, int],
    starts: Mapping[Place, int],
) -> None:
    """OffsetGoneError where we are to start beyond the end: of what is not decided, too."""
    beyond = [place for place, offset in given.items() if offset > ends.get(place, offset)]
    last = offsets(
        cluster,
        dict.fromkeys(beyond, LATEST),
        isolation="read_uncommitted",
        metadata=metadata,
    )
    for place in beyond:
        if given[place] > last[place]:
            raise OffsetGoneError(*place, given[place], starts[place], last[place])


def _skip(
    error: OffsetGoneError,
    left: dict[Place, int],
    ends: Mapping[Place, int],
    start: Mapping[int, int],
) -> None:
    """Go on where the log starts now, if nobody asked for what is gone."""
    place = (error.topic, error.partition)
    if start.get(error.partition) == error.offset or error.offset >= error.log_start:
        raise error
    left[place] = error.log_start
    if left[place] >= ends[place]:
        del left[place]


def read_all(
    cluster: Cluster,
    topic: str,
    *,
    start: Mapping[int, int] | None = None,
    partitions: Sequence[int] | None = None,
    isolation: Isolation = "read_committed",
    settled: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> list[Row]:
    """All records of a topic, partition by partition; for topics that fit into memory."""
    rows: list[Row] = []
    for number, batch in read_batches(
        cluster,
        topic,
        start=start,
        partitions=partitions,
        isolation=isolation,
        settled=settled,
        headers=True,
        timeout_s=timeout_s,
    ):
        times = batch.column("timestamp").cast(pa.int64()).to_pylist()
        columns = (batch.column(name).to_pylist() for name in ("offset", "key", "value", "headers"))
        rows += [
            Row(
                number,
                offset,
                time_us // 1000,
                key,
                value,
                tuple((item["key"], item["value"]) for item in items or ()),
            )
            for time_us, offset, key, value, items in zip(times, *columns, strict=True)
        ]
    rows.sort(key=lambda row: (row.partition, row.offset))
    return rows


def last_values(
    cluster: Cluster, topic: str, *, settled: bool = False, timeout_s: float = TIMEOUT_S
) -> dict[bytes, bytes]:
    """The last committed value of each key; a key whose last value is null is not there.

    Records without a key are passed over. Right where each key stays in one partition.
    """
    found: dict[bytes, bytes] = {}
    for _, batch in read_batches(cluster, topic, settled=settled, timeout_s=timeout_s):
        keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
        for key, value in zip(keys, values, strict=True):
            if value is None:
                found.pop(key, None)
            elif key is not None:
                found[key] = value
    return found
