"""What the broker tells Prometheus: everything here is looked up when it is asked for.

The number of lines is bounded, however many topics and groups there are: partitions, and groups in
partitions, are told one by one up to `Limits.max_metric_partitions` and `max_metric_lags`, in the
order in which they came to be; the rest is put together under the name `other` with an empty
partition. Sizes, offsets and records are summed there, of ages the largest is taken and of times
to loss the soonest.

The event loop is given back every few milliseconds.
"""

from __future__ import annotations

import asyncio
import math
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final

from penstock import __version__
from penstock.broker.lag.alerts import KINDS
from penstock.broker.lag.formulas import Lag
from penstock.broker.metrics.exposition import Family, show_labels
from penstock.wire import api
from penstock.wire.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.server import Broker

OTHER: Final = "other"
_SLICE_S: Final = 0.003
_STARTED_S: Final = time.time()
_PRODUCE: Final = 0


async def expose(broker: Broker) -> bytes:
    """The whole page."""
    breathe = Breather()
    families: list[Family] = []
    for collect in (about, traffic, timings, upkeep, process):
        families += collect(broker)
        await breathe()
    families += await coordinators(broker, breathe)
    families += await partitions(broker, breathe)
    families += await lags(broker, breathe)
    families += alerts(broker)
    chunks: list[str] = []
    for family in families:
        chunks.append("".join(f"{line}\n" for line in family.lines()))
        await breathe()
    return "".join(chunks).encode()


class Breather:
    """Gives the event loop back when it was held long enough."""

    def __init__(self) -> None:
        self._until = perf_counter() + _SLICE_S

    async def __call__(self) -> None:
        if perf_counter() >= self._until:
            await asyncio.sleep(0)
            self._until = perf_counter() + _SLICE_S


def single(name: str, kind: Any, help_: str, value: float) -> Family:
    family = Family(name, kind, help_)
    family.add(value)
    return family


# ---- the broker as a whole -----------------------------------------------------------------


def about(broker: Broker) -> Iterator[Family]:
    info = Family("penstock_info", "gauge", "What runs here; always 1.")
    info.add(1, {"version": __version__, "cluster": broker.store.cluster_id})
    yield info
    failed = sum(part.failure is not None for part in broker.store.partitions.values())
    yield single("penstock_topics", "gauge", "Topics.", len(broker.catalog.topics))
    yield single("penstock_partitions", "gauge", "Partitions.", broker.catalog.partition_count)
    yield single(
        "penstock_partitions_failed", "gauge",
        "Partitions that refuse writes because of their disk.", failed,
    )  # fmt: skip


def traffic(broker: Broker) -> Iterator[Family]:
    seen = broker.traffic
    requests = Family("penstock_requests_total", "counter", "Requests, by API.")
    counts = dict(seen.requests)
    counts[_PRODUCE] = counts.get(_PRODUCE, 0) + seen.recognised
    for key in sorted(counts):
        requests.add(counts[key], {"api": _api_name(key)})
    yield requests
    errors = Family(
        "penstock_request_errors_total", "counter", "Errors that were answered, by API and error."
    )
    for (key, code), count in sorted(seen.errors.items()):
        errors.add(count, {"api": _api_name(key), "error": ErrorCode(code).name})
    yield errors
    for name, help_, value in (
        ("received_bytes", "Bytes read from connections.", seen.bytes_in),
        ("sent_bytes", "Bytes of answers handed to connections.", seen.bytes_out),
        ("connections_accepted", "Connections that were accepted.", seen.connections),
        ("connections_refused", "Connections refused: there were too many.", seen.refused),
        (
            "produce_requests_held",
            "Produce requests that waited for room in a full topic.",
            broker.overload.requests_held,
        ),
        (
            "produce_requests_refused",
            "Produce requests refused because a topic was full.",
            broker.overload.requests_refused,
        ),
        (
            "requests_throttled",
            "Requests of clients over their quota.",
            broker.enforcement.throttled,
        ),
    ):
        yield single(f"penstock_{name}_total", "counter", help_, value)
    yield single("penstock_connections", "gauge", "Connections.", len(broker.connections))


def _api_name(key: int) -> str:
    return api(key).name


def timings(broker: Broker) -> Iterator[Family]:
    for name, help_, histogram in (
        ("sync", "How long the disk took to sync a partition.", broker.committer.sync_seconds),
        ("commit", "From the request of a sync until its writers could be answered.",
         broker.committer.commit_seconds),
        ("event_loop_delay", "How late the event loop was when something was due.",
         broker.lag_watch.loop_delay),
    ):  # fmt: skip
        family = Family(f"penstock_{name}_seconds", "histogram", help_)
        family.add_histogram(histogram)
        yield family


def upkeep(broker: Broker) -> Iterator[Family]:
    counters = broker.housekeeping_counters
    if counters is None:
        return
    for name, field, help_ in (
        ("housekeeping_rounds", "rounds", "Rounds of housekeeping."),
        ("housekeeping_failures", "failures", "What failed in housekeeping."),
        ("retention_removed_segments", "segments_removed", "Segments removed by retention."),
        ("retention_removed_bytes", "bytes_removed", "Bytes removed by retention."),
        ("compactions", "compactions", "Compactions of a partition."),
        ("compaction_read_records", "records_compacted", "Records that compaction looked at."),
        ("compaction_removed_records", "records_removed", "Records that compaction removed."),
        ("archived_segments", "segments_archived", "Segments copied to the archive."),
        ("archived_bytes", "bytes_archived", "Bytes copied to the archive."),
        ("repairs", "repairs", "Partitions brought back after their disk had failed."),
    ):
        yield single(f"penstock_{name}_total", "counter", help_, getattr(counters, field))


# ---- partitions ------------------------------------------------------------------------------


async def partitions(broker: Broker, breathe: Callable[[], Any]) -> list[Family]:
    """Where each partition begins and ends and how large it is."""
    start = Family("penstock_partition_start_offset", "gauge", "The first offset of a partition.")
    end = Family("penstock_partition_end_offset", "gauge", "The offset after a partition's last.")
    size = Family("penstock_partition_size_bytes", "gauge", "Bytes of a partition on disk.")
    families = [start, end, size]
    left = broker.config.limits.max_metric_partitions
    others = [0, 0, 0]
    more = False
    for topic in list(broker.catalog.topics.values()):
        for number in range(topic.partitions):
            partition = broker.partition(topic.name, number)
            if partition is None:
                continue
            values = (partition.log_start, partition.visible, partition.size_bytes)
            if left > 0:
                left -= 1
                labels = show_labels({"topic": topic.name, "partition": str(number)})
                for family, value in zip(families, values, strict=True):
                    family.add_text(labels, value)
            else:
                more = True
                others = [a + b for a, b in zip(others, values, strict=True)]
            await breathe()
    if more:
        labels = show_labels({"topic": OTHER, "partition": ""})
        for family, value in zip(families, others, strict=True):
            family.add_text(labels, value)
    return families


# ---- groups ----------------------------------------------------------------------------------


async def lags(broker: Broker, breathe: Callable[[], Any]) -> list[Family]:
    """How far groups are behind, as the watch has seen it last."""
    records = Family("penstock_group_lag_records", "gauge", "Records still to be read.")
    size = Family("penstock_group_lag_bytes", "gauge", "Bytes still to be read.")
    age = Family("penstock_group_lag_seconds", "gauge", "Age of the first record to be read.")
    loss = Family(
        "penstock_group_time_to_loss_seconds", "gauge",
        "Until retention may remove unread records at the present rates; +Inf if it will not.",
    )  # fmt: skip
    missed = Family(
        "penstock_group_missed_records", "gauge", "Records removed before the group had read them."
    )
    families = [records, size, age, loss, missed]
    left = broker.config.limits.max_metric_lags
    rest: list[Lag] = []

    def add(labels: str, values: tuple[float | None, ...]) -> None:
        for family, value in zip(families, values, strict=True):
            if value is not None:
                family.add_text(labels, value)

    for (group, topic, number), lag in list(broker.lag_watch.lags.items()):
        if left > 0:
            left -= 1
            labels = show_labels({"group": group, "topic": topic, "partition": str(number)})
            add(labels, (lag.records, lag.bytes, lag.seconds, _loss(lag), lag.missed))
        else:
            rest.append(lag)
        await breathe()
    if rest:
        add(
            show_labels({"group": OTHER, "topic": "", "partition": ""}),
            (
                sum(lag.records for lag in rest),
                sum(lag.bytes or 0 for lag in rest),
                max(lag.seconds or 0.0 for lag in rest),
                min(map(_loss, rest)),
                sum(lag.missed for lag in rest),
            ),
        )
    unwatched = single(
        "penstock_group_lags_unwatched", "gauge",
        "Committed offsets that are not watched, because there are too many.",
        broker.lag_watch.unwatched,
    )  # fmt: skip
    return [*families, unwatched]


def _loss(lag: Lag) -> float:
    return math.inf if lag.time_to_loss_s is None else lag.time_to_loss_s


def alerts(broker: Broker) -> Iterator[Family]:
    watch = broker.lag_watch
    firing = Family("penstock_alert", "gauge", "1 for each alert that there is now.")
    for kind, group, topic in list(watch.alerts.firing)[: broker.config.limits.max_metric_lags]:
        firing.add(1, {"alert": kind, "group": group, "topic": topic})
    yield firing
    now = Family("penstock_alerts_firing", "gauge", "How many alerts there are now.")
    begun = Family("penstock_alerts_total", "counter", "How many alerts there have been.")
    by_kind = Counter(kind for kind, _, _ in watch.alerts.firing)
    for kind in KINDS:
        now.add(by_kind[kind], {"alert": kind})
        begun.add(watch.alerts.begun[kind], {"alert": kind})
    yield now
    yield begun
    if watch.webhook is not None:
        sent = Family(
            "penstock_webhook_messages_total", "counter", "Alerts for the webhook, by outcome."
        )
        for outcome in ("sent", "failed", "dropped"):
            sent.add(getattr(watch.webhook, outcome), {"outcome": outcome})
        yield sent


async def coordinators(broker: Broker, breathe: Callable[[], Any]) -> list[Family]:
    """Groups, transactions and queues: how many, and in which state."""
    found = broker.coordination
    groups = Family("penstock_groups", "gauge", "Groups, by kind and state.")
    members = Family("penstock_group_members", "gauge", "Members of groups, by kind of group.")
    states: Counter[tuple[str, str]] = Counter()
    sizes: Counter[str] = Counter()
    for group in list(found.groups.groups.values()):
        states[group.kind, group.state] += 1
        sizes[group.kind] += len(group.describe().members)
        await breathe()
    for (kind, state), count in sorted(states.items()):
        groups.add(count, {"kind": kind, "state": state})
    for kind, count in sorted(sizes.items()):
        members.add(count, {"kind": kind})
    transactions = Family("penstock_transactions", "gauge", "Transactional ids, by state.")
    by_state = Counter(txn.state.value for txn in found.transactions.transactions.values())
    for state, count in sorted(by_state.items()):
        transactions.add(count, {"state": state})
    in_hand = unfinished = 0
    for name in list(found.shares.groups()):
        for queue in found.shares.queues_of(name):
            in_hand += queue.share.locked
            unfinished += queue.share.unfinished
        await breathe()
    return [
        groups,
        members,
        single("penstock_committed_offsets", "gauge", "Offsets that groups have committed.",
               found.groups.offsets.count),
        transactions,
        single("penstock_share_records_acquired", "gauge", "Records that are with consumers of "
               "share groups.", in_hand),
        single("penstock_share_records_unfinished", "gauge", "Records that share groups have begun "
               "with and not finished.", unfinished),
    ]  # fmt: skip


# ---- the process -----------------------------------------------------------------------------


def process(broker: Broker) -> Iterator[Family]:
    """By the names that all Prometheus clients use."""
    del broker
    usage = resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = usage.ru_utime + usage.ru_stime
    yield single("process_cpu_seconds_total", "counter", "CPU time, user and system.", cpu_s)
    yield single("process_resident_memory_bytes", "gauge", "Memory in use.", _resident_bytes(usage))
    yield single(
        "process_start_time_seconds", "gauge", "When the process started, since 1970.", _STARTED_S
    )
    count = _open_files()
    if count is not None:
        yield single("process_open_fds", "gauge", "Open files and connections.", count)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = math.inf if limit == resource.RLIM_INFINITY else limit
    yield single("process_max_fds", "gauge", "How many files may be open.", most)


def _resident_bytes(usage: resource.struct_rusage) -> int:
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except (OSError, ValueError, IndexError):
        # Elsewhere than on Linux: the most that it ever was, in bytes on macOS.
        return usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _open_files() -> int | None:
    for folder in ("/proc/self/fd", "/dev/fd"):
        try:
            return len(os.listdir(folder))
        except OSError:
            continue
    return None
