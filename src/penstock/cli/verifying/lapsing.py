"""Which rows of the source a store with a time to live has no longer.

A row lapses `lifetime_s` after the time of its last record, by the store's clock. The log has these
times, for the tables of databases too: a key that has no record there does not lapse, and is told
if it is missing. What lapses about when the store is read may be there or not, and is right in both
cases; what is there after that is too many.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.cli.verifying.checksums import Digest, Numbers
from penstock.cli.verifying.origins import records_since
from penstock.cli.verifying.topic_rows import TopicRows
from penstock.client.connection import Cluster
from penstock.sinks.contract import Sink
from penstock.spark.sinking.parsing import Parser

# A store may be so late with taking rows out, and its clock is asked before and after.
MARGIN_S: Final = 1.0
_NEVER: Final = np.uint64(2**63)

KeysOf = Callable[[pa.Table], Numbers]


class Lapsing:
    """Of one comparison: `begin` before the store is read, `lapsed` when it was."""

    def __init__(self, cluster: Cluster, topic: str, store: Sink | TopicRows) -> None:
        self._cluster = cluster
        self._topic = topic
        self._store = store
        self._began_s = 0.0

    def begin(self) -> None:
        if self._store.lifetime_s:
            self._began_s = self._store.now_s()

    def lapsed(
        self, parser: Parser, keys: KeysOf, chosen: Callable[[Numbers], Any], there: Numbers
    ) -> Numbers:
        """The chosen keys that the store should not have, and those that it may lack and does;
        `there` are those that it has. `keys` gives the checksums of the keys of parsed rows."""
        if not self._store.lifetime_s:
            return np.zeros(0, np.uint64)
        ended_s = self._store.now_s()
        times = self._times(parser, keys, chosen)
        surely = times.rows <= self._recorded_us(self._began_s - MARGIN_S)
        perhaps = times.rows <= self._recorded_us(ended_s + MARGIN_S)
        gone: Numbers = times.keys[surely | (perhaps & ~np.isin(times.keys, there))]
        return gone

    def _recorded_us(self, end_s: float) -> np.uint64:
        """The time of a record whose row lapses then."""
        return np.uint64(max(0, int((end_s - self._store.lifetime_s) * 1_000_000)))

    def _times(self, parser: Parser, keys_of: KeysOf, chosen: Callable[[Numbers], Any]) -> Digest:
        """The time of the last record of each key, instead of a checksum."""
        found = Digest()
        for records in records_since(self._cluster, self._topic):
            parsed = parser.parse(records)
            keys = keys_of(parsed.upserts)
            wanted = chosen(keys)
            found.put(keys[wanted], _microseconds(parsed.upserted_at)[wanted])
            gone = keys_of(parsed.deletes)
            found.take_out(gone[chosen(gone)])
        return found.sort(last_counts=True)


def _microseconds(origin: pa.Table) -> Numbers:
    """Times since 1970; of records that have none, far in the future."""
    times = pc.fill_null(origin.column("timestamp").cast(pa.int64()), -1).to_numpy()
    found: Numbers = np.where(times < 0, _NEVER, times.astype(np.uint64))
    return found
