"""Fetching: raw record batches of many partitions, from all their leaders at once.

Theory: each leader has a connection of its own and at most one request on its way, which asks for
all partitions that it leads. `fetch` sends what is not yet asked for, and returns as soon as one
leader has brought records; what the others bring is handed out by a later call, if the positions
still fit by then. So a quiet leader, which holds its answer back, never delays a busy one.

Record data are views of what was received, uncopied. The memory is used again only once no view of
it is left: keep the views for as long as they are needed, and no longer.

A partition in trouble (no leader, its broker gone) does not stop the others: it is asked for again,
with growing pauses, and an error tells of it when it has been so for the whole time limit. One
thread.
"""

from __future__ import annotations

import math
import select
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

from penstock.client.connection import (
    Address,
    Cluster,
    Connection,
    Pending,
    Reusable,
    show_address,
)
from penstock.client.errors import (
    ClientError,
    OffsetGoneError,
    RefusedError,
    UnreachableError,
    refused,
)
from penstock.client.metadata import EARLIEST, ISOLATION, Isolation, Metadata, Place, offsets
from penstock.client.retrying import UNKNOWN_TOPIC_S, gave_up, pause_after
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.fetch import FetchPartition, FetchRequest, FetchTopic

MAX_BYTES: Final = 32 << 20
PARTITION_MAX_BYTES: Final = 8 << 20
TIMEOUT_S: Final = 60.0
# Topics have their names up to here, then only ids; names outlive a topic that is made anew.
_NAMES_UP_TO: Final = 12
# How much longer than it was told to wait a broker may take to answer.
_SLACK_S: Final = 30.0
# How long after the caller's time an answer is still waited for, if nothing has come at all.
_GRACE_S: Final = 1.0
_MOMENT_S: Final = 0.02
_UNKNOWN: Final = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@dataclass(frozen=True, slots=True)
class Fetched:
    """What a leader says of a partition: whole batches, the last maybe cut, and how far it goes.

    The first batch may begin before the offset that was asked for. `aborted` are pairs of producer
    id and first offset: whose batches a reader of committed records passes over, until the marker
    of the abort.
    """

    data: memoryview
    high_watermark: int
    last_stable_offset: int
    log_start: int
    aborted: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class _Link:
    """A leader: its connection, and what it is being asked for."""

    connection: Connection
    memory: Reusable
    pending: Pending | None = None
    asked: Mapping[Place, int] | None = None
    due: float = 0.0


@dataclass(slots=True)
class _Trouble:
    """A partition that cannot be fetched: since when, and when it is worth another try."""

    since: float
    error: ClientError
    attempts: int = 0
    again_at: float = 0.0


class Fetcher:
    """Fetches raw batches; a context manager."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        isolation: Isolation = "read_committed",
        max_bytes: int = MAX_BYTES,
        partition_max_bytes: int = PARTITION_MAX_BYTES,
        min_bytes: int = 1,
        timeout_s: float = TIMEOUT_S,
        metadata: Metadata | None = None,
    ) -> None:
        self._cluster = cluster
        self._isolation = ISOLATION[isolation]
        self._max_bytes = max_bytes
        self._partition_max_bytes = partition_max_bytes
        self._min_bytes = min_bytes
        self._timeout_s = timeout_s
        self._metadata = metadata or Metadata(cluster, timeout_s=timeout_s)
        self._links: dict[Address, _Link] = {}
        self._troubles: dict[Place, _Trouble] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for link in self._links.values():
            link.connection.close()
        self._links.clear()

    # ---- fetching ------------------------------------------------------------------------

    def fetch(self, positions: Mapping[Place, int], max_wait_ms: int = 500) -> dict[Place, Fetched]:
        """Batches from these offsets on, of those partitions that have been answered for.

        Waits up to `max_wait_ms` for the first records; then what there is comes back, which may be
        nothing, or places without new records but with their watermarks. Each call brings at most
        `max_bytes` from each leader, but always one whole batch where there is one.

        OffsetGoneError where the log does not have an offset.
        """
        deadline = time.monotonic() + max_wait_ms / 1000
        results: dict[Place, Fetched] = {}
        while positions:
            self._ask(positions, results, deadline)
            if any(link.pending for link in self._links.values()):
                self._gather(positions, results, deadline)
            else:
                self._rest(positions, deadline)
            over_s = time.monotonic() - deadline
            is_waiting = any(link.pending for link in self._links.values())
            if any(fetched.data for fetched in results.values()) or (
                over_s >= 0 and (results or not is_waiting or over_s > _GRACE_S)
            ):
                break
        return results

    def _rest(self, positions: Mapping[Place, int], deadline: float) -> None:
        """Nothing can be asked right now: wait until something can, or for a moment."""
        times = [item.again_at for place, item in self._troubles.items() if place in positions]
        if times:
            now = time.monotonic()
            longest_s = max(deadline - now, _MOMENT_S)
            time.sleep(max(0.0, min(min(times) - now, longest_s)))

    # ---- asking --------------------------------------------------------------------------

    def _ask(
        self, positions: Mapping[Place, int], results: Mapping[Place, Fetched], deadline: float
    ) -> None:
        """Send a request to each leader that has none, for what is not in trouble."""
        now = time.monotonic()
        wait_ms = max(0, math.ceil((deadline - now) * 1000))
        wanted: dict[Address, dict[Place, int]] = {}
        for place, offset in positions.items():
            trouble = self._troubles.get(place)
            if trouble is not None and trouble.again_at > now:
                continue
            if place in results and wait_ms == 0:
                continue
            try:
                address = self._metadata.leader_now(*place)
            except ClientError as error:
                self._fail((place,), error)
            else:
                wanted.setdefault(address, {})[place] = offset
        for address, asked in wanted.items():
            link = self._links.get(address)
            if link is not None and link.asked and not _still_wanted(link.asked, positions):
                # It may hold its answer back for long, and nobody would look at it.
                self._drop(address)
                link = None
            if link is None or link.pending is None:
                self._send(address, asked, wait_ms)

    def _send(self, address: Address, asked: dict[Place, int], max_wait_ms: int) -> None:
        try:
            link = self._links.get(address)
            if link is not None and not link.connection.is_open:
                self._drop(address)
                link = None
            if link is None:
                link = _Link(self._cluster.connect(address), Reusable())
                self._links[address] = link
            request = self._request(asked, max_wait_ms)
            link.connection.set_timeout(max_wait_ms / 1000 + _SLACK_S)
            link.pending = link.connection.submit(request, at_most=_NAMES_UP_TO)
            link.asked = asked
            link.due = time.monotonic() + max_wait_ms / 1000 + _SLACK_S
        except ClientError as error:
            self._drop(address)
            self._fail(asked, error)

    def _request(self, asked: Mapping[Place, int], max_wait_ms: int) -> FetchRequest:
        topics: dict[str, list[FetchPartition]] = {}
        for (topic, number), offset in asked.items():
            part = FetchPartition(
                partition=number,
                fetch_offset=offset,
                partition_max_bytes=min(self._partition_max_bytes, self._max_bytes),
            )
            topics.setdefault(topic, []).append(part)
        return FetchRequest(
            max_wait_ms=max_wait_ms,
            min_bytes=self._min_bytes,
            max_bytes=self._max_bytes,
            isolation_level=self._isolation,
            topics=[FetchTopic(topic=name, partitions=parts) for name, parts in topics.items()],
        )

    # ---- answers -------------------------------------------------------------------------

    def _gather(
        self, positions: Mapping[Place, int], results: dict[Place, Fetched], deadline: float
    ) -> None:
        """Wait for an answer, and take all that are there."""
        waiting = {
            link.connection.fileno(): address
            for address, link in self._links.items()
            if link.pending is not None
        }
        now = time.monotonic()
        # A request that was sent to wait so long is answered a moment after that.
        patience_s = max(0.0, deadline - now) + (0.0 if results else _GRACE_S)
        ready = readable(waiting, patience_s)
        for descriptor in ready:
            self._take(waiting[descriptor], positions, results)
        for address in set(waiting.values()) - {waiting[item] for item in ready}:
            link = self._links[address]
            if link.due < now:
                asked = link.asked or {}
                self._drop(address)
                self._fail(asked, _no_answer(address))

    def _take(
        self, address: Address, positions: Mapping[Place, int], results: dict[Place, Fetched]
    ) -> None:
        link = self._links[address]
        pending, asked = link.pending, link.asked or {}
        assert pending is not None
        link.pending = link.asked = None
        try:
            told = link.connection.receive(pending, link.memory)
            if told.error_code:
                raise refused("fetching", told.error_code)
        except ClientError as error:
            self._drop(address)
            self._fail(asked, error)
            return
        except BaseException:
            self._drop(address)
            raise
        for topic in told.responses:
            for part in topic.partitions:
                place = (topic.topic, part.partition_index)
                if place in asked and positions.get(place) == asked[place]:
                    self._sort(place, asked[place], part, results)

    def _sort(self, place: Place, offset: int, part: Any, results: dict[Place, Fetched]) -> None:
        topic, number = place
        if part.error_code == ErrorCode.OFFSET_OUT_OF_RANGE:
            raise self._gone(place, offset, part)
        if part.error_code:
            error = refused(f"fetching {topic}-{number} from {offset}", part.error_code)
            self._fail((place,), error)
            return
        self._troubles.pop(place, None)
        aborted = part.aborted_transactions or ()
        data = part.records
        results[place] = Fetched(
            memoryview(b"") if data is None else memoryview(data),
            part.high_watermark,
            part.last_stable_offset,
            part.log_start_offset,
            tuple((item.producer_id, item.first_offset) for item in aborted),
        )

    def _gone(self, place: Place, offset: int, part: Any) -> OffsetGoneError:
        """The broker may not say where the log starts and ends, so it is asked."""
        start, end = part.log_start_offset, part.high_watermark
        if start < 0:
            start = offsets(self._cluster, {place: EARLIEST}, metadata=self._metadata)[place]
        if end < 0:
            latest = offsets(
                self._cluster, {place: -1}, isolation="read_uncommitted", metadata=self._metadata
            )
            end = latest[place]
        return OffsetGoneError(*place, offset, start, end)

    # ---- trouble -------------------------------------------------------------------------

    def _drop(self, address: Address) -> None:
        link = self._links.pop(address, None)
        if link is not None:
            link.connection.close()

    def _fail(self, places: Collection[Place], error: ClientError) -> None:
        """Remember that these cannot be fetched now; raise if that has been so for too long."""
        now = time.monotonic()
        self._metadata.forget({topic for topic, _ in places})
        for place in places:
            trouble = self._troubles.setdefault(place, _Trouble(now, error))
            unknown = isinstance(error, RefusedError) and error.code == _UNKNOWN
            limit_s = min(self._timeout_s, UNKNOWN_TOPIC_S) if unknown else self._timeout_s
            if not error.retriable:
                raise error
            if now - trouble.since > limit_s:
                if unknown:
                    # Not there, and it will not appear by itself.
                    raise error
                doing = f"fetching {place[0]}-{place[1]}"
                raise gave_up(doing, now - trouble.since, error) from error
            trouble.error = error
            trouble.again_at = now + pause_after(trouble.attempts)
            trouble.attempts += 1


def _still_wanted(asked: Mapping[Place, int], positions: Mapping[Place, int]) -> bool:
    return any(positions.get(place) == offset for place, offset in asked.items())


def _no_answer(address: Address) -> ClientError:
    return UnreachableError(f"{show_address(address)} does not answer a Fetch")


def readable(descriptors: Iterable[int], timeout_s: float) -> list[int]:
    """Which of them can be read, now or within the time."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(timeout_s * 1000)]
