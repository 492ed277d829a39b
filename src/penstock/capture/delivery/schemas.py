"""Schemas on their way into the log: read when a session begins, written before the first event.

They are written outside of transactions. Whoever reads the topic sees them before the events that
name them, and another capture's large transaction, which is open for minutes, hides nothing of it.
A transaction that is taken back leaves its schemas, which does no harm: the next session finds them
there, with the ids that it would give them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from penstock.capture.events.registry import SchemaRegistry
from penstock.capture.source import CaptureError
from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.errors import RefusedError
from penstock.client.table_schemas import SCHEMAS_TOPIC, SchemaRecords
from penstock.client.writer import LogWriter

_LOGGER = logging.getLogger(__name__)

# Others may publish at the same time; nobody needs more than two.
_TRIES: Final = 10
_TIMEOUT_S: Final = 30.0
_REMEDY: Final = f"penstock topics alter {SCHEMAS_TOPIC} -c cleanup.policy=compact"


class SchemaTopic:
    """The topic of schemas, for one session of a capture."""

    def __init__(self, cluster: Cluster, ensure: Callable[[], None]) -> None:
        self._cluster = cluster
        self._records = SchemaRecords(cluster)
        with _explained():
            ensure()
            self._warn_of_retention()
            self.registry = SchemaRegistry(record for _, record in self._records.news())

    def publish(self) -> None:
        """Have what is pending in the log, and what others have published in the registry."""
        with _explained():
            self._publish()

    def _publish(self) -> None:
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
            advice=f"Let it keep everything: {_REMEDY}",
        )

    def _warn_of_retention(self) -> None:
        """Somebody may have made the topic before: by reading it, where that makes topics."""
        policy = topics.configs(self._cluster, SCHEMAS_TOPIC).get("cleanup.policy")
        if policy is not None and policy != "compact":
            _LOGGER.warning(
                "the topic %s has cleanup.policy=%s: it will forget schemas that events name. %s",
                SCHEMAS_TOPIC,
                policy,
                _REMEDY,
            )


@contextmanager
def _explained() -> Iterator[None]:
    """What the broker does not allow, with what to do about it."""
    try:
        yield
    except RefusedError as error:
        if error.retriable:
            raise
        raise CaptureError(
            f"cannot publish the tables' schemas: {error}",
            advice=f"{error.advice} The topic is {SCHEMAS_TOPIC}; with JSON, "
            "publish_schemas = false does without it.",
        ) from error
