"""An index to search, embedded: tantivy, in a folder.

    tantivy:///data/products?text=title,body&facet=category&keyword=status

What is searched, and how, says `search_fields`. The row itself is kept in the index too, so a hit
is a whole row:

    for hit in sink.search("title:(red shoes) AND price:[10 TO 50]", limit=5):
        print(hit.score, hit.row)

A query is in the language of tantivy: words, "phrases", `field:word`, ranges, AND, OR, NOT, `-`.
Values that an index cannot hold (NaN, dates outside of the years 1678 to 2261) are in the row and
cannot be searched for.

The position is a document in the same commit as the rows. In the folder, `live.json` names the
folder of the index that counts and the writer's token; it is replaced as a whole, which is how a
table built anew, and one that got new columns, takes the place of the old. Whoever changes anything
holds a lock of the operating system on the file `lock`, which goes with its process.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import threading
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, Final

import orjson
import pyarrow as pa
import tantivy

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
from penstock.sinks.disk import sync
from penstock.sinks.errors import (
    FencedError,
    SinkError,
    StoreError,
    StoreUnreachableError,
)
from penstock.sinks.schema import Schema
from penstock.sinks.search_fields import (
    ABOUT,
    ADDERS,
    CHOICES,
    KEY,
    LANGUAGES,
    ROW,
    FieldKind,
    index_schema,
    kinds_of,
)
from penstock.sinks.stores import Address

LIVE, BESIDE = "live", "beside"
KEY_BYTES_MAX: Final = 60_000
HITS_MAX: Final = 100_000
_LOCK_TIMEOUT_S: Final = 60.0
_LOCK_POLL_S: Final = 0.01
_READ_ATTEMPTS: Final = 20
_LOOKUP_KEYS: Final = 1000
_MEMORY_MB: Final = 64
_POSITION: Final = "position"


class QueryError(SinkError):
    """A search that is not written as tantivy understands it."""

    advice = 'Words, "phrases", field:word, field:[1 TO 5], AND, OR, NOT; quote what is special.'


@dataclass(frozen=True, slots=True)
class Hit:
    """A row that was found."""

    row: dict[str, Any]
    score: float


@dataclass(frozen=True, slots=True)
class _State:
    """What `live.json` says."""

    folder: str
    token: str
    schema: Schema
    kinds: dict[str, FieldKind]
    language: str

    def text(self) -> bytes:
        return orjson.dumps(
            {
                "folder": self.folder,
                "token": self.token,
                "schema": self.schema.as_json(),
                "kinds": self.kinds,
                "language": self.language,
            }
        )

    @classmethod
    def read(cls, text: bytes) -> _State:
        found = orjson.loads(text)
        schema = Schema.from_json(found["schema"])
        return cls(found["folder"], found["token"], schema, found["kinds"], found["language"])


class TantivySink(Sink):
    """A table in an index of tantivy; see the module."""

    def __init__(self, address: Address, slot: str = LIVE) -> None:
        self._address = address
        self._root = Path(address.path)
        self._slot = slot
        self._memory_bytes = address.number("memory_mb", _MEMORY_MB, least=15) << 20
        self._token: str | None = None
        self._reading: tuple[str, tantivy.Index] | None = None
        self.target = address.shown if slot == LIVE else f"{address.shown} ({slot})"

    # ---- writing

    def open(self, schema: Schema) -> Position:
        with self._locked():
            old = self._state()
            wanted = schema if old is None else old.schema.evolved(schema, self.target)
            kinds = kinds_of(wanted, self._address)
            language = self._address.option("language")
            token = secrets.token_hex(8)
            if old is not None and (old.kinds, old.language) == (kinds, language):
                self._keep(_State(old.folder, token, wanted, kinds, language))
            else:
                new = _State(f"index-{secrets.token_hex(4)}", token, wanted, kinds, language)
                self._build(new, old)
                self._keep(new)
            self._token = token
            self._sweep()
            return self.position() or Position()

    def apply(self, changes: Changes, aside: Aside) -> Applied:
        with self._locked():
            state = self._state()
            if state is None or self._token is None or state.token != self._token:
                raise FencedError(f"{self.target} has another writer, or was built anew")
            index = self._index(state)
            searcher = index.searcher()
            stored = _position_in(searcher, index.schema)
            if not follows(changes, stored, self.target):
                return Applied(0)
            refused = _too_long(changes, state.schema)
            if refused:
                refusing(refused, self.target, self.max_refused)
                aside(refused)
            with self._writing(index) as writer:
                if searcher.num_docs:
                    _delete(writer, coding.sortable_keys(changes.deletes, state.schema))
                    _delete(writer, coding.sortable_keys(changes.upserts, state.schema))
                _add(writer, changes.upserts, state)
                _add_position(writer, stored.merged(changes.position))
                writer.commit()
            return Applied(changes.rows - len(refused), tuple(refused))

    def _build(self, new: _State, old: _State | None) -> None:
        """Make an index, with the rows and the position of the one that was."""
        place = self._root / new.folder
        place.mkdir(parents=True)
        index = tantivy.Index(index_schema(new.kinds, new.language), str(place), reuse=False)
        with self._writing(index) as writer:
            position = Position()
            if old is not None:
                before = self._index(old)
                position = _position_in(before.searcher(), before.schema)
                for batch in _scanned(before, old.schema, None, None, SCAN_ROWS):
                    _add(writer, pa.Table.from_batches([batch]), new)
            _add_position(writer, position)
            writer.commit()

    @contextmanager
    def _writing(self, index: tantivy.Index) -> Iterator[tantivy.IndexWriter]:
        with self._explaining():
            writer = index.writer(self._memory_bytes, 1)
            try:
                yield writer
            except BaseException:
                writer.rollback()
                raise
            finally:
                # Gives back the index's own lock, once what is being merged is merged.
                writer.wait_merging_threads()

    # ---- reading

    def position(self) -> Position | None:
        found = self._read()
        return None if found is None else _position_in(found[1].searcher(), found[1].schema)

    def stored_schema(self) -> Schema | None:
        state = self._state()
        return None if state is None else state.schema

    def scan(
        self, low: Key | None = None, high: Key | None = None, *, batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        found = self._read()
        if found is not None:
            with self._explaining():
                yield from _scanned(found[1], found[0].schema, low, high, batch_rows)

    def search(
        self,
        text: str,
        limit: int = 10,
        *,
        offset: int = 0,
        fields: list[str] | None = None,
        order_by: str | None = None,
        descending: bool = True,
        all_words: bool = False,
        after: Position | None = None,
        timeout_s: float = 30.0,
    ) -> list[Hit]:
        """The rows that match best, or first by `order_by` (a number, date or truth value).

        Words without a field are looked for in `fields`, all text columns if not given; with
        `all_words` a row must have them all. `after` waits until the index has reached a
        position: what you wrote yourself is found then.
        """
        if not 0 < limit <= HITS_MAX:
            raise ConfigError(f"a search gives 1 to {HITS_MAX} rows, not {limit}")
        if after is not None:
            self.wait_for(after, timeout_s)
        found = self._read()
        if found is None:
            return []
        state, index = found
        query = self._query(text, index, state, fields, all_words=all_words)
        searcher = index.searcher()
        order = tantivy.Order.Desc if descending else tantivy.Order.Asc
        try:
            hits = searcher.search(
                query, limit, count=False, order_by_field=order_by, offset=offset, order=order
            ).hits
        except ValueError as error:
            raise QueryError(f"{self.target}: {error}") from None
        table = _rows_at(searcher, [address for _, address in hits], state.schema)
        return [
            Hit(row, float(score) if order_by is None else 0.0)
            for row, (score, _) in zip(table.to_pylist(), hits, strict=True)
        ]

    def count(self, text: str) -> int:
        """How many rows match."""
        found = self._read()
        if found is None:
            return 0
        state, index = found
        query = self._query(text, index, state, None, all_words=False)
        # Typed without it, but there.
        return int(getattr(index.searcher().search(query, 1, count=True), "count", 0))

    def _query(
        self,
        text: str,
        index: tantivy.Index,
        state: _State,
        fields: list[str] | None,
        *,
        all_words: bool,
    ) -> tantivy.Query:
        words = fields
        if words is None:
            kinds = state.kinds.items()
            words = [name for name, kind in kinds if kind == "text"]
            words = words or [name for name, kind in kinds if kind == "keyword"]
        try:
            query = index.parse_query(text, words or [KEY], conjunction_by_default=all_words)
        except ValueError as error:
            raise QueryError(f"{self.target}: the search {text!r}: {error}") from None
        ours = tantivy.Query.term_query(index.schema, ABOUT, _POSITION)
        return query.and_must_not_match(ours)

    # ---- building anew

    def beside(self, *, fresh: bool = False) -> TantivySink:
        made = TantivySink(self._address, BESIDE)
        if fresh:
            made.remove()
        return made

    def switch(self) -> None:
        assert self._slot == BESIDE, "only what `beside` gave"
        with self._locked():
            state = self._state()
            if state is None or state.token != self._token:
                raise FencedError(f"{self.target} has another writer")
            # A token that nobody has: whoever wrote to either is fenced.
            new = _State(
                state.folder, secrets.token_hex(8), state.schema, state.kinds, state.language
            )
            self._keep(new, LIVE)
            self._file(BESIDE).unlink(missing_ok=True)
            self._token = None
            self._sweep()

    def remove(self) -> None:
        if not self._root.exists():
            return
        with self._locked():
            self._file(self._slot).unlink(missing_ok=True)
            self._token = None
            self._sweep()
            if not self._file(LIVE).exists() and not self._file(BESIDE).exists():
                shutil.rmtree(self._root, ignore_errors=True)

    def close(self) -> None:
        self._reading = None

    # ---- the folder

    def _file(self, slot: str) -> Path:
        return self._root / f"{slot}.json"

    def _state(self, slot: str | None = None) -> _State | None:
        try:
            return _State.read(self._file(slot or self._slot).read_bytes())
        except FileNotFoundError:
            return None
        except NotADirectoryError as error:
            raise StoreError(f"{self.target}: {error}") from error
        except (ValueError, KeyError) as error:
            raise StoreError(
                f"{self._file(slot or self._slot)} is damaged: {error}",
                advice="Remove the folder; what was in it is made again from the log.",
            ) from error

    def _keep(self, state: _State, slot: str | None = None) -> None:
        """Replace the file, in one step that survives a power loss."""
        file = self._file(slot or self._slot)
        part = file.with_suffix(".part")
        part.write_bytes(state.text())
        sync(part)
        part.replace(file)
        sync(self._root)

    def _sweep(self) -> None:
        """Take away indexes that nobody names any more."""
        states = (self._state(LIVE), self._state(BESIDE))
        named = {state.folder for state in states if state is not None}
        for place in self._root.glob("index-*"):
            if place.name not in named:
                shutil.rmtree(place, ignore_errors=True)

    def _read(self) -> tuple[_State, tantivy.Index] | None:
        """The index as it is now. It may be replaced between the look and the opening."""
        for attempt in range(_READ_ATTEMPTS):
            state = self._state()
            if state is None:
                return None
            try:
                return state, self._index(state)
            except ValueError as error:
                if attempt == _READ_ATTEMPTS - 1:
                    raise StoreError(f"{self.target}: {error}") from error
        return None

    def _index(self, state: _State) -> tantivy.Index:
        if self._reading is None or self._reading[0] != state.folder:
            index = tantivy.Index.open(str(self._root / state.folder))
            index.config_reader("manual")
            self._reading = (state.folder, index)
        index = self._reading[1]
        index.reload()
        return index

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock of the folder. It goes with the process that holds it."""
        deadline, pause = monotonic() + _LOCK_TIMEOUT_S, threading.Event()
        with self._explaining():
            while True:
                self._root.mkdir(parents=True, exist_ok=True)
                try:
                    held = os.open(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o644)
                except FileNotFoundError:
                    continue
                try:
                    if _lock(held, self._root / "lock"):
                        yield
                        return
                finally:
                    os.close(held)
                if monotonic() > deadline:
                    raise StoreUnreachableError(
                        f"{self.target} is locked by another process for long",
                        advice="Another process writes to it, or is stopped while it does.",
                    )
                pause.wait(_LOCK_POLL_S)

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            full = error.errno in {28, 122}
            kind = StoreUnreachableError if full else StoreError
            raise kind(
                f"{self.target}: {error.strerror or error}",
                advice="Free disk space." if full else "Look at the path and its permissions.",
            ) from error


def make(address: Address) -> TantivySink:
    """The sink for a URL."""
    address.only(*CHOICES, "language", "memory_mb")
    if address.host or not address.path:
        raise ConfigError(
            f"{address.shown} names no folder",
            advice="One is named with three slashes, as in tantivy:///index; four if absolute.",
        )
    if address.option("language") not in LANGUAGES:
        raise ConfigError(
            f"{address.shown}: there is no language {address.option('language')!r}",
            advice="`en` finds other forms of English words; without it words are as written.",
        )
    return TantivySink(address)


def _lock(held: int, path: Path) -> bool:
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        # Whoever removed the table took the file away with it: then this one counts no more.
        return os.fstat(held).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False


# ---- documents -------------------------------------------------------------------------------


def _too_long(changes: Changes, schema: Schema) -> list[Refused]:
    keys = coding.sortable_keys(changes.upserts, schema)
    reason = f"the key is longer than {KEY_BYTES_MAX} bytes"
    return [
        coding.refused_upsert(changes, schema, at, reason)
        for at, key in enumerate(keys)
        if not _fits(key)
    ]


def _fits(key: str) -> bool:
    return len(key) * 4 <= KEY_BYTES_MAX or len(key.encode()) <= KEY_BYTES_MAX


def _delete(writer: tantivy.IndexWriter, keys: list[str]) -> None:
    for key in keys:
        if _fits(key):
            writer.delete_documents_by_term(KEY, key)


def _add(writer: tantivy.IndexWriter, table: pa.Table, state: _State) -> None:
    keys = coding.sortable_keys(table, state.schema)
    encoded = coding.encoded_rows(table)
    columns = [
        (ADDERS[kind], name, _searched(table.column(name)))
        for name, kind in state.kinds.items()
        if kind != "unindexed" and name in table.column_names
    ]
    for at, key in enumerate(keys):
        if not _fits(key):
            continue
        document = tantivy.Document()
        document.add_text(KEY, key)
        document.add_bytes(ROW, encoded[at])
        for add, name, values in columns:
            value = values[at]
            if value is not None:
                add(document, name, value)
        writer.add_document(document)


def _searched(column: pa.ChunkedArray) -> list[Any]:
    try:
        return list(column.to_pylist())
    except (OverflowError, ValueError):
        # A date that Python does not have cannot be searched for.
        return [_or_none(value) for value in column]


def _or_none(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return None


def _add_position(writer: tantivy.IndexWriter, position: Position) -> None:
    writer.delete_documents_by_term(ABOUT, _POSITION)
    document = tantivy.Document()
    document.add_text(ABOUT, _POSITION)
    document.add_bytes(ROW, position.text().encode())
    writer.add_document(document)


def _position_in(searcher: tantivy.Searcher, schema: tantivy.Schema) -> Position:
    query = tantivy.Query.term_query(schema, ABOUT, _POSITION)
    hits = searcher.search(query, 1, count=False).hits
    if not hits:
        return Position()
    return Position.from_json(bytes(searcher.doc(hits[0][1])[ROW][0]))


def _rows_at(
    searcher: tantivy.Searcher, addresses: list[tantivy.DocAddress], schema: Schema
) -> pa.Table:
    rows = [orjson.loads(bytes(searcher.doc(address)[ROW][0])) for address in addresses]
    return coding.table_from(rows, schema)


def _scanned(
    index: tantivy.Index, schema: Schema, low: Key | None, high: Key | None, batch_rows: int
) -> Iterator[pa.RecordBatch]:
    searcher = index.searcher()
    # Some may be of deleted rows; then nothing is found.
    keys = sorted(key for key, _ in searcher.terms_with_prefix(KEY, ""))
    first = 0 if low is None else bisect_left(keys, coding.sortable_key(low, schema))
    last = len(keys) if high is None else bisect_left(keys, coding.sortable_key(high, schema))
    step = min(batch_rows, _LOOKUP_KEYS)
    for at in range(first, last, step):
        some = keys[at : min(at + step, last)]
        query = tantivy.Query.term_set_query(index.schema, KEY, some)
        hits = searcher.search(query, len(some), count=False).hits
        if not hits:
            continue
        table = _rows_at(searcher, [address for _, address in hits], schema)
        found = coding.sortable_keys(table, schema)
        order = sorted(range(len(found)), key=found.__getitem__)
        yield from table.take(order).combine_chunks().to_batches()
