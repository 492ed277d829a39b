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
writer killed in between leaves rows that the next one writes again. With `ttl_s` a row is gone so
long after its last change, and `scan` no longer gives it.

A Redis Cluster is used like a single server only if all keys are in one slot: put the prefix in
braces (`prefix={orders}`).
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    StoreError,
    StoreUnreachableError,
)
from penstock.sinks.schema import Schema
from penstock.sinks.stores import Address

CHUNK_BYTES: Final = 8 << 20
KEY_BYTES_MAX: Final = 64 << 10
_TIMEOUT_S: Final = 30.0
_OPEN_ATTEMPTS: Final = 10
_RETRIES: Final = 3
_RETRY_S: Final = 0.02
_RETRY_MAX_S: Final = 0.5
_SCAN_COUNT: Final = 2000
_FENCED: Final = 0

# KEYS: the table. ARGV: the token, the position or "", seconds to live or "0", how many rows,
# their keys and values, and then keys to delete.
_APPLY_JSON: Final = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
local last = 4 + 2 * tonumber(ARGV[4])
if ARGV[3] == '0' then
  for at = 5, last, 2 do redis.call('SET', ARGV[at], ARGV[at + 1]) end
else
  for at = 5, last, 2 do redis.call('SET', ARGV[at], ARGV[at + 1], 'EX', ARGV[3]) end
end
for at = last + 1, #ARGV do redis.call('DEL', ARGV[at]) end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'position', ARGV[2]) end
return 1
"""
# A row is here a list of fields and values, packed.
_APPLY_HASH: Final = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
local last = 4 + 2 * tonumber(ARGV[4])
for at = 5, last, 2 do
  redis.call('DEL', ARGV[at])
  redis.call('HSET', ARGV[at], unpack(cjson.decode(ARGV[at + 1])))
  if ARGV[3] ~= '0' then redis.call('EXPIRE', ARGV[at], ARGV[3]) end
end
for at = last + 1, #ARGV do redis.call('DEL', ARGV[at]) end
if ARGV[2] ~= '' then redis.call('HSET', KEYS[1], 'position', ARGV[2]) end
return 1
"""
# ARGV: the schema that was read or "", then token, rows, schema and form of what is to be.
_OPEN: Final = """
local found = redis.call('HGET', KEYS[1], 'schema') or ''
if found ~= ARGV[1] then return 0 end
if found == '' then
  redis.call('HSET', KEYS[1], 'rows', ARGV[3], 'as', ARGV[5], 'position', '{}')
end
redis.call('HSET', KEYS[1], 'token', ARGV[2], 'schema', ARGV[4])
return 1
"""
# KEYS: the table that goes, the set of what is to be swept. 0 if there is none.
_REMOVE: Final = """
local rows = redis.call('HGET', KEYS[1], 'rows')
if not rows then return 0 end
redis.call('SADD', KEYS[2], rows)
redis.call('DEL', KEYS[1])
return 1
"""
# KEYS: the table beside, the live one, the set of what is to be swept. ARGV: the writer's token,
# and one that nobody has: whoever wrote to either is fenced.
_SWITCH: Final = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[1] then return 0 end
local old = redis.call('HGET', KEYS[2], 'rows')
if old then redis.call('SADD', KEYS[3], old) end
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
        self._ttl_s = address.number("ttl_s", 0)
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
            puts, gone, refused = self._encoded(changes, self._schema)
            if refused:
                refusing(refused, self.target)
                aside(refused)
            position = stored.merged(changes.position).text()
            script = _APPLY_HASH if self._form == "hash" else _APPLY_JSON
            chunks = self._chunks(puts, gone)
            for at, (some, keys) in enumerate(chunks):
                reached = position if at == len(chunks) - 1 else ""
                count = str(len(some) // 2)
                arguments = [self._token, reached, str(self._ttl_s), count, *some, *keys]
                if self._run(script, [self._meta], *arguments) == _FENCED:
                    raise self._fenced()
            return Applied(len(puts) // 2 + len(gone), tuple(refused))

    def _encoded(
        self, changes: Changes, schema: Schema
    ) -> tuple[list[bytes], list[bytes], list[Refused]]:
        """Keys and values in turn, keys to delete, and what has too long a key."""
        prefix = self._rows
        keys = [(prefix + key).encode() for key in coding.readable_keys(changes.upserts, schema)]
        gone = [(prefix + key).encode() for key in coding.readable_keys(changes.deletes, schema)]
        encode = _hash_rows if self._form == "hash" else coding.encoded_rows
        values = encode(changes.upserts)
        refused: list[Refused] = []
        if any(len(key) > KEY_BYTES_MAX for key in (*keys, *gone)):
            reason = f"the key is longer than {KEY_BYTES_MAX} bytes"
            long = [at for at, key in enumerate(keys) if len(key) > KEY_BYTES_MAX]
            refused = [coding.refused_upsert(changes, schema, at, reason) for at in long]
            fits = [at for at, key in enumerate(keys) if len(key) <= KEY_BYTES_MAX]
            keys, values = [keys[at] for at in fits], [values[at] for at in fits]
            # A row with such a key was never taken, so there is nothing to delete.
            gone = [key for key in gone if len(key) <= KEY_BYTES_MAX]
        puts: list[bytes] = [b""] * (2 * len(keys))
        puts[::2], puts[1::2] = keys, values
        return puts, gone, refused

    def _chunks(
        self, puts: list[bytes], gone: list[bytes]
    ) -> list[tuple[list[bytes], list[bytes]]]:
        """What goes into one script each: at least one, the position goes with the last."""
        found: list[tuple[list[bytes], list[bytes]]] = []
        begin = size = 0
        for at in range(0, len(puts), 2):
            size += len(puts[at]) + len(puts[at + 1])
            if (at - begin) // 2 + 1 >= self._chunk_rows or size >= CHUNK_BYTES:
                found.append((puts[begin : at + 2], []))
                begin, size = at + 2, 0
        rest = puts[begin:]
        free = self._chunk_rows - len(rest) // 2
        if rest or gone[:free] or not found:
            found.append((rest, gone[:free]))
        more = range(free, len(gone), self._chunk_rows)
        found.extend(([], gone[at : at + self._chunk_rows]) for at in more)
        return found

    def _fenced(self) -> FencedError:
        return FencedError(f"{self.target} has another writer, or was built anew")

    # ---- reading

    def position(self) -> Position | None:
        with self._talking():
            found = self._client.hget(self._meta, "position")
        return None if found is None else Position.from_json(_text(found))

    def stored_schema(self) -> Schema | None:
        with self._talking():
            found = self._client.hget(self._meta, "schema")
        return None if found is None else Schema.from_json(orjson.loads(_text(found)))

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
            keys: dict[Key, bytes] = {}
            for name in self._client.scan_iter(
                match=_literal(prefix) + b"*", count=_SCAN_COUNT, _type=None
            ):
                key = coding.key_from_readable(name[len(prefix) :].decode(), schema)
                if (low is None or key >= low) and (high is None or key < high):
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
            if self._run(_SWITCH, keys, self._token, secrets.token_hex(8)) == _FENCED:
                raise self._fenced()
            self._token = None
            self._sweep()

    def remove(self) -> None:
        with self._talking():
            self._run(_REMOVE, [self._meta, self._garbage])
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
        found = self._client.hgetall(self._meta)
        return {_text(name): _text(value) for name, value in found.items()}

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
        except (redis.ConnectionError, redis.TimeoutError, redis.BusyLoadingError) as error:
            raise StoreUnreachableError(f"{self.target}: {error}") from error
        except redis.OutOfMemoryError as error:
            raise StoreUnreachableError(
                f"{self.target}: {error}", advice="Raise maxmemory of Redis, or set ttl_s."
            ) from error
        except redis.RedisError as error:
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
        socket_connect_timeout=timeout_s,
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
    if types.is_date32(kind) or types.is_timestamp(kind):
        return int(text) if text.lstrip("-").isdigit() else text
    return text


def _literal(prefix: bytes | str) -> bytes:
    """A pattern that only this matches."""
    plain = prefix.encode() if isinstance(prefix, str) else prefix
    return re.sub(rb"([*?\[\]\\^-])", rb"\\\1", plain)


def _text(found: Any) -> str:
    return found.decode() if isinstance(found, bytes) else str(found)
