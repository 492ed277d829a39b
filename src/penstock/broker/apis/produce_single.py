"""Produce requests of one batch for one partition, recognised by their bytes.

A C client sends one partition per request, and all its requests for that partition are the same
bytes up to the records, but for the correlation id. So the first one is decoded in full; from it
a `Target` is remembered under those bytes, and the next ones need one look-up instead of a
decode. The answer, too, is the same bytes but for three numbers. What does not match exactly
goes the ordinary way.

Per request this is about a third of the ordinary work, which is what lets a broker in Python
answer as many small requests as one in Java.
"""

from __future__ import annotations

import struct
from collections.abc import Container
from typing import TYPE_CHECKING, Final

from penstock.broker.slot import Slot
from penstock.errors import LogError, StorageError
from penstock.log.partition import Partition
from penstock.wire import encoder, response_header
from penstock.wire.messages.produce import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from penstock.wire.primitive import decode_uvarint, encode_uvarint

if TYPE_CHECKING:
    from penstock.broker.connection import Connection
    from penstock.broker.server import Broker

# The key covers the request from its client id on; before it are API, version, correlation id.
KEY_START: Final = 8
FLEXIBLE_FROM_VERSION: Final = 9

ANY_CODEC_FROM_VERSION: Final = 7
# Beyond this many a connection's targets are forgotten and learned anew.
MAX_TARGETS: Final = 2_000
# Ordinary names are far shorter; what a connection remembers is bounded.
MAX_KEY_BYTES: Final = 1_000

_INT32: Final = struct.Struct(">i")
_LENGTH_AND_CORRELATION: Final = struct.Struct(">ii")
# Base offset, append time and start of the log.
_NUMBERS: Final = struct.Struct(">qqq")
_MARK: Final = 0x5EA1_C0DE_5EA1_C0DE


class Target:
    """Where the requests with one beginning go, and what their answers look like."""

    __slots__ = (
        "acks", "frame_tail", "head", "partition", "response_size", "tail",
        "topic_index", "version",
    )  # fmt: skip

    def __init__(self, request: ProduceRequest, version: int, partition: Partition) -> None:
        self.partition = partition
        self.version = version
        self.acks = request.acks
        # After the records of a flexible request: no tags of partition, topic and request.
        self.frame_tail = 3 if version >= FLEXIBLE_FROM_VERSION else 0
        topic = request.topic_data[0]
        self.topic_index = (topic.name, topic.topic_id, topic.partition_data[0].index)
        marked = self.encode(PartitionProduceResponse(base_offset=_MARK))
        at = marked.index(struct.pack(">q", _MARK))
        correlation_size = 4
        self.head = response_header(0, version, 0)[correlation_size:] + marked[:at]
        self.tail = marked[at + _NUMBERS.size :]
        self.response_size = correlation_size + len(self.head) + _NUMBERS.size + len(self.tail)

    def encode(self, result: PartitionProduceResponse) -> bytes:
        """The response with one result, without its header."""
        name, topic_id, result.index = self.topic_index
        topic = TopicProduceResponse(name=name, topic_id=topic_id, partition_responses=[result])
        return encoder(ProduceResponse, self.version)(ProduceResponse(responses=[topic]))

    def success(self, correlation_id: int, base_offset: int, append_time_ms: int) -> bytes:
        """The whole frame of an answer."""
        start = _LENGTH_AND_CORRELATION.pack(self.response_size, correlation_id)
        numbers = _NUMBERS.pack(base_offset, append_time_ms, self.partition.log_start)
        return start + self.head + numbers + self.tail


class SingleWrite(Slot):
    """One such request from its staging to its answer: its slot and its write in one."""

    __slots__ = ("acks", "append_time_ms", "base_offset", "correlation_id", "next_offset", "target")

    def __init__(self, connection: Connection, target: Target, correlation_id: int) -> None:
        self.connection = connection
        self.ready = False
        self.target = target
        self.acks = target.acks
        self.correlation_id = correlation_id
        self.base_offset = -1
        self.next_offset = 0
        self.append_time_ms = -1

    def written(self) -> None:
        """It is written, and nobody waits for a sync."""
        frame = self.target.success(self.correlation_id, self.base_offset, self.append_time_ms)
        self.answer_frame(frame)

    def synced(self, error: StorageError | None) -> None:
        if error is None:
            self.written()
        else:
            self.fail(error)

    def fail(self, error: LogError) -> None:
        from penstock.broker.apis.produce import set_error

        result = PartitionProduceResponse()
        set_error(result, error)
        self.connection.traffic.errors[0, result.error_code] += 1
        header = response_header(0, self.target.version, self.correlation_id)
        self.answer((header, self.target.encode(result)))


class Targets:
    """The targets that a connection has used, by the bytes that lead to them."""

    __slots__ = ("_by_length", "_count")

    def __init__(self) -> None:
        self._by_length: dict[int, dict[bytes, Target]] = {}
        self._count = 0

    def learn(
        self, frame: memoryview, records_at: int, request: ProduceRequest, partition: Partition
    ) -> None:
        """Remember the way of a request that was decoded in full, if it is of this kind."""
        if records_at > MAX_KEY_BYTES:
            return
        if self._count >= MAX_TARGETS:
            self._by_length.clear()
            self._count = 0
        _, version = struct.unpack_from(">hh", frame)
        target = Target(request, version, partition)
        key = bytes(frame[:4]) + bytes(frame[KEY_START:records_at])
        self._by_length.setdefault(records_at, {})[key] = target
        self._count += 1

    def forget(self, partition: Partition) -> None:
        """The partition is gone: do not keep it, and its open files, for its producer's sake."""
        self.forget_all((partition,))

    def forget_all(self, partitions: Container[Partition]) -> None:
        """Let the next requests for these partitions come by the ordinary way."""
        for by_key in self._by_length.values():
            for key in [key for key, target in by_key.items() if target.partition in partitions]:
                del by_key[key]
                self._count -= 1

    def find(self, frame: memoryview) -> tuple[Target, memoryview] | None:
        """The target of a frame and its records; None if the frame goes the ordinary way."""
        size = len(frame)
        head = bytes(frame[:4])
        for records_at, by_key in self._by_length.items():
            if size < records_at + 4:
                continue
            target = by_key.get(head + bytes(frame[KEY_START:records_at]))
            if target is None or (target.partition.asks and not target.partition.admits()):
                continue
            if target.frame_tail:
                length, start = decode_uvarint(frame, records_at)
                length -= 1
                if frame[-3] or frame[-2] or frame[-1]:
                    return None
            else:
                (length,) = _INT32.unpack_from(frame, records_at)
                start = records_at + 4
            if length < 0 or start + length + target.frame_tail != size:
                return None
            return target, frame[start : start + length]
        return None


def records_start(frame: memoryview, request: ProduceRequest, version: int) -> int | None:
    """Where the length of the only batch begins, if the request has just one with no tags."""
    if len(request.topic_data) != 1 or len(request.topic_data[0].partition_data) != 1:
        return None
    records = request.topic_data[0].partition_data[0].records
    if request.transactional_id is not None or not records:
        return None
    if version < ANY_CODEC_FROM_VERSION:
        # These must be looked at for a codec that they may not use.
        return None
    if version >= FLEXIBLE_FROM_VERSION:
        length = encode_uvarint(len(records) + 1)
        at = len(frame) - 3 - len(records) - len(length)
        if frame[-3] or frame[-2] or frame[-1] or frame[at : at + len(length)] != length:
            # There are tags, or the length is written in an unusual way.
            return None
        return at
    return len(frame) - len(records) - 4


def stage(broker: Broker, connection: Connection, target: Target, records: memoryview,
          correlation_id: int) -> None:  # fmt: skip
    """Stage the batch; the end of the round writes and answers."""
    write = SingleWrite(connection, target, correlation_id)
    connection.take_slot(write)
    partition = target.partition
    try:
        staged = partition.stage(records, broker.now_ms)
    except StorageError as error:
        broker.round.must_flush(partition)
        write.fail(error)
        return
    except LogError as error:
        write.fail(error)
        return
    write.base_offset, write.next_offset, _, write.append_time_ms = staged
    writes = broker.round.writes
    queued = writes.get(partition)
    if queued is None:
        writes[partition] = [write]
    else:
        queued.append(write)
