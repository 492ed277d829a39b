"""The rounds of a comparison; see the package for why they find what differs, and nothing else."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from itertools import repeat
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.cli import project as projects
from penstock.cli.capture_project import configured
from penstock.cli.kafka import bootstrap_of
from penstock.cli.sinks_file import named
from penstock.cli.sinks_reach import must_answer
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
    TopicOrigin,
    log_ends,
    records_since,
)
from penstock.cli.verifying.report import Difference, OnProgress, Progress, Report, VerifyError
from penstock.client.connection import Cluster
from penstock.errors import ConfigError
from penstock.sinks.contract import Position, Sink
from penstock.sinks.errors import NotReachedError
from penstock.sinks.fields import Column
from penstock.sinks.schema import is_json
from penstock.sinks.spec import SinkSpec
from penstock.spark.sinking.learning import parser_of
from penstock.spark.sinking.parsing import Parsed, Parser

TIMEOUT_S: Final = 600.0
TOPIC: Final = "topic:"
MAX_SHOWN: Final = 1000
# Two numbers of eight bytes for each row of both sides; larger tables are compared in shares.
SHARE_ROWS: Final = 20_000_000
# A key that has changed in each of so many rounds is compared with the log.
_PATIENCE: Final = 3
# Versions of such keys that are looked at in one round.
_MAX_VERSIONS: Final = 20_000
_TELL_S: Final = 0.5


def verify(
    project: projects.Project,
    source: str,
    sink: str,
    *,
    timeout_s: float = TIMEOUT_S,
    on_progress: OnProgress | None = None,
    bootstrap: str = "",
    cluster: Cluster | None = None,
    max_shown: int = MAX_SHOWN,
    share_rows: int = SHARE_ROWS,
) -> Report:
    """Compare a table of a capture (`shop.orders`) or what a topic tells (`topic:NAME`) with a sink
    of the project, or with a store by its URL. VerifyError if that cannot be done in time."""
    began = time.monotonic()
    with ExitStack() as stack:
        if cluster is None:
            at = bootstrap_of(bootstrap, project)
            cluster = stack.enter_context(Cluster(at, client_id="penstock-verify"))
        # Before anything is connected to: what is asked for is there.
        spec = None if "://" in sink else named(project, sink)
        origin = _origin(project, source, cluster)
        stack.callback(origin.close)
        if spec is None:
            spec = SinkSpec(sink.partition("://")[0], origin.topic, sink)
        elif spec.topic != origin.topic:
            raise ConfigError(
                f"sink {spec.name!r} is fed from the topic {spec.topic}, and {source} goes to "
                f"{origin.topic}",
                advice=f"Compare it with its topic: penstock verify {TOPIC}{spec.topic} {sink}",
            )
        must_answer(spec)
        store = stack.enter_context(spec.sink())
        # A URL may have a password in it.
        shown = store.target if "://" in sink else sink
        if not store.readable:
            raise VerifyError(
                f"{store.target} cannot be read back, so there is nothing to compare",
                advice="Its deliveries can be seen at the receiver, and in its dead letters.",
            )
        work = _Comparison(cluster, origin, spec, store, began + timeout_s, on_progress)
        work.share_rows = share_rows
        return work.run(began, shown, max_shown)


def _origin(project: projects.Project, source: str, cluster: Cluster) -> Origin:
    if source.startswith(TOPIC):
        return TopicOrigin(cluster, source.removeprefix(TOPIC))
    capture, dot, table = source.partition(".")
    if not dot or not table:
        raise ConfigError(
            f"{source!r} is no source",
            advice=f"It is CAPTURE.TABLE, as shop.orders, or {TOPIC}NAME for what a topic tells.",
        )
    return TableOrigin(cluster, configured(project, capture), table)


class _GrownError(Exception):
    """Rows have columns that the parser does not know yet."""

    def __init__(self, new: Mapping[str, Column]) -> None:
        super().__init__(str(list(new)))
        self.new = dict(new)


class _Comparison:
    """One run."""

    def __init__(
        self,
        cluster: Cluster,
        origin: Origin,
        spec: SinkSpec,
        store: Sink,
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
        self._parser = self._make_parser()
        self._schema = self._parser.schema
        self._aside: dict[bytes, str] = {}
        self._rows = 0
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
        shown = self._explained(found, max_shown) if len(found) else []
        # What has become equal while it was looked at is not a difference any more.
        count = len(shown) if len(found) <= max_shown else len(found)
        aside = [
            Difference("aside", {"key": key.decode(errors="replace")}, reason=reason)
            for key, reason in list(self._aside.items())[: max_shown - len(shown)]
        ]
        return Report(
            self._origin.name, sink, self._rows, count + len(self._aside), (*shown, *aside),
            self._position, time.monotonic() - began, self._round,
        )  # fmt: skip

    def _make_parser(self, new: Mapping[str, Column] | None = None) -> Parser:
        stored = self._store.stored_schema()
        if stored is None:
            raise VerifyError(
                f"{self._store.target} is not there yet",
                advice="Feed it first: penstock run, or penstock sinks run.",
            )
        at = self._store.position()
        topics = {topic for topic, _ in at.offsets} if at is not None else set()
        if topics and self._origin.topic not in topics:
            raise VerifyError(
                f"{self._store.target} was filled from {', '.join(sorted(topics))}, not from "
                f"{self._origin.topic}"
            )
        parser = parser_of(self._spec, self._cluster, self._origin.topic, stored)
        known = {each.name for each in parser.columns}
        columns = [*parser.columns, *(
            column for name, column in (new or {}).items() if name not in known
        )]  # fmt: skip
        types = {field.name: field for field in stored.fields}
        return replace(
            parser, columns=tuple(replace(each, field=types.get(each.name, each.field))
                                  for each in columns)
        )  # fmt: skip

    # ---- rounds --------------------------------------------------------------------------

    def _settled(self) -> Numbers:
        """The keys of this share that differ for sure."""
        wanted: Numbers | None = None
        certain: list[Numbers] = []
        looked = 0
        while True:
            self._round += 1
            looked += 1
            try:
                unlike, changed, sink = self._compare(wanted)
            except _GrownError as grown:
                self._parser = self._make_parser(grown.new)
                self._schema = self._parser.schema
                self._check_time()
                continue
            moved = np.isin(unlike, changed)
            certain.append(unlike[~moved])
            wanted = unlike[moved]
            if len(wanted) and looked > _PATIENCE:
                # What is there twice is wrong whatever the log says.
                twice = np.array([len(sink.row(int(key))) > 1 for key in wanted])
                certain.append(wanted[twice])
                wanted = self._out_of_step(wanted[~twice], sink)
            if not len(wanted):
                return np.sort(np.concatenate(certain))
            self._check_time(f"{len(wanted)} keys differ and change all the time")

    def _compare(self, wanted: Numbers | None) -> tuple[Numbers, Numbers, Digest]:
        """One round: the keys that differ, those that have changed meanwhile, and the store's
        rows."""
        self._since = log_ends(self._cluster, self._origin.topic)
        source = Digest()
        for parsed in self._source_rows():
            self._divide()
            keys = keys_of(parsed.upserts, self._schema)
            chosen = self._chosen(keys, wanted)
            source.put(keys[chosen], rows_of(parsed.upserts, self._schema)[chosen])
            gone = keys_of(parsed.deletes, self._schema)
            source.take_out(gone[self._chosen(gone, wanted)])
        source.sort(last_counts=self._origin.is_log)
        self._divide()
        if wanted is None:
            self._rows += len(source.keys)
        self._reach()
        sink = Digest()
        self._lapsing.begin()
        for batch in self._sink_rows():
            keys = keys_of(batch, self._schema)
            chosen = self._chosen(keys, wanted)
            sink.put(keys[chosen], rows_of(batch, self._schema)[chosen])
        sink.sort(last_counts=False)
        source.drop(self._lapsing.lapsed(
            self._parser, lambda keys: self._chosen(keys, wanted), sink.keys
        ))  # fmt: skip
        unlike = differing(source, sink)
        changed = self._changed() if len(unlike) else np.zeros(0, np.uint64)
        return unlike, changed, sink

    def _divide(self) -> None:
        if not self._shares:
            self._shares = 1 + (self._origin.estimate() or 0) // self.share_rows

    def _chosen(self, keys: Numbers, wanted: Numbers | None) -> Any:
        if wanted is not None:
            return np.isin(keys, wanted)
        return keys % np.uint64(self._shares) == np.uint64(self._share)

    def _source_rows(self) -> Iterator[Parsed]:
        self._told.begin("source", self._round, self._origin.estimate())
        for parsed in self._origin.rows(self._parser):
            if parsed.new:
                raise _GrownError(parsed.new)
            if parsed.bad.num_rows and not self._origin.is_log:
                self._put_aside(parsed.bad)
            self._told.add(parsed.upserts.num_rows + parsed.deletes.num_rows)
            self._check_time()
            yield parsed

    def _put_aside(self, bad: pa.Table) -> None:
        for key, reason in zip(bad["key"].to_pylist(), bad["reason"].to_pylist(), strict=True):
            self._aside[key or b""] = reason

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

    def _sink_rows(self) -> Iterator[pa.RecordBatch]:
        self._told.begin("sink", self._round, self._rows or None)
        wanted = self._schema.arrow
        for batch in self._store.scan():
            self._told.add(batch.num_rows)
            self._check_time()
            columns = [
                batch.column(field.name).cast(field.type)
                if field.name in batch.schema.names
                else pa.nulls(batch.num_rows, field.type)
                for field in wanted
            ]
            yield pa.record_batch(columns, schema=wanted)

    def _changed(self) -> Numbers:
        """The keys that have records since the source was read."""
        self._told.begin("changes", self._round, None)
        found = []
        for records in records_since(self._cluster, self._origin.topic, self._since):
            parsed = self._parser.parse(records)
            found += [keys_of(parsed.upserts, self._schema), keys_of(parsed.deletes, self._schema)]
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
        parsed = self._parser.parse(records)
        found = [
            *zip(
                parsed.upserted_at["offset"].to_pylist(),
                map(int, keys_of(parsed.upserts, self._schema)),
                map(int, rows_of(parsed.upserts, self._schema)),
                strict=True,
            ),
            *zip(
                parsed.deleted_at["offset"].to_pylist(),
                map(int, keys_of(parsed.deletes, self._schema)),
                repeat(None, parsed.deletes.num_rows),
                strict=True,
            ),
        ]
        for _, key, row in sorted(found, key=lambda each: each[0]):
            yield key, row

    # ---- what differs --------------------------------------------------------------------

    def _explained(self, keys: Numbers, limit: int) -> list[Difference]:
        """What differs in the first of these keys, as it is now."""
        chosen = keys[:limit]
        self._round += 1
        self._since = log_ends(self._cluster, self._origin.topic)
        source: dict[int, list[dict[str, Any]]] = {}
        for parsed in self._source_rows():
            for key, row in self._picked(parsed.upserts, chosen):
                source[key] = [row]
            for key, _ in self._picked(parsed.deletes, chosen):
                source.pop(key, None)
        self._reach()
        sink: dict[int, list[dict[str, Any]]] = {}
        self._lapsing.begin()
        for batch in self._sink_rows():
            for key, row in self._picked(pa.Table.from_batches([batch]), chosen):
                sink.setdefault(key, []).append(row)
        there = np.array(list(sink), np.uint64)
        for key in self._lapsing.lapsed(self._parser, lambda keys: np.isin(keys, chosen), there):
            source.pop(int(key), None)
        found = [self._difference(source.get(key), sink.get(key)) for key in map(int, chosen)]
        made = [each for each in found if each is not None]
        return sorted(made, key=lambda each: tuple(map(_ordered, each.key.values())))

    def _picked(self, rows: pa.Table, keys: Numbers) -> Iterator[tuple[int, dict[str, Any]]]:
        numbers = keys_of(rows, self._schema)
        chosen = np.flatnonzero(np.isin(numbers, keys))
        if len(chosen):
            picked = rows.take(pa.array(chosen, pa.int64()))
            columns = [_values(picked.column(name)) for name in picked.column_names]
            for number, *row in zip(map(int, numbers[chosen]), *columns, strict=True):
                yield number, dict(zip(picked.column_names, row, strict=True))

    def _difference(
        self, source: list[dict[str, Any]] | None, sink: list[dict[str, Any]] | None
    ) -> Difference | None:
        row = (source or sink or [{}])[0]
        key = {name: row.get(name) for name in self._schema.key}
        if source is None:
            return Difference("extra", key) if sink is not None else None
        if sink is None:
            return Difference("missing", key)
        if len(sink) > 1:
            return Difference("double", key, reason=f"it is in the store {len(sink)} times")
        unlike = {
            field.name: (source[0][field.name], sink[0][field.name])
            for field in self._schema.fields
            if not _same(source[0][field.name], sink[0][field.name], field)
        }
        return Difference("other", key, unlike) if unlike else None

    # ---- time ----------------------------------------------------------------------------

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _check_time(self, what: str = "") -> None:
        if self._left() <= 0:
            raise VerifyError(
                f"{self._origin.name} and {self._store.target} could not be compared in "
                f"{self._timeout_s:.0f} s{': ' + what if what else ''}",
                advice="Give it more time with --timeout.",
            )


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


def _values(column: pa.ChunkedArray) -> list[Any]:
    """A column for people; times that Python does not have (`infinity`) as the number they are."""
    try:
        found: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        found = [_value(each) for each in column]
    return found


def _value(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return f"{value.value} ({value.type})"


def _same(one: Any, other: Any, field: pa.Field) -> bool:
    if is_json(field):
        one, other = canonical(one), canonical(other)
    return bool(one == other) or (_is_nan(one) and _is_nan(other))


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _ordered(value: Any) -> tuple[str, Any]:
    return type(value).__name__, value
