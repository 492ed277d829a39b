"""Redis: one key for each row, kept in step by a script that fences older writers.

    redis://:password@host:6379/0?prefix=orders&ttl_s=3600
    rediss://...                                            over TLS

The hash `orders` (the prefix) is about the table: `rows` is what the keys of the rows begin with,
`position` how far the log was read. A row is under `rows` + its key: one column of the key as it
is, several with ":" between.

    rows = r.hget("orders", "rows")          # "orders:5f0c1a22:"
    r.get(rows + "42")                       # {"id":42,"country":"DE",...}

`as=hash` keeps a row as a hash, a field for each column that is not null, instead of as JSON. The
part in the middle of a row's key changes when the table is built anew: read it again now and then,
or read with `RedisSink.get`, which does both in one go.

Rows and position change together, in one script, up to `chunk_rows` rows (5000) at a time: while a
script runs, Redis does nothing else. Of larger batches the position comes with the last chunk; a
writer killed in between leaves rows that the next one writes again.

With `ttl_s` a row is gone so long after the time that its last record has in the log, by the clock
of Redis, whenever it was written: a table built anew has no rows that were gone before. A record
without a time never lapses. Rows that are there already keep their end if `ttl_s` is changed.

A Redis Cluster is used like a single server only if all keys are in one slot: put the prefix in
braces (`prefix={orders}`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import orjson
import pyarrow as pa
import redis
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

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
    SchemaChangedError,
    StoreAwayError,
    StoreError,
    StoreUnreachableError,
)
from penstock.sinks.schema import Schema
from penstock.sinks.stores import Address

CHUNK_BYTES: Final = 8 << 20
KEY_BYTES_MAX: Final = 64 << 10
_TIMEOUT_S: Final = 30.0
_CONNECT_S: Final = 10.0
_OPEN_ATTEMPTS: Final = 10
_RETRIES: Final = 3
_RETRY_S: Final = 0.02
_RETRY_MAX_S: Final = 0.5
_SCAN_COUNT: Final = 2000
_FENCED: Final = 0
_FOREIGN: Final = -1
# The fields of the hash about a table.
_ABOUT: Final = (b"schema", b"rows", b"as", b"position", b"token")

# KEYS: the table. ARGV: the token, the position or "", how many rows, "1" if they lapse, their keys
# and values; if they lapse, the time of each in ms, or ""; and then keys to delete.
_BEGIN: Final = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
local rows = tonumber(ARGV[3])
local last = 4 + 2 * rows
"""
# A time that has passed takes the row out.
_END: Final = """
if ARGV[4] == '1' then
  for row = 1, rows do
    local till = ARGV[last + row]
    if till ~= '' then redis.call('PEXPIREAT', ARGV[3 + 2 * row], till) end
  end
  last = last + rows
end
for at = last + 1, #ARGV do redis.call('DEL', ARGV[at]) end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'position', ARGV[2]) end
return 1
"""
_APPLY_JSON: Final = f"""{_BEGIN}
for at = 5, last, 2 do redis.call('SET', ARGV[at], ARGV[at + 1]) end
{_END}"""
# A row is here a list of fields and values, packed.
_APPLY_HASH: Final = f"""{_BEGIN}
for at = 5, last, 2 do
  redis.call('DEL', ARGV[at])
  redis.call('HSET', ARGV[at], unpack(cjson.decode(ARGV[at + 1])))
end
{_END}"""
# ARGV: the schema that was read or "", then token, rows, schema and form of what is to be.
_OPEN: Final = """
local found = redis.call('HGET', KEYS[1], 'schema') or ''
if found ~= ARGV[1] then return 0 end
if found == '' then
  if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
  redis.call('HSET', KEYS[1], 'rows', ARGV[3], 'as', ARGV[5], 'position', '{}')
end
redis.call('HSET', KEYS[1], 'token', ARGV[2], 'schema', ARGV[4])
return 1
"""
# KEYS: the table that goes, the set of what is to be swept. -1 if it is not ours.
_REMOVE: Final = """
if redis.call('EXISTS', KEYS[1]) == 0 then return 1 end
local rows = redis.call('HGET', KEYS[1], 'rows')
if not rows or redis.call('HEXISTS', KEYS[1], 'schema') == 0 then return -1 end
redis.call('SADD', KEYS[2], rows)
redis.call('DEL', KEYS[1])
return 1
"""
# KEYS: the table beside, the live one, the set of what is to be swept. ARGV: the writer's token,
# and one that nobody has: whoever wrote to either is fenced. -1 if the live one is not ours.
_SWITCH: Final = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
if redis.call('EXISTS', KEYS[2]) == 1 then
  if redis.call('TYPE', KEYS[2]).ok ~= 'hash' then return -1 end
  local old = redis.call('HGET', KEYS[2], 'rows')
  if not old or redis.call('HEXISTS', KEYS[2], 'schema') == 0 then return -1 end
  redis.call('SADD', KEYS[3], old)
end
redis.call('RENAME', KEYS[1], KEYS[2])
redis.call('HSET', KEYS[2], 'token', ARGV[2])
return 1
"""
_GET_JSON: Final = """
local rows = redis.call('HGET', KEYS[1], 'rows')
return rows and redis.call('GET', rows .. ARGV[1])
"""
_GET_HASH: Final = """
local rows = redis.call('HGET', KEYS[1], 'rows')
return rows and redis.call('HGETALL', rows .. ARGV[1])
"""

Form = Literal["json", "hash"]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Changes as a script takes them."""

    # Keys and values in turn.
    puts: list[bytes]
    # When each of these rows lapses; empty if none does.
    ends: list[bytes]
    # Keys to delete.
    gone: list[bytes]

    @property
    def rows(self) -> int:
        return len(self.puts) // 2

    def part(self, begin: int, end: int, gone: Sequence[bytes] = ()) -> _Batch:
        return _Batch(self.puts[2 * begin : 2 * end], self.ends[begin:end], list(gone))

    def given(self) -> list[bytes | str]:
        return [str(self.rows), "1" if self.ends else "", *self.puts, *self.ends, *self.gone]


class RedisSink(Sink):
    """A table in Redis; see the module."""

    def __init__(self, address: Address, slot: str = "") -> None:
        address.only("prefix", "as", "ttl_s", "chunk_rows", "timeout_s")
        form = address.option("as", "json")
        if form not in {"json", "hash"}:
            raise ConfigError(f"{address.shown}: as must be json or hash, not {form!r}")
        self._form: Form = "hash" if form == "hash" else "json"
        self._address = address
        self._prefix = address.option("prefix") or address.name or "penstock"
        self._slot = slot
        self._meta = self._prefix + slot
        self._garbage = f"{self._prefix}+garbage"
        self.lifetime_s = address.number("ttl_s", 0)
        self._chunk_rows = address.number("chunk_rows", 5000, least=1)
        self._client = _client(address)
        self._token: str | None = None
        self._schema: Schema | None = None
        self._rows = ""
        self.target = f"{address.shown} {self._meta}"

    # ---- writing

    def open(self, schema: Schema) -> Position:
        with self._talking():
            for _ in range(_OPEN_ATTEMPTS):
                found = self._about()
                old = Schema.from_json(orjson.loads(found["schema"])) if found else None
                if found and found["as"] != self._form:
                    raise SchemaChangedError(
                        f"{self.target} keeps rows as {found['as']}, wanted is {self._form}"
                    )
                wanted = schema if old is None else old.evolved(schema, self.target)
                token, rows = secrets.token_hex(8), f"{self._meta}:{secrets.token_hex(4)}:"
                text = orjson.dumps(wanted.as_json()).decode()
                done = self._run(
                    _OPEN, [self._meta], found.get("schema", ""), token, rows, text, self._form
                )
                if done:
                    break
            else:
                raise StoreUnreachableError(f"{self.target}: others keep changing its schema")
            now = self._about()
            self._token, self._schema, self._rows = token, wanted, now.get("rows", rows)
            self._sweep()
            return Position.from_json(now.get("position", "{}"))

    def apply(self, changes: Changes, aside: Aside) -> Applied:
        assert self._schema is not None, "open it first"
        with self._talking():
            found = self._about()
            if self._token is None or found.get("token") != self._token:
                raise self._fenced()
            stored = Position.from_json(found["position"])
            if not follows(changes, stored, self.target):
                return Applied(0)
            batch, refused = self._encoded(changes, self._schema)
            if refused:
                refusing(refused, self.target, self.max_refused)
                aside(refused)
            position = stored.merged(changes.position).text()
            script = _APPLY_HASH if self._form == "hash" else _APPLY_JSON
            chunks = self._chunks(batch)
            for at, each in enumerate(chunks):
                reached = position if at == len(chunks) - 1 else ""
                if self._run(script, [self._meta], self._token, reached, *each.given()) == _FENCED:
                    raise self._fenced()
            return Applied(batch.rows + len(batch.gone), tuple(refused))

    def _encoded(self, changes: Changes, schema: Schema) -> tuple[_Batch, list[Refused]]:
        """What goes into scripts, and what has too long a key."""
        prefix = self._rows
        keys = [(prefix + key).encode() for key in coding.readable_keys(changes.upserts, schema)]
        gone = [(prefix + key).encode() for key in coding.readable_keys(changes.deletes, schema)]
        encode = _hash_rows if self._form == "hash" else coding.encoded_rows
        values = encode(changes.upserts)
        ends = self._ends(changes.upserted_at) if self.lifetime_s else []
        refused: list[Refused] = []
        if any(len(key) > KEY_BYTES_MAX for key in (*keys, *gone)):
            reason = f"the key is longer than {KEY_BYTES_MAX} bytes"
            long = [at for at, key in enumerate(keys) if len(key) > KEY_BYTES_MAX]
            refused = [coding.refused_upsert(changes, schema, at, reason) for at in long]
            fits = [at for at, key in enumerate(keys) if len(key) <= KEY_BYTES_MAX]
            keys, values = [keys[at] for at in fits], [values[at] for at in fits]
            ends = [ends[at] for at in fits] if ends else []
            # A row with such a key was never taken, so there is nothing to delete.
            gone = [key for key in gone if len(key) <= KEY_BYTES_MAX]
        puts: list[bytes] = [b""] * (2 * len(keys))
        puts[::2], puts[1::2] = keys, values
        return _Batch(puts, ends, gone), refused

    def _ends(self, origin: pa.Table) -> list[bytes]:
        """When each row lapses, in ms since 1970; nothing if its record has no time."""
        times_us = origin.column("timestamp").cast(pa.int64()).to_pylist()
        return [
            b"" if time_us is None or time_us < 0
            else b"%d" % (time_us // 1000 + self.lifetime_s * 1000)
            for time_us in times_us
        ]  # fmt: skip

    def _chunks(self, batch: _Batch) -> list[_Batch]:
        """What goes into one script each: at least one, the position goes with the last."""
        found: list[_Batch] = []
        begin = size = 0
        for at in range(batch.rows):
            size += len(batch.puts[2 * at]) + len(batch.puts[2 * at + 1])
            if at - begin + 1 >= self._chunk_rows or size >= CHUNK_BYTES:
                found.append(batch.part(begin, at + 1))
                begin, size = at + 1, 0
        free = self._chunk_rows - (batch.rows - begin)
        rest = batch.part(begin, batch.rows, batch.gone[:free])
        if rest.rows or rest.gone or not found:
            found.append(rest)
        more = range(free, len(batch.gone), self._chunk_rows)
        found.extend(_Batch([], [], batch.gone[at : at + self._chunk_rows]) for at in more)
        return found

    def _fenced(self) -> FencedError:
        return FencedError(f"{self.target} has another writer, or was built anew")

    # ---- reading

    def position(self) -> Position | None:
        with self._talking():
            found = self._about()
        return Position.from_json(found["position"]) if found else None

    def stored_schema(self) -> Schema | None:
        with self._talking():
            found = self._about()
        return Schema.from_json(orjson.loads(found["schema"])) if found else None

    def now_s(self) -> float:
        with self._talking():
            seconds, us = self._client.time()
        return float(seconds + us / 1e6)

    def get(self, *key: Any) -> dict[str, Any] | None:
        """The row with this key, columns as Python has them; None if there is none."""
        schema = self._schema or self.stored_schema()
        if schema is None:
            return None
        script = _GET_HASH if self._form == "hash" else _GET_JSON
        with self._talking():
            found = self._run(script, [self._meta], coding.readable_key(key, schema))
        if not found:
            return None
        if self._form == "hash":
            found = dict(zip(found[::2], found[1::2], strict=True))
        row: dict[str, Any] = coding.table_from([self._decoded(found, schema)], schema).to_pylist()[
            0
        ]
        return row

    def scan(
        self, low: Key | None = None, high: Key | None = None, *, batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        with self._talking():
            found = self._about()
            if not found:
                return
            schema = Schema.from_json(orjson.loads(found["schema"]))
            prefix, form = found["rows"].encode(), found["as"]
            first, last = (
                None if limit is None else coding.comparable_key(limit, schema)
                for limit in (low, high)
            )
            keys: dict[Key, bytes] = {}
            for name in self._client.scan_iter(
                match=_literal(prefix) + b"*", count=_SCAN_COUNT, _type=None
            ):
                key = coding.comparable_from_readable(name[len(prefix) :].decode(), schema)
                if (first is None or key >= first) and (last is None or key < last):
                    keys[key] = name
            names = [keys[key] for key in sorted(keys)]
            for at in range(0, len(names), batch_rows):
                some = names[at : at + batch_rows]
                values = self._hashes(some) if form == "hash" else self._client.mget(some)
                decoded = [self._decoded(value, schema) for value in values if value]
                if decoded:
                    yield from coding.table_from(decoded, schema).to_batches()

    def _hashes(self, names: list[bytes]) -> list[Any]:
        with self._client.pipeline(transaction=False) as asked:
            for name in names:
                asked.hgetall(name)
            return list(asked.execute())

    def _decoded(self, value: Any, schema: Schema) -> dict[str, Any]:
        if not isinstance(value, dict):
            found: dict[str, Any] = orjson.loads(value)
            return found
        texts = {name.decode(): text.decode() for name, text in value.items()}
        return {
            field.name: _from_text(texts[field.name], field.type)
            for field in schema.fields
            if field.name in texts
        }

    # ---- building anew

    def beside(self, *, fresh: bool = False) -> RedisSink:
        made = RedisSink(self._address, "+beside")
        if fresh:
            made.remove()
        return made

    def switch(self) -> None:
        assert self._slot, "only what `beside` gave"
        assert self._token is not None, "open it first"
        with self._talking():
            keys = [self._meta, self._prefix, self._garbage]
            done = self._run(_SWITCH, keys, self._token, secrets.token_hex(8))
            if done == _FENCED:
                raise self._fenced()
            if done == _FOREIGN:
                raise self._foreign(self._prefix)
            self._token = None
            self._sweep()

    def remove(self) -> None:
        with self._talking():
            if self._run(_REMOVE, [self._meta, self._garbage]) == _FOREIGN:
                raise self._foreign(self._meta)
            self._token = None
            self._sweep()

    def _sweep(self) -> None:
        """Delete the rows of tables that are gone, which a kill may have left."""
        for prefix in self._client.smembers(self._garbage):
            some: list[bytes] = []
            for name in self._client.scan_iter(match=_literal(prefix) + b"*", count=_SCAN_COUNT):
                some.append(name)
                if len(some) >= _SCAN_COUNT:
                    self._client.unlink(*some)
                    some = []
            if some:
                self._client.unlink(*some)
            self._client.srem(self._garbage, prefix)

    def close(self) -> None:
        self._client.close()

    # ---- talking to it

    def _about(self) -> dict[str, str]:
        """What the hash about the table says; nothing if there is none."""
        found: dict[Any, Any] = self._client.hgetall(self._meta)
        if found and not all(name in found for name in _ABOUT):
            raise self._foreign(self._meta)
        return {name.decode(): found[name].decode() for name in _ABOUT if found}

    def _foreign(self, key: str) -> StoreError:
        return StoreError(
            f"{self._address.shown}: the key {key} is there, and Penstock has not made it",
            advice="Name another prefix, or rename the key.",
        )

    def _run(self, script: str, keys: list[str], *arguments: Any) -> Any:
        run: Callable[..., Any] = self._client.register_script(script)
        return run(keys=keys, args=arguments)

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except redis.AuthenticationError as error:
            raise StoreError(
                f"{self.target}: {error}", advice="Check user and password in the URL."
            ) from error
        except redis.BusyLoadingError as error:
            raise StoreUnreachableError(f"{self.target}: {error}") from error
        except (redis.ConnectionError, redis.TimeoutError) as error:
            raise StoreAwayError(f"{self.target}: {error}") from error
        except redis.OutOfMemoryError as error:
            raise StoreUnreachableError(
                f"{self.target}: {error}", advice="Raise maxmemory of Redis, or set ttl_s."
            ) from error
        except redis.RedisError as error:
            if "WRONGTYPE" in str(error):
                raise self._foreign(self._meta) from error
            raise StoreError(f"{self.target}: {error}") from error


def make(address: Address) -> RedisSink:
    """The sink for a URL."""
    return RedisSink(address)


def _client(address: Address) -> redis.Redis:
    timeout_s = address.number("timeout_s", int(_TIMEOUT_S), least=1)
    database = address.path or "0"
    if not database.isdigit():
        raise ConfigError(f"{address.shown}: a database of Redis is a number, not {database!r}")
    return redis.Redis(
        host=address.host or "127.0.0.1",
        port=address.port or 6379,
        db=int(database),
        username=address.user or None,
        password=address.password or None,
        ssl=address.scheme == "rediss",
        socket_timeout=timeout_s,
        socket_connect_timeout=min(timeout_s, _CONNECT_S),
        # Soon again, for a connection that was closed meanwhile; who feeds the sink tries later.
        retry=Retry(ExponentialBackoff(cap=_RETRY_MAX_S, base=_RETRY_S), _RETRIES),
    )


def _hash_rows(table: pa.Table) -> list[bytes]:
    """Rows as lists of fields and values in turn, without those that are null."""
    return [
        orjson.dumps(
            [
                text
                for name, value in row.items()
                if value is not None
                for text in _pair(name, value)
            ]
        )
        for row in coding.rows_of(table)
    ]


def _pair(name: str, value: Any) -> tuple[str, str]:
    return name, value if isinstance(value, str) else orjson.dumps(value).decode()


def _from_text(text: str, kind: pa.DataType) -> Any:
    """The value of a hash's field as JSON would have it."""
    types = pa.types
    if types.is_integer(kind):
        return int(text)
    if types.is_boolean(kind):
        return text == "true"
    if types.is_floating(kind):
        return text if text in {"NaN", "Infinity", "-Infinity"} else float(text)
    if types.is_temporal(kind):
        return int(text) if text.lstrip("-").isdigit() else text
    return text


def _literal(prefix: bytes | str) -> bytes:
    """A pattern that only this matches."""
    plain = prefix.encode() if isinstance(prefix, str) else prefix
    return re.sub(rb"([*?\[\]\\^-])", rb"\\\1", plain)
