"""Webhooks: each change of a table as a signed HTTP request, as Standard Webhooks has it.

    webhook+https://example.com/hooks?secret=whsec_...&state=/var/lib/shop/hooks.db

    POST /hooks
    webhook-id: orders-0-4711
    webhook-timestamp: 1767225600
    webhook-signature: v1,K5oZfzN95Z9UVu1EsfQmfVNQhnkZ2pj9o9NDN/H/pI4=

    {"type":"orders.upserted","timestamp":"2026-01-01T00:00:00Z","data":{"id":1,"name":"a"}}

A deleted row is `orders.deleted`, its data the key. The receiver answers 2xx, or is asked again,
with growing pauses, `attempts` times (8). Any library for Standard Webhooks checks the signature.

**At least once.** A request has no transaction with us: what was received while we were killed is
sent again, with the same `webhook-id` (topic, partition and offset of the change), so a receiver
that remembers ids has each change once.

**Changes of one key are in order**: a batch has one change of a key, and the next batch waits for
the whole of this one. After a failure, or a kill, the log may be cut into other batches, and a
smaller one has an older change of a key than the one that failed. So what is about to be sent is
written down first, and an older change of a key of which a newer one may have arrived is never
sent: the newer one comes (again) with its own batch. Different keys go over `concurrency` (8)
connections at once, in no order. What was or may have been sent, and the position, are in the
SQLite file `state`, which belongs to this one sink.

A request that got an answer other than 2xx to its last try is put aside with the reason. If there
is no answer, or it says that the receiver is overloaded or down (429, 502, 503, 504), it is not the
row's fault: then the sink fails, to be tried again later. 410 (gone) stops it for good.

There is nothing to read back, to compare, or to build anew.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import sqlite3
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError
from penstock.sinks import rows as coding
from penstock.sinks.contract import (
    SCAN_ROWS,
    Applied,
    Aside,
    Changes,
    Key,
    Position,
    Refused,
    Sink,
    follows,
    refusing,
)
from penstock.sinks.errors import (
    FencedError,
    NotReadableError,
    SinkError,
    StoreError,
    StoreUnreachableError,
)
from penstock.sinks.http import BUSY, Backoff, Connection, Server
from penstock.sinks.schema import Schema
from penstock.sinks.stores import Address

SECRET_BYTES: Final = (24, 64)
_SECRET_PREFIX: Final = "whsec_"
_PAUSE_S: Final = 0.2
_GONE: Final = 410
_REASON_CHARS: Final = 300
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS about (
  one INTEGER PRIMARY KEY CHECK (one = 1), token TEXT, position TEXT, schema TEXT);
CREATE TABLE IF NOT EXISTS sent (
  id TEXT PRIMARY KEY, key TEXT, topic TEXT, partition INTEGER, offset INTEGER, time_us INTEGER,
  delivered INTEGER) WITHOUT ROWID;
DROP TABLE IF EXISTS delivered;
"""


class NotForWebhooksError(SinkError):
    """What was sent cannot be taken back or put in another place."""

    advice = (
        "`penstock sinks rebuild NAME --from beginning` sends everything again, `--from end` only "
        "what comes from then on."
    )


@dataclass(frozen=True, slots=True)
class _Sent:
    """A change of a key that a receiver has, or may have."""

    id: str
    key: str
    topic: str
    partition: int
    offset: int
    time_us: int
    delivered: int = 0

    def is_later_than(self, other: _Sent) -> bool:
        """Of two partitions the time decides, as it does within a batch."""
        if (self.topic, self.partition) == (other.topic, other.partition):
            return self.offset > other.offset
        return self.time_us > other.time_us


@dataclass(frozen=True, slots=True)
class _Message:
    id: str
    body: bytes
    refuse: Callable[[str], Refused]
    about: _Sent

    def with_own_id(self) -> _Message:
        document = orjson.loads(self.body)
        told = orjson.dumps([document["type"], document["data"]])
        own = f"{self.id}-{hashlib.sha256(told).hexdigest()[:16]}"
        return replace(self, id=own, about=replace(self.about, id=own))


class WebhookSink(Sink):
    """Requests for the changes of a table; see the module."""

    readable: ClassVar[bool] = False
    rebuildable: ClassVar[bool] = False

    def __init__(self, address: Address, *, clock: Callable[[], float] = time.time) -> None:
        self._server = Server(
            address.host,
            address.port or (443 if address.scheme.endswith("https") else 80),
            tls=address.scheme.endswith("https"),
            ca_file=address.option("ca_file"),
            user=address.user,
            password=address.password,
            timeout_s=float(address.number("timeout_s", 15, least=1)),
        )
        self._path = "/" + address.path
        self._key = _secret(address)
        self._name = address.option("event") or address.name or "row"
        self._file = Path(address.option("state") or f"{address.name or 'webhook'}.webhook.db")
        self._attempts = address.number("attempts", 8, least=1)
        self._pause_most_s = float(address.number("pause_max_s", 60, least=1))
        self._concurrency = address.number("concurrency", 8, least=1)
        self._clock = clock
        self._local = threading.local()
        self._made: list[Connection] = []
        self._lock = threading.Lock()
        self._token: str | None = None
        self._schema: Schema | None = None
        self.target = address.shown

    # ---- writing

    def open(self, schema: Schema) -> Position:
        with self._database() as database:
            row = database.execute("SELECT position, schema FROM about").fetchone()
            old = None if row is None else Schema.from_json(orjson.loads(row[1]))
            wanted = schema if old is None else old.evolved(schema, self.target)
            position, token = "{}" if row is None else row[0], secrets.token_hex(8)
            database.execute(
                "INSERT OR REPLACE INTO about VALUES (1, ?, ?, ?)",
                (token, position, orjson.dumps(wanted.as_json()).decode()),
            )
        self._token, self._schema = token, wanted
        return Position.from_json(position)

    def apply(self, changes: Changes, aside: Aside) -> Applied:
        assert self._schema is not None, "open it first"
        with self._database() as database:
            stored = self._held(database)
            if not follows(changes, stored, self.target):
                return Applied(0)
            sent = [_Sent(*row) for row in database.execute("SELECT * FROM sent")]
        due = _due(_messages(changes, self._schema, self._name), sent)
        refused = self._deliver(due, {each.id for each in sent})
        if refused:
            refusing(refused, self.target, self.max_refused)
            aside(refused)
        position = stored.merged(changes.position)
        with self._database() as database:
            self._held(database)
            database.execute("UPDATE about SET position = ?", (position.text(),))
            database.executemany(
                "DELETE FROM sent WHERE topic = ? AND partition = ? AND offset < ?",
                [(*place, offset) for place, offset in position.offsets.items()],
            )
        return Applied(changes.rows - len(refused), tuple(refused))

    def _held(self, database: sqlite3.Connection) -> Position:
        """The position, if we still are the writer."""
        row = database.execute("SELECT token, position FROM about").fetchone()
        if row is None or row[0] != self._token:
            raise FencedError(f"{self.target} has another writer")
        return Position.from_json(row[1])

    def _deliver(self, messages: list[_Message], known: set[str]) -> list[Refused]:
        """Send all, several at once; those that the receiver does not take. `known` are ids that
        may have been sent before.

        After a failure that is not a row's fault nothing new is begun; what was delivered is
        remembered.
        """
        failures: list[SinkError] = []
        begun: list[str] = []
        delivered: list[str] = []
        refused: dict[str, Refused] = {}

        def one(message: _Message) -> None:
            if failures:
                return
            begun.append(message.id)
            try:
                reason = self._send(message, failures)
            except SinkError as failure:
                failures.append(failure)
                return
            if reason is None:
                delivered.append(message.id)
            else:
                refused[message.id] = message.refuse(reason)

        self._plan(messages)
        try:
            with ThreadPoolExecutor(self._concurrency, "penstock-webhook") as pool:
                for _ in pool.map(one, messages):
                    pass
        finally:
            if len(delivered) < len(messages):
                never = {each.id for each in messages} - known - set(begun)
                self._remember(delivered, never)
        if failures:
            raise failures[0]
        return [refused[each.id] for each in messages if each.id in refused]

    def _plan(self, messages: list[_Message]) -> None:
        """Write down what is about to be sent."""
        with self._database() as database:
            self._held(database)
            database.executemany(
                "INSERT OR IGNORE INTO sent VALUES (?, ?, ?, ?, ?, ?, ?)",
                [astuple(each.about) for each in messages],
            )

    def _remember(self, delivered: Iterable[str], never: Iterable[str]) -> None:
        """What of the plan has arrived, and what was never begun; of the rest nobody knows."""
        with self._database() as database:
            self._held(database)
            database.executemany(
                "UPDATE sent SET delivered = 1 WHERE id = ?", [(each,) for each in delivered]
            )
            database.executemany("DELETE FROM sent WHERE id = ?", [(each,) for each in never])

    def _send(self, message: _Message, failures: list[SinkError]) -> str | None:
        """None if the receiver has it, else why it does not take it."""
        backoff = Backoff(_PAUSE_S, self._pause_most_s)
        told = ""
        for attempt in range(self._attempts):
            unreachable: SinkError | None = None
            after_s = None
            try:
                answer = self._connection().send(
                    "POST", self._path, message.body, self._headers(message)
                )
            except StoreUnreachableError as error:
                unreachable = error
            else:
                if 200 <= answer.status < 300:
                    return None
                said = answer.body[:_REASON_CHARS].decode(errors="replace")
                told = f"{answer.status} {said}".strip()
                if answer.status == _GONE:
                    raise StoreError(
                        f"{self.target} wants no more webhooks (410)",
                        advice="The receiver has unsubscribed: remove the sink, or its URL.",
                    )
                if answer.status in BUSY:
                    unreachable = StoreUnreachableError(f"{self.target} answers {told}")
                after_s = answer.retry_after_s
            if attempt == self._attempts - 1 or failures:
                if unreachable is not None:
                    raise unreachable
                break
            backoff.wait(after_s)
        return f"after {self._attempts} tries: {told}"

    def _headers(self, message: _Message) -> dict[str, str]:
        moment = str(int(self._clock()))
        headers = {
            "Content-Type": "application/json",
            "User-Agent": "penstock",
            "webhook-id": message.id,
            "webhook-timestamp": moment,
        }
        if self._key:
            signed = b".".join((message.id.encode(), moment.encode(), message.body))
            digest = hmac.new(self._key, signed, hashlib.sha256).digest()
            headers["webhook-signature"] = "v1," + base64.b64encode(digest).decode("ascii")
        return headers

    def _connection(self) -> Connection:
        found: Connection | None = getattr(self._local, "connection", None)
        if found is None:
            found = self._local.connection = Connection(self._server)
            with self._lock:
                self._made.append(found)
        return found

    # ---- reading

    def position(self) -> Position | None:
        if not self._file.exists():
            return None
        with self._database() as database:
            row = database.execute("SELECT position FROM about").fetchone()
        return None if row is None else Position.from_json(row[0])

    def stored_schema(self) -> Schema | None:
        if not self._file.exists():
            return None
        with self._database() as database:
            row = database.execute("SELECT schema FROM about").fetchone()
        return None if row is None else Schema.from_json(orjson.loads(row[0]))

    def scan(
        self, low: Key | None = None, high: Key | None = None, *, batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        raise NotReadableError(f"{self.target}: what was sent cannot be read back")

    def beside(self, *, fresh: bool = False) -> NoReturn:
        raise NotForWebhooksError(f"{self.target}: a webhook cannot be built beside another")

    def switch(self) -> NoReturn:
        raise NotForWebhooksError(f"{self.target}: a webhook cannot be built beside another")

    def relocate(self, position: Position) -> bool:
        with self._database() as database:
            self._held(database)
            database.execute("UPDATE about SET position = ?", (position.text(),))
            # Where they stood is another offset now: what may have been sent is sent again.
            database.execute("DELETE FROM sent")
        return True

    def remove(self) -> None:
        for suffix in ("", "-wal", "-shm"):
            self._file.with_name(self._file.name + suffix).unlink(missing_ok=True)
        self._token = None

    def close(self) -> None:
        for connection in self._made:
            connection.close()
        self._made.clear()
        self._local = threading.local()

    @contextmanager
    def _database(self) -> Iterator[sqlite3.Connection]:
        """A transaction on the state."""
        database = None
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            database = sqlite3.connect(self._file, timeout=30.0, isolation_level=None)
            database.executescript(_TABLES)
            database.execute("BEGIN IMMEDIATE")
            yield database
            database.execute("COMMIT")
        except sqlite3.OperationalError as error:
            raise StoreUnreachableError(
                f"{self.target}: its state {self._file}: {error}",
                advice="Look at the path, its permissions and the disk's free space.",
            ) from error
        except (sqlite3.DatabaseError, OSError) as error:
            raise StoreError(f"{self.target}: its state {self._file}: {error}") from error
        finally:
            if database is not None:
                # What is not committed is undone.
                database.close()


def make(address: Address) -> WebhookSink:
    """The sink for a URL."""
    address.only(
        "secret", "state", "event", "attempts", "pause_max_s", "concurrency", "timeout_s", "ca_file"
    )
    if not address.host:
        raise ConfigError(f"{address.shown} names no host")
    return WebhookSink(address)


def _secret(address: Address) -> bytes:
    """The key for signatures; none if there is no secret."""
    text = address.option("secret")
    if not text:
        return b""
    wrong = ConfigError(
        f"{address.shown}: the secret is not one of Standard Webhooks",
        advice="It is whsec_ and then 24 to 64 random bytes in base64.",
    )
    try:
        key = base64.b64decode(text.removeprefix(_SECRET_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise wrong from None
    if not SECRET_BYTES[0] <= len(key) <= SECRET_BYTES[1]:
        raise wrong
    return key


def _messages(changes: Changes, schema: Schema, name: str) -> list[_Message]:
    made: list[_Message] = []
    for table, origin, verb, refused in (
        (changes.upserts, changes.upserted_at, "upserted", coding.refused_upsert),
        (changes.deletes, changes.deleted_at, "deleted", coding.refused_delete),
    ):
        times = origin.select(["timestamp"])
        moments = coding.columns_of(times)[0] if times.num_rows else []
        places = zip(
            coding.readable_keys(table, schema),
            origin.column("topic").to_pylist(),
            origin.column("partition").to_pylist(),
            origin.column("offset").to_pylist(),
            pc.fill_null(origin.column("timestamp").cast(pa.int64()), -1).to_pylist(),
            strict=True,
        )
        for at, (row, place, moment) in enumerate(
            zip(coding.rows_of(table), places, moments, strict=True)
        ):
            body = {"type": f"{name}.{verb}", "timestamp": moment, "data": row}

            def refuse(reason: str, at: int = at, make: Any = refused) -> Refused:
                found: Refused = make(changes, schema, at, reason)
                return found

            key, topic, partition, offset, time_us = place
            identity = f"{topic}-{partition}-{offset}"
            about = _Sent(identity, key, topic, partition, offset, time_us)
            made.append(_Message(identity, orjson.dumps(body), refuse, about))
    # In the order of the log, as far as there is one.
    made.sort(key=lambda each: (each.about.topic, each.about.partition, each.about.offset))
    # Several changes may stand at one place, as the rows of a flow's batch do: what else they say
    # tells them apart, and is the same when the batch is sent again.
    alone = Counter(each.id for each in made)
    return [each if alone[each.id] == 1 else each.with_own_id() for each in made]


def _due(messages: list[_Message], sent: Iterable[_Sent]) -> list[_Message]:
    """Without what was delivered, and what is older than what may have been."""
    by_key: dict[str, list[_Sent]] = {}
    for each in sent:
        by_key.setdefault(each.key, []).append(each)
    return [
        message
        for message in messages
        if not any(
            each.is_later_than(message.about) or (each.delivered and each.id == message.id)
            for each in by_key.get(message.about.key, ())
        )
    ]
