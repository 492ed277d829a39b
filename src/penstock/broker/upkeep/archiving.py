"""The archive round by round: closed segments go there, expired ones go from there.

The archive may be slow or out of reach: every call runs on a thread, nothing waits for it but
these rounds, and what fails is tried again ever more rarely. A partition's local segments stay
until they are archived, unless `retention.*` says that they are to go anyway.

Deleting a topic leaves objects behind. Their folders are noted in the data directory before they
are removed, so that a stop in between does not leave them for ever.
"""

from __future__ import annotations

import logging
import os
from functools import partial

from penstock.broker.upkeep.care import Backoff, Care, Workshop
from penstock.errors import PenstockError
from penstock.log.archive import Archive, ArchivedLog, ArchiveReader, Manifest
from penstock.log.checkpoint import read_checkpoint, write_checkpoint
from penstock.log.partition import Partition
from penstock.log.tiering import (
    REMOVALS_FILE,
    archive_folder,
    next_upload,
    publish,
    reconcile,
    remove_archived,
    remove_segments,
)

log = logging.getLogger(__name__)


class ArchiveRounds:
    """Moves closed segments to the archive."""

    def __init__(self, workshop: Workshop, archive: Archive | None) -> None:
        self._workshop = workshop
        self._archive = archive
        self._reader = ArchiveReader(archive) if archive is not None else None
        self._removals: list[str] = []
        self._removal = Backoff()
        self._warned: set[str] = set()

    def attach(self) -> None:
        """Let archived records be read; before the broker serves anyone."""
        store = self._workshop.store
        path = os.path.join(store.folder, REMOVALS_FILE)
        rows = read_checkpoint(store.disk, path, columns=1) or []
        self._removals = [folder for (folder,) in rows]
        for partition in store.partitions.values():
            self._attach(partition)
            if partition.archived.segments and self._archive is None:
                log.error(
                    "%s has records in an archive and the broker was started without one: they "
                    "cannot be read. Start it with the --archive that it had.",
                    partition.id,
                )

    def _attach(self, partition: Partition) -> None:
        if partition.archived.segments and partition.archived.reader is not self._reader:
            partition.archived = ArchivedLog(partition.archived.manifest, self._reader)

    async def round(self) -> None:
        """One partition after the other; then what is left of deleted ones."""
        if self._archive is None:
            return
        for care in await self._workshop.partitions():
            await self._workshop.breathe()
            if self._wanted(care):
                with self._workshop.guard("archiving", care.partition, care.archiving):
                    await self._archive_partition(self._archive, care)
        await self._remove_deleted(self._archive)

    def warn_without_archive(self, partition: Partition) -> None:
        """Say once that a topic wants an archive and there is none."""
        if self._archive is None and partition.config.remote_storage_enable:
            if partition.id.topic not in self._warned:
                log.warning(
                    "topic %s has remote.storage.enable and the broker has no archive",
                    partition.id.topic,
                )
            self._warned.add(partition.id.topic)

    def _wanted(self, care: Care) -> bool:
        partition = care.partition
        used = partition.config.remote_storage_enable or bool(partition.archived.segments)
        healthy = not partition.gone and partition.failure is None
        in_memory = partition.config.durability == "memory"
        ready = care.archiving.ready(self._workshop.now_ms())
        return used and healthy and ready and not in_memory

    async def _archive_partition(self, archive: Archive, care: Care) -> None:
        partition = care.partition
        if not care.reconciled:
            async with care.lock:
                if partition.gone:
                    return
                await self._workshop.whole(self._reconcile(archive, care))
        folder = partition.archived.manifest.folder
        while partition.config.remote_storage_enable and not partition.gone:
            upload = next_upload(partition)
            if upload is None:
                break
            segment = await self._workshop.on_thread(
                partial(upload.run, archive, folder, lambda: self._workshop.stopping)
            )
            async with care.lock:
                manifest = partition.archived.manifest.with_segment(segment)
                await self._workshop.whole(self._publish(archive, partition, manifest))
            self._workshop.counters.segments_archived += 1
            self._workshop.counters.bytes_archived += segment.size
        async with care.lock:
            if partition.archived.segments and not partition.gone:
                await self._workshop.whole(self._expire(archive, partition))

    async def _reconcile(self, archive: Archive, care: Care) -> None:
        partition = care.partition
        manifest = partition.archived.manifest
        if not manifest.folder:
            cluster_id = self._workshop.store.cluster_id
            folder = await self._workshop.on_thread(partial(archive_folder, cluster_id, partition))
            manifest = Manifest(folder)
        manifest = await self._workshop.on_thread(
            partial(reconcile, archive, partition.disk, partition.folder, manifest)
        )
        partition.archived = ArchivedLog(manifest, self._reader)
        care.reconciled = True

    async def _publish(self, archive: Archive, partition: Partition, manifest: Manifest) -> None:
        if partition.gone:
            # Its folder may be another topic's by now.
            return
        await self._workshop.on_thread(
            partial(publish, archive, partition.disk, partition.folder, manifest)
        )
        partition.archived = ArchivedLog(manifest, self._reader)

    async def _expire(self, archive: Archive, partition: Partition) -> None:
        """Archived segments below the start of the log go, once that start is durable."""
        start = partition.log_start
        manifest = partition.archived.manifest
        expired = [item for item in manifest.segments if item.end_offset <= start]
        if not expired:
            return
        await self._workshop.checkpoint()
        await self._publish(archive, partition, manifest.from_offset(start))
        await self._workshop.on_thread(partial(remove_segments, archive, manifest.folder, expired))

    # ---- deleted topics ------------------------------------------------------------------

    def note_deletion(self, partition: Partition) -> None:
        """What the partition has in the archive is to go; durable on return."""
        folder = partition.archived.manifest.folder
        if folder and folder not in self._removals:
            self._removals.append(folder)
            self._save_removals()

    def _save_removals(self) -> None:
        store = self._workshop.store
        rows = [(folder,) for folder in self._removals]
        write_checkpoint(store.disk, os.path.join(store.folder, REMOVALS_FILE), rows)

    async def _remove_deleted(self, archive: Archive) -> None:
        now_ms = self._workshop.now_ms()
        for folder in list(self._removals):
            if not self._removal.ready(now_ms):
                return
            try:
                await self._workshop.on_thread(partial(remove_archived, archive, folder))
                self._removals.remove(folder)
                await self._workshop.on_thread(self._save_removals)
                self._removal.succeeded()
            except PenstockError as error:
                self._workshop.counters.failures += 1
                self._removal.failed(now_ms)
                log.warning("removing %s from the archive: %s", folder, error)
