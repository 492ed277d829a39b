"""A member of a group in a process of its own, to be killed: it cannot say goodbye.

It joins, reads records one by one until it has so many, commits, prints one line, and then goes on
polling for as long as it lives. `{"settings": ..., "topic": ..., "count": ...}` is its argument.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer

from conformance.scenario import Cluster


def start(cluster: Cluster, group: str, topic: str, count: int, **settings: Any) -> Child:
    """Start one and wait until it has read and committed so many records."""
    named = {name.replace("_", "."): value for name, value in settings.items()}
    wanted = {
        "settings": {
            "bootstrap.servers": cluster.bootstrap,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            **named,
        },
        "topic": topic,
        "count": count,
    }
    child = Child(
        subprocess.Popen(
            [sys.executable, "-m", "conformance.child", json.dumps(wanted)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            cwd=Path(__file__).resolve().parent.parent,
        )
    )
    cluster.at_end(child.kill)
    assert child.process.stdout is not None
    assert child.process.stdout.readline() == b"ready\n", "the other member did not get ready"
    return child


class Child:
    """The process, as its parent sees it."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def main() -> None:
    wanted = json.loads(sys.argv[1])
    consumer = Consumer(wanted["settings"])
    consumer.subscribe([wanted["topic"]])
    count = 0
    while True:
        message = consumer.poll(0.1)
        if message is None or message.error() is not None or count >= wanted["count"]:
            continue
        count += 1
        consumer.commit(message=message, asynchronous=False)
        if count == wanted["count"]:
            consumer.pause(consumer.assignment())
            print("ready", flush=True)


if __name__ == "__main__":
    main()
