"""The command line: `python -m benchmarks.consumers [--quick] [--systems a,b] [--only part]`.

Parts: `rebalance`, `commits`, `transactions`, `queue`. Every system is started alone on an empty
folder, runs the parts it can, and is stopped; rounds of all systems are interleaved and the best
one counts. The table goes to stdout, `benchmarks/results/consumers.json` and `docs/benchmarks.md`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Final

from confluent_kafka import KafkaException

from benchmarks.broker import docs
from benchmarks.broker.clients import BUILD, ROOT, ClientError, build
from benchmarks.broker.processes import ServerError
from benchmarks.broker.results import describe_machine
from benchmarks.broker.servers import Server
from benchmarks.broker.systems import SYSTEMS, System
from benchmarks.broker.workloads import progress
from benchmarks.consumers import commits, queue, rebalance, transactions
from benchmarks.consumers.report import render

PARTS: Final = ("rebalance", "commits", "transactions", "queue")
CHOSEN: Final = ("penstock", "penstock-os", "kafka", "rabbit-classic", "rabbit-quorum")
RESULTS: Final = ROOT / "benchmarks" / "results" / "consumers.json"

# By name of the measurement, one value per round.
Cells = dict[str, list[float]]


class Plan:
    """How much of everything."""

    def __init__(self, *, quick: bool) -> None:
        self.rounds = 1 if quick else 2
        self.members = (2, 10) if quick else (2, 10, 50)
        self.committers = (1, 16)
        self.commit_s = 1.0 if quick else 3.0
        self.txn_s = 2.0 if quick else 6.0
        self.consumers = (1, 4) if quick else (1, 4, 16)
        self.messages = 50_000 if quick else 200_000


def main() -> int:
    options = _parse()
    for ending in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(ending, _interrupt)
    plan = Plan(quick=options.quick)
    machine = describe_machine(BUILD / "data")
    cells: dict[str, Cells] = {key: {} for key in options.systems}
    failures = 0
    try:
        for number in range(1, plan.rounds + 1):
            for key in options.systems:
                progress(f"round {number} of {plan.rounds}: {key}")
                failures += _round(SYSTEMS[key], plan, options.only or PARTS, cells[key], number)
    except KeyboardInterrupt:
        progress("interrupted; every server is stopped, nothing is written")
        return 130
    text = render(machine, cells)
    print(text)
    if not options.quick:
        RESULTS.parent.mkdir(parents=True, exist_ok=True)
        RESULTS.write_text(json.dumps({"machine": machine, "cells": cells}, indent=1) + "\n")
        docs.replace_section(docs.DOCS, "bench-consumers", text)
    return 1 if failures else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.consumers", description=__doc__)
    parser.add_argument("--systems", type=lambda text: text.split(","), default=list(CHOSEN))
    parser.add_argument("--only", action="append", choices=PARTS, help="a part; may be repeated")
    parser.add_argument("--quick", action="store_true", help="one short round, nothing is written")
    return parser.parse_args()


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _round(system: System, plan: Plan, parts: tuple[str, ...], cells: Cells, number: int) -> int:
    """One system, started anew; how many of its parts failed."""
    folder = BUILD / "data" / f"consumers-{system.key}"
    shutil.rmtree(folder, ignore_errors=True)
    server = system.make(folder)
    failures = 0
    try:
        build("kafka_bench" if system.speaks_kafka else "rabbit_bench")
        server.start()
        for part in parts:
            for name, run in _jobs(system, server, plan, part, number):
                progress(f"  {name}")
                try:
                    cells.setdefault(name, []).append(run())
                except (ClientError, KafkaException, RuntimeError, OSError) as error:
                    failures += 1
                    progress(f"  {name} failed: {error}")
    except (ServerError, ClientError) as error:
        failures += 1
        progress(f"  {system.key} failed: {error}")
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)
    return failures


Job = tuple[str, Callable[[], float]]


def _jobs(system: System, server: Server, plan: Plan, part: str, run: int) -> list[Job]:
    """What a part measures on a system, by name."""
    address = server.address
    if not system.speaks_kafka:
        if part != "queue":
            return []
        kind = system.key.removeprefix("rabbit-")
        return [
            (
                f"queue_{n}",
                partial(queue.measure_rabbit, address, kind, n, plan.messages, f"{n}-{run}"),
            )
            for n in plan.consumers
        ]
    if part == "rebalance":
        return [
            (
                f"rebalance_{protocol}_{n}",
                partial(rebalance.measure, address, n, protocol, f"{protocol}-{n}-{run}"),
            )
            for protocol in ("classic", "consumer")
            for n in plan.members
        ]
    if part == "commits":
        return [
            (f"commits_{n}", partial(commits.measure, address, n, plan.commit_s, f"{n}-{run}"))
            for n in plan.committers
        ]
    if part == "transactions":
        pipeline = transactions.Measured(address, plan.txn_s, str(run))
        return [
            (f"transactions_{name}", partial(pipeline.value, name))
            for name in ("txn_per_s", "p50_ms", "p99_ms")
        ]
    return [
        (f"queue_{n}", partial(queue.measure, address, n, plan.messages, f"{n}-{run}"))
        for n in plan.consumers
    ]


if __name__ == "__main__":
    raise SystemExit(main())
