"""Captures from outside: what they tell, where they stand, and telling them what to do.

Everything goes through the log, so it works from any process and any machine:

    with Cluster("127.0.0.1:9092") as cluster:
        for status in statuses(cluster):
            print(status.name, status.state, status.lag_ms_p50)
        send(cluster, "shop", snapshot_signal("public.orders", where="id > 100"))
        send(cluster, "shop", Signal("pause"))
"""

from __future__ import annotations

from penstock.capture.delivery.config import TopicSettings
from penstock.capture.delivery.metering import CaptureStatus
from penstock.capture.delivery.signals import (
    SIGNALS_TOPIC,
    Signal,
    snapshot_all_signal,
    snapshot_signal,
)
from penstock.capture.delivery.state import CAPTURE_TOPIC, State, state_topic
from penstock.capture.delivery.topics import Topics
from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.client.reading import last_values
from penstock.client.topics import delete
from penstock.client.writer import LogWriter

__all__ = [
    "Signal",
    "forget",
    "send",
    "snapshot_all_signal",
    "snapshot_signal",
    "state_of",
    "status_of",
    "statuses",
]


def statuses(cluster: Cluster) -> list[CaptureStatus]:
    """What all captures have told last, by name. `ts_ms` says when that was."""
    if not Metadata(cluster).topics([CAPTURE_TOPIC]):
        return []
    told = last_values(cluster, CAPTURE_TOPIC)
    return sorted((CaptureStatus.decode(value) for value in told.values()), key=lambda it: it.name)


def status_of(cluster: Cluster, name: str) -> CaptureStatus | None:
    """What a capture has told last; None if it never has."""
    return next((status for status in statuses(cluster) if status.name == name), None)


def state_of(cluster: Cluster, name: str) -> State | None:
    """Where a capture stands: its position, its snapshots; None if it has never run."""
    topic = state_topic(name)
    if not Metadata(cluster).topics([topic]):
        return None
    stored = last_values(cluster, topic).get(name.encode())
    return None if stored is None else State.decode(stored)


def send(cluster: Cluster, name: str, signal: Signal) -> None:
    """Tell a capture something; it hears it when it runs, now or later."""
    Topics(cluster, TopicSettings()).ensure_own(name)
    with LogWriter(cluster) as writer:
        writer.write(SIGNALS_TOPIC, [name.encode()], [signal.encode()])


def forget(cluster: Cluster, name: str) -> None:
    """Take what the log knows of a capture away; topics of its events stay. It must not run.

    What it needs in the database is removed by the source's own `remove`.
    """
    delete(cluster, [state_topic(name)], missing_ok=True)
    if Metadata(cluster).topics([CAPTURE_TOPIC]):
        with LogWriter(cluster) as writer:
            writer.write(CAPTURE_TOPIC, [name.encode()], [None])
