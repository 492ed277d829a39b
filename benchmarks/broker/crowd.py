"""Many of everything at once: partitions, groups and connections. What does a crowd cost?

    start; create topics of 500 partitions each, write a record to every partition
    one member in each group (KIP-848), which commits an offset; the other connections stay idle
    hold: members send heartbeats, one client writes one record at a time; memory at both ends
    disconnect all; stop cleanly, start, stop again

A system that cannot take the whole crowd on this machine gets a row that says where it ended.
"""

from __future__ import annotations

import contextlib
import resource
import shutil
import socket
import struct
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.broker import processes
from benchmarks.broker.clients import ClientError
from benchmarks.broker.processes import ServerError
from benchmarks.broker.servers import Server
from benchmarks.broker.systems import System
from benchmarks.broker.workloads import progress
from penstock.errors import PenstockError
from penstock.records.record import Record, encode
from penstock.wire import Message, api, decode_response_header, decoder, encoder, request_header
from penstock.wire.messages.consumer_group_heartbeat import ConsumerGroupHeartbeatRequest
from penstock.wire.messages.create_topics import CreatableTopic, CreateTopicsRequest
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from penstock.wire.messages.metadata import MetadataRequest
from penstock.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from penstock.wire.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    TopicProduceData,
)

TOPIC_PARTITIONS: Final = 500
SHARED_TOPIC: Final = "members"
TIMEOUT_S: Final = 900.0
SETTLE_S: Final = 15.0
# What both brokers offer and no client library is needed for.
VERSIONS: Final = {0: 9, 3: 9, 8: 9, 10: 4, 19: 5, 68: 1}
_LENGTH: Final = struct.Struct(">i")
# Of a coordinator that is only being started.
_NOT_YET: Final = frozenset({14, 15, 16})

Entry = dict[str, Any]


@dataclass(frozen=True)
class Crowd:
    """How many of what, and how long they stay."""

    partitions: int = 20_000
    groups: int = 1_000
    connections: int = 5_000
    hold_s: float = 60.0

    @property
    def text(self) -> str:
        return f"{self.partitions:,} / {self.groups:,} / {self.connections:,}"


def _stop_text(entry: Entry, name: str) -> str:
    text = f"{entry[f'{name}_s']:.2f} s"
    cpu_s = entry.get(f"{name}_cpu_s")
    return text if cpu_s is None else f"{text} ({cpu_s:.1f} s)"


MEASURES: Final[dict[str, Callable[[Entry], str]]] = {
    "measured": lambda e: e["measured"],
    "partitions / groups / connections": lambda e: e["crowd"],
    "creating the partitions": lambda e: f"{e['create_s']:.1f} s ({e['create_cpu_s']:.1f} s)",
    "one record to each": lambda e: f"{e['write_s']:.1f} s ({e['write_cpu_s']:.1f} s)",
    "memory: idle, empty": lambda e: f"{e['empty_mb']:.0f} MB",
    "memory: with the partitions": lambda e: f"{e['partitions_mb']:.0f} MB",
    "memory: with groups and connections too": lambda e: f"{e['full_mb']:.0f} MB",
    "memory: at the end of the hold": lambda e: f"{e['held_mb']:.0f} MB",
    "memory: after all have disconnected": lambda e: f"{e['after_mb']:.0f} MB",
    "processor in the hold": lambda e: f"{e['hold_cpu']:.0%} of a core",
    "publish-to-ack in the hold, p50 / p99": lambda e: (
        f"{e['ack_p50_ms']:.1f} / {e['ack_p99_ms']:.1f} ms"
    ),
    "clean stop": lambda e: _stop_text(e, "stop"),
    "start after it": lambda e: f"{e['restart_s']:.2f} s",
    "clean stop without changes": lambda e: _stop_text(e, "second_stop"),
}


class Peer:
    """One connection that asks and waits."""

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.socket = socket.create_connection((host, int(port)), timeout=TIMEOUT_S)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._correlation_id = 0

    def send(self, request: Message) -> None:
        version = VERSIONS[request.API_KEY]
        self._correlation_id += 1
        head = request_header(request.API_KEY, version, self._correlation_id, "crowd")
        frame = head + encoder(type(request), version)(request)
        self.socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self, key: int) -> Any:
        (length,) = _LENGTH.unpack(self._exactly(4))
        frame = self._exactly(length)
        version = VERSIONS[key]
        _, at = decode_response_header(key, version, frame)
        return decoder(api(key).response, version)(frame, at)[0]

    def call(self, request: Message) -> Any:
        self.send(request)
        return self.receive(request.API_KEY)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise ClientError("the server has closed a connection")
            data += more
        return data

    def close(self) -> None:
        self.socket.close()


@dataclass
class Member:
    """The only member of a group, on a connection of its own."""

    group: str
    peer: Peer
    epoch: int = 0
    name: str = ""

    def join(self) -> None:
        """Find the coordinator, join, and commit an offset."""
        self.name = str(uuid.uuid4())
        self._until_ready(
            FindCoordinatorRequest(key_type=0, coordinator_keys=[self.group]),
            lambda answer: answer.coordinators[0].error_code,
        )
        answer = self._until_ready(
            ConsumerGroupHeartbeatRequest(
                group_id=self.group,
                member_id=self.name,
                rebalance_timeout_ms=60_000,
                subscribed_topic_names=[SHARED_TOPIC],
                topic_partitions=[],
            ),
            lambda answer: answer.error_code,
        )
        self.epoch = answer.member_epoch
        partition = OffsetCommitRequestPartition(
            partition_index=0, committed_offset=1, committed_metadata=""
        )
        self._until_ready(
            OffsetCommitRequest(
                group_id=self.group,
                generation_id_or_member_epoch=self.epoch,
                member_id=self.name,
                topics=[OffsetCommitRequestTopic(name=SHARED_TOPIC, partitions=[partition])],
            ),
            lambda answer: answer.topics[0].partitions[0].error_code,
        )

    def heartbeat(self) -> None:
        request = ConsumerGroupHeartbeatRequest(
            group_id=self.group, member_id=self.name, member_epoch=self.epoch
        )
        answer = self.peer.call(request)
        if answer.error_code:
            raise ClientError(f"heartbeat of {self.group}: error {answer.error_code}")
        self.epoch = answer.member_epoch

    def _until_ready(self, request: Message, code_of: Callable[[Any], int]) -> Any:
        deadline = time.monotonic() + 60
        while True:
            answer = self.peer.call(request)
            code = code_of(answer)
            if not code:
                return answer
            if code not in _NOT_YET or time.monotonic() > deadline:
                raise ClientError(f"{self.group}: error {code}")
            time.sleep(0.1)


def measure(system: System, folder: Path, crowd: Crowd) -> Entry:
    """The whole case for one system; what failed is said in the entry."""
    shutil.rmtree(folder, ignore_errors=True)
    server = system.make(folder)
    entry: Entry = {
        "title": f"{system.name}, {system.level}",
        "crowd": crowd.text,
        "partitions": crowd.partitions,
    }
    try:
        server.start()
        time.sleep(1)
        entry["empty_mb"] = processes.memory_mb(server.pid)
        try:
            _partitions(server, crowd, entry)
            _clients(server, crowd, entry)
            _stops(server, entry)
        except (ClientError, ServerError, PenstockError, OSError) as error:
            entry["failed"] = str(error).strip().splitlines()[0]
            progress(f"  {system.key}: {entry['failed']}")
        return entry
    finally:
        with contextlib.suppress(ServerError):
            server.stop(clean=False)
        shutil.rmtree(folder, ignore_errors=True)


def _cpu_of_ended_s() -> float:
    """Processor time of all children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _timed(server: Server, entry: Entry, name: str, work: Callable[[], None]) -> None:
    """Seconds, and the server's processor time."""
    begun, cpu = time.monotonic(), processes.cpu_s(server.pid)
    work()
    entry[f"{name}_s"] = time.monotonic() - begun
    entry[f"{name}_cpu_s"] = processes.cpu_s(server.pid) - cpu
    progress(f"  {name}: {entry[f'{name}_s']:.1f} s")


def _partitions(server: Server, crowd: Crowd, entry: Entry) -> None:
    peer = Peer(server.address)
    sizes = {
        f"crowd{at}": min(TOPIC_PARTITIONS, crowd.partitions - at * TOPIC_PARTITIONS)
        for at in range(-(-crowd.partitions // TOPIC_PARTITIONS))
    }

    def create() -> None:
        for name, count in {SHARED_TOPIC: 4, **sizes}.items():
            topic = CreatableTopic(name=name, num_partitions=count, replication_factor=1)
            answer = peer.call(CreateTopicsRequest(topics=[topic], timeout_ms=600_000))
            if answer.topics[0].error_code:
                raise ClientError(f"{name} with {count} partitions: {answer.topics[0]}")

    def write() -> None:
        batch = encode([Record(0, int(time.time() * 1000), None, bytes(100))])
        for name, count in sizes.items():
            data = [PartitionProduceData(index=n, records=batch) for n in range(count)]
            topic = TopicProduceData(name=name, partition_data=data)
            _produce(peer, ProduceRequest(acks=-1, timeout_ms=600_000, topic_data=[topic]))

    _timed(server, entry, "create", create)
    _timed(server, entry, "write", write)
    peer.close()
    entry["partitions_mb"] = processes.memory_mb(server.pid)


def _produce(peer: Peer, request: ProduceRequest) -> None:
    deadline = time.monotonic() + 60
    while True:
        parts = peer.call(request).responses[0].partition_responses
        codes = {part.error_code for part in parts} - {0}
        if not codes:
            return
        if codes - {3, 6} or time.monotonic() > deadline:
            raise ClientError(f"writing: errors {sorted(codes)}")
        # Made, and not known everywhere yet.
        time.sleep(0.2)


def _clients(server: Server, crowd: Crowd, entry: Entry) -> None:
    peers: list[Peer] = []
    try:
        while len(peers) < crowd.connections:
            peers.append(Peer(server.address))
            peers[-1].call(MetadataRequest(topics=[]))
        members = [Member(f"group{at}", peer) for at, peer in enumerate(peers[: crowd.groups])]
        for member in members:
            member.join()
        progress(f"  {len(peers)} connections, {len(members)} groups")
        entry["full_mb"] = processes.memory_mb(server.pid)
        _hold(server, members, crowd.hold_s, entry)
    finally:
        for peer in peers:
            peer.close()
    time.sleep(SETTLE_S)
    entry["after_mb"] = processes.memory_mb(server.pid)


def _hold(server: Server, members: list[Member], hold_s: float, entry: Entry) -> None:
    """Heartbeats of all members every five seconds, and between them records one at a time."""
    peer = Peer(server.address)
    batch = encode([Record(0, int(time.time() * 1000), None, bytes(100))])
    data = [PartitionProduceData(index=0, records=batch)]
    request = ProduceRequest(
        acks=-1,
        timeout_ms=60_000,
        topic_data=[TopicProduceData(name=SHARED_TOPIC, partition_data=data)],
    )
    took_ms: list[float] = []
    begun, cpu = time.monotonic(), processes.cpu_s(server.pid)
    at = 0
    while (now := time.monotonic() - begun) < hold_s:
        due = int(now / 5.0 * len(members)) + 1
        for member in (members[n % len(members)] for n in range(at, due)):
            member.heartbeat()
        at = due
        sent = time.monotonic()
        _produce(peer, request)
        took_ms.append((time.monotonic() - sent) * 1000)
        time.sleep(0.02)
    took_ms.sort()
    entry["hold_cpu"] = (processes.cpu_s(server.pid) - cpu) / (time.monotonic() - begun)
    entry["ack_p50_ms"] = took_ms[len(took_ms) // 2]
    entry["ack_p99_ms"] = took_ms[int(len(took_ms) * 0.99)]
    entry["held_mb"] = processes.memory_mb(server.pid)
    peer.close()


def _stops(server: Server, entry: Entry) -> None:
    for name in ("stop", "second_stop"):
        begun, cpu = time.monotonic(), processes.cpu_s(server.pid)
        ended = _cpu_of_ended_s()
        server.stop()
        entry[f"{name}_s"] = time.monotonic() - begun
        entry[f"{name}_cpu_s"] = _cpu_of_ended_s() - ended - cpu
        if name == "stop":
            entry["restart_s"] = server.start()
    progress(f"  stops {entry['stop_s']:.2f} s and {entry['second_stop_s']:.2f} s")
