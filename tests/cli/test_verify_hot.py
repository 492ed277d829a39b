"""`penstock verify` on keys that are written all the time: each look finds another row."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from penstock.cli.verifying import Report, VerifyError
from penstock.cli.verifying.engine import Comparison
from penstock.cli.verifying.origins import TopicOrigin, log_ends
from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.sinks import Position, Schema, open_sink
from penstock.sinks.fields import from_text
from penstock.sinks.spec import SinkSpec
from penstock.testing.redis import RedisServer
from penstock.testing.sinks import changes, never
from tests.cli.runner import run

FIELDS = "id bigint, n bigint, at timestamp_ntz"
SCHEMA = Schema.of(from_text(FIELDS), "id")
Row = dict[str, Any]


class Log:
    """A topic with one key, and the numbers that were written under it."""

    def __init__(self, cluster: Cluster, bootstrap: str) -> None:
        self.cluster, self.topic = cluster, f"t-{uuid4().hex[:8]}"
        self._producer = Producer({"bootstrap.servers": bootstrap})
        self.last = 0
        create(cluster, self.topic, partitions=1)

    def write(self, *, gone: bool = False) -> None:
        self.last += 1
        value = None if gone else json.dumps({"id": 1, "n": self.last, "at": 0})
        self._producer.produce(self.topic, value, "1")
        assert self._producer.flush(60) == 0


class Written:
    """A store that is written to while it is waited for, and while it is read."""

    readable = True
    lifetime_s = 0
    target = "the store"

    def __init__(self, log: Log, rows: Callable[[int], list[int]]) -> None:
        """`rows` tells which numbers it holds, by the last one that it has reached."""
        self._log, self._rows = log, rows
        self.gone = False
        self.at = 0

    def stored_schema(self) -> Schema:
        return SCHEMA

    def position(self) -> Position:
        return log_ends(self._log.cluster, self._log.topic)

    def wait_for(self, position: Position, timeout_s: float) -> Position:
        for gone in (False, False, self.gone):
            self._log.write(gone=gone)
        self._reached = self._log.last
        return self.position()

    def scan(self) -> Iterator[pa.RecordBatch]:
        self._log.write()
        rows = [{"id": 1, "n": number, "at": self.at} for number in self._rows(self._reached)]
        yield pa.RecordBatch.from_pylist(rows, schema=SCHEMA.arrow)


def compared(log: Log, store: Any, *, timeout_s: float = 60) -> Report:
    spec = SinkSpec("s", log.topic, "sqlite:///x", key=("id",), fields=FIELDS, format="json")
    began = time.monotonic()
    origin = TopicOrigin(log.cluster, log.topic)
    work = Comparison(log.cluster, origin, spec, store, began + timeout_s, None)
    return work.run(began, "s", 10)


@pytest.fixture
def log(at: str) -> Iterator[Log]:
    with Cluster(at) as cluster:
        made = Log(cluster, at)
        made.write()
        yield made


@pytest.mark.parametrize("later", [0, 1])
def test_what_was_reached_or_came_since_is_right(log: Log, later: int) -> None:
    assert compared(log, Written(log, lambda reached: [reached + later])).equal


def test_a_key_that_is_deleted_and_written_again(log: Log) -> None:
    store = Written(log, lambda reached: [])
    store.gone = True
    assert compared(log, store).equal


def test_a_key_that_is_there_twice(log: Log) -> None:
    found = compared(log, Written(log, lambda reached: [reached, reached]))
    assert [each.kind for each in found.differences] == ["double"]


@pytest.mark.parametrize("rows", [lambda reached: [reached - 1], lambda reached: []])
def test_a_row_older_than_what_was_reached_is_not(
    log: Log, rows: Callable[[int], list[int]]
) -> None:
    with pytest.raises(VerifyError, match="could not be compared"):
        compared(log, Written(log, rows), timeout_s=1)


def test_times_that_python_does_not_have(log: Log) -> None:
    class Still(Written):
        def wait_for(self, position: Position, timeout_s: float) -> Position:
            return self.position()

        def scan(self) -> Iterator[pa.RecordBatch]:
            columns = [pa.array([1]), pa.array([log.last]), pa.array([2**63 - 1])]
            columns[2] = columns[2].view(pa.timestamp("us"))
            yield pa.record_batch(columns, schema=SCHEMA.arrow)

    (found,) = compared(log, Still(log, lambda reached: [])).differences
    assert found.kind == "other"
    assert found.columns["at"][1] == "9223372036854775807 (timestamp[us])"
    assert found.as_dict()["columns"]["at"]["source"] == "1970-01-01 00:00:00"


@pytest.mark.databases
def test_no_password_is_told(
    log: Log, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with RedisServer(requirepass="s3cr3t") as server:
        url = f"redis://:s3cr3t@127.0.0.1:{server.port}/0?prefix=x"
        with open_sink(url) as sink:
            sink.open(SCHEMA)
            one = changes(SCHEMA, [{"id": 1, "n": 7, "at": None}], [], since=0, until=1)
            sink.apply(
                type(one)(
                    one.upserts, one.deletes, log_ends(log.cluster, log.topic), Position(),
                    one.upserted_at, one.deleted_at,
                ),
                never,
            )  # fmt: skip
        for more in ([], ["--json"]):
            ran = run("verify", f"topic:{log.topic}", url, "-b", at, *more)
            assert ran.status == 1, ran.err
            assert "s3cr3t" not in ran.out + ran.err
            assert f"127.0.0.1:{server.port}" in ran.out + ran.err
