"""The contestants: one row per system and durability, all with one partition (stream, queue).

`level` sorts the durabilities into what they mean for an acknowledged message: `disk` has been
fsynced, `os` has been handed to the operating system (a crash of the process loses nothing, a
crash of the machine may), `memory` is nowhere but in the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.broker import servers
from benchmarks.broker.clients import BUILD
from benchmarks.broker.servers import Server


@dataclass(frozen=True)
class System:
    """A system at one durability: how to start it, how to drive it."""

    key: str
    name: str
    level: str
    durability: str
    program: str
    make: Callable[[Path], Server]
    version: Callable[[], str]
    create: tuple[str, ...] = ()
    speaks_kafka: bool = False


SYSTEMS: Final = {
    system.key: system
    for system in (
        *(
            System(
                key,
                "Penstock",
                level,
                text,
                "kafka_bench",
                partial(servers.Penstock, durability=level),
                servers.penstock_version,
                speaks_kafka=True,
            )
            for key, level, text in (
                ("penstock", "disk", "`disk` (default): fsync before the ack, group commit"),
                ("penstock-os", "os", "`os`: page cache"),
                ("penstock-memory", "memory", "`memory`: nothing survives"),
            )
        ),
        System(
            "kafka",
            "Apache Kafka",
            "os",
            "default: page cache, no fsync",
            "kafka_bench",
            lambda folder: servers.Kafka(folder, {}),
            servers.kafka_version,
            speaks_kafka=True,
        ),
        System(
            "kafka-fsync",
            "Apache Kafka",
            "disk",
            "`log.flush.interval.messages=1`: fsync of every batch",
            "kafka_bench",
            lambda folder: servers.Kafka(folder, {"log.flush.interval.messages": "1"}),
            servers.kafka_version,
            speaks_kafka=True,
        ),
        System(
            "nats",
            "NATS JetStream",
            "os",
            "file storage, default: fsync every 2 min",
            "nats_bench",
            lambda folder: servers.Nats(folder, sync_always=False),
            servers.nats_version,
        ),
        System(
            "nats-fsync",
            "NATS JetStream",
            "disk",
            "file storage, `sync_interval: always`",
            "nats_bench",
            lambda folder: servers.Nats(folder, sync_always=True),
            lambda: servers.nats_sync_version(BUILD / "nats-check"),
        ),
        System(
            "rabbit-classic",
            "RabbitMQ classic queue",
            "disk",
            "persistent messages, confirms after fsync",
            "rabbit_bench",
            lambda folder: servers.Rabbit(folder, stream=False),
            servers.rabbit_version,
            create=("kind=classic",),
        ),
        System(
            "rabbit-quorum",
            "RabbitMQ quorum queue",
            "disk",
            "confirms after fsync of its write-ahead log",
            "rabbit_bench",
            lambda folder: servers.Rabbit(folder, stream=False),
            servers.rabbit_version,
            create=("kind=quorum",),
        ),
        System(
            "rabbit-stream",
            "RabbitMQ stream",
            "os",
            "default: page cache, no fsync",
            "rabbit_stream_bench",
            lambda folder: servers.Rabbit(folder, stream=True),
            servers.rabbit_version,
        ),
        System(
            "redis",
            "Redis Streams",
            "os",
            "`appendfsync everysec` (default of the append-only file)",
            "redis_bench",
            lambda folder: servers.Redis(folder, "everysec"),
            servers.redis_version,
        ),
        System(
            "redis-fsync",
            "Redis Streams",
            "disk",
            "`appendfsync always`",
            "redis_bench",
            lambda folder: servers.Redis(folder, "always"),
            servers.redis_version,
        ),
    )
}
