"""Topics, made when they are needed first; those that are there are left as they are."""

from __future__ import annotations

from typing import Final

from penstock.capture.delivery.config import TopicSettings
from penstock.capture.delivery.signals import SIGNALS_TOPIC
from penstock.capture.delivery.state import CAPTURE_TOPIC, state_topic
from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.client.table_schemas import SCHEMAS_TOPIC, SCHEMAS_TOPIC_CONFIG
from penstock.client.topics import create

_WEEK_MS: Final = 7 * 24 * 3_600_000
# Rows of databases are larger than messages use to be; brokers take 1 MB unless told otherwise.
_MESSAGE_MAX_BYTES: Final = 20 << 20
_COMPACT: Final = {"cleanup.policy": "compact"}


class Topics:
    """Makes topics of one capture."""

    def __init__(self, cluster: Cluster, settings: TopicSettings) -> None:
        self._cluster = cluster
        self._settings = settings
        self._metadata = Metadata(cluster)
        self._known: set[str] = set()

    def ensure(self, topic: str, *, compacted: bool) -> None:
        """Have a topic of events."""
        if topic in self._known:
            return
        config = {"max.message.bytes": str(_MESSAGE_MAX_BYTES), **self._settings.config}
        partitions = self._settings.partitions
        if topic == SCHEMAS_TOPIC:
            config, partitions = dict(SCHEMAS_TOPIC_CONFIG), 1
        if compacted:
            config |= _COMPACT
        self._create(topic, partitions, config)

    def ensure_own(self, name: str) -> None:
        """Have the topics that a capture needs for itself."""
        self._create(state_topic(name), 1, _COMPACT)
        self._create(CAPTURE_TOPIC, 1, _COMPACT)
        self._create(SIGNALS_TOPIC, 1, {"retention.ms": str(_WEEK_MS)})

    def partitions(self, topic: str) -> int:
        """How many partitions a topic of a table has; it is made if it is not there."""
        self.ensure(topic, compacted=True)
        return len(self._metadata.partitions(topic))

    def exists(self, topic: str) -> bool:
        return topic in self._known or bool(self._metadata.topics([topic]))

    def _create(self, topic: str, partitions: int, config: dict[str, str]) -> None:
        create(
            self._cluster,
            topic,
            partitions=partitions,
            replication=self._settings.replication,
            config=config,
            exists_ok=True,
        )
        self._known.add(topic)
