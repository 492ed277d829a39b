"""What is known of one transactional id: a value, and how it is written in the journal.

A transactional id has *ids*: the producer id and epoch that its present producer holds. Every new
producer of the same transactional id is given a higher epoch, and from then on nobody with a lower
one is listened to: that is fencing. Where epochs run out the next producer gets a new producer id.

    Empty ──▶ Ongoing ──▶ PrepareCommit ──▶ CompleteCommit ──▶ Ongoing …
                     └──▶ PrepareAbort  ──▶ CompleteAbort  ──▶ Ongoing …

`Prepare…` means decided: from there on a transaction is carried out whatever happens. (The names
are Kafka's, and so are shown to clients. A transaction that waits for somebody else's decision in
the sense of a two-phase commit is `Ongoing`, and `enduring`.)

The records of a transaction carry the ids that its producer had. They are still the transaction's
when a later producer has resumed it and holds others, or its end gave others: `written` has them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.broker.catalog import Topic

# Kafka gives no client the largest epoch there is, so that it can still be fenced.
LAST_EPOCH: Final = 0x7FFF - 1
# What is shown as the timeout of a transaction that has none.
NO_TIMEOUT_MS: Final = 0x7FFFFFFF


class State(StrEnum):
    """Where a transaction is; the names are what DescribeTransactions shows."""

    EMPTY = "Empty"
    ONGOING = "Ongoing"
    PREPARE_COMMIT = "PrepareCommit"
    PREPARE_ABORT = "PrepareAbort"
    COMPLETE_COMMIT = "CompleteCommit"
    COMPLETE_ABORT = "CompleteAbort"


DECIDED: Final = frozenset({State.PREPARE_COMMIT, State.PREPARE_ABORT})
COMPLETE: Final = frozenset({State.COMPLETE_COMMIT, State.COMPLETE_ABORT})


class Ids(NamedTuple):
    """What a producer identifies itself with."""

    producer_id: int
    epoch: int


NO_IDS: Final = Ids(-1, -1)


class Parts(NamedTuple):
    """The partitions of one topic that take part in a transaction."""

    topic: str
    numbers: frozenset[int]


@dataclass(frozen=True, slots=True)
class Transaction:
    """One transactional id, and its transaction if there is one; never changed, but replaced."""

    name: str
    ids: Ids
    state: State = State.EMPTY
    timeout_ms: int = 60_000
    # Its transactions are decided by somebody else, who may take any time for it: KIP-939.
    two_phase: bool = False
    # The epoch that was replaced by the present one, if a repeated request may still name it.
    last_epoch: int = -1
    # The producer id that was replaced when its epochs ran out.
    previous_id: int = -1
    # Whether its end gave the producer a new epoch: KIP-890.
    bumped: bool = False
    # Of the open transaction: it is never aborted for taking long, nor after a loss of power.
    enduring: bool = False
    # What the records of the open or decided transaction carry, where that is not `ids`.
    written: Ids | None = None
    # What the markers of a decided transaction carry.
    marker: Ids | None = None
    # Topic id → partitions. By id: a topic made anew under the old name has no part in it.
    partitions: Mapping[UUID, Parts] = field(default_factory=dict)
    # The groups of which it commits offsets.
    groups: frozenset[str] = frozenset()
    started_ms: int = -1
    updated_ms: int = 0

    @property
    def txn_ids(self) -> Ids:
        """What the records of the open or decided transaction carry."""
        return self.written or self.ids

    @property
    def shown_ids(self) -> Ids:
        """Of an open transaction what its records carry: whoever prepared it knows it by them."""
        return self.txn_ids if self.state == State.ONGOING else self.ids

    @property
    def is_kept(self) -> bool:
        """Whether it was resumed by another producer, who may only end it."""
        return self.state == State.ONGOING and self.written is not None

    @property
    def is_exhausted(self) -> bool:
        """Whether no client may be given a higher epoch of this producer id."""
        return self.ids.epoch >= LAST_EPOCH

    @property
    def endures(self) -> bool:
        """Whether what is done here is durable before it is acknowledged."""
        return self.enduring if self.state == State.ONGOING else self.two_phase

    @property
    def shown_timeout_ms(self) -> int:
        return NO_TIMEOUT_MS if self.endures else self.timeout_ms

    def holds(self, topic_id: UUID, number: int) -> bool:
        parts = self.partitions.get(topic_id)
        return parts is not None and number in parts.numbers

    # ---- steps ---------------------------------------------------------------------------

    def opened(self, now_ms: int) -> Transaction:
        """With an open transaction: the one there is, or a new one."""
        if self.state == State.ONGOING:
            return replace(self, updated_ms=now_ms)
        return replace(
            self,
            state=State.ONGOING,
            enduring=self.two_phase,
            bumped=False,
            written=None,
            marker=None,
            partitions={},
            groups=frozenset(),
            started_ms=now_ms,
            updated_ms=now_ms,
        )

    def with_partitions(self, added: Iterable[tuple[Topic, int]]) -> Transaction:
        partitions = dict(self.partitions)
        for topic, number in added:
            known = partitions.get(topic.id)
            numbers = known.numbers if known is not None else frozenset[int]()
            partitions[topic.id] = Parts(topic.name, numbers | {number})
        return replace(self, partitions=partitions)

    def without_topic(self, topic_id: UUID) -> Transaction:
        kept = {id_: parts for id_, parts in self.partitions.items() if id_ != topic_id}
        return replace(self, partitions=kept)

    def decided(self, *, commit: bool, ids: Ids, bumped: bool, now_ms: int) -> Transaction:
        """Decided, with the ids that the producer has from now on.

        The markers fence whatever of this transaction is still under way: where its producer
        gets a new epoch they carry that one.
        """
        txn = self.txn_ids
        # Where a new producer id is used from now on, the old one is closed with its next epoch.
        same_id = ids.producer_id == txn.producer_id
        marker = ids if same_id else Ids(txn.producer_id, txn.epoch + 1)
        return replace(
            self,
            state=State.PREPARE_COMMIT if commit else State.PREPARE_ABORT,
            ids=ids,
            previous_id=self.ids.producer_id,
            last_epoch=self.ids.epoch if bumped else self.last_epoch,
            bumped=bumped,
            # Whatever the producer writes with its next epoch is not this transaction's.
            written=txn if txn != ids else None,
            marker=marker,
            updated_ms=now_ms,
        )

    def completed(self, now_ms: int) -> Transaction:
        commit = self.state == State.PREPARE_COMMIT
        return replace(
            self,
            state=State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT,
            enduring=False,
            written=None,
            marker=None,
            partitions={},
            groups=frozenset(),
            updated_ms=now_ms,
        )

    # ---- the journal ---------------------------------------------------------------------

    def to_json(self) -> dict[str, Any]:
        """As the journal's value; what has its ordinary value is left out."""
        value: dict[str, Any] = {
            "ids": list(self.ids),
            "state": self.state.value,
            "timeout_ms": self.timeout_ms,
            "updated_ms": self.updated_ms,
        }
        if self.two_phase:
            value["two_phase"] = True
        if self.enduring:
            value["enduring"] = True
        if self.last_epoch >= 0:
            value["last_epoch"] = self.last_epoch
        if self.previous_id >= 0:
            value["previous_id"] = self.previous_id
        if self.bumped:
            value["bumped"] = True
        if self.written is not None:
            value["written"] = list(self.written)
        if self.marker is not None:
            value["marker"] = list(self.marker)
        if self.partitions:
            value["partitions"] = {
                str(id_): [parts.topic, sorted(parts.numbers)]
                for id_, parts in self.partitions.items()
            }
        if self.groups:
            value["groups"] = sorted(self.groups)
        if self.started_ms >= 0:
            value["started_ms"] = self.started_ms
        return value

    @classmethod
    def from_json(cls, name: str, value: Mapping[str, Any]) -> Transaction:
        written, marker = value.get("written"), value.get("marker")
        return cls(
            name,
            Ids(*value["ids"]),
            State(value["state"]),
            value["timeout_ms"],
            two_phase=value.get("two_phase", False),
            enduring=value.get("enduring", False),
            last_epoch=value.get("last_epoch", -1),
            previous_id=value.get("previous_id", -1),
            bumped=value.get("bumped", False),
            written=Ids(*written) if written is not None else None,
            marker=Ids(*marker) if marker is not None else None,
            partitions={
                UUID(id_): Parts(topic, frozenset(numbers))
                for id_, (topic, numbers) in value.get("partitions", {}).items()
            },
            groups=frozenset(value.get("groups", ())),
            started_ms=value.get("started_ms", -1),
            updated_ms=value["updated_ms"],
        )
