"""The metrics page, read by Prometheus' own parser, over real HTTP."""

from __future__ import annotations

import asyncio
import http.client
import math
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from penstock.broker.config import Limits
from penstock.broker.lag.formulas import Lag
from penstock.broker.metrics import collect as metrics
from penstock.broker.metrics.exposition import Family
from penstock.broker.metrics.http import MAX_CONNECTIONS, MAX_HEAD_BYTES
from penstock.broker.metrics.metering import Histogram
from penstock.errors import ConfigError, StorageError
from penstock.testing.broker import Broker
from tests.broker.disks import HastyDisk
from tests.broker.raw import RawClient
from tests.broker.requests import batch, create, fetch, metadata, produce
from tests.harness.profiles import examples

NEVER_MS = 3_600_000
BY_NAME_VERSION = 12
LAG = Lag(5, 0, 10, 5, 50, 1.5, 0, 0, 60.0, None)

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def parse(text: str) -> Samples:
    """All samples by name and labels, having checked that none is there twice."""
    found: Samples = {}
    families: list[Metric] = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    for family in families:
        assert family.documentation
        assert family.type != "unknown"
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in found, key
            found[key] = sample.value
    return found


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, frozenset(labels.items())]


def get(broker: Broker, path: str = "/metrics", method: str = "GET") -> tuple[int, str, str]:
    server = broker.server.metrics_server
    assert server is not None
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request(method, path)
        answer = connection.getresponse()
        return answer.status, answer.headers["Content-Type"], answer.read().decode()
    finally:
        connection.close()


def scrape(broker: Broker) -> Samples:
    status, kind, text = get(broker)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    return parse(text)


def running(**more: Any) -> Broker:
    merged: dict[str, Any] = {
        "metrics_port": 0, "lag_interval_ms": 0, "housekeeping_interval_ms": NEVER_MS, **more,
    }  # fmt: skip
    return Broker(disk=HastyDisk(), **merged)


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with running() as started:
        yield started


# ---- the format ------------------------------------------------------------------------------


@settings(max_examples=examples(50))
@given(st.lists(st.tuples(st.text(max_size=8), st.floats() | st.integers(-10, 2**53)), max_size=5))
def test_any_label_and_value_is_read_back(rows: list[tuple[str, float]]) -> None:
    family = Family("m", "gauge", 'with "quotes", \\ and\nlines')
    expected = {}
    for at, (label, number) in enumerate(rows):
        # Labels are told apart by characters that cannot be in a line of text.
        clean = "".join(c for c in label if c == "\n" or c.isprintable())
        family.add(number, {"label": clean, "n": str(at)})
        expected[clean, str(at)] = number
    text = "".join(f"{line}\n" for line in family.lines())
    found = {}
    for metric in text_string_to_metric_families(text):
        for sample in metric.samples:
            found[sample.labels["label"], sample.labels["n"]] = sample.value
    assert found.keys() == expected.keys()
    for key, number in expected.items():
        assert found[key] == number or (math.isnan(found[key]) and math.isnan(number))


@settings(max_examples=examples(50))
@given(st.lists(st.floats(0, 100)))
def test_a_histogram_adds_up(values: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 10.0))
    for item in values:
        histogram.observe(item)
    family = Family("h_seconds", "histogram", "x")
    family.add_histogram(histogram)
    found = parse("".join(f"{line}\n" for line in family.lines()))
    assert value(found, "h_seconds_count") == len(values)
    assert value(found, "h_seconds_sum") == pytest.approx(sum(values))
    for bound in (0.1, 1.0, 10.0):
        below = sum(item <= bound for item in values)
        assert value(found, "h_seconds_bucket", le=str(bound)) == below
    assert value(found, "h_seconds_bucket", le="+Inf") == len(values)


# ---- what is told ----------------------------------------------------------------------------


def test_requests_bytes_and_errors_are_counted() -> None:
    with running() as broker, RawClient(broker.bootstrap) as client:
        client.call(create("t"))
        for at in range(7):
            # After the first they are recognised by their bytes.
            client.call(produce("t", batch(b"v%d" % at)), BY_NAME_VERSION)
        client.call(produce("missing", batch(b"x")), BY_NAME_VERSION)
        client.call(produce("t", batch(b"x")[:-1] + b"\1"), BY_NAME_VERSION)
        client.call(fetch("t"), BY_NAME_VERSION)
        client.call(fetch("t", 99), BY_NAME_VERSION)
        client.call(metadata("t"))
        found = scrape(broker)
        requests = {
            dict(labels)["api"]: count
            for (name, labels), count in found.items()
            if name == "penstock_requests_total"
        }
        assert requests == {"Produce": 9, "Fetch": 2, "Metadata": 1, "CreateTopics": 1}
        errors = {
            (dict(labels)["api"], dict(labels)["error"]): count
            for (name, labels), count in found.items()
            if name == "penstock_request_errors_total"
        }
        assert errors == {
            ("Produce", "UNKNOWN_TOPIC_OR_PARTITION"): 1,
            ("Produce", "CORRUPT_MESSAGE"): 1,
            ("Fetch", "OFFSET_OUT_OF_RANGE"): 1,
        }
        assert value(found, "penstock_received_bytes_total") > 7 * len(batch(b"v0"))
        assert value(found, "penstock_sent_bytes_total") > 7 * len(batch(b"v0"))
        assert value(found, "penstock_connections") == 1
        assert value(found, "penstock_connections_accepted_total") == 1
        assert value(found, "penstock_partition_end_offset", topic="t", partition="0") == 7
        assert value(found, "penstock_partition_start_offset", topic="t", partition="0") == 0
        size = value(found, "penstock_partition_size_bytes", topic="t", partition="0")
        assert size == 7 * len(batch(b"v0"))


def test_the_broker_and_its_process(broker: Broker) -> None:
    found = scrape(broker)
    names = {name for name, _ in found}
    assert {
        "penstock_info", "penstock_topics", "penstock_partitions_failed",
        "penstock_sync_seconds_count", "penstock_commit_seconds_count",
        "penstock_event_loop_delay_seconds_count", "penstock_compactions_total",
        "penstock_retention_removed_segments_total", "penstock_share_records_acquired",
        "process_cpu_seconds_total", "process_open_fds",
    } <= names  # fmt: skip
    assert value(found, "process_resident_memory_bytes") > 1 << 20
    assert value(found, "process_open_fds") > 3


def test_every_metric_is_documented(broker: Broker) -> None:
    page = (Path(__file__).parents[3] / "docs" / "lag.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^# TYPE (\S+)", get(broker)[2], re.MULTILINE))
    assert {name for name in told if f"`{name}`" not in page} == set()


def test_syncs_are_timed() -> None:
    with running(durability="disk") as broker, RawClient(broker.bootstrap) as client:
        client.call(create("t"))
        before = value(scrape(broker), "penstock_sync_seconds_count")
        client.call(produce("t", batch(b"x")), BY_NAME_VERSION)
        found = scrape(broker)
        assert value(found, "penstock_sync_seconds_count") > before
        count = value(found, "penstock_commit_seconds_count")
        assert count == value(found, "penstock_commit_seconds_bucket", le="+Inf")


def test_groups_are_counted(broker: Broker) -> None:
    broker.call(lambda server: server.coordination.groups.get_or_make("counted", "classic"))
    found = scrape(broker)
    assert value(found, "penstock_groups", kind="classic", state="Empty") == 1
    assert value(found, "penstock_group_members", kind="classic") == 0


def test_lag_is_told_by_group_and_partition(broker: Broker) -> None:
    def put(server: object) -> None:
        broker.server.lag_watch.lags = {
            ("g", "t", 0): LAG,
            ('g "2"', "t", 1): Lag(5, 0, 5, 0, 0, 0.0, 3, 0, None, None),
        }

    broker.call(put)
    found = scrape(broker)
    labels = {"group": "g", "topic": "t", "partition": "0"}
    assert value(found, "penstock_group_lag_records", **labels) == 5
    assert value(found, "penstock_group_lag_bytes", **labels) == 50
    assert value(found, "penstock_group_lag_seconds", **labels) == 1.5
    assert value(found, "penstock_group_time_to_loss_seconds", **labels) == 60
    labels = {"group": 'g "2"', "topic": "t", "partition": "1"}
    assert value(found, "penstock_group_time_to_loss_seconds", **labels) == math.inf
    assert value(found, "penstock_group_missed_records", **labels) == 3


def test_the_number_of_lines_is_bounded() -> None:
    limits = Limits(max_metric_partitions=3, max_metric_lags=2)
    with running(limits=limits) as broker, RawClient(broker.bootstrap) as client:
        client.call(create("few", 2))
        client.call(create("many", 4))
        for number in range(4):
            client.call(produce("many", {number: batch(b"x")}), BY_NAME_VERSION)

        def put(server: object) -> None:
            watch = broker.server.lag_watch
            watch.lags = {(f"g{n}", "t", 0): LAG for n in range(10)}
            watch.alerts.observe("a", "t", {0: LAG}, 0)

        broker.call(put)
        found = scrape(broker)
        ends = {k: v for k, v in found.items() if k[0] == "penstock_partition_end_offset"}
        assert len(ends) == 4
        others = {"topic": "other", "partition": ""}
        assert value(found, "penstock_partition_end_offset", **others) == 3
        lags = {k: v for k, v in found.items() if k[0] == "penstock_group_lag_records"}
        assert len(lags) == 3
        rest = {"group": "other", "topic": "", "partition": ""}
        assert value(found, "penstock_group_lag_records", **rest) == 8 * 5
        assert value(found, "penstock_group_lag_seconds", **rest) == 1.5
        assert value(found, "penstock_group_time_to_loss_seconds", **rest) == 60
        assert value(found, "penstock_alert", alert="near-loss", group="a", topic="t") == 1
        assert value(found, "penstock_alerts_firing", alert="near-loss") == 1


# ---- the server ------------------------------------------------------------------------------


def test_pages_and_methods(broker: Broker) -> None:
    assert get(broker, "/healthz") == (200, "text/plain; charset=utf-8", "ok\n")
    assert get(broker, "/healthz?verbose")[0] == 200
    assert get(broker, "/")[0] == 404
    assert get(broker, "/metrics", "POST")[0] == 405
    assert get(broker, "/metrics", "HEAD")[::2] == (200, "")


def test_health_is_that_of_the_brokers_own_topics() -> None:
    with running() as broker:

        def fail(server: object) -> None:
            broker.server.coordination.journal.partition.failure = StorageError("no disk")

        def heal(server: object) -> None:
            broker.server.coordination.journal.partition.failure = None

        broker.call(fail)
        status, _, text = get(broker, "/healthz")
        assert status == 503
        assert "no disk" in text
        broker.call(heal)
        assert get(broker, "/healthz")[0] == 200


def test_before_it_is_ready_it_says_so(broker: Broker) -> None:
    server = broker.server.metrics_server
    assert server is not None
    server.ready = False
    try:
        assert [get(broker, path)[::2] for path in ("/metrics", "/healthz")] == [
            (503, "starting\n"),
            (503, "starting\n"),
        ]
    finally:
        server.ready = True


def raw(broker: Broker, data: bytes) -> bytes:
    """What comes back for these bytes, up to the end of the connection."""
    server = broker.server.metrics_server
    assert server is not None
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\r\n\r\n", b" 405 "),
        (b"GET\r\n\r\n", b" 404 "),
        (b"GET /metrics\r\n\r\n", b" 200 "),
        (b"\xff\x00 \xff\r\n\r\n", b" 405 "),
        (b"GET /" + b"x" * (2 * MAX_HEAD_BYTES) + b"\r\n\r\n", b" 431 "),
        (b"GET /metrics HTTP/1.1\r\n", b""),
        (b"", b""),
    ],
)
def test_whatever_is_sent(broker: Broker, data: bytes, status: bytes) -> None:
    answer = raw(broker, data)
    assert status in answer[:20]
    assert bool(answer) == bool(status)
    assert get(broker, "/healthz")[0] == 200


def test_connections_are_bounded(broker: Broker) -> None:
    server = broker.server.metrics_server
    assert server is not None
    held = [
        socket.create_connection(("127.0.0.1", server.port), 20) for _ in range(MAX_CONNECTIONS)
    ]
    try:
        assert b" 503 " in raw(broker, b"GET /metrics HTTP/1.1\r\n\r\n")[:20]
    finally:
        for connection in held:
            connection.close()
    while get(broker, "/healthz")[0] != 200:
        pass


def test_a_port_that_is_taken_is_explained() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        broker = running(metrics_port=taken.getsockname()[1])
        with pytest.raises(ConfigError, match="cannot serve metrics"):
            broker.start()


def test_off_unless_asked_for() -> None:
    with Broker(disk=HastyDisk()) as broker:
        assert broker.server.metrics_server is None


@pytest.mark.parametrize("wrong", [{"metrics_port": 70_000}, {"alert_webhook": "ftp://x/y"},
                                      {"alert_webhook": "http://"}])  # fmt: skip
def test_wrong_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Broker(**wrong)


def test_a_stop_does_not_wait_for_who_says_nothing() -> None:
    broker = running().start()
    server = broker.server.metrics_server
    assert server is not None
    with socket.create_connection(("127.0.0.1", server.port), 20) as silent:
        silent.sendall(b"GET ")
        # It is known there once a later one is answered.
        assert get(broker, "/healthz")[0] == 200
        broker.stop()
        assert silent.recv(10) == b""


def test_a_large_page_does_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others get their turn while it is made."""
    monkeypatch.setattr(metrics, "_SLICE_S", 0.0)
    with running() as broker, RawClient(broker.bootstrap) as client:
        client.call(create("wide", 20))

        async def turns() -> int:
            page = asyncio.ensure_future(metrics.expose(broker.server))
            count = 0
            while not page.done():
                await asyncio.sleep(0)
                count += 1
            parse(page.result().decode())
            return count

        future = asyncio.run_coroutine_threadsafe(turns(), broker.server.loop)
        assert future.result(60) > 20
