"""The rounds of a comparison; see the package for why they find what differs, and nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import repeat
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.cli import output
from penstock.cli.verifying.checksums import (
    Digest,
    Numbers,
    canonical,
    differing,
    keys_of,
    rows_of,
)
from penstock.cli.verifying.lapsing import Lapsing
from penstock.cli.verifying.origins import (
    Origin,
    TableOrigin,
    log_ends,
    records_since,
)
from penstock.cli.verifying.query import QueryOrigin
from penstock.cli.verifying.report import Difference, OnProgress, Progress, Report, VerifyError
from penstock.cli.verifying.set_aside import SetAside
from penstock.cli.verifying.topic_rows import TopicRows
from penstock.cli.verifying.values import (
    Form,
    Meaning,
    compared_as,
    form_of,
    shown,
    values_of,
)
from penstock.client.connection import Cluster
from penstock.sinks.contract import Position, Sink
from penstock.sinks.errors import NotReachedError, SchemaChangedError
from penstock.sinks.fields import Column
from penstock.sinks.schema import Schema, is_json
from penstock.sinks.spec import SinkSpec
from penstock.spark.reading.captured import history_of
from penstock.spark.sinking.learning import parser_of
from penstock.spark.sinking.parsing import Parsed, Parser

# Two numbers of eight bytes for each row of both sides; larger tables are compared in shares.
SHARE_ROWS: Final = 20_000_000
# A key that has changed in each of so many rounds is compared with the log.
_PATIENCE: Final = 3
# Versions of such keys that are looked at in one round.
_MAX_VERSIONS: Final = 20_000
_TELL_S: Final = 0.5
# What differs between a query and the store in so many rounds does so for sure.
_SAME: Final = 4
# So many keys are named that could not be compared.
_NAMED: Final = 5


def not_there(target: str) -> VerifyError:
    """There is no store to compare with."""
    return VerifyError(
        f"{target} is not there yet", advice="Feed it first: penstock run, or penstock sinks run."
    )


class _GrownError(Exception):
    """Records have columns, or name schemas, that the parser does not know yet."""

    def __init__(self, new: Mapping[str, Column], schemas: Collection[int]) -> None:
        super().__init__(str([*new, *schemas]))
        self.new = dict(new)
        self.schemas = frozenset(schemas)


class Comparison:
    """One run."""

    def __init__(
        self,
        cluster: Cluster,
        origin: Origin,
        spec: SinkSpec,
        store: Sink | TopicRows,
        deadline: float,
        on_progress: OnProgress | None,
    ) -> None:
        self._cluster = cluster
        self._origin = origin
        self._spec = spec
        self._store = store
        self._deadline = deadline
        self._timeout_s = deadline - time.monotonic()
        self._told = _Telling(on_progress)
        self._lapsing = Lapsing(cluster, origin.topic, store)
        self._names: dict[int, str] = {}
        self._new: dict[str, Column] = {}
        self._parser, self._form = self._make_parser()
        self._rows = self._stored_rows = 0
        self._round = 0
        self._position = Position()
        self._since = Position()
        self.share_rows = SHARE_ROWS
        # Which share is compared now, of how many; the first look tells how many there must be.
        self._share, self._shares = 0, 0

    def run(self, began: float, sink: str, max_shown: int) -> Report:
        certain = [self._settled()]
        while self._share + 1 < self._shares:
            self._share += 1
            certain.append(self._settled())
        found = np.concatenate(certain)
        shown = self._differences(found, max_shown) if len(found) else []
        # What has become equal while it was looked at is not a difference any more.
        count = len(shown) if len(found) <= max_shown else len(found)
        set_aside, reasons = self._origin.set_aside()
        if isinstance(self._store, TopicRows):
            more, others = self._store.aside.found()
            set_aside, reasons = set_aside + more, reasons + others
        aside = [self._aside(each) for each in reasons[: max_shown - len(shown)]]
        origin = self._origin
        return Report(
            origin.name, sink, self._rows, count + set_aside, (*shown, *aside), self._position,
            time.monotonic() - began, self._round, self._stored_rows, set_aside,
            not_compared=tuple(origin.not_compared) if isinstance(origin, QueryOrigin)
            else self._gone,
        )  # fmt: skip

    def _aside(self, found: SetAside) -> Difference:
        where = f" ({self._origin.topic}-{found.partition} at {found.offset})"
        return Difference("aside", {"key": found.key},
                          reason=found.reason + (where if self._origin.is_log else ""))  # fmt: skip

    def _make_parser(self, new: Mapping[str, Column] | None = None) -> tuple[Parser, Form]:
        stored = self._store.stored_schema()
        if stored is None:
            raise not_there(self._store.target)
        at = self._store.position()
        topics = {topic for topic, _ in at.offsets} if at is not None else set()
        if topics and self._origin.topic not in topics:
            raise VerifyError(
                f"{self._store.target} was filled from {', '.join(sorted(topics))}, not from "
                f"{self._origin.topic}"
            )
        parser = _parser_of(self._spec, self._cluster, self._origin.topic, stored)
        known = {each.name for each in parser.columns}
        columns = [*parser.columns, *(
            column for name, column in (new or {}).items() if name not in known
        )]  # fmt: skip
        # A store keeps what was dropped, and nobody knows any more what it should be.
        self._gone = self._dropped(parser) if isinstance(self._origin, TableOrigin) else ()
        columns = [each for each in columns if each.name not in self._gone]
        fields = {field.name: field for field in stored.fields}
        meanings: dict[str, Meaning] = {}
        for place, column in enumerate(columns):
            field = fields.get(column.name, column.field)
            meaning = compared_as(column.field, field)
            if meaning is None:
                # Read as the store has it, a wider integer for example.
                columns[place] = replace(column, field=field)
            else:
                meanings[column.name] = meaning
        parser = replace(parser, columns=tuple(columns))
        return parser, Form(parser.schema, meanings)

    def _dropped(self, parser: Parser) -> tuple[str, ...]:
        """The columns that the table does not have any more."""
        assert isinstance(self._origin, TableOrigin)
        table = self._origin.table.full_name
        known = [each.schema for each in history_of(self._cluster, self._origin.topic)
                 if each.schema.table == table]  # fmt: skip
        if not known:
            return ()
        now = {*parser.key, *(each.name for each in (*known[-1].columns, *known[-1].key_only))}
        return tuple(name for name in parser.schema.names if name not in now)

    def _grow(self, grown: _GrownError) -> None:
        """Know what records have shown."""
        self._new.update(grown.new)
        self._parser, self._form = self._make_parser(self._new)
        lost = dict.fromkeys(grown.schemas - self._parser.schemas.keys())
        # What nobody knows cannot be read.
        self._parser = replace(self._parser, schemas={**self._parser.schemas, **lost})

    def _parsed(self, records: pa.Table) -> Parsed:
        """Records of the log."""
        parsed = self._parser.parse(records)
        if parsed.unknown:
            raise _GrownError({}, parsed.unknown)
        return parsed

    @property
    def _compared(self) -> Form:
        """How both sides are brought together; of a query its answer tells."""
        return self._origin.form if isinstance(self._origin, QueryOrigin) else self._form

    def _keys(self, rows: pa.Table) -> Numbers:
        """The checksums of the keys of what a parser gives."""
        form = self._compared
        return keys_of(form.of(rows), form.schema)

    def _sums(self, rows: pa.Table) -> Numbers:
        """The checksums of the rows that a parser gives."""
        form = self._compared
        return rows_of(form.of(rows), form.schema)

    # ---- rounds --------------------------------------------------------------------------

    def _settled(self) -> Numbers:
        """The keys of this share that differ for sure."""
        if isinstance(self._origin, QueryOrigin) and not self._origin.is_exact:
            return self._settled_query(self._origin)
        wanted: Numbers | None = None
        certain: list[Numbers] = []
        looked = 0
        while True:
            self._round += 1
            looked += 1
            try:
                unlike, changed, sink = self._compare(wanted)
            except _GrownError as grown:
                self._grow(grown)
                self._check_time()
                continue
            moved = np.isin(unlike, changed)
            certain.append(unlike[~moved])
            wanted = unlike[moved]
            if len(wanted) and looked > _PATIENCE:
                # What is there twice is wrong whatever the log says.
                twice = np.array([len(sink.row(int(key))) > 1 for key in wanted])
                certain.append(wanted[twice])
                try:
                    wanted = self._out_of_step(wanted[~twice], sink)
                except _GrownError as grown:
                    self._grow(grown)
            if not len(wanted):
                return np.sort(np.concatenate(certain))
            self._check_time(f"{len(wanted)} keys differ and change all the time")

    def _settled_query(self, origin: QueryOrigin) -> Numbers:
        """The same, where flows are between the database and the store.

        A flow writes what has come of a whole micro-batch, so the log need not have each value that
        the database had. What differs does so for sure if nothing was captured meanwhile, or if
        it differs each time and nothing was written of the key. A key that is written all the time
        must be found equal once: that its answer is among what was written proves nothing, a count
        that is too large by one has been there, too.
        """
        wanted: Numbers | None = None
        certain: list[Numbers] = []
        # By key the store's rows, and how often they were found while nothing was written.
        before: dict[int, tuple[list[int], int]] = {}
        while True:
            self._round += 1
            try:
                unlike, changed, sink = self._compare(wanted)
            except _GrownError as grown:
                self._grow(grown)
                self._check_time()
                continue
            if not len(unlike) or origin.is_quiet():
                return np.sort(np.concatenate([*certain, unlike]))
            sure = []
            for key, moved in zip(map(int, unlike), np.isin(unlike, changed), strict=True):
                stored = sink.row(key)
                last, times = before.get(key, (stored, 0))
                times = times + 1 if stored == last and not moved else 1
                before[key] = stored, times
                sure.append(times >= _SAME or len(stored) > 1)
            certain.append(unlike[np.array(sure)])
            wanted = unlike[~np.array(sure)]
            if not len(wanted):
                return np.sort(np.concatenate(certain))
            told = [self._names[key] for key in map(int, wanted) if key in self._names][:_NAMED]
            self._check_time(
                f"{output.count(len(wanted), 'key')} not found equal, and written all the time"
                + (f", among them {', '.join(told)}" if told else "")
            )

    def _compare(self, wanted: Numbers | None) -> tuple[Numbers, Numbers, Digest]:
        """One round: the keys that differ, those that have changed meanwhile, and the store's
        rows."""
        self._since = log_ends(self._cluster, self._origin.topic)
        self._source = source = Digest()
        for _, formed, gone in self._source_rows():
            self._divide()
            keys, rows = keys_of(formed, self._schema), rows_of(formed, self._schema)
            chosen = self._chosen(keys, wanted)
            source.put(keys[chosen], rows[chosen])
            source.take_out(gone[self._chosen(gone, wanted)])
            if wanted is not None and self._origin.has_forms:
                self._note_names(formed, keys, chosen)
        source.sort(last_counts=self._origin.is_log)
        self._check_single(source)
        self._divide()
        if wanted is None:
            self._rows += len(source.keys)
        self._reach()
        sink = Digest()
        self._lapsing.begin()
        for _, formed in self._sink_rows():
            keys = keys_of(formed, self._schema)
            rows = rows_of(formed, self._schema)
            if isinstance(self._origin, QueryOrigin):
                rows = self._origin.forgiven(formed, keys, rows)
            chosen = self._chosen(keys, wanted)
            sink.put(keys[chosen], rows[chosen])
        sink.sort(last_counts=False)
        if wanted is None:
            self._stored_rows += len(sink.keys)
        source.drop(self._lapsing.lapsed(
            self._parser, self._keys, lambda keys: self._chosen(keys, wanted), sink.keys
        ))  # fmt: skip
        unlike = differing(source, sink)
        changed = self._changed() if len(unlike) else np.zeros(0, np.uint64)
        return unlike, changed, sink

    @property
    def _schema(self) -> Schema:
        return self._compared.schema

    def _note_names(self, formed: pa.Table, keys: Numbers, chosen: Any) -> None:
        """Names for people of the keys that are looked at again."""
        places = np.flatnonzero(chosen)[:_NAMED]
        names = formed.select(list(self._schema.key)).take(pa.array(places, pa.int64()))
        for key, row in zip(keys[places], names.to_pylist(), strict=True):
            self._names[int(key)] = " ".join(map(str, row.values()))

    def _check_single(self, source: Digest) -> None:
        """VerifyError if a query has several rows of a key."""
        if not self._origin.has_forms:
            return
        twice = source.keys[1:][source.keys[1:] == source.keys[:-1]]
        if not len(twice):
            return
        rows = (self._picked(raw, formed, twice[:1]) for raw, formed, _ in self._source_rows())
        row = next((row for found in rows for _, row in found), {})
        key = ", ".join(f"{name} = {self._shown_source(name, row)}" for name in self._schema.key)
        raise VerifyError(
            f"the query has several rows of {key}, which is the key of {self._store.target}",
            advice=f"It must have one row of each: GROUP BY {', '.join(self._schema.key)}.",
        )

    def _divide(self) -> None:
        if not self._shares:
            self._shares = 1 + (self._origin.estimate() or 0) // self.share_rows

    def _chosen(self, keys: Numbers, wanted: Numbers | None) -> Any:
        if wanted is not None:
            return np.isin(keys, wanted)
        return keys % np.uint64(self._shares) == np.uint64(self._share)

    def _source_rows(self) -> Iterator[tuple[pa.Table, pa.Table, Numbers]]:
        """The source's rows as they are and as they are compared, and the keys that are gone."""
        self._told.begin("source", self._round, self._origin.estimate())
        for parsed in self._origin.rows(self._parser):
            if parsed.new or parsed.unknown:
                raise _GrownError(parsed.new, parsed.unknown)
            self._told.add(parsed.upserts.num_rows + parsed.deletes.num_rows)
            self._check_time()
            if self._origin.has_forms:
                yield parsed.upserts, parsed.upserts, np.zeros(0, np.uint64)
            else:
                yield parsed.upserts, self._form.of(parsed.upserts), self._keys(parsed.deletes)

    def _reach(self) -> None:
        """Wait until the store has all that the source's rows showed."""
        self._told.begin("log", self._round, None)
        self._origin.settle(self._deadline)
        until = log_ends(self._cluster, self._origin.topic)
        try:
            self._position = self._store.wait_for(until, max(self._left(), 0.001))
        except NotReachedError as error:
            raise VerifyError(
                str(error),
                advice="Is it fed? `penstock sinks list` tells; --timeout gives it more time.",
            ) from error

    def _sink_rows(self) -> Iterator[tuple[pa.Table, pa.Table]]:
        """The store's rows as they are, and as they are compared."""
        self._told.begin("sink", self._round, self._rows or None)
        form = self._compared
        for batch in self._store.scan():
            self._told.add(batch.num_rows)
            self._check_time()
            columns = []
            for field in form.schema.fields:
                if field.name not in batch.schema.names:
                    column = pa.nulls(batch.num_rows, field.type)
                elif form.meaning(field.name) is None:
                    column = batch.column(field.name).cast(field.type)
                else:
                    column = batch.column(field.name)
                columns.append(column)
            raw = pa.table(columns, names=list(form.schema.names))
            yield raw, form.of(raw)

    def _changed(self) -> Numbers:
        """The keys that have records since the source was read."""
        self._told.begin("changes", self._round, None)
        found = []
        for records in records_since(self._cluster, self._origin.topic, self._since):
            parsed = self._parsed(records)
            found += [self._keys(parsed.upserts), self._keys(parsed.deletes)]
            self._told.add(records.num_rows)
        return np.unique(np.concatenate(found)) if found else np.zeros(0, np.uint64)

    def _out_of_step(self, keys: Numbers, sink: Digest) -> Numbers:
        """Of keys that never are quiet, those whose row in the store is not what the log has for
        them: as it was at the position that the store had reached, or later."""
        topic = self._origin.topic
        # By key: in each partition the last before that position; and all that came since.
        last: dict[int, dict[int, int | None]] = {}
        later: dict[int, set[int | None]] = {}
        seen = 0
        for records in records_since(self._cluster, topic, self._since):
            number = int(records["partition"][0].as_py())
            at = self._position.offsets.get((topic, number), 0)
            read = int(pc.sum(pc.less(records["offset"], at)).as_py())
            for key, row in self._versions(records.slice(0, read)):
                last.setdefault(key, {})[number] = row
            for place in range(read, records.num_rows):
                if seen >= _MAX_VERSIONS:
                    break
                seen += 1
                for key, row in self._versions(records.slice(place, 1)):
                    later.setdefault(key, set()).add(row)
        left = []
        for key in map(int, keys):
            known = later.get(key, set()) | set(last.get(key, {}).values())
            row = next(iter(sink.row(key)), None)
            if row not in known:
                left.append(key)
        return np.array(left, np.uint64)

    def _versions(self, records: pa.Table) -> Iterator[tuple[int, int | None]]:
        """The last row of each key in these records; None if it was deleted."""
        parsed = self._parsed(records)
        found = [
            *zip(
                parsed.upserted_at["offset"].to_pylist(),
                map(int, self._keys(parsed.upserts)),
                map(int, self._sums(parsed.upserts)),
                strict=True,
            ),
            *zip(
                parsed.deleted_at["offset"].to_pylist(),
                map(int, self._keys(parsed.deletes)),
                repeat(None, parsed.deletes.num_rows),
                strict=True,
            ),
        ]
        for _, key, row in sorted(found, key=lambda each: each[0]):
            yield key, row

    # ---- what differs --------------------------------------------------------------------

    def _differences(self, keys: Numbers, limit: int) -> list[Difference]:
        while True:
            try:
                return self._explained(keys, limit)
            except _GrownError as grown:
                self._grow(grown)
                self._check_time()

    def _explained(self, keys: Numbers, limit: int) -> list[Difference]:
        """What differs in the first of these keys, as it is now."""
        chosen = keys[:limit]
        self._round += 1
        self._since = log_ends(self._cluster, self._origin.topic)
        source: dict[int, list[dict[str, Any]]] = {}
        for raw, formed, gone in self._source_rows():
            for key, row in self._picked(raw, formed, chosen):
                source[key] = [row]
            for key in gone[np.isin(gone, chosen)]:
                source.pop(int(key), None)
        self._reach()
        sink: dict[int, list[dict[str, Any]]] = {}
        self._lapsing.begin()
        for raw, formed in self._sink_rows():
            for key, row in self._picked(raw, formed, chosen):
                sink.setdefault(key, []).append(row)
        there = np.array(list(sink), np.uint64)
        for key in self._lapsing.lapsed(
            self._parser, self._keys, lambda keys: np.isin(keys, chosen), there
        ):
            source.pop(int(key), None)
        found = [self._difference(source.get(key), sink.get(key)) for key in map(int, chosen)]
        made = [each for each in found if each is not None]
        return sorted(made, key=lambda each: tuple(map(_ordered, each.key.values())))

    def _picked(
        self, rows: pa.Table, formed: pa.Table, keys: Numbers
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The rows of these keys, as they are."""
        numbers = keys_of(formed, self._schema)
        chosen = np.flatnonzero(np.isin(numbers, keys))
        if len(chosen):
            picked = rows.take(pa.array(chosen, pa.int64()))
            columns = [values_of(picked.column(name)) for name in picked.column_names]
            for number, *row in zip(map(int, numbers[chosen]), *columns, strict=True):
                yield number, dict(zip(picked.column_names, row, strict=True))

    def _difference(
        self, source: list[dict[str, Any]] | None, sink: list[dict[str, Any]] | None
    ) -> Difference | None:
        row = (source or sink or [{}])[0]
        key = {
            name: self._shown_source(name, row) if source else row.get(name)
            for name in self._schema.key
        }
        if source is None:
            return Difference("extra", key) if sink is not None else None
        if sink is None:
            return Difference("missing", key)
        if len(sink) > 1:
            return Difference("double", key, reason=f"it is in the store {len(sink)} times")
        unlike = {
            field.name: (self._shown_source(field.name, source[0]), sink[0][field.name])
            for field in self._schema.fields
            if not self._same(source[0][field.name], sink[0][field.name], field)
        }
        return Difference("other", key, unlike) if unlike else None

    def _shown_source(self, name: str, row: Mapping[str, Any]) -> Any:
        meaning = self._compared.meaning(name)
        if meaning is None or not self._origin.has_forms:
            return row.get(name)
        return shown(row.get(name), meaning)

    def _same(self, source: Any, stored: Any, field: pa.Field) -> bool:
        meaning = self._compared.meaning(field.name)
        if meaning is None:
            return _same(source, stored, field)
        there = form_of(stored, meaning)
        if isinstance(self._origin, QueryOrigin):
            return self._origin.same(field.name, source, there)
        return form_of(source, meaning) == there

    # ---- time ----------------------------------------------------------------------------

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _check_time(self, what: str = "") -> None:
        if self._left() <= 0:
            raise VerifyError(
                f"{self._origin.name} and {self._store.target} could not be compared in "
                f"{self._timeout_s:.0f} s{': ' + what if what else ''}",
                advice="Give it more time with --timeout, or try when less is written.",
            )


def _parser_of(spec: SinkSpec, cluster: Cluster, topic: str, stored: Schema) -> Parser:
    """What reads a topic as the source means it, with all columns of the store."""
    try:
        return parser_of(spec, cluster, topic, stored)
    except SchemaChangedError:
        # The store has other types than the table, from before they were known, for example: it
        # cannot be fed further, but its values can be read as the table's.
        parser = parser_of(replace(spec, key=stored.key), cluster, topic, None)
    known = {each.name for each in parser.columns}
    more = [Column(field) for field in stored.fields if field.name not in known]
    return replace(parser, columns=(*parser.columns, *more))


class _Telling:
    """Tells how far it is, now and then."""

    def __init__(self, on_progress: OnProgress | None) -> None:
        self._tell = on_progress
        self._next = 0.0

    def begin(self, phase: str, number: int, total: int | None) -> None:
        self._phase, self._round, self._total = phase, number, total
        self._rows, self._began = 0, time.monotonic()
        self.add(0)

    def add(self, rows: int) -> None:
        self._rows += rows
        now = time.monotonic()
        if self._tell is None or (rows and now < self._next):
            return
        self._next = now + _TELL_S
        took_s = max(now - self._began, 1e-3)
        share = min(1.0, self._rows / self._total) if self._total else None
        self._tell(Progress(self._phase, self._rows, self._rows / took_s, share, self._round))


def _same(one: Any, other: Any, field: pa.Field) -> bool:
    if is_json(field):
        one, other = canonical(one), canonical(other)
    return bool(one == other) or (_is_nan(one) and _is_nan(other))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _ordered(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value
