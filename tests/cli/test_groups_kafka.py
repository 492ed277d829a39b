"""`penstock groups` on a real Apache Kafka, with Kafka's own tool beside it."""

from __future__ import annotations

import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from penstock.testing.apache_kafka import SMALL_JVM_OPTIONS, ApacheKafka
from penstock.testing.java import java_command, kafka_home
from tests.cli.group_scenarios import FIRST_MS, SCENARIOS, STEP_MS, Place

TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_kafka(name: str, apache_kafka: ApacheKafka) -> None:
    SCENARIOS[name](apache_kafka.bootstrap)


def tool(place: Place, *args: str) -> list[tuple[int, int]]:
    """What Kafka's own tool would set: partitions and new offsets."""
    command = [
        *java_command(kafka_home(), SMALL_JVM_OPTIONS, TOOL),
        "--bootstrap-server", place.at, "--group", place.group,
        "--reset-offsets", "--all-topics", "--dry-run", *args,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = re.findall(rf"^{place.group}\s+{place.topic}\s+(\d+)\s+(\d+)", done.stdout, re.MULTILINE)
    assert rows, done.stdout + done.stderr
    return sorted((int(partition), int(offset)) for partition, offset in rows)


def test_resets_are_what_kafkas_own_tool_makes_of_them(apache_kafka: ApacheKafka) -> None:
    place = Place(apache_kafka.bootstrap)
    place.commit(4, 6)
    at_ms = FIRST_MS + 5 * STEP_MS - 1
    moment = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    pairs = [
        (("--to-offset", "99"), ("--to-offset", "99")),
        (("--shift-by", "-5"), ("--shift-by", "-5")),
        (("--to-time", str(at_ms)), ("--to-datetime", moment.replace("+00:00", "Z"))),
    ]
    ours = [[(number, new) for number, _, new in place.plan(*args)] for args, _ in pairs]
    with ThreadPoolExecutor(2) as threads:
        theirs = list(threads.map(lambda pair: tool(place, *pair[1]), pairs))
    assert ours == theirs
