"""Quotas: how many bytes and requests a second a client may use.

A quota belongs to an *entity*: a user, a client id, or both together; each of them by name or as
the default of those that have none of their own. Of all entities that fit a client the most
particular counts, for each kind of quota by itself, in Kafka's order:

    user and client id · user and default client id · user · default user and client id ·
    default users and client ids · default user · client id · default client id

Who shares a quota: the connections of one user and client id where the entity names both, all of
a user or all of a client id where it names one. Without authentication every user is ANONYMOUS.

`QuotaCoordinator` is what was set, durable by the journal. `Meters` is the accounting: a bucket
for each client, which fills at the quota's rate and holds what comes in one second; who takes more
than there is goes into debt, and waits until it is paid. So over any time a client uses its rate,
plus one second's worth, plus one request per connection. Both are pure: no sockets and no clock.

`Enforcement` puts itself before the broker's `dispatch` while there are quotas, and nothing is
there otherwise. As in Kafka, a client over its quota is answered at once, told in the answer how
long to wait (`throttle_time_ms`), and not read from for as long.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.broker.catalog import ApiError, Topic
from penstock.broker.journal import Entry, Key
from penstock.broker.overload import RequestHeldError
from penstock.wire import decode_request_header
from penstock.wire.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.connection import Connection
    from penstock.broker.server import Broker

PRODUCED: Final = "producer_byte_rate"
CONSUMED: Final = "consumer_byte_rate"
# Penstock's own: requests a second. Kafka's request_percentage counts time of its threads.
REQUESTED: Final = "request_rate"
KINDS: Final = (PRODUCED, CONSUMED, REQUESTED)
USER: Final = "user"
CLIENT_ID: Final = "client-id"
IP: Final = "ip"
# Everyone, as long as nobody says who they are.
ANONYMOUS: Final = "ANONYMOUS"

MAX_ENTITIES: Final = 10_000
# Clients that are accounted for; beyond it the longest silent is forgotten.
MAX_TRACKED: Final = 10_000
BURST_MS: Final = 1_000
# Longer than this nobody is told to wait at a time; what is owed stays owed.
MAX_THROTTLE_MS: Final = 30_000

_PRODUCE: Final = 0
# Fetch and ShareFetch.
_CONSUMING: Final = frozenset({1, 78})
_DEFAULT: Final = "-default"

# Type and name; no name stands for the default. In the order of the types.
Entity = tuple[tuple[str, str | None], ...]
Scope = tuple[str, str | None, str | None]


def entity_of(*, user: str | None = "", client_id: str | None = "") -> Entity:
    """An entity by its parts: None is the default, an empty name leaves a part out."""
    parts = ((CLIENT_ID, client_id), (USER, user))
    return tuple((kind, name) for kind, name in parts if name != "")


# ---- what was set ----------------------------------------------------------------------------


class Change(NamedTuple):
    """One quota of an entity, to be set, or removed where there is no value."""

    kind: str
    value: float | None


class QuotaCoordinator:
    """The quotas of one broker."""

    kinds: Final = frozenset({"quota"})

    def __init__(self) -> None:
        self.quotas: dict[Entity, dict[str, float]] = {}
        self.on_change: Callable[[], None] = lambda: None

    def alter(
        self, parts: Sequence[tuple[str, str | None]], changes: Sequence[Change]
    ) -> list[Entry]:
        """The entries that change an entity's quotas; ApiError if that cannot be."""
        entity = checked_entity(parts)
        values = dict(self.quotas.get(entity, {}))
        seen: set[str] = set()
        for change in changes:
            if change.kind in seen:
                raise _invalid(f"{change.kind} is named twice")
            seen.add(change.kind)
            if change.value is None:
                values.pop(change.kind, None)
            else:
                values[change.kind] = checked_value(change.kind, change.value)
        if entity not in self.quotas and len(self.quotas) >= MAX_ENTITIES and values:
            raise ApiError(
                ErrorCode.POLICY_VIOLATION, f"at most {MAX_ENTITIES} entities can have quotas"
            )
        if values == self.quotas.get(entity, {}):
            return []
        return [(_key_of(entity), values or None)]

    def limit(self, user: str, client_id: str, kind: str) -> tuple[float, Scope] | None:
        """What holds for a client, and who shares it; None if it may use what it likes."""
        # An empty client id is nobody's own, and falls under the default.
        clients = (client_id, None, "") if client_id else (None, "")
        for of_user in (user, None, ""):
            for of_client in clients:
                entity = entity_of(user=of_user, client_id=of_client)
                value = self.quotas.get(entity, {}).get(kind)
                if value is not None:
                    named = dict(entity)
                    return value, (
                        kind,
                        user if USER in named else None,
                        client_id if CLIENT_ID in named else None,
                    )
        return None

    # ---- as a coordinator ------------------------------------------------------------------

    def replay(self, key: Key, value: Any) -> None:
        """Apply one entry."""
        entity = _entity_in(key)
        if value is None:
            self.quotas.pop(entity, None)
        else:
            self.quotas[entity] = dict(value)
        self.on_change()

    def reset(self) -> None:
        """Be as new: everything is about to be replayed."""
        self.quotas.clear()
        self.on_change()

    def begin(self, now_ms: int, elapsed_ms: int, *, lost: bool) -> Iterable[Entry]:
        return ()

    def topic_deleted(self, topic: Topic) -> Iterable[Entry]:
        return ()

    def tick(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        return ()

    @property
    def next_due_ms(self) -> int | None:
        return None


def checked_entity(parts: Sequence[tuple[str, str | None]]) -> Entity:
    """The entity that a client means; ApiError if there can be none like it."""
    named: dict[str, str | None] = {}
    for kind, name in parts:
        if kind == IP:
            raise _invalid("this broker has no quotas for addresses")
        if kind not in (USER, CLIENT_ID):
            raise _invalid(f"there is no entity type {kind!r}, only {USER} and {CLIENT_ID}")
        if kind in named:
            raise _invalid(f"{kind} is named twice")
        if name == "":
            raise _invalid(f"the name of a {kind} is empty")
        named[kind] = name
    if not named:
        raise _invalid("an entity must name a user or a client id")
    return tuple(sorted(named.items()))


def checked_value(kind: str, value: float) -> float:
    """The value of a quota; ApiError if it is none."""
    if kind not in KINDS:
        raise _invalid(f"there is no quota {kind!r} here, only {', '.join(KINDS)}")
    if not math.isfinite(value) or value <= 0:
        raise _invalid(f"{kind} must be more than 0, not {value}")
    if kind != REQUESTED and value != int(value):
        raise _invalid(f"{kind} must be a whole number, not {value}")
    return value


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, message)


def _key_of(entity: Entity) -> Key:
    key: list[str] = ["quota"]
    for kind, name in entity:
        key += [kind + _DEFAULT, ""] if name is None else [kind, name]
    return tuple(key)


def _entity_in(key: Key) -> Entity:
    words = [str(word) for word in key[1:]]
    return tuple(
        (kind.removesuffix(_DEFAULT), None if kind.endswith(_DEFAULT) else name)
        for kind, name in zip(words[::2], words[1::2], strict=True)
    )


# ---- accounting ------------------------------------------------------------------------------


class Bucket:
    """What one client may use, as it comes in and goes."""

    __slots__ = ("_at_ms", "left", "rate")

    def __init__(self, rate: float, elapsed_ms: int) -> None:
        self.rate = rate
        self.left = rate * BURST_MS / 1000
        self._at_ms = elapsed_ms

    def take(self, amount: float, elapsed_ms: int) -> int:
        """Use some, also more than there is; for how long to wait then."""
        came_in = max(elapsed_ms - self._at_ms, 0) * self.rate / 1000
        self._at_ms = elapsed_ms
        self.left = min(self.left + came_in, self.rate * BURST_MS / 1000) - amount
        if self.left >= 0:
            return 0
        return min(math.ceil(-self.left * 1000 / self.rate), MAX_THROTTLE_MS)

    def give_back(self, amount: float) -> None:
        """What was taken was not used after all."""
        self.left += amount


class Meters:
    """The buckets of all clients that have quotas."""

    def __init__(self, quotas: QuotaCoordinator) -> None:
        self._quotas = quotas
        self._buckets: OrderedDict[Scope, Bucket] = OrderedDict()
        self._limits: dict[tuple[str, str, str], tuple[float, Scope] | None] = {}

    def __len__(self) -> int:
        return len(self._buckets)

    def forget(self) -> None:
        """The quotas have changed: begin anew."""
        self._buckets.clear()
        self._limits.clear()

    def bucket(self, user: str, client_id: str, kind: str, elapsed_ms: int) -> Bucket | None:
        """A client's bucket for one kind of quota; None if it has none of that kind."""
        who = (user, client_id, kind)
        if who not in self._limits:
            if len(self._limits) >= MAX_TRACKED:
                self._limits.clear()
            self._limits[who] = self._quotas.limit(*who)
        found = self._limits[who]
        if found is None:
            return None
        rate, scope = found
        bucket = self._buckets.get(scope)
        if bucket is not None:
            self._buckets.move_to_end(scope)
            return bucket
        bucket = self._buckets[scope] = Bucket(rate, elapsed_ms)
        if len(self._buckets) > MAX_TRACKED:
            self._buckets.popitem(last=False)
        return bucket


# ---- enforcement -----------------------------------------------------------------------------


class ClientQuota:
    """What the client of one request may still use for its answer."""

    __slots__ = ("_connection", "_enforcement", "_throttle_ms", "bucket")

    def __init__(
        self, enforcement: Enforcement, connection: Connection, bucket: Bucket, throttle_ms: int
    ) -> None:
        self._enforcement = enforcement
        self._connection = connection
        self._throttle_ms = throttle_ms
        self.bucket = bucket

    @property
    def most_bytes(self) -> int:
        """The most that one answer should hold, so that the wait after it is not too long."""
        return max(int(self.bucket.rate * BURST_MS / 1000), 1)

    def consumed(self, size: int) -> int:
        """So much is answered now; for how long the client is to wait."""
        throttle_ms = self.bucket.take(size, self._enforcement.elapsed_ms())
        throttle_ms = max(throttle_ms, self._throttle_ms)
        if throttle_ms:
            self._enforcement.mute(self._connection, throttle_ms)
        return throttle_ms


class Enforcement:
    """Holds clients to their quotas."""

    def __init__(self, broker: Broker, quotas: QuotaCoordinator) -> None:
        self._broker = broker
        self._quotas = quotas
        self.meters = Meters(quotas)
        # Requests whose clients were told to wait.
        self.throttled = 0
        quotas.on_change = self._follow

    def _follow(self) -> None:
        """Be in the way of requests only while there are quotas."""
        self.meters.forget()
        wanted = bool(self._quotas.quotas)
        self._broker.dispatch = self.dispatch if wanted else self._broker.dispatch_plain

    def elapsed_ms(self) -> int:
        return self._broker.clock.elapsed_ms()

    def dispatch(self, connection: Connection, frame: memoryview) -> None:
        """Account for a request, then have it handled."""
        key, _, _, client, _ = decode_request_header(frame, 0)
        now, client_id = self.elapsed_ms(), client or ""
        charges: Mapping[str, float] = {REQUESTED: 1}
        if key == _PRODUCE:
            charges = {REQUESTED: 1, PRODUCED: len(frame)}
        throttle_ms, paid = 0, []
        for kind, amount in charges.items():
            bucket = self.meters.bucket(ANONYMOUS, client_id, kind, now)
            if bucket is not None:
                throttle_ms = max(throttle_ms, bucket.take(amount, now))
                paid.append((bucket, amount))
        quota = None
        if key in _CONSUMING:
            bucket = self.meters.bucket(ANONYMOUS, client_id, CONSUMED, now)
            if bucket is not None:
                quota = ClientQuota(self, connection, bucket, throttle_ms)
        try:
            if throttle_ms or quota is not None:
                self._broker.dispatch_in_full(connection, frame, throttle_ms, quota)
            else:
                self._broker.dispatch_plain(connection, frame)
        except RequestHeldError:
            # It comes again.
            for bucket, amount in paid:
                bucket.give_back(amount)
            raise
        if throttle_ms:
            self.mute(connection, throttle_ms)

    def mute(self, connection: Connection, throttle_ms: int) -> None:
        """Read nothing from a client while it is to wait."""
        self.throttled += 1
        connection.mute(throttle_ms)
