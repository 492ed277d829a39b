"""Schemas on their way into the log: read when a session begins, written before the first event.

They are written outside of transactions. Whoever reads the topic sees them before the events that
name them, and another capture's large transaction, which is open for minutes, hides nothing of it.
A transaction that is taken back leaves its schemas, which does no harm: the next session finds them
there, with the ids that it would give them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from penstock.capture.events.registry import SchemaRegistry
from penstock.capture.source import CaptureError
from penstock.client.connection import Cluster
from penstock.client.table_schemas import SCHEMAS_TOPIC, SchemaRecords
from penstock.client.writer import LogWriter

# Others may publish at the same time; nobody needs more than two.
_TRIES: Final = 10
_TIMEOUT_S: Final = 30.0


class SchemaTopic:
    """The topic of schemas, for one session of a capture."""

    def __init__(self, cluster: Cluster, ensure: Callable[[], None]) -> None:
        ensure()
        self._cluster = cluster
        self._records = SchemaRecords(cluster)
        self.registry = SchemaRegistry(record for _, record in self._records.news())

    def publish(self) -> None:
        """Have what is pending in the log, and what others have published in the registry."""
        registry = self.registry
        for _ in range(_TRIES):
            registry.learn([record for _, record in self._records.news()])
            if not registry.pending:
                return
            keys, values = zip(
                *(record.encode() for record in registry.pending.values()), strict=True
            )
            with LogWriter(self._cluster, timeout_s=_TIMEOUT_S) as writer:
                writer.write(SCHEMAS_TOPIC, keys, values, partition=0)
        raise CaptureError(
            f"the topic {SCHEMAS_TOPIC} does not hold what was written to it",
            advice="Must its cleanup.policy be compact, and its retention unlimited: is it?",
        )
