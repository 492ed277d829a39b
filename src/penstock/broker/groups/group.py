"""What every kind of group has in common, and what a group is given to work with.

The coordinator knows groups only by the protocol `Group`; each kind is a class of its own. A group
keeps its deadlines in `timers` of its own: whatever it notes there brings it a `tick` in time.

Durable is what a group's entries say: the coordinator hands every entry whose key is
`("group", id)`, or begins with another kind of `PART_KINDS` and the group's id, to the group's
`replay`, when it is written and again at every start. The rest of a group's state is about who
waits for what, and may be lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from penstock.broker.catalog import Catalog
from penstock.broker.config import BrokerConfig
from penstock.broker.groups.settings import GroupSettings
from penstock.broker.journal import Entry, Key
from penstock.broker.timers import Timers
from penstock.wire.errors import ErrorCode

Kind = Literal["classic", "consumer", "share", "streams"]

# Entries about a part of a group, such as one member: (kind, group id, ...), and the kind of group
# that they belong to.
PART_KINDS: Final[dict[str, Kind]] = {
    "group-member": "consumer",
    "share-member": "share",
    "streams-member": "streams",
    "streams-topology": "streams",
}

# What clients send that are no members: they commit by hand, or ask for an administrator.
NO_GENERATION: Final = -1
NO_MEMBER: Final = ""


@dataclass(frozen=True, slots=True)
class MemberDescription:
    """One member, as it is told to whoever asks about the group."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    # As the client sent them; the broker does not look into them.
    metadata: bytes = b""
    assignment: bytes = b""


@dataclass(frozen=True, slots=True)
class GroupDescription:
    """A group, as it is told to whoever asks about it."""

    group_id: str
    kind: Kind
    # As Kafka spells it: Empty, PreparingRebalance, Stable, Reconciling, ...
    state: str
    protocol_type: str
    protocol: str = ""
    members: tuple[MemberDescription, ...] = ()


class Group(Protocol):
    """A group of any kind."""

    @property
    def id(self) -> str: ...

    @property
    def kind(self) -> Kind: ...

    @property
    def state(self) -> str:
        """As Kafka spells it."""
        ...

    @property
    def protocol_type(self) -> str:
        """What ListGroups says: `consumer`, `share`, whatever classic members agreed on, or ""."""
        ...

    @property
    def is_empty(self) -> bool:
        """Whether it has no members and expects none."""
        ...

    @property
    def idle_since_ms(self) -> int | None:
        """Since when it has no members, in wall-clock time; None if it has some or never had."""
        ...

    @property
    def timers(self) -> Timers[Any]:
        """Its deadlines, made by `GroupContext.timers`."""
        ...

    def check_commit(
        self,
        member_id: str,
        generation: int,
        instance_id: str | None,
        *,
        in_transaction: bool,
        version: int,
    ) -> ErrorCode:
        """Whether this member may commit offsets; `generation` is a member's epoch in KIP-848.

        `version` is that of the request: older clients do not know the newer codes.
        """
        ...

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        """Whether this member may ask for committed offsets; nobody and -1 always may."""
        ...

    def touch(self, member_id: str, elapsed_ms: int) -> None:
        """A member has committed, so it lives (classic groups; the others need heartbeats)."""
        ...

    def subscribed_to(self, topic: str) -> bool:
        """Whether a member reads this topic, so that its offsets are still needed."""
        ...

    def describe(self) -> GroupDescription: ...

    def tick(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        """Do what is due by now; called when the first of `timers` is."""
        ...

    def begin(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        """The group was replayed and the broker is about to serve: give members their time."""
        ...

    def replay(self, key: Key, value: Any) -> None:
        """Apply an entry of this group."""
        ...

    def tombstones(self) -> Iterable[Entry]:
        """The entries that make it gone."""
        ...

    def dismiss(self, code: ErrorCode) -> None:
        """It is about to be dropped: answer everybody who waits with this error."""
        ...


@dataclass(frozen=True, slots=True)
class GroupContext:
    """What a group is given: everything it may look at besides itself."""

    config: BrokerConfig
    catalog: Catalog
    # The settings of the group with this id, as they are now.
    settings: Callable[[str], GroupSettings]
    # Called with a group's id when one of its deadlines has come nearer.
    on_earlier: Callable[[str], None] = field(default=lambda _id: None)
    # How much of the processor's time the event loop has used, in seconds.
    spent_s: Callable[[], float] = field(default=time.thread_time)

    def timers(self, group_id: str) -> Timers[Any]:
        """Deadlines for the group with this id."""
        return Timers(lambda: self.on_earlier(group_id))


# Makes a new, empty group.
Maker = Callable[[str, GroupContext], Group]
