"""Where a sink writes to, as it travels to the tasks, and the connections that a process keeps.

Spark's Python workers live on from task to task. Each keeps its connections to the log here, so
that a micro-batch begins with the first record and not with a handshake.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.client.connection import Cluster, parse_bootstrap
from penstock.client.metadata import Metadata
from penstock.client.producing import Sender
from penstock.client.retrying import until_answered
from penstock.client.transacting import Ids, Transaction, init_producer
from penstock.client.transactions import described
from penstock.records.compression import CODES
from penstock.spark.sink.errors import SinkError

if TYPE_CHECKING:
    from penstock.client.security import Security

CODEC: Final = "lz4"
BATCH_BYTES: Final = 1_000_000
# The broker's own limit by default. A batch may take long; a driver that died is fenced, and its
# transaction aborted, by its successor.
TRANSACTION_TIMEOUT_MS: Final = 900_000
DELIVERY_TIMEOUT_S: Final = 120.0
# How many sinks a worker keeps connections for.
_KEPT: Final = 8
_IDLE_S: Final = 300.0

_SECURITY: Final = ("security.", "sasl.", "ssl.")
_NUMBERS: Final = ("batch.size", "transaction.timeout.ms", "delivery.timeout.ms")
_WITHOUT_EFFECT: Final = frozenset(
    {"acks", "buffer.memory", "enable.idempotence", "linger.ms", "max.request.size",
     "max.in.flight.requests.per.connection", "request.timeout.ms", "retries", "retry.backoff.ms"}
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """The log, and how to write to it."""

    bootstrap: str
    security: Security | None = field(default=None, repr=False)
    client_id: str = "penstock-spark"
    codec: str = CODEC
    batch_bytes: int = BATCH_BYTES
    transaction_timeout_ms: int = TRANSACTION_TIMEOUT_MS
    delivery_timeout_s: float = DELIVERY_TIMEOUT_S

    @classmethod
    def from_options(cls, bootstrap: str, options: Mapping[str, str] | None = None) -> Target:
        """From Kafka's names of producer settings, with or without `kafka.` before them."""
        given = {
            key.lower().removeprefix("kafka."): str(value).strip()
            for key, value in (options or {}).items()
        }
        bootstrap = bootstrap or given.pop("bootstrap.servers", "")
        given.pop("bootstrap.servers", None)
        parse_bootstrap(bootstrap)
        secret = {name: given.pop(name) for name in list(given) if name.startswith(_SECURITY)}
        numbers = {name: _number(name, given.pop(name)) for name in _NUMBERS if name in given}
        codec = given.pop("compression.type", CODEC)
        if codec not in CODES:
            raise SinkError(
                f"compression.type is {codec!r}", advice=f"Choose one of {', '.join(CODES)}."
            )
        client_id = given.pop("client.id", "penstock-spark")
        if given.get("acks", "all") not in {"all", "-1"}:
            raise SinkError(
                f"acks is {given['acks']!r}", advice="The sink waits for all: leave it."
            )
        unknown = sorted(given.keys() - _WITHOUT_EFFECT)
        if unknown:
            known = ("compression.type", "client.id", *_NUMBERS)
            raise SinkError(
                f"there is no option {unknown[0]!r}",
                advice=f"Known are kafka.{', kafka.'.join(known)}, and those of TLS and SASL.",
            )
        return cls(
            bootstrap,
            security=_security(secret) if secret else None,
            client_id=client_id,
            codec=codec,
            batch_bytes=numbers.get("batch.size", BATCH_BYTES),
            transaction_timeout_ms=numbers.get("transaction.timeout.ms", TRANSACTION_TIMEOUT_MS),
            delivery_timeout_s=numbers.get("delivery.timeout.ms", DELIVERY_TIMEOUT_S * 1000) / 1000,
        )

    def connect(self) -> Cluster:
        """A cluster of the caller's own."""
        extra: dict[str, Any] = {} if self.security is None else {"security": self.security}
        return Cluster(self.bootstrap, client_id=self.client_id, **extra)


def _security(secret: Mapping[str, str]) -> Security:
    # Loaded where it is needed: most tasks need none.
    from penstock.client.security import Security

    return Security.from_options(secret)


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1 << 30:
        raise SinkError(f"{name} is {text!r}", advice="Use a whole number above 0.")
    return int(text)


class Joined(Transaction):
    """Somebody else's transaction, joined by its ids: to add partitions to it and write."""

    def join(self, ids: Ids) -> None:
        if ids != self._ids:
            self._reset(ids)

    def has_any(self, places: Iterable[tuple[str, int]]) -> bool:
        """Whether some of these partitions belong to the transaction already."""
        wanted = set(places)
        if wanted & self._added:
            return True
        name = self.transactional_id
        told = until_answered(
            lambda: described(self._cluster, name),
            f"describing the transaction of {name!r}",
            self._retry_s,
        )
        return told.is_open and any(
            (topic, number) in wanted
            for topic, numbers in told.partitions.items()
            for number in numbers
        )


class Link:
    """A process's connections to one target."""

    def __init__(self, target: Target, transactional_id: str | None) -> None:
        self.cluster = target.connect()
        self.metadata = Metadata(self.cluster, timeout_s=target.delivery_timeout_s)
        self.sender = Sender(
            self.cluster,
            transactional_id=transactional_id,
            timeout_s=target.delivery_timeout_s,
            metadata=self.metadata,
        )
        self.joined = (
            Joined(
                self.cluster,
                transactional_id,
                retry_s=target.delivery_timeout_s,
                metadata=self.metadata,
            )
            if transactional_id is not None
            else None
        )
        # Without transactions: our own idempotent producer, and where it stands.
        self._own: Ids | None = None
        self._own_used = 0.0
        self.sequences: dict[tuple[str, int], int] = {}

    def own_ids(self) -> Ids:
        """An idempotent producer of this process's own; a new one after a pause.

        Brokers forget producers that are idle for long, and then refuse their next number.
        """
        now = time.monotonic()
        if self._own is None or now - self._own_used > _IDLE_S:
            self._own = init_producer(self.cluster)
            self.sequences.clear()
        self._own_used = now
        return self._own

    def close(self) -> None:
        self.sender.close()
        self.cluster.close()


_links: dict[tuple[Target, str | None], Link] = {}


def link(target: Target, transactional_id: str | None = None) -> Link:
    """The connections of this process to a target, made if there are none."""
    key = (target, transactional_id)
    found = _links.pop(key, None)
    if found is None:
        while len(_links) >= _KEPT:
            _links.pop(next(iter(_links))).close()
        found = Link(target, transactional_id)
    _links[key] = found
    return found


def drop(target: Target, transactional_id: str | None = None) -> None:
    """Forget the connections to a target: after an error nobody knows what is on its way."""
    found = _links.pop((target, transactional_id), None)
    if found is not None:
        found.close()
