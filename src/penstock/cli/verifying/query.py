"""A query of the captured database, compared with what flows have made of the log.

The answer's rows are brought to the store's columns, each value as what it means in the source. A
derived topic follows with its flows: so what the store has counts only when the capture has written
what the answer showed, each flow between has read that, and the store has what they wrote.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.events.composer import Composer
from penstock.capture.source import Position as DatabasePosition
from penstock.capture.sources import open_source
from penstock.cli.verifying.captured import CaptureProgress
from penstock.cli.verifying.checksums import Numbers, checksums, keys_of, rows_of
from penstock.cli.verifying.databases import Answer, AnswerColumn, open_database
from penstock.cli.verifying.flow_graph import FlowGraph, wait_for_flow
from penstock.cli.verifying.origins import Origin, events_of, log_ends
from penstock.cli.verifying.report import VerifyError
from penstock.cli.verifying.set_aside import SetAside
from penstock.cli.verifying.values import UNREAD, Form, Meaning, form_of, meaning_of
from penstock.client.connection import Cluster
from penstock.sinks.contract import ORIGIN, Position
from penstock.sinks.schema import Schema, is_json
from penstock.spark.sinking.parsing import BAD, Parsed, Parser

# Rows of which keys are told without a value.
_MAX_NULL_KEYS: Final = 1000


class QueryOrigin(Origin):
    """What a database answers to a query."""

    has_forms = True

    def __init__(
        self, cluster: Cluster, config: CaptureConfig, sql: str, topic: str, sink: str,
        stored: Schema, flows: FlowGraph, tolerance: float, deadline: float,
    ) -> None:  # fmt: skip
        """`sink` is what the query is compared with, for people."""
        super().__init__()
        self.topic = topic
        self.name = f"query of {config.name}"
        self._cluster, self._config, self._deadline = cluster, config, deadline
        self._sink = sink
        self._sql = sql.strip().rstrip(";").strip()
        if not self._sql:
            raise VerifyError("the query is empty", advice="It is one SELECT statement.")
        self._stored = stored
        self._tolerance = tolerance
        self._position: DatabasePosition | None = None
        self._asked_at = Position()
        self._columns: Sequence[AnswerColumn] = ()
        self._meanings: dict[str, Meaning] = {}
        self._floats: frozenset[str] = frozenset()
        self._answer: list[pa.Table] = []
        self._index: tuple[Numbers, Numbers, Any] | None = None
        with open_source(config.source) as source:
            self._progress = CaptureProgress(cluster, config, source.kind)
            self._database = open_database(source.kind, config.source)
            events = events_of(config, source.kind)
            tables = {
                table.full_name: composer.topic
                for table in source.tables()
                if isinstance(composer := events.composer(table, b"{}"), Composer)
            }
        self._progress.check()
        self._flows = flows.upstream(topic)
        self._resolve = flows.resolve
        self._read = self._captured(flows, tables)
        self._tables = {name for name, each in tables.items() if each in self._read}

    def _captured(self, flows: FlowGraph, tables: Mapping[str, str]) -> frozenset[str]:
        """The topics at the beginning of what leads to ours: those that the flows read first."""
        if not self._flows:
            if self.topic not in tables.values():
                raise VerifyError(
                    f"{self.topic} is no topic of capture {self._config.name}, and which flow "
                    f"writes it is not known in {flows.data}",
                    advice="Run this where `penstock run` keeps its flows, or name the folder with "
                    "--data.",
                )
            return frozenset({self.topic})
        written = {topic for flow in self._flows for topic in flow.topics}
        written |= {topic for flow in self._flows for topic in flow.topics.values()}
        first = {topic for flow in self._flows for topic in flow.streams} - written
        if not first & set(tables.values()):
            raise VerifyError(
                f"{self.topic} comes from {', '.join(sorted(first)) or 'no topic'}, of which "
                f"capture {self._config.name} writes none",
                advice="Name the capture of the database that the query is for.",
            )
        return frozenset(first)

    # ---- the answer ----------------------------------------------------------------------

    @property
    def form(self) -> Form:
        """How both sides' values are compared; known when rows were read."""
        schema = Schema(
            tuple(each for each in self._stored.fields if each.name in self._meanings),
            self._stored.key,
        )
        return Form(schema, self._meanings)

    @property
    def not_compared(self) -> list[str]:
        """Columns of the store that the answer does not have."""
        return [name for name in self._stored.names if name not in self._meanings]

    def rows(self, parser: Parser) -> Iterator[Parsed]:
        self._asked_at = self._ends()
        self._null_keys: list[SetAside] = []
        self.aside_count = 0
        self._answer, self._index = [], None
        left_s = max(self._deadline - time.monotonic(), 0.001)
        with self._database.asked(self._sql, left_s) as answer:
            names = _placed(answer, self._stored, self._sink)
            for found in answer.rows():
                columns = list(zip(*found, strict=True))
                yield self._formed(answer, names, columns)
            if not self._meanings:
                yield self._formed(answer, names, [()] * len(names))
            self._position = answer.position()

    def _formed(self, answer: Answer, names: Sequence[str], columns: Sequence[Any]) -> Parsed:
        if not self._meanings:
            self._learn(answer.columns, names, columns)
        by_name = {
            name: pa.array([form_of(each, self._meanings[name]) for each in values], pa.string())
            for name, values in zip(names, columns, strict=True)
        }
        schema = self.form.schema
        table = pa.table([by_name[name] for name in schema.names], names=list(schema.names))
        rows = self._without_null_keys(table)
        if self._tolerance:
            self._answer.append(rows)
        return _parsed(rows, schema)

    def _learn(
        self, columns: Sequence[AnswerColumn], names: Sequence[str], values: Sequence[Any]
    ) -> None:
        """What the answer's columns mean; from then on that stays."""
        floats = set()
        for column, name, some in zip(columns, names, values, strict=True):
            field = self._stored.field(name)
            self._meanings[name] = _meaning(column, some, field)
            if (
                column.is_float
                or pa.types.is_floating(field.type)
                or any(isinstance(each, float) for each in some)
            ):
                floats.add(name)
        self._floats = frozenset(floats - set(self._stored.key))

    def _without_null_keys(self, table: pa.Table) -> pa.Table:
        key = list(self._stored.key)
        if not any(table.column(name).null_count for name in key):
            return table
        kept = []
        for at, row in enumerate(table.select(key).to_pylist()):
            missing = [name for name in key if row[name] is None]
            if not missing:
                kept.append(at)
                continue
            self.aside_count += 1
            if len(self._null_keys) < _MAX_NULL_KEYS:
                told = ", ".join("NULL" if each is None else each for each in row.values())
                why = f"column {missing[0]} of the key is NULL, which no store can have"
                self._null_keys.append(SetAside(told, why, 0, 0))
        return table.take(pa.array(kept, pa.int64()))

    def set_aside(self) -> tuple[int, list[SetAside]]:
        return self.aside_count, self._null_keys

    # ---- when it counts ------------------------------------------------------------------

    def settle(self, deadline: float) -> None:
        """Wait for the capture, and for each flow in the order of the data."""
        assert self._position is not None
        self._progress.wait(self._position, self._tables, deadline)
        for flow in self._flows:
            wanted = Position()
            for topic in flow.streams:
                wanted = wanted.merged(log_ends(self._cluster, self._resolve(topic)))
            wait_for_flow(self._cluster, flow, wanted, lambda: deadline - time.monotonic())

    @property
    def is_exact(self) -> bool:
        """Whether what differs does so for sure: without flows the log has each change of a key."""
        return not self._flows

    def is_quiet(self) -> bool:
        """Whether nothing was captured since before the query was asked: then each flow has read
        exactly what the answer shows."""
        return self._ends().offsets == self._asked_at.offsets

    def _ends(self) -> Position:
        ends = Position()
        for topic in self._read:
            ends = ends.merged(log_ends(self._cluster, topic))
        return ends

    def estimate(self) -> int | None:
        return None

    # ---- floats --------------------------------------------------------------------------

    def forgiven(self, rows: pa.Table, keys: Numbers, numbers: Numbers) -> Numbers:
        """The checksums of a store's rows; of those whose floats are as near as was asked for,
        that of the answer's row."""
        if not self._tolerance or not self._floats:
            return numbers
        if self._index is None:
            schema = self.form.schema
            whole = pa.concat_tables(self._answer) if self._answer else schema.arrow.empty_table()
            known = keys_of(whole, schema)
            order = np.argsort(known, kind="stable")
            self._index = known[order], rows_of(whole, schema)[order], whole.take(pa.array(order))
        known, wanted, answer = self._index
        if not len(known):
            return numbers
        at = np.minimum(np.searchsorted(known, keys), len(known) - 1)
        candidates = np.flatnonzero((known[at] == keys) & (wanted[at] != numbers))
        exact = [field for field in self.form.schema.fields if field.name not in self._floats]
        if not len(candidates):
            return numbers
        mine = rows.take(pa.array(candidates))
        theirs = answer.take(pa.array(at[candidates]))
        same = _sums(mine, exact) == _sums(theirs, exact)
        for name in self._floats:
            same &= [
                self.near(one, other)
                for one, other in zip(
                    mine.column(name).to_pylist(), theirs.column(name).to_pylist(), strict=True
                )
            ]
        result = numbers.copy()
        result[candidates[same]] = wanted[at[candidates[same]]]
        return result

    def same(self, name: str, one: str | None, other: str | None) -> bool:
        """Whether two forms of a column count as equal."""
        return one == other or (name in self._floats and self.near(one, other))

    def near(self, one: str | None, other: str | None) -> bool:
        """Whether two numbers are as near as was asked for."""
        if one is None or other is None or one.startswith(UNREAD) or other.startswith(UNREAD):
            return one == other
        if one == other:
            return True
        first, second = float(one), float(other)
        return abs(first - second) <= self._tolerance * max(abs(first), abs(second))


def _sums(rows: pa.Table, fields: Sequence[pa.Field]) -> Numbers:
    parts = [checksums(batch, list(fields)) for batch in rows.combine_chunks().to_batches()]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def _placed(answer: Answer, stored: Schema, sink: str) -> list[str]:
    """The store's column for each of the answer's; VerifyError with the remedy if there is none."""
    given = [each.name for each in answer.columns]
    folded: dict[str, list[str]] = {}
    for name in stored.names:
        folded.setdefault(name.casefold(), []).append(name)
    names = []
    for name in given:
        alike = folded.get(name.casefold(), [])
        names.append(name if name in stored.names else alike[0] if len(alike) == 1 else "")
    missing = [name for name in stored.key if name not in names]
    if missing:
        raise VerifyError(
            f"the query has no column {missing[0]}, by which the rows of {sink} are told apart; it "
            f"has {', '.join(given)}",
            advice=f"Rows are compared by their key: SELECT ... AS {missing[0]}.",
        )
    unknown = [name for name, place in zip(given, names, strict=True) if not place]
    if unknown:
        left = [name for name in stored.names if name not in names]
        has = f"; of its columns the query lacks {', '.join(left)}" if left else ""
        raise VerifyError(
            f"{sink} has no column {', '.join(unknown)}, as the query does{has}",
            advice=f"Name the query's columns as those of {sink}, with AS, or leave them out.",
        )
    doubled = [name for name in names if names.count(name) > 1]
    if doubled:
        raise VerifyError(
            f"the query has column {doubled[0]} twice", advice="Name each column once, with AS."
        )
    return names


def _meaning(column: AnswerColumn, values: Sequence[Any], stored: pa.Field) -> Meaning:
    """What a column of an answer means: as the database says, or else its values and the store."""
    there = meaning_of(stored)
    meaning = column.meaning
    if meaning is None:
        kinds = {type(each) for each in values} - {type(None)}
        if not kinds:
            return there
        if kinds <= {bytes}:
            meaning = "bytes"
        elif str in kinds:
            # SQLite has neither dates nor decimals, but texts of them.
            meaning = there if there != "bytes" else "text"
        else:
            meaning = "number"
    if meaning == "text" and is_json(stored):
        return "json"
    return "boolean" if meaning in ("text", "bytes") and there == "boolean" else meaning


def _parsed(rows: pa.Table, schema: Schema) -> Parsed:
    """As if it had come from the log."""
    origin = ORIGIN.empty_table()
    return Parsed(
        rows.cast(schema.arrow), origin, schema.key_arrow.empty_table(), origin, BAD.empty_table(),
        records=rows.num_rows,
    )  # fmt: skip
