"""The Kafka protocol without a client library: Apache Kafka and Penstock.

librdkafka costs as much as the broker behind it; these figures are what the broker does when the
client costs nothing. Requests are built once (`benchmarks/clients/raw_kafka.c`); c is the number
of connections, d the number of requests in flight on each.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from benchmarks.broker import clients, processes
from benchmarks.broker.results import Answer, SystemResult
from benchmarks.broker.servers import Server

KIB: Final = 1024
MIB: Final = 1024 * KIB


@dataclass(frozen=True)
class RawCell:
    """One shape of load; `unit` is what its rate is read in."""

    name: str
    text: str
    unit: str
    mode: str
    arguments: dict[str, int]


PRODUCE_CELLS: Final = (
    RawCell(
        "raw_produce_64k",
        "produce, 64 KiB requests, c1 d8",
        "MB/s",
        "produce",
        {"conns": 1, "depth": 8, "bytes": 64 * KIB, "record": KIB},
    ),
    RawCell(
        "raw_produce_64k_deep",
        "produce, 64 KiB requests, c1 d64",
        "MB/s",
        "produce",
        {"conns": 1, "depth": 64, "bytes": 64 * KIB, "record": KIB},
    ),
    RawCell(
        "raw_produce_1m",
        "produce, 1 MiB requests, c1 d4",
        "MB/s",
        "produce",
        # Kafka takes at most 1 MiB and 12 bytes by default, the batch header included.
        {"conns": 1, "depth": 4, "bytes": MIB, "record": KIB},
    ),
    RawCell(
        "raw_small_d256",
        "produce, one 100 B record a request, c1 d256",
        "req/s",
        "produce",
        {"conns": 1, "depth": 256, "bytes": 1, "record": 100},
    ),
    RawCell(
        "raw_small_c32",
        "produce, one 100 B record a request, c32 d1",
        "req/s",
        "produce",
        {"conns": 32, "depth": 1, "bytes": 1, "record": 100},
    ),
    RawCell(
        "raw_small_d1",
        "produce, one 100 B record a request, c1 d1",
        "p50 / p99",
        "produce",
        {"conns": 1, "depth": 1, "bytes": 1, "record": 100},
    ),
)
# Read over what the 64 KiB produce wrote.
FETCH_CELLS: Final = (
    RawCell(
        "raw_fetch_64k",
        "fetch, 64 KiB answers, c1 d4",
        "MB/s",
        "fetch",
        {"conns": 1, "depth": 4, "max_bytes": 64 * KIB},
    ),
    RawCell(
        "raw_fetch_1m",
        "fetch, 1 MiB answers, c1 d2",
        "MB/s",
        "fetch",
        {"conns": 1, "depth": 2, "max_bytes": MIB},
    ),
)
RAW_CELLS: Final = PRODUCE_CELLS + FETCH_CELLS


def measure(
    server: Server, new_topic: Callable[[], str], seconds: float, result: SystemResult
) -> None:
    """Every raw cell once."""

    def cell(cell: RawCell, topic: str, **more: int) -> Answer:
        def run(seconds: float) -> Answer:
            return clients.run(
                "raw_kafka",
                cell.mode,
                addr=server.address,
                topic=topic,
                seconds=seconds,
                **cell.arguments,
                **more,
            )

        if cell.mode == "fetch" or cell is not first:
            run(seconds / 2)  # warms this very path; the first was warmed by what ran before
            os.sync()
        before = processes.cpu_s(server.pid)
        answer = run(seconds)
        answer["server_cpu_s"] = round(processes.cpu_s(server.pid) - before, 2)
        result.add(cell.name, answer)
        return answer

    first, *others = PRODUCE_CELLS
    log = new_topic()
    os.sync()
    written = cell(first, log)
    for fetch in FETCH_CELLS:
        cell(
            fetch,
            log,
            batch_bytes=written["batch_bytes"],
            batch_records=written["batch_records"],
            batches=written["requests"],
        )
    for produce in others:
        os.sync()
        cell(produce, new_topic())
