"""A member of a classic group: what it sent, what it waits for, and how it is written down."""

from __future__ import annotations

import struct
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.broker.groups.group import NO_MEMBER, MemberDescription
from penstock.wire.errors import ErrorCode

_COUNT: Final = struct.Struct(">i")
_LENGTH: Final = struct.Struct(">h")
# The version of the consumer's own protocol, which every version of it begins with.
_VERSION_BYTES: Final = 2
# What an entry says of a member besides what the member sent.
_ENTRY_BYTES: Final = 200


@dataclass(frozen=True, slots=True)
class JoinCall:
    """Someone wants to be a member, or to go on being one."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    # The ways to assign partitions that the member knows, in the order of its preference.
    protocols: Mapping[str, bytes]
    # The id that it gets if it has none.
    new_member_id: str
    # Whether it must come again with the id that it gets: clients since 2.2 do.
    must_know_id: bool = True
    # Whether it understands that a leader need not assign anything.
    can_skip_assignment: bool = True

    @property
    def size(self) -> int:
        """How many bytes the member makes the group hold."""
        names = len(self.client_id) + len(self.instance_id or "")
        return names + sum(len(name) + len(data) for name, data in self.protocols.items())


@dataclass(frozen=True, slots=True)
class JoinAnswer:
    """What a join comes to."""

    code: ErrorCode
    member_id: str = NO_MEMBER
    generation: int = -1
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = NO_MEMBER
    # For the leader: all members with their id, their instance id and what they sent.
    members: tuple[tuple[str, str | None, bytes], ...] = ()
    skip_assignment: bool = False


@dataclass(frozen=True, slots=True)
class SyncCall:
    """A member wants its assignment."""

    member_id: str
    generation: int
    instance_id: str | None = None
    # What the member takes to be agreed on, if it says so.
    protocol_type: str | None = None
    protocol: str | None = None
    # From the leader: everybody's, by member id.
    assignments: Mapping[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SyncAnswer:
    """What a member is assigned."""

    code: ErrorCode
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


JoinReply = Callable[[JoinAnswer], None]
SyncReply = Callable[[SyncAnswer], None]


@dataclass(slots=True)
class Member:
    """One member."""

    id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: dict[str, bytes]
    assignment: bytes = b""
    # Whether it has not been in a generation yet.
    is_new: bool = False
    join_reply: JoinReply | None = field(default=None, repr=False)
    sync_reply: SyncReply | None = field(default=None, repr=False)

    @classmethod
    def of(cls, call: JoinCall, member_id: str) -> Member:
        return cls(
            member_id,
            call.instance_id,
            call.client_id,
            call.client_host,
            call.session_timeout_ms,
            call.rebalance_timeout_ms,
            dict(call.protocols),
        )

    def update(self, call: JoinCall) -> None:
        self.session_timeout_ms = call.session_timeout_ms
        self.rebalance_timeout_ms = call.rebalance_timeout_ms
        self.protocols = dict(call.protocols)

    def sent_the_same(self, call: JoinCall) -> bool:
        """Whether it has nothing new to say; the order is part of what it says."""
        return list(self.protocols.items()) == list(call.protocols.items())

    def vote(self, candidates: set[str]) -> str:
        """The first of the candidates in the order of its preference; there is one."""
        return next(name for name in self.protocols if name in candidates)

    def answer_join(self, answer: JoinAnswer) -> None:
        reply, self.join_reply = self.join_reply, None
        if reply is not None:
            reply(answer)

    def answer_sync(self, answer: SyncAnswer) -> None:
        reply, self.sync_reply = self.sync_reply, None
        if reply is not None:
            reply(answer)

    def metadata(self, protocol: str | None) -> bytes:
        return self.protocols.get(protocol or "", b"")

    @property
    def size(self) -> int:
        """About how many bytes of an entry are about it, before base64."""
        names = len(self.id) + len(self.client_id) + len(self.instance_id or "")
        sent = sum(len(name) + len(data) for name, data in self.protocols.items())
        return _ENTRY_BYTES + names + sent

    def describe(self, protocol: str | None) -> MemberDescription:
        """With what it sent, if the group has settled on a protocol."""
        return MemberDescription(
            self.id,
            self.instance_id,
            self.client_id,
            self.client_host,
            self.metadata(protocol),
            self.assignment,
        )

    # ---- entries ---------------------------------------------------------------------------

    def state(self, assignment: bytes) -> dict[str, Any]:
        """What an entry says of the member.

        Kafka keeps the chosen protocol only; then a client that knows another one of the members'
        could join before a restart and not after it.
        """
        return {
            "id": self.id,
            "instance": self.instance_id,
            "client": self.client_id,
            "host": self.client_host,
            "session_ms": self.session_timeout_ms,
            "rebalance_ms": self.rebalance_timeout_ms,
            "protocols": [
                [name, b64encode(data).decode()] for name, data in self.protocols.items()
            ],
            "assignment": b64encode(assignment).decode(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Member:
        return cls(
            state["id"],
            state["instance"],
            state["client"],
            state["host"],
            state["session_ms"],
            state["rebalance_ms"],
            {name: b64decode(data) for name, data in state["protocols"]},
        )


def common_protocols(members: Collection[Member]) -> set[str]:
    """The protocols that all members know."""
    counts = Counter(name for member in members for name in member.protocols)
    return {name for name, count in counts.items() if count == len(members)}


def chosen_protocol(members: Collection[Member]) -> str:
    """The one that most members prefer among those that all know; the earlier one at a tie."""
    common = common_protocols(members)
    votes = Counter(member.vote(common) for member in members)
    return votes.most_common(1)[0][0]


def assignment_in(state: Mapping[str, Any]) -> bytes:
    return b64decode(state["assignment"])


def topics_in(subscription: bytes) -> set[str] | None:
    """The topics in what a consumer sends when it joins; None if that is something else."""
    topics: set[str] = set()
    try:
        (count,) = _COUNT.unpack_from(subscription, _VERSION_BYTES)
        at = _VERSION_BYTES + _COUNT.size
        for _ in range(count):
            (length,) = _LENGTH.unpack_from(subscription, at)
            at += _LENGTH.size + length
            if length < 0 or at > len(subscription):
                return None
            topics.add(subscription[at - length : at].decode())
    except (struct.error, UnicodeDecodeError):
        return None
    return topics
