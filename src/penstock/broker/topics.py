"""Topics as they come, change and go: the catalog's word, the partitions' files, and who must know.

A topic's record in the catalog is the truth. Its partitions are made before the record is written
and undone if it cannot be; they are removed after the record is gone. So at any moment every topic
of the catalog has its partitions, and a crash leaves at most files that belong to no topic, which
the next start clears away. Of one name one thing happens at a time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

from penstock.broker.catalog import ApiError, KeyValue, Topic
from penstock.broker.waiting import NameLocks
from penstock.errors import StorageError
from penstock.log.disk import Disk
from penstock.log.partition import Partition, PartitionId
from penstock.wire.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.server import Broker

log = logging.getLogger(__name__)

_DELETION_PATIENCE_S: Final = 1.0


class Topics:
    """The partitions of all topics, by name."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._by_name: dict[str, list[Partition]] = {}
        self._names = NameLocks()
        # Deleted topics whose files are not gone yet: their names wait for it.
        self._cleaning: dict[str, asyncio.Task[None]] = {}

    def partition(self, topic: str, number: int) -> Partition | None:
        partitions = self._by_name.get(topic)
        if partitions is None or not 0 <= number < len(partitions):
            return None
        return partitions[number]

    def load(self, topic: Topic) -> None:
        """Open the partitions of a topic that is in the catalog, at a start."""
        self._by_name[topic.name] = [self._load(topic, at) for at in range(topic.partitions)]

    def _load(self, topic: Topic, number: int, disk: Disk | None = None) -> Partition:
        return self._broker.store.load(
            PartitionId(topic.name, number),
            topic.config,
            topic_id=topic.id,
            leader_epoch=self._broker.leader_epoch,
            disk=disk,
        )

    async def create(self, name: str, partitions: int, settings: Mapping[str, str]) -> Topic:
        """Make a topic; ApiError or StorageError if it cannot be, and then nothing is made."""
        async with self._names.alone(name):
            if name in self._cleaning:
                await asyncio.wait([self._cleaning[name]])
            await self._with_new_partitions(
                lambda: self._broker.catalog.create_topic(name, partitions, settings)
            )
        topic = self._broker.catalog.topics[name]
        log.info("created topic %s with %d partitions", name, topic.partitions)
        return topic

    async def _with_new_partitions(self, command: Callable[[], list[KeyValue]]) -> None:
        """Commit a topic's record once its new partitions are there; undo them otherwise."""
        name, made = "", list[PartitionId]()

        async def make(records: list[KeyValue]) -> None:
            nonlocal name
            topic = self._broker.catalog.topic_in(records[0])
            name, store = topic.name, self._broker.store
            numbers = range(len(self._by_name.get(name, ())), topic.partitions)
            disk = store.disk_for_new(len(numbers))
            await self._make(topic, numbers, disk, made)
            if disk is None:
                return
            on_thread = self._broker.loop.run_in_executor
            try:
                await on_thread(None, disk.sync_all)
            except StorageError as error:
                if not store.bulk_sync_failed:
                    raise
                # It may be about anything in the file system, and is told once: what was made
                # goes, and is made again with syncs that tell of nothing else.
                log.warning("%s; each partition of %s is synced by itself", error, name)
                doomed = store.detach(made)
                made.clear()
                await on_thread(None, store.erase, doomed)
                await self._make(topic, numbers, None, made)
            else:
                store.made_on(disk, made)

        try:
            await self._broker.metadata_log.commit(command, make)
        except BaseException:
            self._broker.store.erase(self._detach(made))
            raise
        fresh = [self._broker.store.partitions[id_] for id_ in made]
        self._by_name.setdefault(name, []).extend(fresh)
        for partition in fresh:
            self._broker.overload.follow(partition)
        self._broker.recompression.follow(fresh, fresh=True)

    async def _make(
        self, topic: Topic, numbers: Iterable[int], disk: Disk | None, made: list[PartitionId]
    ) -> None:
        """Make partitions, and note down in `made` which were begun."""
        for number in numbers:
            made.append(PartitionId(topic.name, number))
            # What a deleted topic of the same name may have left.
            self._broker.store.delete(made[-1])
            partition = self._load(topic, number, disk)
            # Now, so that the first write need not wait for the disk.
            partition.epochs.assign(partition.leader_epoch, partition.log_end)
            await asyncio.sleep(0)

    def _detach(self, ids: list[PartitionId]) -> list[str]:
        """Let go of partitions that the catalog does not know; their folders, out of the way."""
        gone = [
            self._broker.store.partitions[id_]
            for id_ in ids
            if id_ in self._broker.store.partitions
        ]
        try:
            doomed = self._broker.store.detach(ids)
        except StorageError as error:
            # What is left goes at the next start, or when a topic of this name is made.
            log.error("files of %s could not be removed: %s", ids[0].topic, error)
            doomed = []
        for partition in gone:
            self._let_go(partition)
        return doomed

    def _let_go(self, partition: Partition) -> None:
        """The partition is gone: tell those who wait for it, and forget the ways to it."""
        partition.gone = True
        self._broker.on_synced(partition)
        self._broker.overload.leave(partition)
        self._broker.recompression.leave(partition)
        for connection in self._broker.connections:
            connection.targets.forget(partition)

    async def create_if_absent(self, name: str) -> Topic:
        """Auto-creation: another client may have been quicker."""
        try:
            return await self.create(name, -1, {})
        except ApiError as error:
            if error.code != ErrorCode.TOPIC_ALREADY_EXISTS:
                raise
            return self._broker.catalog.topics[name]

    async def delete(self, topic: Topic) -> None:
        """Delete a topic; its files are gone on return, unless the disk or the archive hangs."""
        async with self._names.alone(topic.name):
            await self._broker.metadata_log.commit(lambda: self._broker.catalog.delete_topic(topic))
            partitions = self._by_name.pop(topic.name, [])
            for partition in partitions:
                self._let_go(partition)
            self._broker.coordination.topic_deleted(topic)
            cleaning = self._broker.task(self._clean_up(topic.name, partitions))
            self._cleaning[topic.name] = cleaning
        await asyncio.wait([cleaning], timeout=_DELETION_PATIENCE_S)
        log.info("deleted topic %s", topic.name)

    async def _clean_up(self, name: str, partitions: list[Partition]) -> None:
        """Remove a deleted topic's files once nobody works on them any more."""
        assert self._broker.housekeeping is not None
        try:
            for partition in partitions:
                await self._broker.committer.settled(partition)
                await self._broker.housekeeping.let_go(partition)
            doomed = self._detach([partition.id for partition in partitions])
            await self._broker.loop.run_in_executor(None, self._broker.store.erase, doomed)
        finally:
            del self._cleaning[name]

    async def add_partitions(self, name: str, count: int) -> None:
        async with self._names.alone(name):
            await self._with_new_partitions(
                lambda: self._broker.catalog.add_partitions(self._broker.catalog.topic(name), count)
            )

    async def change_settings(
        self, name: str, change: Callable[[Mapping[str, str]], Mapping[str, str]]
    ) -> None:
        """Give a topic the settings that `change` makes of those it has by then."""

        def command() -> list[KeyValue]:
            topic = self._broker.catalog.topic(name)
            records = self._broker.catalog.change_settings(topic, change(topic.settings))
            archived = any(partition.archived.segments for partition in self._by_name[name])
            if archived and self._broker.catalog.topic_in(records[0]).config.compacted:
                raise ApiError(
                    ErrorCode.INVALID_CONFIG, "an archived topic cannot be compacted any more"
                )
            return records

        await self._broker.metadata_log.commit(command)
        self._refit([name])

    async def change_defaults(
        self, broker: str, change: Callable[[Mapping[str, str]], Mapping[str, str]]
    ) -> None:
        """Give a broker, or all of them, the settings that `change` makes of those it has."""
        catalog = self._broker.catalog

        def command() -> list[KeyValue]:
            settings = change(catalog.broker_settings.get(broker, {}))
            records = catalog.change_broker_settings(broker, settings)
            if "compact" in settings.get("log.cleanup.policy", "") and self._any_archived():
                raise ApiError(
                    ErrorCode.INVALID_REQUEST, "archived topics cannot be compacted any more"
                )
            return records

        await self._broker.metadata_log.commit(command)
        self._refit(name for name in self._by_name if name in catalog.topics)

    def _any_archived(self) -> bool:
        """Whether something is in the archive of a topic without a cleanup.policy of its own."""
        topics = self._broker.catalog.topics
        return any(
            partition.archived.segments
            for name, partitions in self._by_name.items()
            if name in topics and "cleanup.policy" not in topics[name].settings
            for partition in partitions
        )

    def _refit(self, names: Iterable[str]) -> None:
        """The settings of topics have changed, perhaps: their partitions go on with them."""
        changed: list[Partition] = []
        for name in names:
            config = self._broker.catalog.topics[name].config
            for partition in self._by_name[name]:
                if partition.config != config:
                    partition.reconfigure(config)
                    changed.append(partition)
        self._broker.recompression.follow(changed)
        for partition in changed:
            self._broker.overload.follow(partition)
            self._broker.on_synced(partition)
            self._broker.committer.request(partition)
