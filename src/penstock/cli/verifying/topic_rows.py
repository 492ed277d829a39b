"""The rows that a topic tells, as if it were a store: the last of each key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pyarrow as pa

from penstock.cli.verifying.checksums import keys_of
from penstock.cli.verifying.origins import log_ends, records_since
from penstock.cli.verifying.set_aside import AsideKeys
from penstock.client.connection import Cluster
from penstock.sinks.contract import Position
from penstock.sinks.schema import Schema
from penstock.spark.sinking.parsing import Parser


class TopicRows:
    """What `_Comparison` asks of a store."""

    readable = True
    lifetime_s = 0

    def __init__(self, cluster: Cluster, topic: str, parser_of: Callable[[], Parser]) -> None:
        """`parser_of` gives what reads the records that there are now."""
        self.target = f"topic {topic}"
        self.aside = AsideKeys()
        self._cluster = cluster
        self._topic = topic
        self._parser_of = parser_of
        self._parser = parser_of()

    def stored_schema(self) -> Schema:
        """The columns that its records have."""
        return self._parser.schema

    def position(self) -> Position:
        """Its end."""
        return log_ends(self._cluster, self._topic)

    def wait_for(self, position: Position, timeout_s: float) -> Position:
        """A topic is never behind itself."""
        return self.position()

    def now_s(self) -> float:
        """Nothing lapses here."""
        return 0.0

    def scan(self) -> Iterator[pa.RecordBatch]:
        """The last row of each key."""
        rows, unknown = self._last_rows()
        if unknown:
            # The table was altered; what is not published is not known to anybody.
            self._parser = self._parser_of()
            lost = dict.fromkeys(unknown - self._parser.schemas.keys())
            self._parser = replace(self._parser, schemas={**self._parser.schemas, **lost})
            rows, _ = self._last_rows()
        yield from rows.combine_chunks().to_batches()

    def _last_rows(self) -> tuple[pa.Table, set[int]]:
        """The last row of each key, and the schemas that the parser does not know."""
        self.aside = AsideKeys()
        schema = self._parser.schema
        rows, keys, places = [schema.arrow.empty_table()], [], []
        count = 0
        unknown: set[int] = set()
        for records in records_since(self._cluster, self._topic):
            parsed = self._parser.parse(records)
            self.aside.note(records, parsed)
            unknown |= parsed.unknown
            found = parsed.upserts.num_rows
            rows.append(parsed.upserts)
            keys += [keys_of(parsed.upserts, schema), keys_of(parsed.deletes, schema)]
            places += [np.arange(count, count + found), np.full(parsed.deletes.num_rows, -1)]
            count += found
        if not keys:
            return rows[0], unknown
        numbers, at = np.concatenate(keys), np.concatenate(places)
        # Within one parse no key is in both; the later parse counts.
        order = np.argsort(numbers, kind="stable")
        numbers, at = numbers[order], at[order]
        last = np.ones(len(numbers), np.bool_)
        last[:-1] = numbers[:-1] != numbers[1:]
        at = np.sort(at[last & (at >= 0)])
        return pa.concat_tables(rows).take(pa.array(at, pa.int64())), unknown
