"""All partitions of a data directory, and what is known of the directory as a whole.

    DIR/meta.properties                      whose directory it is
    DIR/.lock                                held while a broker runs on it
    DIR/clean-shutdown                       there only after a clean stop
    DIR/recovery-point-offset-checkpoint     up to where each partition is synced
    DIR/log-start-offset-checkpoint          where each partition begins
    DIR/partition-states                     what a start after a clean stop need not look for
    DIR/TOPIC-N/…                            one folder a partition

The marker of a clean stop is removed, durably, before anything is opened for writing. The two
checkpoints are written now and then and at a stop; being behind costs only work at recovery.
"""

from __future__ import annotations

import base64
import logging
import os
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from penstock.errors import DataDirectoryError, DiskFullError, StorageError
from penstock.log.archive import LOCAL_COPY
from penstock.log.checkpoint import read_checkpoint, seal, unseal, write_checkpoint
from penstock.log.clock import Clock, SystemClock
from penstock.log.config import TopicConfig
from penstock.log.deferred_sync import DeferredSyncDisk
from penstock.log.disk import (
    BulkSync,
    Disk,
    OsDisk,
    make_dirs_durably,
    read_whole,
    write_atomically,
)
from penstock.log.memory import MemoryDisk, OffsetReserve
from penstock.log.open_logs import OpenLogs
from penstock.log.partition import Partition, PartitionId
from penstock.log.partition_states import (
    STATES_FILE,
    StoredState,
    decode_states,
    encode_states,
    marker_for,
    restore,
    store_state,
)
from penstock.log.recovery import Known, open_partition
from penstock.log.segment import LOG_SUFFIX

log = logging.getLogger(__name__)

META_FILE: Final = "meta.properties"
LOCK_FILE: Final = ".lock"
CLEAN_MARKER: Final = "clean-shutdown"
RECOVERY_POINTS: Final = "recovery-point-offset-checkpoint"
LOG_STARTS: Final = "log-start-offset-checkpoint"
# The files that belong to the directory as a whole.
FILES: Final = (META_FILE, LOCK_FILE, CLEAN_MARKER, RECOVERY_POINTS, LOG_STARTS, STATES_FILE)
PARTITION_METADATA: Final = "partition.metadata"
DELETED_SUFFIX: Final = "-delete"
# What stays of a partition's name in the name of its deleted folder, which is 255 bytes at most.
_DOOMED_LENGTH: Final = 200
STRAY_SUFFIX: Final = "-stray"
# More files than this are synced together with all others of the file system.
_MANY_UNSYNCED: Final = 64
# So many folders of deleted partitions are removed at once at a start, the others later.
_FEW_DELETED: Final = 64


class CheckpointRows(NamedTuple):
    """The two checkpoints as of one moment; a later one has a higher number."""

    number: int
    points: list[tuple[str, int, int]]
    starts: list[tuple[str, int, int]]


class LogStore:
    """The partitions of one data directory. Call `open` first and `close` last."""

    def __init__(
        self,
        folder: str,
        disk: Disk | None = None,
        clock: Clock | None = None,
        *,
        most_open_logs: int = 0,
    ) -> None:
        """`most_open_logs`: beyond it idle ones are closed; 0: what the system allows."""
        self.most_open_logs = most_open_logs
        self.folder = os.path.abspath(folder)
        self.disk: Disk = disk or OsDisk()
        self.clock: Clock = clock or SystemClock()
        self.partitions: dict[PartitionId, Partition] = {}
        self.cluster_id = ""
        self.was_clean = True
        self._memory = MemoryDisk()
        self._unlock: Callable[[], None] | None = None
        self._recovery_points: dict[PartitionId, int] = {}
        self._log_starts: dict[PartitionId, int] = {}
        self._checkpoint_lock = threading.Lock()
        self._rows_made = 0
        self._written = CheckpointRows(0, [], [])
        # Deleted partitions that the checkpoints on disk still name.
        self._stale: set[PartitionId] = set()
        # What the last clean stop wrote down of partitions that are not loaded yet, by their names.
        self._states: dict[str, StoredState] = {}
        # What names the file that they were read from.
        self._states_marker = b""
        self._topic_ids: dict[PartitionId, str] = {}
        self._bulk_sync: BulkSync | None = None
        # What could not be written was told once, and will not be told again: from then on each
        # file is synced by itself.
        self.bulk_sync_failed = False
        # Folders of deleted partitions that are still to be removed.
        self.leftovers: list[str] = []
        # Whether `erase` goes on.
        self.erasing = True

    # ---- the directory -------------------------------------------------------------------

    def open(self) -> None:
        """Take the directory; DataDirectoryError if another process has it."""
        make_dirs_durably(self.disk, self.folder)
        self._unlock = self.disk.lock(self._path(LOCK_FILE))
        if self._unlock is None:
            raise DataDirectoryError(
                f"{self.folder} is in use by another broker",
                advice="Stop that one first, or choose another directory with --data.",
            )
        try:
            # What a killed process left may be in the page cache only.
            self.disk.sync_dir(self.folder)
            self._read_identity()
            self._recovery_points = self._read_offsets(RECOVERY_POINTS)
            self._log_starts = self._read_offsets(LOG_STARTS)
            self._written = self.checkpoint_rows()
            self._remove_deleted()
            marker = self._path(CLEAN_MARKER)
            self.was_clean = self.disk.exists(marker)
            if self.was_clean:
                self._read_states(read_whole(self.disk, marker))
                self.disk.remove(marker)
                self.disk.sync_dir(self.folder)
            self._bulk_sync = self.disk.bulk_sync(self.folder)
            if isinstance(self.disk, OsDisk):
                self.disk.opening = OpenLogs(self.partitions, self.most_open_logs).opening
        except BaseException:
            self._unlock()
            self._unlock = None
            raise

    def _path(self, *parts: str) -> str:
        return os.path.join(self.folder, *parts)

    def _read_identity(self) -> None:
        path = self._path(META_FILE)
        if not self.disk.exists(path):
            ours = {LOCK_FILE, META_FILE + ".tmp"}
            foreign = [n for n in self.disk.names(self.folder) if n not in ours]
            if foreign:
                raise DataDirectoryError(
                    f"{self.folder} is not empty and not a Penstock data directory",
                    advice="Choose an empty directory with --data.",
                )
            self.cluster_id = _new_cluster_id()
            lines = ["version=1", f"cluster.id={self.cluster_id}", "node.id=1", ""]
            write_atomically(self.disk, path, seal("\n".join(lines)))
            return
        text = unseal(read_whole(self.disk, path)) or ""
        values = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        if values.get("version") != "1" or not values.get("cluster.id"):
            raise DataDirectoryError(f"{path} is damaged or of a newer version")
        self.cluster_id = values["cluster.id"]

    def _read_offsets(self, name: str) -> dict[PartitionId, int]:
        rows = read_checkpoint(self.disk, self._path(name), columns=3) or []
        try:
            return {PartitionId(topic, int(number)): int(at) for topic, number, at in rows}
        except ValueError:
            return {}

    def _read_states(self, marker: bytes) -> None:
        path = self._path(STATES_FILE)
        data = read_whole(self.disk, path) if self.disk.exists(path) else b""
        if marker == marker_for(data):
            self._states = decode_states(data) or {}
            self._states_marker = marker
        elif data:
            log.warning("%s does not go with the last stop, and is not used", path)

    def _states_as_read(self) -> dict[str, StoredState]:
        """What `open` has read of them, from the file: they are not kept in memory."""
        if not any(partition.state_is_stored for partition in self.partitions.values()):
            return {}
        path = self._path(STATES_FILE)
        try:
            data = read_whole(self.disk, path) if self.disk.exists(path) else b""
        except StorageError as error:
            log.warning("what is known of partitions is written anew: %s", error)
            return {}
        return (decode_states(data) or {}) if marker_for(data) == self._states_marker else {}

    def forget_states(self) -> None:
        """All partitions are loaded."""
        self._states = {}

    def _remove_deleted(self) -> None:
        names = [name for name in self.disk.names(self.folder) if name.endswith(DELETED_SUFFIX)]
        doomed = [self._path(name) for name in names]
        self.erase(doomed[:_FEW_DELETED])
        self.leftovers = doomed[_FEW_DELETED:]

    def checkpoint(self, *, force: bool = False) -> None:
        """Write down how far each partition is synced and where it begins, if it changed.

        What is known of partitions that are not loaded stays as it is.
        """
        self.write_checkpoint(self.checkpoint_rows(), force=force)

    def checkpoint_rows(self) -> CheckpointRows:
        """What a checkpoint would say now; for `write_checkpoint`."""
        for partition in self.partitions.values():
            if partition.config.durability != "memory":
                self._recovery_points[partition.id] = partition.recovery_point
                self._log_starts[partition.id] = partition.log_start
        points = [(i.topic, i.number, at) for i, at in self._recovery_points.items()]
        starts = [(i.topic, i.number, at) for i, at in self._log_starts.items()]
        self._rows_made += 1
        return CheckpointRows(self._rows_made, points, starts)

    def write_checkpoint(self, rows: CheckpointRows, *, force: bool = False) -> None:
        """Make the rows durable, on any thread. Nothing happens if later ones are already."""
        with self._checkpoint_lock:
            written = self._written
            if rows.number <= written.number:
                return
            if force or rows.points != written.points:
                write_checkpoint(self.disk, self._path(RECOVERY_POINTS), rows.points)
            if force or rows.starts != written.starts:
                write_checkpoint(self.disk, self._path(LOG_STARTS), rows.starts)
            self._written = rows

    def close(self) -> bool:
        """Sync everything, leave the marker of a clean stop, release the directory.

        Whether it is clean: everything is on disk, and the next start may believe it.
        """
        self.stop_erasing()
        clean = self.was_clean or not self._unloaded()
        try:
            self._forget_gone()
            self._sync_together()
        except StorageError as error:
            log.error("the stop was not clean: %s", error)
            clean = False
        lines: list[str] = []
        stored = self._states_as_read()
        for id_, partition in self.partitions.items():
            state = stored.pop(str(id_), None)
            clean = _close_partition(partition, self._topic_ids[id_], state, lines) and clean
        try:
            self.checkpoint(force=True)
            if clean:
                states = encode_states(lines)
                write_atomically(self.disk, self._path(STATES_FILE), states)
                write_atomically(self.disk, self._path(CLEAN_MARKER), marker_for(states))
        except StorageError as error:
            log.error("the stop was not clean: %s", error)
            clean = False
        self.partitions.clear()
        self.abandon()
        return clean

    def _forget_gone(self) -> None:
        """The partitions of topics whose deletion this stop has interrupted."""
        gone = [id_ for id_, partition in self.partitions.items() if partition.gone]
        if gone:
            self.detach(gone)

    def _sync_file_system(self) -> None:
        """Sync everything; once that has failed, each file must be asked by itself."""
        if self._bulk_sync is None:
            raise StorageError(f"{self.folder} is closed")
        try:
            self._bulk_sync.sync()
        except StorageError:
            self.bulk_sync_failed = True
            raise

    def _sync_together(self) -> None:
        """Where many partitions have something to sync, do it in one go."""
        bulk_sync = self._bulk_sync
        if bulk_sync is None or self.bulk_sync_failed:
            return
        unsynced = [
            partition
            for partition in self.partitions.values()
            if partition.config.durability != "memory"
            and partition.failure is None
            and not partition.is_synced
            and bulk_sync.covers(partition.folder)
        ]
        if len(unsynced) <= _MANY_UNSYNCED:
            return
        for partition in unsynced:
            partition.flush()
        plans = [(partition, partition.plan_sync(active_too=True)) for partition in unsynced]
        together = True
        try:
            self._sync_file_system()
        except StorageError as error:
            # It may be about anything in the file system. Logs were open before they were
            # written: each of them tells of its own failures, and of no other's.
            log.warning("%s; each log is synced by itself", error)
            together = False
        for partition, plan in plans:
            if plan.closed or not together:
                # Indexes of closed segments are not written yet.
                plan.run()
            partition.finish_sync(plan)

    def _unloaded(self) -> list[str]:
        """Partitions that nobody has opened, and thus checked, since an unclean stop.

        Not what is left of deleted ones, or was put aside.
        """
        loaded = {str(id_) for id_ in self.partitions}
        return [
            name
            for name in self.disk.names(self.folder)
            if name not in loaded
            and name.rpartition("-")[2].isdigit()
            and self.disk.exists(self._path(name, PARTITION_METADATA))
        ]

    def abandon(self) -> None:
        """Release the directory without touching it further."""
        self.stop_erasing()
        self._states = {}
        if self._bulk_sync is not None:
            self._bulk_sync.close()
            self._bulk_sync = None
        for partition in self.partitions.values():
            partition.close()
        self.partitions.clear()
        if self._unlock is not None:
            self._unlock()
            self._unlock = None

    # ---- partitions ----------------------------------------------------------------------

    def disk_for_new(self, count: int) -> DeferredSyncDisk | None:
        """For `load`, to make so many partitions at once; None if each is synced by itself.

        Nobody may rely on them before `made_on` it.
        """
        if count <= _MANY_UNSYNCED or self._bulk_sync is None or self.bulk_sync_failed:
            return None
        return DeferredSyncDisk(self.disk, self._sync_file_system)

    def made_on(self, made: DeferredSyncDisk, ids: Iterable[PartitionId]) -> None:
        """What was made is on disk by `sync_all`: go on as with any other partition."""
        for id_ in ids:
            partition = self.partitions[id_]
            if partition.disk is made:
                partition.use_disk(self.disk)

    def load(
        self,
        id_: PartitionId,
        config: TopicConfig,
        *,
        topic_id: uuid.UUID,
        leader_epoch: int = 0,
        disk: Disk | None = None,
    ) -> Partition:
        """Open the partition, or make it if it is not there.

        DataDirectoryError if the files are those of another topic that had the same name.
        """
        folder = self._path(str(id_))
        if disk is None or self.disk.exists(folder):
            # A folder that is there may be a link, or a mount, to where nothing is deferred.
            disk = self.disk
        self._topic_ids[id_] = encode_uuid(topic_id)
        partition = self._restore(id_, config, folder, leader_epoch)
        if partition is not None:
            self.partitions[id_] = partition
            return partition
        self._check_owner(folder, topic_id)
        if config.durability == "memory":
            partition = self._load_in_memory(id_, config, folder, leader_epoch)
        else:
            known = Known(
                self.was_clean,
                self._recovery_points.get(id_, 0),
                self._log_starts.get(id_, 0),
                leader_epoch,
            )
            partition = open_partition(id_, disk, folder, config, self.clock, known)
        self._write_partition_metadata(disk, folder, topic_id)
        self.partitions[id_] = partition
        return partition

    def _restore(
        self, id_: PartitionId, config: TopicConfig, folder: str, leader_epoch: int
    ) -> Partition | None:
        """The partition as the last clean stop left it; None where that cannot be told."""
        state = self._states.pop(str(id_), None)
        if state is None or state.topic_id != self._topic_ids[id_]:
            return None
        partition = Partition(id_, self.disk, folder, config, self.clock)
        partition.leader_epoch = leader_epoch
        partition.log_start = self._log_starts.get(id_, 0)
        found = restore(partition, state, self._recovery_points.get(id_, 0))
        return partition if found else None

    def _load_in_memory(
        self, id_: PartitionId, config: TopicConfig, folder: str, leader_epoch: int
    ) -> Partition:
        self.disk.make_dirs(folder)
        self.disk.sync_dir(self.folder)
        reserve = OffsetReserve(self.disk, folder)
        known = Known(True, log_start=reserve.limit, leader_epoch=leader_epoch)
        partition = open_partition(id_, self._memory, folder, config, self.clock, known)
        partition.reserve = reserve
        return partition

    def _check_owner(self, folder: str, topic_id: uuid.UUID) -> None:
        path = os.path.join(folder, PARTITION_METADATA)
        text = unseal(read_whole(self.disk, path)) if self.disk.exists(path) else None
        if text and f"topic_id: {encode_uuid(topic_id)}" not in text.splitlines():
            raise DataDirectoryError(
                f"{folder} belongs to another topic of the same name",
                advice="Move the folder out of the data directory.",
            )

    def remove_strays(
        self, topics: Mapping[str, uuid.UUID], deleted: Collection[uuid.UUID]
    ) -> None:
        """Before any topic is loaded: clear away partitions that belong to none of `topics`.

        Those of `deleted` topics, whose deletion a crash interrupted, and those without records,
        whose creation was, are removed. Others are nobody's to remove: they are put aside.
        """
        gone = {encode_uuid(id_) for id_ in deleted}
        for name in self.disk.names(self.folder):
            topic, _, number = name.rpartition("-")
            wanted, state = topics.get(topic), self._states.get(name)
            if wanted is not None and state is not None and state.topic_id == encode_uuid(wanted):
                continue
            path = self._path(name, PARTITION_METADATA)
            if not number.isdigit() or not self.disk.exists(path):
                continue
            text = unseal(read_whole(self.disk, path)) or ""
            owner = dict(line.split(": ", 1) for line in text.splitlines()).get("topic_id")
            if owner is None or (wanted is not None and owner == encode_uuid(wanted)):
                continue
            if self.partitions.get(PartitionId(topic, int(number))) is not None:
                continue
            if owner in gone or not self._holds_records(name):
                log.warning("%s belongs to no topic and is removed", name)
                self.delete(PartitionId(topic, int(number)))
            else:
                log.error("%s belongs to no known topic and is put aside", name)
                self.disk.rename(self._path(name), f"{self._path(name)}.{owner}{STRAY_SUFFIX}")
                self.disk.sync_dir(self.folder)

    def _holds_records(self, name: str) -> bool:
        folder = self._path(name)
        if self.disk.exists(os.path.join(folder, LOCAL_COPY)):
            return True
        for segment in self.disk.names(folder):
            if segment.endswith(LOG_SUFFIX):
                file = self.disk.open(os.path.join(folder, segment))
                try:
                    if file.size():
                        return True
                finally:
                    file.close()
        return False

    def _write_partition_metadata(self, disk: Disk, folder: str, topic_id: uuid.UUID) -> None:
        path = os.path.join(folder, PARTITION_METADATA)
        if not disk.exists(path):
            text = f"version: 0\ntopic_id: {encode_uuid(topic_id)}\n"
            write_atomically(disk, path, seal(text))

    def delete(self, id_: PartitionId) -> None:
        """Forget a partition and remove its files; readers that hold one open go on."""
        self.erase(self.detach([id_]))

    def detach(self, ids: Sequence[PartitionId]) -> list[str]:
        """Forget partitions and move their folders out of the way; `erase` takes the answer.

        A new topic of the same name may come as soon as this is done.
        """
        doomed: list[str] = []
        for id_ in ids:
            partition = self.partitions.pop(id_, None)
            point, start = self._recovery_points.pop(id_, None), self._log_starts.pop(id_, None)
            self._topic_ids.pop(id_, None)
            if partition is not None:
                partition.gone = True
                partition.forbid_files()
            if partition is not None or point is not None or start is not None:
                self._stale.add(id_)
            self._memory.remove_tree(self._path(str(id_)))
        try:
            self._forget_stale(ids)
        except DiskFullError as error:
            # Deleting is what makes room. `load` does it before a name is used again.
            log.warning("no checkpoint: %s", error)
        for id_ in ids:
            folder = self._path(str(id_))
            if self.disk.exists(folder):
                name = f"{str(id_)[:_DOOMED_LENGTH]}.{uuid.uuid4().hex}{DELETED_SUFFIX}"
                doomed.append(self._path(name))
                self.disk.rename(folder, doomed[-1])
        if doomed:
            self.disk.sync_dir(self.folder)
        return doomed

    def _forget_stale(self, ids: Iterable[PartitionId]) -> None:
        """What the checkpoints say of deleted partitions must not be taken for new ones."""
        if self._stale.intersection(ids):
            self.checkpoint(force=True)
            self._stale.clear()

    def erase(self, doomed: Iterable[str]) -> None:
        """Remove what `detach` moved away; on any thread."""
        for folder in doomed:
            if not self.erasing:
                # The next start goes on with it.
                return
            self.disk.remove_tree(folder)

    def stop_erasing(self) -> None:
        """Have `erase` come to an end soon; what it leaves goes at the next start."""
        self.erasing = False


def _close_partition(
    partition: Partition, topic_id: str, stored: StoredState | None, lines: list[str]
) -> bool:
    """Sync and close one partition; whether the next start may believe its files."""
    try:
        partition.flush()
        if partition.config.durability == "memory":
            if partition.reserve is not None:
                partition.reserve.release(partition.log_end)
        elif partition.is_healthy and _synced(partition):
            state = store_state(partition, stored)
            if state is not None:
                lines.append(f"{partition.id} {topic_id} {state}")
    except StorageError as error:
        log.error("%s could not be closed cleanly: %s", partition.id, error)
        return False
    finally:
        partition.close()
    return partition.is_healthy


def _synced(partition: Partition) -> bool:
    """Sync what is not yet; whether that worked."""
    if not partition.is_synced:
        plan = partition.plan_sync(active_too=True)
        plan.run()
        partition.finish_sync(plan)
    return partition.is_healthy


def encode_uuid(value: uuid.UUID) -> str:
    """Kafka's text form of a uuid: URL-safe base 64 without padding."""
    return base64.urlsafe_b64encode(value.bytes).rstrip(b"=").decode()


def _new_cluster_id() -> str:
    return encode_uuid(uuid.uuid4())
