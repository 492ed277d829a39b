"""Transactions of other producers: listed, described, resumed, committed and aborted by their id.

A producer that leaves the decision to somebody else (KIP-939) tells it which transaction is
prepared: the producer id and epoch that its records carry. Whoever decides, in whatever process,
resumes the transaction by its transactional id, sees whether it is the one that was prepared, and
ends it. From the moment it is resumed the producer that began it can write nothing more.

    with Cluster("127.0.0.1:9092") as cluster:
        resumed = resume(cluster, "orders-1")
        if resumed.prepared == decided_to_commit:
            end(cluster, resumed, commit=True)
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from penstock.client.connection import TRANSACTION, Cluster, check
from penstock.wire import Message
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.describe_transactions import DescribeTransactionsRequest
from penstock.wire.messages.end_txn import EndTxnRequest
from penstock.wire.messages.init_producer_id import InitProducerIdRequest
from penstock.wire.messages.list_transactions import ListTransactionsRequest

# The timeout that brokers show where there is none.
NO_TIMEOUT_MS: Final = 0x7FFFFFFF
# KIP-939: a transaction may be kept.
KEEPING_VERSION: Final = 6
# Brokers filter by duration from here on.
_DURATION_VERSION: Final = 1
_TIMEOUT_MS: Final = 60_000
_ATTEMPTS: Final = 50
_PAUSE_S: Final = 0.1


class Ids(NamedTuple):
    """What a producer's records carry."""

    producer_id: int
    epoch: int

    def __str__(self) -> str:
        return f"{self.producer_id}:{self.epoch}"


@dataclass(frozen=True, slots=True)
class Listed:
    """A transactional id as it is listed."""

    transactional_id: str
    producer_id: int
    state: str


@dataclass(frozen=True, slots=True)
class Described:
    """A transactional id with all that is known of it."""

    transactional_id: str
    state: str
    ids: Ids
    timeout_ms: int
    started_ms: int
    partitions: dict[str, list[int]]

    @property
    def is_open(self) -> bool:
        return self.state == "Ongoing"

    @property
    def is_two_phase(self) -> bool:
        """Whether it waits for somebody's decision for as long as it takes."""
        return self.timeout_ms == NO_TIMEOUT_MS


@dataclass(frozen=True, slots=True)
class Resumed:
    """A transactional id that is ours now, and the transaction that was kept for us to end."""

    transactional_id: str
    ids: Ids
    # None: there is no open transaction.
    prepared: Ids | None


def listed(
    cluster: Cluster, *, states: Iterable[str] = (), longer_than_ms: int = -1
) -> list[Listed]:
    """The transactional ids of all brokers, by name."""
    request = ListTransactionsRequest(state_filters=list(states), duration_filter=longer_than_ms)
    found: list[Listed] = []
    for broker in cluster.brokers():
        needed = _DURATION_VERSION if longer_than_ms >= 0 else 0
        told = broker.call(request, at_least=needed)
        check(told.error_code, "listing transactions")
        found += [
            Listed(item.transactional_id, item.producer_id, item.transaction_state)
            for item in told.transaction_states
        ]
    return sorted(found, key=lambda item: item.transactional_id)


def described(cluster: Cluster, transactional_id: str) -> Described:
    coordinator = cluster.coordinator(TRANSACTION, transactional_id)
    request = DescribeTransactionsRequest(transactional_ids=[transactional_id])
    item = coordinator.call(request).transaction_states[0]
    check(item.error_code, f"describing {transactional_id!r}")
    return Described(
        transactional_id,
        item.transaction_state,
        Ids(item.producer_id, item.producer_epoch),
        item.transaction_timeout_ms,
        item.transaction_start_time_ms,
        {topic.topic: sorted(topic.partitions) for topic in item.topics},
    )


def resume(cluster: Cluster, transactional_id: str, *, timeout_ms: int | None = None) -> Resumed:
    """Take a transactional id over, with the transaction that is open, to end it.

    Its transactions wait for a decision from then on, or have a timeout, if one is given.
    """
    coordinator = cluster.coordinator(TRANSACTION, transactional_id)
    request = InitProducerIdRequest(
        transactional_id=transactional_id,
        transaction_timeout_ms=_TIMEOUT_MS if timeout_ms is None else timeout_ms,
        enable_2pc=timeout_ms is None,
        keep_prepared_txn=True,
    )
    told = coordinator.call(request, at_least=KEEPING_VERSION)
    check(told.error_code, f"resuming the transaction of {transactional_id!r}")
    prepared = Ids(told.ongoing_txn_producer_id, told.ongoing_txn_producer_epoch)
    return Resumed(
        transactional_id,
        Ids(told.producer_id, told.producer_epoch),
        prepared if prepared.producer_id >= 0 else None,
    )


def end(cluster: Cluster, resumed: Resumed, *, commit: bool) -> None:
    """Commit or abort what was resumed; done on return."""
    name = resumed.transactional_id
    request = EndTxnRequest(
        transactional_id=name,
        producer_id=resumed.ids.producer_id,
        producer_epoch=resumed.ids.epoch,
        committed=commit,
    )
    doing = f"{'committing' if commit else 'aborting'} the transaction of {name!r}"
    check(_until_settled(cluster, name, request), doing)


def terminate(cluster: Cluster, transactional_id: str) -> None:
    """Abort whatever is open and fence whoever began it; known to every broker."""
    request = InitProducerIdRequest(
        transactional_id=transactional_id, transaction_timeout_ms=_TIMEOUT_MS
    )
    code = _until_settled(cluster, transactional_id, request)
    check(code, f"aborting the transaction of {transactional_id!r}")


def _until_settled(cluster: Cluster, name: str, request: Message) -> int:
    """The code of the answer; Kafka wants to be asked again while it carries something out."""
    for attempt in range(_ATTEMPTS):
        if attempt:
            time.sleep(_PAUSE_S)
        code: int = cluster.coordinator(TRANSACTION, name).call(request).error_code
        if code != ErrorCode.CONCURRENT_TRANSACTIONS:
            break
    return code
