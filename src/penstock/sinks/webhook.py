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
that remembers ids has each change once. Changes of one key are in order, since a batch has one
change of a key, and the next batch waits for the whole of this one; different keys go over
`concurrency` (8) connections at once, in no order. What was delivered, and the position, are in
the SQLite file `state`, which belongs to this one sink.

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
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, NoReturn

import orjson
import pyarrow as pa

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
CREATE TABLE IF NOT EXISTS delivered (id TEXT PRIMARY KEY) WITHOUT ROWID;
"""


class NotForWebhooksError(SinkError):
    """What was sent cannot be taken back or put in another place."""

    advice = "To send everything again, remove the sink's state: the log is read from the start."


@dataclass(frozen=True, slots=True)
class _Message:
    id: str
    body: bytes
    refuse: Callable[[str], Refused]

    def with_own_id(self) -> _Message:
        document = orjson.loads(self.body)
        told = orjson.dumps([document["type"], document["data"]])
        return replace(self, id=f"{self.id}-{hashlib.sha256(told).hexdigest()[:16]}")


class WebhookSink(Sink):
    """Requests for the changes of a table; see the module."""

    readable: ClassVar[bool] = False

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
            done = {row[0] for row in database.execute("SELECT id FROM delivered")}
        waiting = _messages(changes, self._schema, self._name)
        refused = self._deliver([each for each in waiting if each.id not in done])
        if refused:
            refusing(refused, self.target)
            aside(refused)
        with self._database() as database:
            self._held(database)
            position = stored.merged(changes.position).text()
            database.execute("UPDATE about SET position = ?", (position,))
            database.execute("DELETE FROM delivered")
        return Applied(changes.rows - len(refused), tuple(refused))

    def _held(self, database: sqlite3.Connection) -> Position:
        """The position, if we still are the writer."""
        row = database.execute("SELECT token, position FROM about").fetchone()
        if row is None or row[0] != self._token:
            raise FencedError(f"{self.target} has another writer")
        return Position.from_json(row[1])

    def _deliver(self, messages: list[_Message]) -> list[Refused]:
        """Send all, several at once; those that the receiver does not take.

        After a failure that is not a row's fault nothing new is begun; what was delivered is
        remembered.
        """
        failures: list[SinkError] = []
        delivered: list[str] = []
        refused: dict[str, Refused] = {}

        def one(message: _Message) -> None:
            if failures:
                return
            try:
                reason = self._send(message, failures)
            except SinkError as failure:
                failures.append(failure)
                return
            if reason is None:
                delivered.append(message.id)
            else:
                refused[message.id] = message.refuse(reason)

        try:
            with ThreadPoolExecutor(self._concurrency, "penstock-webhook") as pool:
                for _ in pool.map(one, messages):
                    pass
        finally:
            if len(delivered) < len(messages):
                self._remember(delivered)
        if failures:
            raise failures[0]
        return [refused[each.id] for each in messages if each.id in refused]

    def _remember(self, ids: list[str]) -> None:
        with self._database() as database:
            self._held(database)
            database.executemany(
                "INSERT OR IGNORE INTO delivered VALUES (?)", [(each,) for each in ids]
            )

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
    made: list[tuple[tuple[str, int, int], _Message]] = []
    for table, origin, verb, refused in (
        (changes.upserts, changes.upserted_at, "upserted", coding.refused_upsert),
        (changes.deletes, changes.deleted_at, "deleted", coding.refused_delete),
    ):
        times = origin.select(["timestamp"])
        moments = coding.columns_of(times)[0] if times.num_rows else []
        places = zip(
            origin.column("topic").to_pylist(),
            origin.column("partition").to_pylist(),
            origin.column("offset").to_pylist(),
            strict=True,
        )
        for at, (row, place, moment) in enumerate(
            zip(coding.rows_of(table), places, moments, strict=True)
        ):
            body = {"type": f"{name}.{verb}", "timestamp": moment, "data": row}

            def refuse(reason: str, at: int = at, make: Any = refused) -> Refused:
                found: Refused = make(changes, schema, at, reason)
                return found

            topic, partition, offset = place
            made.append(
                (place, _Message(f"{topic}-{partition}-{offset}", orjson.dumps(body), refuse))
            )
    # In the order of the log, as far as there is one.
    made.sort(key=lambda each: each[0])
    # Several changes may stand at one place, as the rows of a flow's batch do: what else they say
    # tells them apart, and is the same when the batch is sent again.
    alone = Counter(message.id for _, message in made)
    return [message if alone[message.id] == 1 else message.with_own_id() for _, message in made]
