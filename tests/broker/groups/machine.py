"""Classic groups without a broker: a coordinator, a clock that is a number, and clients to play.

`Machine` does what the API layer and the journal do: it applies every entry at once, after a turn
through JSON as on disk, and it keeps all entries, so that a restart is a replay of them. `Client`
is one consumer that speaks the protocol by the book, one step at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from uuid import UUID

import orjson

from penstock.broker.catalog import Catalog, Topic
from penstock.broker.config import BrokerConfig, Limits
from penstock.broker.groups.classic import ClassicGroup
from penstock.broker.groups.classic_member import JoinAnswer, JoinCall, SyncAnswer, SyncCall
from penstock.broker.groups.coordinator import GroupCoordinator
from penstock.broker.groups.offsets import NewOffset
from penstock.broker.journal import Entry, Key
from penstock.wire.errors import ErrorCode

NOW_MS = 1_700_000_000_000
SESSION_MS = 10_000
REBALANCE_MS = 60_000
QUIET_MS = 50
GROUP = "g"


class Machine:
    """A coordinator with its journal in memory."""

    def __init__(self, **settings: Any) -> None:
        limits = settings.pop("limits", Limits())
        self.config = BrokerConfig(
            data="", limits=limits, group_initial_delay_ms=QUIET_MS, **settings
        )
        self.catalog = Catalog(self.config)
        self.now_ms = NOW_MS
        self.elapsed_ms = 0
        # What the coordinator takes of the processor: nothing, unless a test says so.
        self.spent_s = 0.0
        self.journal: dict[Key, Any] = {}
        self.groups = self._start()
        self._ids = count(1)

    def _start(self) -> GroupCoordinator:
        groups = GroupCoordinator(self.config, self.catalog, lambda: self.spent_s)
        for key, value in self.journal.items():
            groups.replay(key, orjson.loads(orjson.dumps(value)))
        self.groups = groups
        self.write(groups.begin(self.now_ms, self.elapsed_ms, lost=False))
        return groups

    def restart(self) -> None:
        """Forget everything but the journal, which is compacted by then."""
        self.groups.dismiss_all()
        self.elapsed_ms = 0
        self.groups = self._start()

    def write(self, entries: Iterable[Entry], most: int | None = None) -> None:
        """Apply entries; no more than so many, as where a crash comes between two batches."""
        for entry in list(entries)[:most]:
            written, value = orjson.loads(orjson.dumps(entry))
            key = tuple(written)
            self.journal.pop(key, None)
            if value is not None:
                self.journal[key] = value
            self.groups.replay(key, value)

    def pass_time(self, ms: int) -> None:
        """Let time pass, with a tick for each deadline on the way."""
        end_ms = self.elapsed_ms + ms
        while True:
            due_ms = self.groups.next_due_ms
            step_ms = min(end_ms if due_ms is None else max(due_ms, self.elapsed_ms), end_ms)
            self.now_ms += step_ms - self.elapsed_ms
            self.elapsed_ms = step_ms
            self.write(self.groups.tick(self.now_ms, self.elapsed_ms))
            next_ms = self.groups.next_due_ms
            if self.elapsed_ms >= end_ms and (next_ms is None or next_ms > end_ms):
                return

    def new_id(self) -> str:
        return f"member-{next(self._ids)}"

    def topic(self, name: str, partitions: int = 4, *, id_: int = 1) -> Topic:
        """A topic, in place of the one that may have the name."""
        old = self.catalog.topics.pop(name, None)
        if old is not None:
            del self.catalog.by_id[old.id]
        topic = Topic(name, UUID(int=id_), partitions)
        self.catalog.topics[name] = self.catalog.by_id[topic.id] = topic
        return topic

    def group(self, group_id: str = GROUP) -> ClassicGroup:
        group = self.groups.get_or_make(group_id, "classic")
        assert isinstance(group, ClassicGroup)
        return group

    # ---- offsets ---------------------------------------------------------------------------

    def commit(
        self,
        *offsets: NewOffset,
        member_id: str = "",
        generation: int = -1,
        instance_id: str | None = None,
        group_id: str = GROUP,
        version: int = 9,
        expire_ms: int | None = None,
    ) -> list[ErrorCode]:
        codes, entries = self.groups.commit(
            group_id,
            member_id,
            generation,
            instance_id,
            offsets,
            version=version,
            now_ms=self.now_ms,
            elapsed_ms=self.elapsed_ms,
            expire_ms=expire_ms,
        )
        self.write(entries)
        return codes

    def commit_in_transaction(
        self,
        producer_id: int,
        *offsets: NewOffset,
        member_id: str = "",
        generation: int = -1,
        group_id: str = GROUP,
    ) -> list[ErrorCode]:
        codes, entries = self.groups.commit_in_transaction(
            producer_id,
            group_id,
            member_id,
            generation,
            None,
            offsets,
            version=5,
            now_ms=self.now_ms,
        )
        self.write(entries)
        return codes

    def finish(self, producer_id: int, *, commit: bool, most: int | None = None) -> None:
        self.write(self.groups.finish_transaction(producer_id, commit, self.now_ms), most)


@dataclass
class Client:
    """One consumer in one group."""

    machine: Machine
    instance_id: str | None = None
    protocols: Mapping[str, bytes] = field(default_factory=lambda: {"range": b"r"})
    protocol_type: str = "consumer"
    session_ms: int = SESSION_MS
    rebalance_ms: int = REBALANCE_MS
    group_id: str = GROUP
    version: int = 9
    member_id: str = ""
    generation: int = -1
    assignment: bytes | None = None
    # What it waits for.
    joins: list[JoinAnswer] = field(default_factory=list)
    syncs: list[SyncAnswer] = field(default_factory=list)

    @property
    def group(self) -> ClassicGroup:
        return self.machine.group(self.group_id)

    def send_join(self) -> None:
        """Join; the answer comes into `joins`, now or later."""
        machine = self.machine
        call = JoinCall(
            self.member_id,
            self.instance_id,
            "client",
            "/127.0.0.1",
            self.session_ms,
            self.rebalance_ms,
            self.protocol_type,
            self.protocols,
            machine.new_id(),
            must_know_id=self.version >= 4,
            can_skip_assignment=self.version >= 9,
        )
        entries = self.group.join(call, machine.now_ms, machine.elapsed_ms, self._joined)
        machine.write(entries)
        if self.joins and self.joins[-1].code == ErrorCode.MEMBER_ID_REQUIRED:
            self.joins.pop()
            self.send_join()

    def _joined(self, answer: JoinAnswer) -> None:
        self.joins.append(answer)
        if answer.code in (ErrorCode.NONE, ErrorCode.MEMBER_ID_REQUIRED):
            self.member_id = answer.member_id
            self.generation = answer.generation

    def send_sync(self, assignments: Mapping[str, bytes] | None = None) -> None:
        call = SyncCall(
            self.member_id, self.generation, self.instance_id, assignments=assignments or {}
        )
        machine = self.machine
        machine.write(self.group.sync(call, machine.now_ms, machine.elapsed_ms, self._synced))

    def _synced(self, answer: SyncAnswer) -> None:
        self.syncs.append(answer)
        if answer.code == ErrorCode.NONE:
            self.assignment = answer.assignment

    def heartbeat(self) -> ErrorCode:
        machine = self.machine
        return self.group.heartbeat(
            self.member_id, self.generation, self.instance_id, machine.elapsed_ms
        )

    def leave(self) -> ErrorCode:
        machine = self.machine
        codes, entries = self.group.leave(
            [(self.member_id, self.instance_id)], machine.now_ms, machine.elapsed_ms
        )
        machine.write(entries)
        return codes[0]

    def commit(self, topic: str, offset: int) -> ErrorCode:
        return self.machine.commit(
            NewOffset(topic, 0, offset),
            member_id=self.member_id,
            generation=self.generation,
            instance_id=self.instance_id,
            group_id=self.group_id,
        )[0]

    @property
    def leads(self) -> bool:
        return bool(self.joins) and self.joins[-1].leader == self.member_id


def stable(machine: Machine, clients: Sequence[Client]) -> None:
    """All of these join and sync, until each has its assignment."""
    for client in clients:
        client.send_join()
    machine.pass_time(QUIET_MS)
    settle(clients)


def settle(clients: Sequence[Client]) -> None:
    """All have been told the generation: they sync, the leader last."""
    (leader,) = [client for client in clients if client.leads]
    for client in clients:
        if client is not leader:
            client.send_sync()
    leader.send_sync({client.member_id: f"for {client.member_id}".encode() for client in clients})
