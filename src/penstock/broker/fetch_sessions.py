"""Fetch sessions (KIP-227): clients name their partitions once and then only what changed.

A session belongs to whoever knows its id and the next epoch. Its partitions keep their order; an
incremental answer tells only of partitions with records, an error or moved bounds. The number of
sessions is bounded: one that was not used for two minutes makes room, and its client starts a new
one; while all are in use, further clients do without.
"""

from __future__ import annotations

import random
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.fetch import FetchPartition, FetchRequest, PartitionData
from penstock.wire.zero import ZERO_UUID

if TYPE_CHECKING:
    from penstock.broker.catalog import Catalog

NO_SESSION: Final = 0
INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
SESSIONS_FROM_VERSION: Final = 7
EVICTABLE_AFTER_S: Final = 120.0
TOPIC_IDS_FROM_VERSION: Final = 13
_MAX_EPOCH: Final = 0x7FFFFFFF
_PARTITIONS_PER_SESSION: Final = 200

Key = tuple[str, uuid.UUID, int]


class SessionError(PenstockError):
    """The request does not fit the session it names."""

    def __init__(self, code: ErrorCode) -> None:
        super().__init__(code.name)
        self.code = code


class FetchedPartition:
    """A partition in a fetch: from where, how much, and what its client was told last."""

    __slots__ = (
        "key", "leader_epoch", "max_bytes", "number", "offset", "told", "topic", "topic_id",
        "unknown_code",
    )  # fmt: skip

    def __init__(
        self, key: Key, topic: str, topic_id: uuid.UUID, number: int, code: ErrorCode
    ) -> None:
        self.key = key
        self.topic = topic
        self.topic_id = topic_id
        self.number = number
        self.unknown_code = code
        self.offset = 0
        self.max_bytes = 0
        self.leader_epoch = -1
        self.told: tuple[int, int] | None = None

    def update(self, wanted: FetchPartition) -> None:
        self.offset = wanted.fetch_offset
        self.max_bytes = wanted.partition_max_bytes
        self.leader_epoch = wanted.current_leader_epoch


class Session:
    """The partitions of a client's fetches; with id 0 those of a single one."""

    def __init__(self, id_: int = NO_SESSION) -> None:
        self.id = id_
        self.epoch = INITIAL_EPOCH
        self.last_used_s = 0.0
        self.incremental = False
        # Whether its topics are named by their ids; they are for as long as it lasts.
        self.by_id = False
        self.partitions: dict[Key, FetchedPartition] = {}
        # How many of them the bound on all sessions knows of.
        self.counted = 0

    def must_tell(self, item: FetchedPartition, data: PartitionData) -> bool:
        """Whether an answer has to mention the partition; remembers what it says."""
        bounds = (data.high_watermark, data.log_start_offset)
        records: Any = data.records
        news = bool(data.error_code) or bool(records) or item.told != bounds
        item.told = None if data.error_code else bounds
        if records and self.incremental and self.partitions.pop(item.key, None) is not None:
            # Whoever was served goes to the end, so that small answers serve all in turn.
            self.partitions[item.key] = item
        return news or not self.incremental

    def update(self, request: FetchRequest, catalog: Catalog, *, by_id: bool) -> None:
        for topic in request.topics:
            name, id_, code = _resolve(topic.topic, topic.topic_id, by_id, catalog)
            for wanted in topic.partitions:
                key = (topic.topic, id_, wanted.partition)
                item = self.partitions.get(key)
                if item is None:
                    item = self.partitions[key] = FetchedPartition(
                        key, name, id_, wanted.partition, code
                    )
                item.update(wanted)
        for forgotten in request.forgotten_topics_data:
            id_ = forgotten.topic_id if by_id else ZERO_UUID
            for number in forgotten.partitions:
                self.partitions.pop((forgotten.topic, id_, number), None)


def _resolve(
    name: str, id_: uuid.UUID, by_id: bool, catalog: Catalog
) -> tuple[str, uuid.UUID, ErrorCode]:
    """The topic's name, however it was named, and what to answer where there is none."""
    if not by_id:
        return name, ZERO_UUID, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    topic = catalog.by_id.get(id_)
    if topic is None:
        return f"?{id_}", id_, ErrorCode.UNKNOWN_TOPIC_ID
    return topic.name, id_, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


class FetchSessions:
    """All sessions, the longest unused first."""

    def __init__(
        self,
        limit: int,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limit = limit
        self._clock = clock
        # A session may have many partitions if others have few: memory is bounded by the sum.
        self._partitions_left = limit * _PARTITIONS_PER_SESSION
        self._rng = rng or random.SystemRandom()
        self._sessions: OrderedDict[int, Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._sessions)

    def session_for(self, request: FetchRequest, version: int, catalog: Catalog) -> Session:
        """The session that the request belongs to, brought up to date."""
        by_id = version >= TOPIC_IDS_FROM_VERSION
        if version < SESSIONS_FROM_VERSION or request.session_epoch == FINAL_EPOCH:
            self._end(request.session_id)
            session = Session()
        elif request.session_epoch == INITIAL_EPOCH:
            self._end(request.session_id)
            session = self._create(bool(request.topics), by_id=by_id)
        else:
            session = self._continue(request.session_id, request.session_epoch, by_id=by_id)
        session.update(request, catalog, by_id=by_id)
        if not session.partitions and session.id != NO_SESSION:
            # Nothing is left to tell news of: as in Kafka the session ends.
            self._end(session.id)
            return Session()
        self._bound(session)
        return session

    def _end(self, id_: int) -> None:
        session = self._sessions.pop(id_, None)
        if session is not None:
            self._partitions_left += session.counted

    def _bound(self, session: Session) -> None:
        """Count the session's partitions; end the longest unused until there is room for them."""
        if session.id == NO_SESSION:
            return
        self._partitions_left -= len(session.partitions) - session.counted
        session.counted = len(session.partitions)
        while self._partitions_left < 0:
            self._end(next(iter(self._sessions)))
        if session.id not in self._sessions:
            # Too large to be remembered: answered as a fetch without a session.
            session.id = NO_SESSION

    def _create(self, has_partitions: bool, *, by_id: bool) -> Session:
        if not has_partitions or self._limit <= 0:
            return Session()
        if len(self._sessions) >= self._limit and not self._evict():
            # All are in use: this client names its partitions each time.
            return Session()
        id_ = NO_SESSION
        while id_ == NO_SESSION or id_ in self._sessions:
            id_ = self._rng.randrange(1, 1 << 31)
        session = self._sessions[id_] = Session(id_)
        session.epoch = 1
        session.by_id = by_id
        session.last_used_s = self._clock()
        return session

    def _evict(self) -> bool:
        """End the longest unused session, if it is unused at all."""
        oldest = next(iter(self._sessions.values()))
        if self._clock() - oldest.last_used_s < EVICTABLE_AFTER_S:
            return False
        self._end(oldest.id)
        return True

    def _continue(self, id_: int, epoch: int, *, by_id: bool) -> Session:
        session = self._sessions.get(id_)
        if session is None:
            raise SessionError(ErrorCode.FETCH_SESSION_ID_NOT_FOUND)
        if session.epoch != epoch:
            raise SessionError(ErrorCode.INVALID_FETCH_SESSION_EPOCH)
        if session.by_id != by_id:
            raise SessionError(ErrorCode.FETCH_SESSION_TOPIC_ID_ERROR)
        self._sessions.move_to_end(id_)
        session.last_used_s = self._clock()
        session.epoch = 1 if epoch == _MAX_EPOCH else epoch + 1
        session.incremental = True
        return session
