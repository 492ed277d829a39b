"""Small things that every workload on the Kafka protocol needs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

from confluent_kafka import Producer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from benchmarks.broker.clients import ROOT

TIMEOUT_S = 30.0


def admin(bootstrap: str) -> AdminClient:
    return AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})


def create_topic(bootstrap: str, name: str, partitions: int) -> None:
    # A client that nobody holds any more gives up what it is doing.
    client = admin(bootstrap)
    for future in client.create_topics([NewTopic(name, partitions, 1)]).values():
        future.result(TIMEOUT_S)


def set_group(bootstrap: str, group: str, **settings: str) -> None:
    """Change settings of a group; dots of their names are written as two underscores."""
    entries = [
        ConfigEntry(name.replace("__", "."), value, incremental_operation=AlterConfigOpType.SET)
        for name, value in settings.items()
    ]
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
    client = admin(bootstrap)
    for future in client.incremental_alter_configs([resource]).values():
        future.result(TIMEOUT_S)


def produce_to_each(bootstrap: str, topic: str, partitions: int) -> None:
    """One record into each partition."""
    producer = Producer({"bootstrap.servers": bootstrap, "log_level": 0})
    for partition in range(partitions):
        producer.produce(topic, b"first", partition=partition)
    if producer.flush(TIMEOUT_S):
        raise RuntimeError(f"could not fill {topic}")


def worker(module: str, arguments: Iterable[str]) -> subprocess.Popen[str]:
    """A process of its own: one interpreter for each consumer, as users would have."""
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        cwd=ROOT,
    )
