"""The transaction coordinator alone, with a journal that is a list: for tests without a broker.

What a broker does around the state machine is done here by hand: entries are applied as they are
written, new producer ids are given where they are asked for, decided transactions are carried out
(`finish`), and a restart replays everything, or all but the last entries.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final
from uuid import UUID

import orjson

from penstock.broker.catalog import Topic
from penstock.broker.journal import Entry
from penstock.broker.transactions.coordinator import (
    InitRequest,
    Outcome,
    Then,
    TransactionCoordinator,
    TransactionSettings,
)
from penstock.broker.transactions.state import Ids, State, Transaction
from penstock.wire.errors import ErrorCode

TIMEOUT_MS: Final = 60_000
FIRST_ID: Final = 1_000


def topic(name: str) -> Topic:
    """A topic whose id follows from its name."""
    return Topic(name, UUID(bytes=name.encode().ljust(16, b"-")), partitions=4)


A, B = topic("a"), topic("b")


class Machine:
    """A coordinator, its journal and its clock."""

    def __init__(self, **settings: Any) -> None:
        self.settings = TransactionSettings(**settings)
        self.now_ms = 1_000_000
        self.next_id = FIRST_ID
        self.journal: list[tuple[bytes, bytes]] = []
        # The journal up to here survives any loss.
        self.durable = 0
        self.coordinator = TransactionCoordinator(self.settings)
        self.coordinator.begin(self.now_ms, self.now_ms, lost=False)

    def write(self, entries: Iterable[Entry]) -> None:
        for key, value in entries:
            # As the journal has them: tuples become lists, and nothing else is lost.
            self.journal.append((orjson.dumps(key), orjson.dumps(value)))
            self.coordinator.replay(key, value)

    def wait_durable(self) -> None:
        self.durable = len(self.journal)

    def of(self, name: str) -> Transaction:
        return self.coordinator.transactions[name]

    def state(self, name: str) -> State:
        return self.of(name).state

    # ---- what producers ask --------------------------------------------------------------

    def ask_init(self, name: str, fresh_id: int | None = None, **asked: Any) -> Outcome:
        """One question, as it is answered."""
        request = InitRequest(name, asked.pop("timeout_ms", TIMEOUT_MS), **asked)
        outcome = self.coordinator.init(request, fresh_id=fresh_id, now_ms=self.now_ms)
        self.write(outcome.entries)
        return outcome

    def init(self, name: str, **asked: Any) -> Outcome:
        """Ask until there is an answer, and do what is asked for meanwhile."""
        fresh_id: int | None = None
        while True:
            outcome = self.ask_init(name, fresh_id, **asked)
            if outcome.then == Then.NEW_ID:
                fresh_id = self.new_id()
            elif outcome.then == Then.FINISH:
                self.finish()
            else:
                return outcome

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id - 1

    def write_to(
        self, name: str, ids: Ids, where: Topic, number: int = 0, *, implicit: bool = True
    ) -> ErrorCode:
        code, entries = self.coordinator.admit_write(
            name, ids, where, number, implicit=implicit, now_ms=self.now_ms, elapsed_ms=self.now_ms
        )
        self.write(entries)
        return code

    def add(self, name: str, ids: Ids, *partitions: tuple[Topic, int]) -> ErrorCode:
        if self.coordinator.would_open(name):
            self.wait_durable()
        code, entries = self.coordinator.add_partitions(
            name, ids, list(partitions), now_ms=self.now_ms, elapsed_ms=self.now_ms
        )
        self.write(entries)
        return code

    def commit_offsets(
        self, name: str, ids: Ids, group: str, *, implicit: bool = True
    ) -> ErrorCode:
        code, entries = self.coordinator.admit_offsets(
            name, ids, group, implicit=implicit, now_ms=self.now_ms, elapsed_ms=self.now_ms
        )
        self.write(entries)
        return code

    def add_group(self, name: str, ids: Ids, group: str) -> ErrorCode:
        if self.coordinator.would_open(name):
            self.wait_durable()
        code, entries = self.coordinator.add_group(
            name, ids, group, now_ms=self.now_ms, elapsed_ms=self.now_ms
        )
        self.write(entries)
        return code

    def decide(self, name: str, ids: Ids, *, commit: bool = True, bumps: bool = True) -> Outcome:
        """End a transaction, without carrying it out."""
        fresh_id: int | None = None
        while True:
            outcome = self.coordinator.end(
                name, ids, commit=commit, bumps=bumps, fresh_id=fresh_id, now_ms=self.now_ms
            )
            if outcome.then != Then.NEW_ID:
                self.write(outcome.entries)
                return outcome
            fresh_id = self.new_id()

    def end(self, name: str, ids: Ids, *, commit: bool = True, bumps: bool = True) -> Outcome:
        outcome = self.decide(name, ids, commit=commit, bumps=bumps)
        self.finish()
        return outcome

    # ---- what the broker does ------------------------------------------------------------

    def finish(self) -> dict[str, tuple[Ids | None, bool]]:
        """Carry out what is decided; the markers that would be written, and whether they commit."""
        markers = {}
        for name in sorted(self.coordinator.undone):
            txn = self.of(name)
            markers[name] = (txn.marker, txn.state == State.PREPARE_COMMIT)
            self.write(self.coordinator.complete(name, self.now_ms))
        return markers

    def pass_time(self, by_ms: int) -> None:
        self.now_ms += by_ms
        self.write(self.coordinator.tick(self.now_ms, self.now_ms))

    def restart(self, *, lost: bool = False, without_last: int = 0) -> None:
        """Replay the journal, which may have lost its last entries."""
        if without_last:
            del self.journal[-without_last:]
        self.coordinator.reset()
        for key, value in self.journal:
            self.coordinator.replay(tuple(orjson.loads(key)), orjson.loads(value))
        self.write(self.coordinator.begin(self.now_ms, self.now_ms, lost=lost))


def opened(machine: Machine, name: str = "t", **asked: bool) -> Ids:
    """A producer with an open transaction in partition 0 of `a`."""
    ids = machine.init(name, **asked).ids
    assert machine.write_to(name, ids, A) == ErrorCode.NONE
    return ids


def set_epoch(machine: Machine, name: str, epoch: int) -> None:
    """As if it had been fenced that often."""
    txn = machine.of(name)
    moved = replace(txn, ids=Ids(txn.ids.producer_id, epoch))
    machine.write([(("txn", name), moved.to_json())])
