"""The command line: `python -m benchmarks.sync [--only PART] [--rounds N] [--quick]`.

Parts: `sustained` (changes/s that a sink takes from a topic that is full of them) and `delay` (from
the commit in a SQLite database to the moment when the change is in the store: capture, log, Spark
and the store's own commit) at 1,000 and 10,000 changes/s. One sink at a time, fed by Spark on two
cores as `penstock run` does it. The tables go to stdout, `benchmarks/results/sync.json` and
`docs/benchmarks.md`.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from uuid import uuid4

import numpy as np
import orjson
import pyarrow as pa
from confluent_kafka import Producer
from numpy.typing import NDArray

from benchmarks import frame
from benchmarks.broker.clients import BUILD, ROOT
from benchmarks.broker.workloads import progress
from benchmarks.capture import peers
from benchmarks.capture.__main__ import broker
from benchmarks.capture.databases import NOTE, TABLE
from benchmarks.frame import Asked, Cells, best, number
from benchmarks.spark.data import make_topic
from benchmarks.sync.feeding import Noted, fed
from benchmarks.sync.stores import STORES
from benchmarks.sync.writer import File
from penstock.client.connection import Cluster
from penstock.client.metadata import LATEST, Metadata, offsets
from penstock.client.reading import read_batches
from penstock.sinks.contract import Position
from penstock.spark.session import RESIDENT_TASKS, session

PARTITIONS: Final = 2
RATES: Final = (1_000, 10_000)
# Transactions in which a backlog is taken.
BATCHES: Final = 6
# By store: changes/s that it should take at least.
TARGETS: Final = {
    "SQLite": 50_000, "PostgreSQL": 40_000, "tantivy": 20_000, "OpenSearch": 20_000,
    "Redis": 50_000, "Delta": 30_000,
}  # fmt: skip
PEERS: Final = (
    "No peer takes part: none that we know keeps all of these stores in step and runs on one "
    "machine without containers. The targets are our own; that of the delay is a p50 of 1 s at "
    "1,000 changes/s."
)
FOLDER: Final = BUILD / "data" / "sync"
Measure = Callable[[Any, str, str, str, Path, Asked], dict[str, float]]


def _each(measure: Measure, asked: Asked, prepare: Callable[[str, Asked], str]) -> Cells:
    """Every store that there is, by turns, on one log and in one session."""
    cells: Cells = {}
    with broker() as bootstrap:
        topic = prepare(bootstrap, asked)
        # Tasks import what notes their commits.
        os.environ["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])
        )
        settings = {"spark.ui.enabled": "false", RESIDENT_TASKS: "1"}
        spark = session("bench", "local[2]", **settings)
        for turn in range(asked.rounds):
            for name, store in STORES.items():
                folder = FOLDER / f"{name.lower()}-{turn}"
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                try:
                    with store(folder) as url:
                        if url is None:
                            progress(f"  {name} is not on this machine")
                            continue
                        found = measure(spark, bootstrap, topic, url, folder, asked)
                except Exception as error:
                    # One that fails does not take the figures of the others with it.
                    progress(f"  {name} failed: {type(error).__name__}: {error}")
                    continue
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
                progress(f"  {name}: " + ", ".join(f"{k} {v:,.1f}" for k, v in found.items()))
                for cell, value in found.items():
                    cells.setdefault(cell, {}).setdefault(name, []).append(value)
        spark.stop()
    return cells


# ---- sustained -------------------------------------------------------------------------------


def _count(asked: Asked) -> int:
    return 30_000 if asked.quick else 600_000


def _events(count: int) -> Iterator[tuple[bytes, bytes | None]]:
    """Changes as capture writes them: 7 in 10 inserts, 2 updates, 1 delete of a row at random."""
    chance = random.Random(7)
    rows = 0
    for at in range(count):
        kind = chance.random()
        key = rows if kind < 0.7 or not rows else chance.randrange(rows)
        rows += key == rows
        written_us = 1_760_000_000_000_000 + at
        row = {"id": key, "customer": f"customer-{key % 5000}", "country": "DE",
               "amount": key / 100, "quantity": at % 7, "note": NOTE,
               "created": "2026-11-01 12:34:56", "written_us": written_us}  # fmt: skip
        gone = kind >= 0.9 and key < rows - 1
        event = {"before": row if gone else None, "after": None if gone else row,
                 "source": {"connector": "sqlite", "name": "bench", "table": TABLE, "ts_ms": at},
                 "op": "d" if gone else "u" if kind >= 0.7 else "c", "ts_ms": at}  # fmt: skip
        yield orjson.dumps({"id": key}), orjson.dumps(event)


def _filled(bootstrap: str, asked: Asked) -> str:
    topic = "backlog"
    make_topic(bootstrap, topic, partitions=PARTITIONS)
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 20, "batch.size": 262_144,
                         "compression.type": "lz4"})  # fmt: skip
    for key, value in _events(_count(asked)):
        while True:
            try:
                producer.produce(topic, value, key)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(300):
        raise RuntimeError("not all changes were written")
    return topic


def _sustained(
    spark: Any, bootstrap: str, topic: str, url: str, folder: Path, asked: Asked
) -> dict[str, float]:
    """Changes/s between the first commit of a store and the last: without the query's start."""
    count = _count(asked)
    notes = folder / "commits"
    spec = Noted("bench", topic, url, max_records=count // BATCHES, notes=notes)
    commits = spec.commits
    with fed(spark, bootstrap, spec, folder / "data") as until:
        until(lambda: bool(commits.at_us) and commits.records(-1) >= count)
    took_s = (commits.at_us[-1] - commits.at_us[0]) / 1e6
    return {"sustained": (commits.records(-1) - commits.records(0)) / max(took_s, 1e-6)}


def sustained(asked: Asked) -> Cells:
    return _each(_sustained, asked, _filled)


# ---- delay -----------------------------------------------------------------------------------


def _captured(bootstrap: str, asked: Asked) -> str:
    # The capture makes its topics itself.
    return f"{peers.PREFIX}.{TABLE}"


def _delay(
    spark: Any, bootstrap: str, topic: str, url: str, folder: Path, asked: Asked
) -> dict[str, float]:
    """Milliseconds from the commit in the database to that in the store."""
    seconds = 5.0 if asked.quick else 20.0
    rates = RATES[:1] if asked.quick else RATES
    database = File(folder / "source.db")
    database.start()
    database.make_table(1)
    found: dict[str, float] = {}
    # The end of the folder's name makes that of the capture, which must be a new one.
    with peers.penstock(database, bootstrap, folder / f"capture_{uuid4().hex[:6]}") as capture:
        capture.wait_for(1)
        with _deleted_after(bootstrap, topic):
            spec = Noted("bench", topic, url, notes=folder / "commits")
            with fed(spark, bootstrap, spec, folder / "data") as until:
                until(lambda: bool(spec.commits.at_us))
                first = 10
                for rate in (rates[0], *rates):
                    # The first one is for warming up.
                    begin = _ends(bootstrap, topic)
                    # It is waited for here, so that the sink is looked after meanwhile.
                    with _writing(folder / "source.db", rate, seconds, first) as writing:
                        until(lambda: writing.poll() is not None)
                    first += 10_000_000
                    capture.wait_for(1)
                    _reach(bootstrap, topic, spec, until)
                    waits, logged = _waits_ms(bootstrap, topic, spec, begin)
                    found[f"log_{rate}_p50"] = float(np.percentile(logged, 50))
                    found[f"delay_{rate}_p50"] = float(np.percentile(waits, 50))
                    found[f"delay_{rate}_p99"] = float(np.percentile(waits, 99))
                    found[f"rate_{rate}"] = len(waits) / seconds
    return found


@contextmanager
def _writing(
    path: Path, rate: int, seconds: float, first: int
) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "benchmarks.sync.writer"]
    process = subprocess.Popen(
        [*command, str(path), str(rate), str(seconds), str(first)],
        cwd=ROOT, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield process
        if process.wait() != 0:
            raise RuntimeError("the writer failed")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def _deleted_after(bootstrap: str, topic: str) -> Iterator[None]:
    from penstock.client.topics import delete

    try:
        yield
    finally:
        with Cluster(bootstrap) as cluster:
            delete(cluster, [topic], missing_ok=True)


def _ends(bootstrap: str, topic: str) -> Position:
    with Cluster(bootstrap) as cluster:
        metadata = Metadata(cluster)
        places = [(topic, at) for at in metadata.partitions(topic)]
        return Position(offsets(cluster, dict.fromkeys(places, LATEST), metadata=metadata))


def _reach(bootstrap: str, topic: str, spec: Noted, until: Callable[..., None]) -> None:
    """All is in the log, as its end does not move any more, and in the store."""
    seen: list[Position] = []

    def is_quiet() -> bool:
        seen.append(_ends(bootstrap, topic))
        return len(seen) > 20 and len({each.text() for each in seen[-20:]}) == 1

    until(is_quiet)
    until(lambda: spec.commits.positions[-1].reaches(seen[-1]))


def _waits_ms(
    bootstrap: str, topic: str, spec: Noted, begin: Position
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """From the database to the store, and to the capture's record, for each change."""
    found, logged = [], []
    start = {at: offset for (_, at), offset in begin.offsets.items()}
    with Cluster(bootstrap) as cluster:
        for at, batch in read_batches(cluster, topic, start=start):
            stamps = batch.column("timestamp").cast(pa.int64()).to_pylist()
            columns = (batch.column(name).to_pylist() for name in ("offset", "value"))
            rows = [
                (offset, orjson.loads(value)["after"]["written_us"], stamp)
                for offset, value, stamp in zip(*columns, stamps, strict=True)
                if value is not None
            ]
            told = np.array(rows, np.int64).reshape(-1, 3)
            found.append(spec.commits.visible_us((topic, at), told[:, 0]) - told[:, 1])
            logged.append((told[:, 2] - told[:, 1]) / 1000)
    return np.concatenate(found) / 1000, np.concatenate(logged)


def delay(asked: Asked) -> Cells:
    return _each(_delay, asked, _captured)


# ---- the table -------------------------------------------------------------------------------

PARTS: Final[dict[str, frame.Part]] = {"sustained": sustained, "delay": delay}


def render(results: dict[str, Any]) -> str:
    cells: Cells = {}
    for part in results["parts"].values():
        cells.update(part["cells"])
    heads = [f"p50 / p99 at {rate:,}/s, ms" for rate in RATES]
    lines = [
        frame.measured_on(results),
        "",
        PEERS,
        "",
        f"| store | changes/s, sustained | target | {' | '.join(heads)} |",
        "|---|---:|---:|" + "---:|" * len(heads),
    ]
    for name in STORES:
        rate = best(cells.get("sustained", {}).get(name))
        waits = [_shown(cells, f"delay_{each}", name) for each in RATES]
        if rate is None and not any(waits):
            continue
        target = number(TARGETS[name]) if name in TARGETS else "—"
        lines.append(
            f"| {name} | {number(rate)} | {target} | {' | '.join(x or '—' for x in waits)} |"
        )
    return "\n".join(lines)


def _shown(cells: Cells, cell: str, name: str) -> str:
    middle, most = (
        best(cells.get(f"{cell}_{which}", {}).get(name), lower=True) for which in ("p50", "p99")
    )
    if middle is None:
        return ""
    held = best(cells.get(cell.replace("delay", "rate"), {}).get(name)) or 0.0
    wanted = int(cell.rpartition("_")[2])
    # What the writer and the capture did not make is not what was asked for.
    note = "" if held > 0.95 * wanted else f" (only {number(held)}/s made)"
    return f"{number(middle)} / {number(most)}{note}"


if __name__ == "__main__":
    raise SystemExit(frame.run("sync", __doc__ or "", PARTS, render))
