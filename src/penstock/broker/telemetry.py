"""Client metrics (KIP-714): what clients are asked to push, and how often they may.

Nothing here receives the metrics of clients, so none are requested, whatever subscriptions there
are. A client that asks all the same gets a subscription without metrics; what it pushes is checked
as Apache Kafka checks it, and dropped. Requests that come more often than the push interval allows
are refused.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final
from uuid import UUID, uuid4

from crc32c import crc32c

from penstock.broker.catalog import ApiError
from penstock.errors import CorruptBatchError
from penstock.records.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD, decompress
from penstock.wire.errors import ErrorCode
from penstock.wire.zero import ZERO_UUID

# Kafka's default of interval.ms.
PUSH_INTERVAL_MS: Final = 300_000
# Kafka's default of telemetry.max.bytes.
MAX_BYTES: Final = 1 << 20
# The best first, as Kafka lists them.
COMPRESSION_TYPES: Final = (ZSTD, LZ4, GZIP, SNAPPY)
# As many as Kafka remembers; the longest silent make room for new ones.
MAX_INSTANCES: Final = 16_384
# A client that is silent for longer is forgotten.
EXPIRATION_MS: Final = 3 * PUSH_INTERVAL_MS
_RESERVED: Final = frozenset({ZERO_UUID, UUID(int=1)})
_ASK_AGAIN: Final = frozenset(
    {ErrorCode.UNKNOWN_SUBSCRIPTION_ID, ErrorCode.UNSUPPORTED_COMPRESSION_TYPE}
)
# Kafka's checksum of the requested metrics (an empty set as Java writes it) and the interval.
_SUBSCRIPTION: Final = crc32c(f"[]{PUSH_INTERVAL_MS}".encode())


def subscription_id(instance_id: UUID) -> int:
    """The id of an instance's subscription; the same at each start, and as Kafka computes it."""
    folded = (instance_id.int >> 64) ^ (instance_id.int & 0xFFFF_FFFF_FFFF_FFFF)
    unsigned = (_SUBSCRIPTION ^ (folded >> 32) ^ folded) & 0xFFFF_FFFF
    return unsigned - (1 << 32) if unsigned >> 31 else unsigned


@dataclass(slots=True)
class ClientInstance:
    """What is remembered of a client that asked for a subscription or pushed metrics."""

    seen_ms: int
    asked_ms: int = -PUSH_INTERVAL_MS
    pushed_ms: int = -PUSH_INTERVAL_MS
    is_terminating: bool = False
    last_error: ErrorCode = ErrorCode.NONE

    def may_ask(self, now_ms: int) -> bool:
        """Once in an interval, unless the last push said that the subscription is another."""
        if now_ms - max(self.asked_ms, self.pushed_ms) >= PUSH_INTERVAL_MS:
            self.asked_ms = now_ms
            return True
        return self.last_error in _ASK_AGAIN

    def may_push(self, now_ms: int) -> bool:
        """Once after each subscription, because clients spread their first push, then as above."""
        if self.asked_ms > self.pushed_ms or now_ms - self.pushed_ms >= PUSH_INTERVAL_MS:
            self.pushed_ms = now_ms
            return True
        return False


@dataclass(frozen=True, slots=True)
class Push:
    """One request with metrics."""

    subscription_id: int
    is_terminating: bool
    compression_type: int
    metrics: bytes | memoryview


class ClientTelemetry:
    """All clients that take part. Knows no sockets and no clock: `now_ms` is monotonic time."""

    def __init__(self) -> None:
        # The longest silent first.
        self._instances: OrderedDict[UUID, ClientInstance] = OrderedDict()
        # The instance that a connection was the first to name.
        self._by_connection: dict[object, UUID] = {}

    def __len__(self) -> int:
        return len(self._instances)

    def subscribe(self, instance_id: UUID, connection: object, now_ms: int) -> UUID:
        """The instance's id, a new one for a client without; ApiError if it asks too often."""
        if instance_id == ZERO_UUID:
            instance_id = uuid4()
        instance = self._instance(instance_id, connection, now_ms)
        if not instance.may_ask(now_ms):
            raise ApiError(
                ErrorCode.THROTTLING_QUOTA_EXCEEDED, "asked before the push interval is over"
            )
        instance.last_error = ErrorCode.NONE
        return instance_id

    def push(self, instance_id: UUID, push: Push, connection: object, now_ms: int) -> None:
        """Check what a client pushes, and drop it; ApiError if it may not push that now."""
        if instance_id in _RESERVED:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"no client has the id {instance_id}")
        instance = self._instance(instance_id, connection, now_ms)
        try:
            _check(instance_id, instance, push, now_ms)
        except ApiError as error:
            instance.last_error = error.code
            raise
        finally:
            instance.is_terminating = push.is_terminating
        instance.last_error = ErrorCode.NONE

    def disconnected(self, connection: object) -> None:
        """Forget the instance that came with a connection which is gone."""
        instance_id = self._by_connection.pop(connection, None)
        if instance_id is not None:
            self._instances.pop(instance_id, None)

    def _instance(self, instance_id: UUID, connection: object, now_ms: int) -> ClientInstance:
        while self._instances:
            oldest = next(iter(self._instances))
            if now_ms - self._instances[oldest].seen_ms < EXPIRATION_MS:
                break
            del self._instances[oldest]
        instance = self._instances.get(instance_id)
        if instance is None:
            if len(self._instances) >= MAX_INSTANCES:
                self._instances.popitem(last=False)
            instance = self._instances[instance_id] = ClientInstance(now_ms)
            self._by_connection[connection] = instance_id
        instance.seen_ms = now_ms
        self._instances.move_to_end(instance_id)
        return instance


def _check(instance_id: UUID, instance: ClientInstance, push: Push, now_ms: int) -> None:
    if instance.is_terminating:
        raise ApiError(ErrorCode.INVALID_REQUEST, "the client has pushed its last metrics already")
    if not instance.may_push(now_ms) and not push.is_terminating:
        raise ApiError(
            ErrorCode.THROTTLING_QUOTA_EXCEEDED, "pushed before the push interval is over"
        )
    if push.subscription_id != subscription_id(instance_id):
        raise ApiError(
            ErrorCode.UNKNOWN_SUBSCRIPTION_ID, f"there is no subscription {push.subscription_id}"
        )
    if push.compression_type not in (NONE, *COMPRESSION_TYPES):
        raise ApiError(
            ErrorCode.UNSUPPORTED_COMPRESSION_TYPE, f"unknown codec {push.compression_type}"
        )
    if len(push.metrics) > MAX_BYTES:
        raise ApiError(
            ErrorCode.TELEMETRY_TOO_LARGE, f"the metrics have more than {MAX_BYTES} bytes"
        )
    if push.metrics:
        try:
            decompress(push.compression_type, push.metrics, MAX_BYTES)
        except CorruptBatchError as error:
            raise ApiError(ErrorCode.INVALID_RECORD, str(error)) from error
