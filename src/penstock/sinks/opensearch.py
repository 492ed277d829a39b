"""Elasticsearch and OpenSearch, over HTTP.

    opensearch+https://user:password@host:9200/products?keyword=status&ca_file=ca.pem

A row is a document, its fields the columns, `products` an alias of the index that counts. Text is
searched word by word, and as a whole under `title.keyword`; columns named in `keyword`, and those
of the key, only as a whole. Search it as you like: the alias hides what we add.

There are no transactions here. The rows of a batch go in requests of `bulk_rows` (5000) or
`bulk_bytes` (8 MiB), `concurrency` (2) at a time. Each document is written with the number of its
batch as version, deletes too, so that writing it again, or an old writer's late request, changes
nothing: a new writer counts on from a number that the old one never had. When all are written and
searchable, the document `_penstock` gets the position, on condition that nobody has changed it
since it was read: that is how an older writer is fenced. Deletes are remembered for `gc_deletes`
(1h); a request on its way for longer than that could bring a row back.

What a server refuses for what it contains (text of more than 32766 bytes as a key) is put aside;
when it is busy, the same is tried again, with pauses.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, as_completed, wait
from itertools import chain
from typing import Any, Final
from urllib.parse import quote

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
from penstock.sinks.errors import FencedError, StoreError, StoreUnreachableError
from penstock.sinks.http import BUSY, Answer, Backoff, Connections, Server
from penstock.sinks.schema import Schema, is_json
from penstock.sinks.stores import Address

STATE: Final = "_penstock"
SORT: Final = "penstock_key"
ID_BYTES_MAX: Final = 512
ATTEMPTS: Final = 8
ORPHAN_S: Final = 600.0
_TWO_INDEXES: Final = b"no write index is defined for alias"
_SCROLL: Final = "5m"
_KEYWORD_MAX: Final = 8000
_JSON: Final = {"Content-Type": "application/json"}
_NDJSON: Final = {"Content-Type": "application/x-ndjson"}
# Of the answer to a bulk request: the rest is as long as the request, and nobody reads it.
_TOLD: Final = "error,errors,items.*.status,items.*.error"
_ENCODED_ROWS: Final = 5000
_OPTIONS: Final = (
    "index", "keyword", "shards", "replicas", "gc_deletes", "ca_file", "verify", "timeout_s",
    "bulk_rows", "bulk_bytes", "concurrency",
)  # fmt: skip


class OpenSearchSink(Sink):
    """A table in an index; see the module."""

    def __init__(self, address: Address, slot: str = "") -> None:
        name = address.option("index") or address.path.strip("/") or address.name
        if not name or name != name.lower() or name[0] in "-_+" or set(name) & set(' "*\\<|,>/?#:'):
            raise ConfigError(
                f"{address.shown}: {name!r} is no name for an index",
                advice="In small letters, without spaces, not beginning with - or _.",
            )
        self._address = address
        self._name, self._slot = name, slot
        self._alias = name + slot
        self._keywords = frozenset(filter(None, address.option("keyword").split(",")))
        self._rows = address.number("bulk_rows", 5000, least=1)
        self._bytes = address.number("bulk_bytes", 8 << 20, least=1024)
        self._concurrency = address.number("concurrency", 2, least=1)
        self._connections = Connections(
            Server(
                address.host or "127.0.0.1",
                address.port or 9200,
                tls=address.scheme.endswith("https"),
                ca_file=address.option("ca_file"),
                verify=address.flag("verify", True),
                user=address.user,
                password=address.password,
                timeout_s=float(address.number("timeout_s", 60, least=1)),
            )
        )
        self._token: str | None = None
        self._version = 0
        self._orphan_s = ORPHAN_S
        self._schema: Schema | None = None
        self.target = f"{address.shown} {self._alias}"

    # ---- writing

    def open(self, schema: Schema) -> Position:
        if SORT in schema.names:
            raise ConfigError(f"{self.target}: no column may be called {SORT!r}")
        missing = self._keywords - set(schema.names)
        if missing:
            raise ConfigError(f"{self.target}: keyword names {min(missing)!r}, no column")
        for _ in range(ATTEMPTS):
            found = self._state()
            if found is None:
                self._create(schema)
                continue
            state, guard = found
            old = Schema.from_json(state["schema"])
            wanted = old.evolved(schema, self.target)
            if wanted != old:
                mapping = {"properties": self._properties(wanted)}
                self._ask("PUT", f"/{self._alias}/_mapping", mapping)
            token = secrets.token_hex(8)
            version = state["version"] + 1
            state = {**state, "token": token, "schema": wanted.as_json(), "version": version}
            if self._keep(state, guard):
                self._token, self._schema = token, wanted
                return Position.from_json(state["position"])
        raise StoreUnreachableError(f"{self.target}: others keep taking it over")

    def _create(self, schema: Schema) -> None:
        """An index with its alias and its state. Who comes second finds that of the first."""
        index = f"{self._alias}-{secrets.token_hex(4)}"
        hidden = {"filter": {"exists": {"field": SORT}}}
        settings = {
            "number_of_shards": self._address.number("shards", 1, least=1),
            "number_of_replicas": self._address.number("replicas", 0),
            "gc_deletes": self._address.option("gc_deletes", "1h"),
            # Each batch is made searchable once, when all of it is there: see `apply`.
            "refresh_interval": "-1",
            "mapping.total_fields.limit": 3000,
        }
        mappings = {"dynamic": False, "properties": self._properties(schema)}
        self._ask("PUT", f"/{index}", {"settings": settings, "mappings": mappings})
        state = {"schema": schema.as_json(), "position": "{}", "token": "", "version": 0}
        # The state is there before anyone can find the index.
        self._ask("PUT", f"/{index}/_doc/{STATE}", {"penstock": orjson.dumps(state).decode()})
        if self._state() is None:
            action = {"add": {"index": index, "alias": self._alias, **hidden}}
            self._ask("POST", "/_aliases", {"actions": [action]})
            if self._indexes(self._alias) == [index]:
                self._sweep()
                return
            # Another did the same at the same moment. Nobody can use an alias of two indexes, so
            # whoever sees both takes his own away; the pauses of the two will not be the same.
            self._asked("DELETE", f"/{index}", allowed={404})
            Backoff(0.1, 0.5).wait()
        else:
            self._asked("DELETE", f"/{index}", allowed={404})

    def _sweep(self) -> None:
        """Take away indexes that a writer had made when it was killed, before they had an alias.

        Those that are young may be somebody's who is about to name them.
        """
        ours = re.compile(re.escape(self._alias) + r"-[0-9a-f]{8}")
        answer = self._asked("GET", f"/{self._alias}-*/_alias", allowed={404})
        found = {} if answer.status == 404 else orjson.loads(answer.body)
        for index, about in found.items():
            if not ours.fullmatch(index) or about["aliases"]:
                continue
            told = self._asked("GET", f"/{index}/_settings", allowed={404})
            if told.status == 404:
                continue
            made_ms = int(orjson.loads(told.body)[index]["settings"]["index"]["creation_date"])
            if time.time() - made_ms / 1000 > self._orphan_s:
                self._asked("DELETE", f"/{index}", allowed={404})

    def _properties(self, schema: Schema) -> dict[str, Any]:
        made = {field.name: self._mapped(field, schema) for field in schema.fields}
        made[SORT] = {"type": "keyword"}
        return made

    def _mapped(self, field: pa.Field, schema: Schema) -> dict[str, Any]:
        types, kind = pa.types, field.type
        if is_json(field):
            return {"type": "keyword", "index": False, "doc_values": False}
        if types.is_string(kind) and field.name not in {*self._keywords, *schema.key}:
            whole = {"type": "keyword", "ignore_above": _KEYWORD_MAX}
            return {"type": "text", "fields": {"keyword": whole}}
        if types.is_boolean(kind):
            return {"type": "boolean"}
        # One kind for all widths, for a column may become wider and its mapping may not.
        if types.is_integer(kind):
            return {"type": "long"}
        if types.is_floating(kind) or types.is_decimal(kind):
            return {"type": "double", "ignore_malformed": True}
        if types.is_date32(kind) or types.is_timestamp(kind):
            return {"type": "date", "ignore_malformed": True}
        if types.is_binary(kind):
            return {"type": "binary"}
        return {"type": "keyword", "ignore_above": _KEYWORD_MAX}

    def apply(self, changes: Changes, aside: Aside) -> Applied:
        assert self._schema is not None, "open it first"
        found = self._state()
        if found is None or found[0]["token"] != self._token:
            raise self._fenced()
        state, guard = found
        stored = Position.from_json(state["position"])
        if not follows(changes, stored, self.target):
            return Applied(0)
        self._version = state["version"] + 1
        refused = self._write(changes, self._schema)
        if refused:
            refusing(refused, self.target, self.max_refused)
            aside(refused)
        if changes.rows:
            # Whoever waits for the position may then search.
            self._ask("POST", f"/{self._alias}/_refresh")
        reached = stored.merged(changes.position).text()
        state = {**state, "position": reached, "version": self._version}
        if not self._keep(state, guard):
            raise self._fenced()
        return Applied(changes.rows - len(refused), tuple(refused))

    def _fenced(self) -> FencedError:
        return FencedError(f"{self.target} has another writer, or was built anew")

    def _write(self, changes: Changes, schema: Schema) -> list[Refused]:
        """All rows, in requests of limited size; those that the server does not take."""
        puts = changes.upserts.num_rows
        requests = _pieces(self._lines(changes, schema), self._rows, self._bytes)
        return [
            coding.refused_upsert(changes, schema, at, reason)
            if at < puts
            else coding.refused_delete(changes, schema, at - puts, reason)
            for at, reason in sorted(self._sent(requests))
        ]

    def _sent(self, requests: Iterable[tuple[int, Sequence[bytes]]]) -> Iterator[tuple[int, str]]:
        """Send requests; what the server does not take of them.

        No key is there twice, so their order does not matter. While some are on their way the next
        one is made, and waits for its turn: more than that would only take memory. If one fails,
        none is begun any more, and those on their way are waited for: what is tried again must not
        meet them.
        """
        under_way: set[Future[list[tuple[int, str]]]] = set()
        with ThreadPoolExecutor(self._concurrency, "penstock-bulk") as pool:
            for request in requests:
                if len(under_way) >= self._concurrency:
                    done, under_way = wait(under_way, return_when=FIRST_COMPLETED)
                    yield from chain.from_iterable(each.result() for each in done)
                under_way.add(pool.submit(self._bulk, *request))
            yield from chain.from_iterable(each.result() for each in as_completed(under_way))

    def _lines(self, changes: Changes, schema: Schema) -> Iterator[bytes]:
        """The rows as a bulk request has them: upserts, then deletes."""
        for part in _parts(changes.upserts):
            keys = coding.sortable_keys(part, schema)
            for key, row in zip(keys, coding.rows_of(part), strict=True):
                row[SORT] = key
                head = orjson.dumps({"index": _versioned(key, self._version)})
                yield b"%b\n%b\n" % (head, orjson.dumps(row))
        for part in _parts(changes.deletes):
            for key in coding.sortable_keys(part, schema):
                yield orjson.dumps({"delete": _versioned(key, self._version)}) + b"\n"

    def _bulk(self, begin: int, lines: Sequence[bytes]) -> list[tuple[int, str]]:
        """Send some lines, the first of this number; those that the server does not take, and
        why."""
        left = list(enumerate(lines, begin))
        refused: list[tuple[int, str]] = []
        backoff = Backoff(0.1, 5.0)
        busy = ""
        path = f"/{self._alias}/_bulk?require_alias=true&filter_path={_TOLD}"
        for _ in range(ATTEMPTS):
            body = b"".join(line for _, line in left)
            found = orjson.loads(self._asked("POST", path, body, _NDJSON).body)
            if not found["errors"]:
                return refused
            again = []
            for (at, line), item in zip(left, found["items"], strict=True):
                told = next(iter(item.values()))
                status, error = told["status"], told.get("error")
                # 409: what is there is newer. 404 and no error: what is to be deleted is not there.
                if status < 300 or status == 409 or (status == 404 and error is None):
                    continue
                if status == 404:
                    # The index itself is gone.
                    raise self._fenced()
                error = error or {}
                reason = f"{error.get('type')}: {error.get('reason')}"
                if status in BUSY or status >= 500:
                    again.append((at, line))
                    busy = reason
                else:
                    cause = (error.get("caused_by") or {}).get("reason")
                    refused.append((at, f"{reason}; {cause}" if cause else reason))
            if not again:
                return refused
            left = again
            backoff.wait()
        raise StoreUnreachableError(f"{self.target} is too busy: {busy}")

    # ---- reading

    def position(self) -> Position | None:
        found = self._state()
        return None if found is None else Position.from_json(found[0]["position"])

    def stored_schema(self) -> Schema | None:
        found = self._state()
        return None if found is None else Schema.from_json(found[0]["schema"])

    def scan(
        self, low: Key | None = None, high: Key | None = None, *, batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        schema = self.stored_schema()
        if schema is None:
            return
        bounds = {}
        if low is not None:
            bounds["gte"] = coding.sortable_key(low, schema)
        if high is not None:
            bounds["lt"] = coding.sortable_key(high, schema)
        query = {"range": {SORT: bounds}} if bounds else {"match_all": {}}
        asked = {"size": min(batch_rows, SCAN_ROWS), "sort": [SORT], "query": query}
        self._ask("POST", f"/{self._alias}/_refresh")
        found = self._ask("POST", f"/{self._alias}/_search?scroll={_SCROLL}", asked)
        try:
            while hits := found["hits"]["hits"]:
                rows = [hit["_source"] for hit in hits]
                yield from coding.table_from(rows, schema).to_batches()
                more = {"scroll": _SCROLL, "scroll_id": found["_scroll_id"]}
                found = self._ask("POST", "/_search/scroll", more)
        finally:
            self._asked("DELETE", "/_search/scroll", _body({"scroll_id": found["_scroll_id"]}))

    def search(self, query: dict[str, Any], limit: int = 10) -> list[dict[str, Any]]:
        """The rows that match a query in the language of the server, best first."""
        schema = self.stored_schema()
        if schema is None:
            return []
        found = self._ask("POST", f"/{self._alias}/_search", {"query": query, "size": limit})
        rows = [hit["_source"] for hit in found["hits"]["hits"]]
        return list(coding.table_from(rows, schema).to_pylist())

    # ---- building anew

    def beside(self, *, fresh: bool = False) -> OpenSearchSink:
        made = OpenSearchSink(self._address, "--beside")
        if fresh:
            made.remove()
        return made

    def switch(self) -> None:
        assert self._slot, "only what `beside` gave"
        found = self._state()
        if found is None or found[0]["token"] != self._token:
            raise self._fenced()
        new = self._indexes(self._alias)[0]
        # Whoever wrote to either is fenced.
        if not self._keep({**found[0], "token": ""}, found[1]):
            raise self._fenced()
        hidden = {"filter": {"exists": {"field": SORT}}}
        actions: list[dict[str, Any]] = [
            {"remove_index": {"index": old}} for old in self._indexes(self._name)
        ]
        actions += [
            {"remove": {"index": new, "alias": self._alias}},
            {"add": {"index": new, "alias": self._name, **hidden}},
        ]
        self._ask("POST", "/_aliases", {"actions": actions})
        self._token = None

    def remove(self) -> None:
        for index in self._indexes(self._alias):
            self._asked("DELETE", f"/{index}", allowed={404})
        self._token = None

    def close(self) -> None:
        self._connections.close()

    # ---- talking to it

    def _indexes(self, alias: str) -> list[str]:
        answer = self._asked("GET", f"/_alias/{quote(alias)}", allowed={404})
        return [] if answer.status == 404 else sorted(orjson.loads(answer.body))

    def _state(self) -> tuple[dict[str, Any], str] | None:
        """What is known of the table, and the condition for changing it."""
        backoff = Backoff(0.1, 0.5)
        for _ in range(ATTEMPTS):
            answer = self._asked("GET", f"/{self._alias}/_doc/{STATE}", allowed={400, 404})
            if answer.status != 400:
                break
            # Two have made an index at the same moment, and one is about to take his away.
            backoff.wait()
        else:
            said = answer.body[:1000].decode(errors="replace")
            raise StoreError(f"{self.target} cannot be read: HTTP {answer.status}. {said}")
        if answer.status == 404:
            found = orjson.loads(answer.body)
            if "_index" in found and found["_index"] == self._alias:
                raise StoreError(
                    f"{self.target} is an index that Penstock has not made",
                    advice="Name another one: what is built anew must be able to take its place.",
                )
            return None
        found = orjson.loads(answer.body)
        guard = f"if_seq_no={found['_seq_no']}&if_primary_term={found['_primary_term']}"
        return orjson.loads(found["_source"]["penstock"]), guard

    def _keep(self, state: dict[str, Any], guard: str) -> bool:
        """Change the state, if nobody else has."""
        body = _body({"penstock": orjson.dumps(state).decode()})
        path = f"/{self._alias}/_doc/{STATE}?{guard}&require_alias=true"
        return self._asked("PUT", path, body, allowed={404, 409}).status < 300

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        answer = self._asked(method, path, None if body is None else _body(body))
        return orjson.loads(answer.body)

    def _asked(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: dict[str, str] = _JSON,
        allowed: frozenset[int] | set[int] = frozenset(),
    ) -> Answer:
        backoff = Backoff(0.1, 5.0)
        for attempt in range(ATTEMPTS):
            answer = self._connections.send(method, path, body, headers)
            if answer.status < 300 or answer.status in allowed:
                return answer
            if not _passes(answer) or attempt == ATTEMPTS - 1:
                break
            backoff.wait(answer.retry_after_s)
        said = answer.body[:1000].decode(errors="replace")
        message = f"{self.target}: {method} {path.partition('?')[0]}: {answer.status} {said}"
        if _passes(answer) or answer.status >= 500:
            raise StoreUnreachableError(message)
        if answer.status in {401, 403}:
            raise StoreError(message, advice="Check user and password, and what the user may do.")
        raise StoreError(message)


def make(address: Address) -> OpenSearchSink:
    """The sink for a URL."""
    address.only(*_OPTIONS)
    return OpenSearchSink(address)


def _passes(answer: Answer) -> bool:
    """Whether the same may succeed a little later: the server is busy, or the alias has two indexes
    for the moment in which another writer finds that it was not the first (see `_create`)."""
    return answer.status in BUSY or (answer.status == 400 and _TWO_INDEXES in answer.body)


def _body(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value)


def _versioned(key: str, version: int) -> dict[str, Any]:
    # What is written a second time is the same.
    return {"_id": _id(key), "version": version, "version_type": "external_gte"}


def _id(key: str) -> str:
    """An id may neither be long nor empty; ours never look like another's."""
    if len(key.encode()) < ID_BYTES_MAX:
        return "=" + key
    return "#" + hashlib.sha256(key.encode()).hexdigest()


def _parts(table: pa.Table) -> Iterator[pa.Table]:
    for at in range(0, table.num_rows, _ENCODED_ROWS):
        yield table.slice(at, _ENCODED_ROWS)


def _pieces(lines: Iterable[bytes], rows: int, size: int) -> Iterator[tuple[int, list[bytes]]]:
    """Lines in requests of limited size, each with the number of its first line."""
    begin = held = 0
    piece: list[bytes] = []
    for line in lines:
        if piece and (len(piece) >= rows or held + len(line) > size):
            yield begin, piece
            begin, held, piece = begin + len(piece), 0, []
        piece.append(line)
        held += len(line)
    if piece:
        yield begin, piece
