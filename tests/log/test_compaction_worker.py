"""Compaction on a real disk: in the child process, and as Kafka's own tool sees the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.log.cleaner import Cleaner
from penstock.log.compaction import Result, compact
from penstock.log.disk import OsDisk
from penstock.log.partition import Partition
from penstock.log.store import LogStore
from penstock.records.record import BatchOptions
from penstock.testing.clock import ManualClock
from penstock.testing.kafka_tools import DumpedLine, KafkaTools, parse_dump
from tests.log.keeping import (
    COMPACTED,
    HOUR_MS,
    ID,
    Pair,
    append,
    close_segment,
    open_store,
    run_pass,
    stored,
    stored_headers,
)


def real_log(folder: Path) -> tuple[LogStore, Partition, ManualClock]:
    clock = ManualClock()
    store = open_store(COMPACTED, clock, OsDisk(), folder)
    partition = store.partitions[ID]
    for at in range(120):
        codec = at % 5
        pairs: list[Pair] = [(b"k%d" % (at % 9), b"v%d" % at), (b"gone%d" % (at % 4), None)]
        options = BatchOptions(codec, 40 + at % 2, 0, at // 2 * 2)
        append(partition, pairs, options=options)
        clock.advance(7)
    close_segment(partition)
    return store, partition, clock


def dump(tools: KafkaTools, *files: str) -> list[DumpedLine]:
    """As `dump_log`, but gaps between offsets are what a compacted log is about."""
    arguments = ["--deep-iteration", "--files", ",".join(files)]
    answer = tools.call({"op": "dump", "arguments": arguments})
    lines, findings = parse_dump(answer["text"])
    assert "failure" not in answer, answer["failure"]
    assert [text for text in findings if not text.startswith("Non-consecutive offsets")] == []
    return lines


def test_kafkas_tool_reads_compacted_segments(tmp_path: Path, kafka_tools: KafkaTools) -> None:
    store, partition, clock = real_log(tmp_path / "data")
    run_pass(partition)
    files = [
        s.path(suffix) for s in partition.closed for suffix in (".log", ".index", ".timeindex")
    ]
    lines = dump(kafka_tools, *files)
    times = {
        line.number("offset"): line.number("CreateTime") for line in lines if line.kind == "record"
    }
    assert times == {item.offset: item.timestamp_ms for item in stored(partition)}
    headers = stored_headers(partition)
    batches = [line for line in lines if line.kind == "batch"]
    assert [line.number("lastOffset") for line in batches] == [h.last_offset for h in headers]
    assert [line.number("producerId") for line in batches] == [h.producer_id for h in headers]
    assert [line.number("count") for line in batches] == [h.record_count for h in headers]
    horizons = [
        line.text for line in batches if f"OptionalLong[{clock.now_ms() + HOUR_MS}]" in line.text
    ]
    assert len(horizons) == 4
    store.close()


def ask(request: dict[str, object]) -> dict[str, Any]:
    """What the child process answers; its input stays open meanwhile."""
    with start_worker() as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(json.dumps(request).encode() + b"\n")
        child.stdin.flush()
        answer: dict[str, Any] = json.loads(child.stdout.readline())
    return answer


def start_worker() -> subprocess.Popen[bytes]:
    place = str(Path(penstock.__file__).parent.parent)
    command = [sys.executable, "-m", "penstock.log.compaction_worker"]
    pipe = subprocess.PIPE
    env = {**os.environ, "PYTHONPATH": place}
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, env=env)


def cleaned_files(partition: Partition) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in Path(partition.folder).glob("*.cleaned")}


@pytest.mark.processes
def test_the_child_process_does_the_same(tmp_path: Path) -> None:
    _, partition, clock = real_log(tmp_path / "data")
    due = Cleaner(partition).due(clock.now_ms())
    assert due is not None
    expected = compact(partition.disk, partition.folder, due.job)
    files = cleaned_files(partition)
    assert files
    answer = ask({"folder": partition.folder, "job": due.job.to_json()})
    assert Result.from_json(answer["result"]) == expected
    assert cleaned_files(partition) == files


@pytest.mark.processes
def test_the_child_process_says_what_went_wrong(tmp_path: Path) -> None:
    _, partition, clock = real_log(tmp_path / "data")
    due = Cleaner(partition).due(clock.now_ms())
    assert due is not None
    log = Path(partition.closed[0].path(".log"))
    log.write_bytes(log.read_bytes()[:-3])
    answer = ask({"folder": partition.folder, "job": due.job.to_json()})
    assert "shorter" in answer["error"]


@pytest.mark.processes
def test_the_child_process_ends_with_its_parent() -> None:
    with start_worker() as child:
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(60) == 1
