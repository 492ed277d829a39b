"""Fifty small flows with state on one driver: how late each is, and whether any starves."""

from __future__ import annotations

import shutil
import threading
import time
from typing import Final

import orjson
from confluent_kafka import Producer

from benchmarks.broker.clients import BUILD
from benchmarks.broker.workloads import progress
from benchmarks.frame import Asked, Cells
from benchmarks.live.freshness import Appended, Commits, percentile
from benchmarks.live.processes import Usage, command
from benchmarks.spark.data import broker, make_topic
from penstock.cli.demo_parts import memory_bytes

FOLDER: Final = BUILD / "data" / "live-fifty"
FLOWS: Final = 50
TOPIC: Final = "events"
RATE: Final = 100
# Each row is updated again and again.
KEYS: Final = 1_000
START_S: Final = 600.0

_FILE: Final = """
from pyspark.sql import functions as F
from penstock.spark import flow, stream, topic, views

events = stream("events", changelog="key string, value bigint, number bigint")

def declare(number):
    @flow(inputs=events, output=topic(f"counted-{number:02}", key="_key"), shards=2,
          name=f"counted-{number:02}")
    def counted(events):
        return views.sql(
            f"SELECT key, count(*) AS n, sum(value + {number}) AS total FROM events GROUP BY key",
            keys={"events": "number"}, events=events,
        ).changes()
    return counted

flows = [declare(number) for number in range(%d)]
"""


def measure(asked: Asked) -> Cells:
    """One round is enough to see whether one starves; each begins with an empty log."""
    cells: Cells = {}
    for _ in range(asked.rounds):
        found = _round(30.0 if asked.quick else 120.0, 10 if asked.quick else FLOWS)
        progress("  " + ", ".join(f"{name} {value:,.2f}" for name, value in found.items()))
        for name, value in found.items():
            cells.setdefault(name, {}).setdefault("penstock", []).append(value)
    return cells


def _round(seconds: float, flows: int) -> dict[str, float]:
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir(parents=True)
    (FOLDER / "flows.py").write_text(_FILE % flows)
    stop = threading.Event()
    with broker() as bootstrap:
        make_topic(bootstrap, TOPIC, partitions=1)
        writer = threading.Thread(target=_write, args=[bootstrap, stop], daemon=True)
        writer.start()
        arguments = ("run", "flows.py", "--bootstrap", bootstrap, "--plain", "--master",
                     "local[2]", "--conf", "spark.ui.enabled=false")  # fmt: skip
        log = FOLDER / "run.log"
        with command(*arguments, folder=FOLDER, log=log) as run:
            appended = Appended(bootstrap, [TOPIC])
            commits = Commits(FOLDER / ".penstock" / "flows")
            try:
                appended.start()
                commits.start()
                began = time.time()
                while time.time() < began + START_S:
                    if len(commits.ages(appended, began, time.time())) >= flows:
                        break
                    time.sleep(1.0)
                time.sleep(10.0)
                used, begin = Usage(), time.time()
                time.sleep(seconds)
                share, end = used.share(), time.time()
                memory = memory_bytes([run.pid]) / 1e9
                commits.look()
            finally:
                commits.close()
                appended.close()
                stop.set()
            by_flow = commits.ages(appended, begin, end)
    ages = [age for each in by_flow.values() for age in each]
    starved = flows - sum(map(bool, by_flow.values()))
    return {
        "fifty_p50": percentile(ages, 0.5), "fifty_p99": percentile(ages, 0.99),
        "fifty_starved": starved, "fifty_cpu": share, "fifty_memory": memory,
    }  # fmt: skip


def _write(bootstrap: str, stop: threading.Event) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5})
    number = 0
    while not stop.wait(1 / RATE):
        event = {"key": f"k{number % 20}", "value": number % 100, "number": number % KEYS}
        producer.produce(TOPIC, orjson.dumps(event), str(number % KEYS))
        producer.poll(0)
        number += 1
    producer.flush(30)
