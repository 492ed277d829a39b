"""The watch in a running broker: what it measures, when it warns, and what it does not hold up."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.broker.config import Limits
from penstock.broker.lag import watch as lag_watch
from penstock.broker.lag.formulas import Lag
from penstock.testing.broker import Broker
from penstock.testing.clock import ManualClock
from penstock.wire.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitRequestTopic,
)
from tests.broker.disks import HastyDisk
from tests.broker.lag.receiver import Receiver
from tests.broker.raw import RawClient
from tests.broker.requests import batch_of_size, create, delete, delete_records, produce
from tests.broker.waits import wait_until

NEVER_MS = 3_600_000
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
COMMIT_VERSION = 7
BY_NAME_VERSION = 12


class Watched:
    """A broker whose time the test moves, and a client of it."""

    def __init__(self, **settings: Any) -> None:
        self.clock = ManualClock()
        merged: dict[str, Any] = {
            # Passes are made by the test, and believed at once.
            "lag_interval_ms": 0,
            "housekeeping_interval_ms": NEVER_MS,
            **settings,
        }
        self.broker = Broker(disk=HastyDisk(), clock=self.clock, **merged).start()
        self.client = RawClient(self.broker.bootstrap)

    def close(self) -> None:
        self.client.close()
        self.broker.stop()

    def topic(self, name: str, partitions: int = 1, **configs: str) -> None:
        named = {key.replace("_", "."): value for key, value in configs.items()}
        result = self.client.call(create(name, partitions, configs=named)).topics[0]
        assert not result.error_code, result.error_message

    def write(self, topic: str, count: int, size: int = 100, partition: int = 0) -> None:
        """So many batches of one record."""
        for _ in range(count):
            item = batch_of_size(size, at_ms=self.clock.now_ms())
            request = produce(topic, {partition: item})
            answer = self.client.call(request, BY_NAME_VERSION)
            assert not answer.responses[0].partition_responses[0].error_code

    def commit(self, group: str, topic: str, offset: int, partition: int = 0) -> None:
        part = OffsetCommitRequestPartition(
            partition_index=partition, committed_offset=offset, committed_metadata=""
        )
        request = OffsetCommitRequest(
            group_id=group,
            generation_id_or_member_epoch=-1,
            topics=[OffsetCommitRequestTopic(name=topic, partitions=[part])],
        )
        answer = self.client.call(request, COMMIT_VERSION)
        assert not answer.topics[0].partitions[0].error_code

    def look(self, after_ms: int = 0) -> None:
        """One pass, after so much time."""
        self.clock.advance(after_ms)
        server = self.broker.server
        asyncio.run_coroutine_threadsafe(server.lag_watch.look(), server.loop).result(60)

    def lag(self, group: str, topic: str, partition: int = 0) -> Lag:
        return self.broker.call(lambda server: server.lag_watch.lags[group, topic, partition])

    @property
    def firing(self) -> set[tuple[str, str, str]]:
        return self.broker.call(lambda server: set(server.lag_watch.alerts.firing))


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched()
    yield made
    made.close()


def test_what_is_measured(watched: Watched) -> None:
    watched.topic("t", 2, retention_ms=str(HOUR_MS))
    watched.write("t", 4, 100)
    watched.clock.advance(MINUTE_MS)
    watched.write("t", 6, 200)
    watched.commit("g", "t", 2)
    watched.commit("g", "t", 0, partition=1)
    watched.look(after_ms=1000)
    lag = watched.lag("g", "t")
    assert (lag.records, lag.bytes, lag.seconds) == (8, 2 * 100 + 6 * 200, 61.0)
    assert lag.time_to_loss_s == 3600 - 61
    assert watched.lag("g", "t", 1).records == 0
    watched.commit("g", "t", 10)
    watched.look()
    lag = watched.lag("g", "t")
    assert (lag.records, lag.bytes, lag.seconds, lag.time_to_loss_s) == (0, 0, 0.0, None)


def test_rates_come_from_passes(watched: Watched) -> None:
    watched.topic("t", retention_bytes="10000")
    watched.write("t", 20, 100)
    watched.commit("slow", "t", 0)
    watched.commit("quick", "t", 0)
    watched.look()
    watched.write("t", 20, 100)
    watched.commit("slow", "t", 10)
    watched.commit("quick", "t", 20)
    watched.look(after_ms=10_000)
    # 200 bytes a second are written, 100 read; 3000 of 10000 bytes are behind.
    assert watched.lag("slow", "t").time_to_loss_s == pytest.approx(70)
    assert watched.lag("slow", "t").kept_s == pytest.approx(50)
    assert watched.lag("quick", "t").time_to_loss_s is None


def test_records_that_are_gone_were_missed(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.topic("t")
    watched.write("t", 10)
    watched.commit("late", "t", 3)
    watched.commit("fine", "t", 8)
    watched.client.call(delete_records("t", 7))
    with caplog.at_level(logging.INFO, logger="penstock.broker.lag.watch"):
        watched.look()
        watched.look()
        assert (watched.lag("late", "t").missed, watched.lag("late", "t").records) == (4, 3)
        assert watched.firing == {("missed", "late", "t")}
        watched.commit("late", "t", 9)
        watched.look()
    assert watched.firing == set()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2
    assert "group late has missed 4 records of t" in told[0]
    assert "is back" in told[1]


def test_an_alert_before_records_are_lost(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.topic("t", retention_ms=str(10 * HOUR_MS))
    watched.write("t", 3)
    watched.commit("stuck", "t", 0)
    watched.commit("done", "t", 3)
    with caplog.at_level(logging.WARNING, logger="penstock.broker.lag.watch"):
        watched.look()
        watched.look(after_ms=8 * HOUR_MS)
        assert watched.firing == set()
        watched.look(after_ms=HOUR_MS + MINUTE_MS)
        watched.look(after_ms=MINUTE_MS)
    assert watched.firing == {("near-loss", "stuck", "t")}
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "group stuck will miss records of t in 59m"
    ]
    watched.commit("stuck", "t", 3)
    watched.look()
    assert watched.firing == set()


def test_rates_are_believed_only_after_a_while() -> None:
    watched = Watched(lag_interval_ms=NEVER_MS)
    try:
        watched.topic("t", retention_ms=str(10 * HOUR_MS))
        watched.write("t", 3)
        watched.commit("g", "t", 0)
        watched.look(after_ms=10 * HOUR_MS)
        watched.look(after_ms=HOUR_MS)
        assert watched.lag("g", "t").time_to_loss_s == 0
        assert watched.firing == set()
        watched.look(after_ms=2 * HOUR_MS)
        assert watched.firing == {("near-loss", "g", "t")}
    finally:
        watched.close()


def test_a_topic_that_waits_for_the_group_loses_nothing(watched: Watched) -> None:
    watched.topic("t", retention_ms=str(HOUR_MS), overflow="block", overflow_groups="waited")
    watched.write("t", 3)
    for group in ("waited", "other"):
        watched.commit(group, "t", 0)
    watched.look(after_ms=MINUTE_MS)
    assert watched.lag("waited", "t").time_to_loss_s is None
    assert watched.lag("other", "t").time_to_loss_s == 59 * 60


def test_what_is_gone_is_forgotten(watched: Watched) -> None:
    watched.topic("t")
    watched.topic("u")
    watched.write("t", 3)
    for topic in ("t", "u"):
        watched.commit("g", topic, 0)
    watched.client.call(delete_records("t", 2))
    watched.look()
    assert watched.firing == {("missed", "g", "t")}
    assert not watched.client.call(delete("t")).responses[0].error_code
    watched.look()
    assert watched.firing == set()
    assert list(watched.broker.call(lambda s: s.lag_watch.lags)) == [("g", "u", 0)]
    assert watched.broker.call(lambda s: len(s.lag_watch._writers)) == 1
    # Made anew it does not inherit the offset.
    watched.topic("t")
    watched.look()
    assert list(watched.broker.call(lambda s: s.lag_watch.lags)) == [("g", "u", 0)]


def test_a_group_that_stands_still_costs_no_read(watched: Watched) -> None:
    watched.topic("t")
    watched.write("t", 3)
    watched.commit("g", "t", 1)
    watched.look()
    place = watched.broker.call(lambda s: s.lag_watch._readers["g", "t", 0].place)
    watched.write("t", 1)
    watched.look()
    assert watched.broker.call(lambda s: s.lag_watch._readers["g", "t", 0].place) is place
    assert watched.lag("g", "t").bytes == 300


def test_share_groups_are_watched_by_their_start(watched: Watched) -> None:
    watched.topic("t")
    watched.write("t", 5)

    def begin(server: object) -> None:
        broker = watched.broker.server
        broker.coordination.groups.get_or_make("queue", "share")
        broker.coordination.shares.open("queue", broker.catalog.topics["t"], 0, 2)

    watched.broker.call(begin)
    watched.look()
    assert (watched.lag("queue", "t").records, watched.lag("queue", "t").bytes) == (3, 300)


def test_there_is_a_bound_on_what_is_watched() -> None:
    watched = Watched(limits=Limits(max_watched_lags=3))
    try:
        watched.topic("t", 2)
        for group in ("a", "b", "c"):
            watched.commit(group, "t", 0, 0)
            watched.commit(group, "t", 0, 1)
        watched.look()
        assert watched.broker.call(lambda s: (len(s.lag_watch.lags), s.lag_watch.unwatched)) == (
            3,
            3,
        )
    finally:
        watched.close()


def test_there_is_a_bound_on_what_is_said_at_once(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    watched.topic("t")
    watched.write("t", 2)
    for at in range(60):
        watched.commit(f"g{at}", "t", 0)
    watched.client.call(delete_records("t", 1))
    with caplog.at_level(logging.WARNING, logger="penstock.broker.lag.watch"):
        watched.look()
    assert len(watched.firing) == 60
    assert len(caplog.records) == 51
    assert caplog.records[-1].getMessage() == "10 more alerts have begun or ended"


def test_alerts_go_to_the_webhook(receiver: Receiver) -> None:
    watched = Watched(alert_webhook=receiver.url)
    try:
        watched.topic("t")
        watched.write("t", 5)
        watched.commit("g", "t", 1)
        watched.client.call(delete_records("t", 4))
        watched.look()
        wait_until(watched.broker, lambda server: len(receiver.got) == 1)
        (message,) = receiver.messages
        assert {k: message[k] for k in ("alert", "state", "group", "topic", "partitions")} == {
            "alert": "missed", "state": "firing", "group": "g", "topic": "t", "partitions": [0],
        }  # fmt: skip
        assert (message["missed_records"], message["records_behind"]) == (3, 1)
        assert message["timestamp_ms"] == watched.clock.now_ms()
        # A receiver that hangs holds up nothing.
        receiver.gate.clear()
        watched.commit("g", "t", 5)
        watched.look()
        watched.write("t", 1)
    finally:
        watched.close()


def test_it_runs_by_itself() -> None:
    with Broker(disk=HastyDisk(), lag_interval_ms=1) as broker:
        wait_until(broker, lambda server: server.lag_watch.passes >= 3)
        assert broker.call(lambda server: sum(server.lag_watch.loop_delay.counts)) >= 3


@pytest.mark.parametrize(
    "settings",
    [
        {"retention_bytes": "100000", "segment_bytes": "10000"},
        {"retention_ms": "600000", "segment_bytes": "10000"},
    ],
)
def test_the_warning_comes_before_the_loss(watched: Watched, settings: dict[str, str]) -> None:
    """Writers write twice as fast as the group reads, and retention follows."""
    watched.topic("t", 1, **settings)
    server = watched.broker.server
    assert server.housekeeping is not None
    seen: list[tuple[float | None, bool, bool]] = []
    for step in range(200):
        watched.write("t", 4, 1000)
        watched.commit("slow", "t", 2 * (step + 1))
        watched.commit("quick", "t", 4 * (step + 1))
        watched.look(after_ms=10_000)
        future = asyncio.run_coroutine_threadsafe(server.housekeeping.upkeep(), server.loop)
        future.result(60)
        kinds = {kind for kind, group, _ in watched.firing if group == "slow"}
        assert kinds == {kind for kind, _, _ in watched.firing}, "only the slow one is told of"
        loss_s = watched.lag("slow", "t").time_to_loss_s
        seen.append((loss_s, "near-loss" in kinds, "missed" in kinds))
        if "missed" in kinds:
            break
    lost_at = len(seen) - 1
    assert seen[lost_at][2], "nothing was lost"
    warned_at = next(at for at, (_, near, _) in enumerate(seen) if near)
    assert warned_at < lost_at - 2
    assert all(near for _, near, _ in seen[warned_at:lost_at])
    # The estimate never promises more time than there is, but for the rate's first samples.
    for at in range(8, lost_at):
        estimate_s = seen[at][0]
        assert estimate_s is not None
        assert estimate_s <= (lost_at - at) * 10 * 1.1 + 20


def test_a_pass_over_many_rests_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lag_watch, "_SLICE_S", 0.0)
    monkeypatch.setattr(lag_watch, "_WORK_S", 0.0)
    watched = Watched(lag_interval_ms=1)
    try:
        watched.topic("t", 4)
        for number in range(4):
            watched.commit("g", "t", 0, number)
        wait_until(watched.broker, lambda server: len(server.lag_watch.lags) == 4)
        before = watched.broker.call(lambda server: server.lag_watch.passes)
        wait_until(watched.broker, lambda server: server.lag_watch.passes >= before + 2)
        rests = watched.broker.call(lambda server: sum(server.lag_watch.loop_delay.counts))
        # One before each pass, and one after each of the four partitions.
        assert rests >= 2 * 5
    finally:
        watched.close()
