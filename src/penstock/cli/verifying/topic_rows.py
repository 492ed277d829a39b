"""The rows that a topic tells, as if it were a store: the last of each key."""

from __future__ import annotations

from collections.abc import Iterator

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

    def __init__(self, cluster: Cluster, topic: str, parser: Parser) -> None:
        self.target = f"topic {topic}"
        self.aside = AsideKeys()
        self._cluster = cluster
        self._topic = topic
        self._parser = parser

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
        self.aside = AsideKeys()
        schema = self._parser.schema
        rows, keys, places = [], [], []
        count = 0
        for records in records_since(self._cluster, self._topic):
            parsed = self._parser.parse(records)
            self.aside.note(records, parsed)
            found = parsed.upserts.num_rows
            rows.append(parsed.upserts)
            keys += [keys_of(parsed.upserts, schema), keys_of(parsed.deletes, schema)]
            places += [np.arange(count, count + found), np.full(parsed.deletes.num_rows, -1)]
            count += found
        if not rows:
            return
        numbers, at = np.concatenate(keys), np.concatenate(places)
        # Within one parse no key is in both; the later parse counts.
        order = np.argsort(numbers, kind="stable")
        numbers, at = numbers[order], at[order]
        last = np.ones(len(numbers), np.bool_)
        last[:-1] = numbers[:-1] != numbers[1:]
        at = np.sort(at[last & (at >= 0)])
        yield from pa.concat_tables(rows).take(pa.array(at)).combine_chunks().to_batches()
