"""Consumers that are cut off, and a broker that is killed, while a queue is worked through.

The history of what was delivered and what was confirmed is kept as it happens. At the end: every
record was confirmed or its confirmation got lost on the way; none was delivered after a consumer
knew that it is finished; none was in two hands at once.
"""

from __future__ import annotations

import random
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest

from penstock.records.record import Record, encode
from penstock.testing.process import BrokerProcess
from penstock.testing.tcp_proxy import TcpProxy
from tests.broker.raw import ConnectionEndedError
from tests.broker.requests import now_ms
from tests.broker.shares.members import (
    ACCEPT,
    RELEASE,
    Answer,
    Taker,
    lag_of,
    new_queue,
    send_batch,
)
from tests.harness.profiles import QUEUE_RECORDS

TAKERS = 6
TIMEOUT_S = 120.0
_LOST = (ConnectionEndedError, ConnectionError, BrokenPipeError, TimeoutError, OSError)


class Through:
    """A broker behind a proxy."""

    def __init__(self, proxy: TcpProxy) -> None:
        self.bootstrap = proxy.address


class History:
    """What consumers have seen."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.confirmed: set[int] = set()
        self.delivered: set[int] = set()
        self.problems: list[str] = []

    def got(self, offsets: list[int], known: set[int]) -> None:
        """`known`: what was confirmed before the fetch was sent."""
        with self.lock:
            self.delivered |= set(offsets)
            again = known & set(offsets)
            if again:
                self.problems.append(f"delivered although confirmed: {sorted(again)[:5]}")

    def snapshot(self) -> set[int]:
        with self.lock:
            return set(self.confirmed)

    def confirm(self, offsets: list[int]) -> None:
        with self.lock:
            twice = self.confirmed & set(offsets)
            if twice:
                self.problems.append(f"confirmed to two: {sorted(twice)[:5]}")
            self.confirmed |= set(offsets)


class Worker(threading.Thread):
    """A consumer that is cut off now and then, and comes back."""

    def __init__(self, place: Through, queue: tuple[str, str], history: History, seed: int) -> None:
        super().__init__(daemon=True)
        self.place, self.queue, self.history = place, queue, history
        self.rng = random.Random(seed)
        self.stop = threading.Event()

    def run(self) -> None:
        while not self.stop.is_set():
            with suppress(*_LOST):
                topic, group = self.queue
                with Taker(self.place, group, topic) as taker:
                    self.work(taker)
            # The broker may be away for a moment.
            self.stop.wait(0.02)

    def work(self, taker: Taker) -> None:
        while not self.stop.is_set():
            known = self.history.snapshot()
            got = taker.fetch(max_records=self.rng.randrange(1, 60), strict=True, wait_ms=50)
            if got.error != "NONE":
                return
            self.history.got(got.offsets, known)
            answers: list[Answer] = []
            accepted: list[int] = []
            for offset in got.offsets:
                kind = ACCEPT if self.rng.random() < 0.9 else RELEASE
                answers.append((offset, offset, kind))
                accepted += [offset] if kind == ACCEPT else []
            if not answers:
                continue
            if self.rng.random() < 0.05:
                # Dies without a word.
                return
            if taker.acknowledge(*answers) != "NONE":
                return
            self.history.confirm(accepted)


@pytest.mark.parametrize("ordered", ["false", "true"])
@pytest.mark.processes
def test_nothing_is_lost_and_nothing_comes_back(tmp_path: Path, seed: int, ordered: str) -> None:
    rng = random.Random(seed)
    history = History()
    with BrokerProcess(tmp_path / "data", durability="disk") as process:
        queue = new_queue(process, share_delivery_count_limit="1000", share_ordered_by_key=ordered)
        for first in range(0, QUEUE_RECORDS, 50):
            records = [
                Record(at, now_ms(), b"%d" % rng.randrange(40), b"%d" % (first + at))
                for at in range(50)
            ]
            send_batch(process, queue[0], encode(records))
        with Taker(process, queue[1], queue[0]) as taker:
            # From now on the group is known.
            taker.fetch(max_records=1, strict=True)
        with TcpProxy(process.bootstrap) as proxy:
            place = Through(proxy)
            workers = [Worker(place, queue, history, rng.getrandbits(32)) for _ in range(TAKERS)]
            for worker in workers:
                worker.start()
            disturb(process, proxy, queue[1], rng)
            finish(process, queue[1], workers)
    assert history.problems == []
    assert history.delivered == set(range(QUEUE_RECORDS))


def disturb(process: BrokerProcess, proxy: TcpProxy, group: str, rng: random.Random) -> None:
    """Cut connections, and kill the broker twice, as the work goes on."""
    # How many records are left then. What consumers know tells less: answers get lost.
    kills = [QUEUE_RECORDS * 3 // 4, QUEUE_RECORDS // 2]
    deadline = monotonic() + TIMEOUT_S
    while (left := lag_of(process, group)) > QUEUE_RECORDS // 4:
        assert monotonic() < deadline, f"{left} records are left"
        if kills and left <= kills[0]:
            kills.pop(0)
            process.kill()
            process.start()
        elif rng.random() < 0.5:
            proxy.cut_after(rng.randrange(200, 4_000), towards=rng.choice(["client", "server"]))
        else:
            proxy.cut()
        wait_until_left(process, group, left - 40, deadline)


def wait_until_left(process: BrokerProcess, group: str, left: int, deadline: float) -> None:
    waiting = threading.Event()
    while lag_of(process, group) > left and monotonic() < deadline:
        waiting.wait(0.01)


def finish(process: BrokerProcess, group: str, workers: list[Worker]) -> None:
    """Until nothing is left to do."""
    deadline = monotonic() + TIMEOUT_S
    waiting = threading.Event()
    while (lag := lag_of(process, group)) and monotonic() < deadline:
        waiting.wait(0.02)
    for worker in workers:
        worker.stop.set()
    for worker in workers:
        worker.join(TIMEOUT_S)
    assert lag == 0
