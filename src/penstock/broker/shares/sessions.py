"""Share sessions: a consumer names its partitions once and then only what changed.

A session belongs to a group's member and to the connection it was begun on. Its epoch says which
request is next: 0 begins it, -1 ends it, and after 2^31 - 1 comes 1. When the connection is lost
the session ends, and what the member has not answered for goes to others. The number of sessions
is bounded, as is the number of their partitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final
from uuid import UUID

from penstock.broker.catalog import ApiError
from penstock.wire.errors import ErrorCode

INITIAL_EPOCH: Final = 0
FINAL_EPOCH: Final = -1
_MAX_EPOCH: Final = 0x7FFFFFFF
# Kafka's group.share.max.share.sessions.
MAX_SESSIONS: Final = 2_000
MAX_PARTITIONS_PER_SESSION: Final = 10_000

Place = tuple[UUID, int]


class ShareSession:
    """The partitions that a member fetches from, whose turn it is first."""

    __slots__ = ("epoch", "group", "member", "partitions", "tie")

    def __init__(self, group: str, member: str) -> None:
        self.group = group
        self.member = member
        self.epoch = 1
        self.partitions: dict[Place, None] = {}
        # Cuts it loose from its connection.
        self.tie: Callable[[], None] = lambda: None

    def update(self, added: Iterable[Place], forgotten: Iterable[Place]) -> None:
        for place in forgotten:
            self.partitions.pop(place, None)
        for place in added:
            self.partitions.setdefault(place)
        if len(self.partitions) > MAX_PARTITIONS_PER_SESSION:
            raise ApiError(
                ErrorCode.INVALID_REQUEST,
                f"a share session has at most {MAX_PARTITIONS_PER_SESSION} partitions",
            )

    def served(self, place: Place) -> None:
        """Whoever was served goes to the end, so that small answers serve all in turn."""
        if place in self.partitions:
            del self.partitions[place]
            self.partitions[place] = None


class ShareSessions:
    """All sessions of one broker."""

    def __init__(self, limit: int = MAX_SESSIONS) -> None:
        self._limit = limit
        self._sessions: dict[tuple[str, str], ShareSession] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def find(self, group: str, member: str) -> ShareSession | None:
        return self._sessions.get((group, member))

    def begin(self, group: str, member: str) -> ShareSession:
        """A new session, in place of the one that the member may have."""
        before = self._sessions.pop((group, member), None)
        if before is not None:
            before.tie()
        if len(self._sessions) >= self._limit:
            raise ApiError(
                ErrorCode.SHARE_SESSION_LIMIT_REACHED, "there are too many share sessions"
            )
        session = self._sessions[group, member] = ShareSession(group, member)
        return session

    def go_on(self, group: str, member: str, epoch: int) -> ShareSession:
        """The member's session, if this is the request that is next in it."""
        session = self._sessions.get((group, member))
        if session is None:
            raise ApiError(ErrorCode.SHARE_SESSION_NOT_FOUND, "there is no such share session")
        if epoch == FINAL_EPOCH:
            return session
        if epoch != session.epoch:
            raise ApiError(
                ErrorCode.INVALID_SHARE_SESSION_EPOCH,
                f"the session's epoch is {session.epoch}, not {epoch}",
            )
        session.epoch = 1 if epoch == _MAX_EPOCH else epoch + 1
        return session

    def end(self, session: ShareSession) -> bool:
        """End a session; whether it was still the member's."""
        session.tie()
        key = (session.group, session.member)
        if self._sessions.get(key) is not session:
            return False
        del self._sessions[key]
        return True

    def clear(self) -> None:
        for session in list(self._sessions.values()):
            self.end(session)
