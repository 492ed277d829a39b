"""The first offset that each group still needs, whatever its kind.

Of a consumer group that is its committed offset; of a share group its start offset, below which
every record is finished. An offset counts only if its topic is the one that it was committed for.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from penstock.broker.lag.watch import Offset

if TYPE_CHECKING:
    from penstock.broker.catalog import Catalog
    from penstock.broker.coordination import Coordination


class GroupPositions:
    """All groups of a broker, as `LagWatch` looks at them."""

    def __init__(self, coordination: Coordination, catalog: Catalog) -> None:
        self._coordination = coordination
        self._catalog = catalog

    def groups(self) -> list[str]:
        coordination = self._coordination
        return list(dict.fromkeys([*coordination.groups.offsets.by_group, *self._shares()]))

    def of(self, group: str) -> Iterator[Offset]:
        known = self._coordination.groups.get(group)
        if known is not None and known.kind == "share":
            yield from self._of_share(group)
        else:
            yield from self._of_consumers(group)

    def _of_consumers(self, group: str) -> Iterator[Offset]:
        groups = self._coordination.groups
        for topic, partition in list(groups.offsets.of(group)):
            offset = groups.committed(group, topic, partition)
            if offset is not None and offset >= 0:
                yield Offset(topic, partition, offset)

    def _shares(self) -> Iterator[str]:
        return self._coordination.shares.groups()

    def _of_share(self, group: str) -> Iterator[Offset]:
        for queue in self._coordination.shares.queues_of(group):
            topic = self._catalog.topics.get(queue.topic)
            if topic is not None and topic.id_text == queue.key[1]:
                yield Offset(queue.topic, queue.number, queue.share.start)
