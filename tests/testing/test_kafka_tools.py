"""The dump tool: what it reads on a log of Apache Kafka, and that no damage passes unnoticed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

import pytest

from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.java import HOME_VARIABLE, JavaProcess
from penstock.testing.java_client import NewRecord
from penstock.testing.kafka_tools import DumpError, KafkaTools, KafkaToolsError, parse_dump

BATCHES = 40
SEGMENT = "00000000000000000000"


@pytest.fixture(scope="session")
def kafka_log(
    kafka_tools: KafkaTools, apache_kafka: ApacheKafka, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A segment that Apache Kafka wrote and closed: several batches, indexes, a snapshot."""
    kept = tmp_path_factory.mktemp("kafka-log") / "events-0"
    kept.mkdir()
    topic = f"events-{uuid4().hex[:8]}"
    with kafka_tools.java_client(apache_kafka.bootstrap) as client:
        # An index entry for every batch; and nothing goes for being from long ago.
        configs = {"index.interval.bytes": "0", "segment.ms": "60000", "retention.ms": "-1"}
        client.create_topic(topic, 1, configs)
        # Long enough that both are in one batch, however slow the machine is.
        settings = {"compression.type": "lz4", "linger.ms": "60000"}
        for number in range(BATCHES):
            record = NewRecord(b"v%d" % number, b"k%d" % number, [("h", b"1")], 1000 + number)
            client.produce(topic, [record, record], settings)
        # So much later that the broker closes the segment before it.
        client.produce(topic, [NewRecord(b"late", None, [], 10_000_000)], settings)
    folder = apache_kafka.log_dir / f"{topic}-0"
    for file in (*folder.glob(f"{SEGMENT}.*"), folder / f"{2 * BATCHES:020d}.snapshot"):
        shutil.copy(file, kept)
    return kept


@pytest.fixture
def log(kafka_log: Path, tmp_path: Path) -> Path:
    """A copy to do damage to."""
    return Path(shutil.copytree(kafka_log, tmp_path / kafka_log.name))


def test_a_folder_is_dumped_whole(kafka_tools: KafkaTools, kafka_log: Path) -> None:
    lines = kafka_tools.dump_log(kafka_log)
    batches = [line for line in lines if line.kind == "batch"]
    assert [line.number("baseOffset") for line in batches] == list(range(0, 2 * BATCHES, 2))
    assert {line.fields["compresscodec"] for line in batches} == {"lz4"}
    (producer,) = kafka_tools.dump_snapshot(next(kafka_log.glob("*.snapshot")))
    assert {line.number("producerId") for line in batches} == {producer.number("producerId")}
    records = [line for line in lines if line.kind == "record"]
    assert [line.number("offset") for line in records] == list(range(2 * BATCHES))
    assert records[-1].fields["headerKeys"] == "[h]"
    assert "payload" not in records[-1].fields
    positions = [line.number("position") for line in lines if line.kind == "offset-index"]
    assert positions == [line.number("position") for line in batches[1:]]
    times_ms = [line.number("timestamp") for line in lines if line.kind == "time-index"]
    assert times_ms[-1] == 1000 + BATCHES - 1
    with pytest.raises(KafkaToolsError, match="not a number"):
        batches[0].number("compresscodec")


def test_payloads_on_request(kafka_tools: KafkaTools, kafka_log: Path) -> None:
    lines = kafka_tools.dump_log(kafka_log / f"{SEGMENT}.log", payloads=True)
    pairs = [
        (line.fields["key"], line.fields["payload"]) for line in lines if line.kind == "record"
    ]
    assert pairs[:3] == [("k0", "v0"), ("k0", "v0"), ("k1", "v1")]


def test_a_producer_snapshot(kafka_tools: KafkaTools, kafka_log: Path) -> None:
    (snapshot,) = kafka_log.glob("*.snapshot")
    (producer,) = kafka_tools.dump_snapshot(snapshot)
    assert producer.number("lastSequence") == producer.number("lastOffset") == 2 * BATCHES - 1


def flip(path: Path, position: int) -> None:
    """Turn every bit of one byte around."""
    data = bytearray(path.read_bytes())
    data[position] ^= 0xFF
    path.write_bytes(data)


def cut(path: Path, size: int) -> None:
    """Keep only the beginning of a file."""
    path.write_bytes(path.read_bytes()[:size])


@pytest.mark.parametrize(
    ("suffix", "damage", "finding"),
    [
        ("log", lambda path: flip(path, 70), "isvalid: false"),
        ("log", lambda path: cut(path, path.stat().st_size - 3), "invalid bytes at the end"),
        ("log", lambda path: path.write_bytes(path.read_bytes()[100:]), "CorruptRecord"),
        ("index", lambda path: flip(path, 3), "Mismatches in"),
        ("index", lambda path: flip(path, 7), "CorruptRecord"),
        ("timeindex", lambda path: flip(path, 6), "out of order|mismatch"),
        ("timeindex", lambda path: flip(path, 11), "not found|mismatch|Exception"),
        ("snapshot", lambda path: flip(path, 20), "Snapshot is corrupt"),
    ],
    ids=["record", "torn", "shifted", "index", "index-position", "time", "time-offset", "snapshot"],
)
def test_damage_is_found(
    kafka_tools: KafkaTools,
    log: Path,
    suffix: str,
    damage: Callable[[Path], object],
    finding: str,
) -> None:
    (file,) = log.glob(f"*.{suffix}")
    damage(file)
    with pytest.raises(DumpError, match=finding):
        kafka_tools.dump_log(log)
    # The process is as good as before.
    assert kafka_tools.call({"op": "ping"})["ok"]


def test_what_is_no_log_file_is_refused(kafka_tools: KafkaTools, tmp_path: Path) -> None:
    with pytest.raises(KafkaToolsError, match="nothing to dump"):
        kafka_tools.dump_log(tmp_path)
    stray = tmp_path / "notes.txt"
    stray.write_text("")
    with pytest.raises(DumpError, match="unknown file"):
        kafka_tools.dump_log(stray)
    absent = tmp_path / f"{SEGMENT}.log"
    with pytest.raises(DumpError, match=r"NoSuchFileException|FileNotFoundException"):
        kafka_tools.dump_log(absent)
    assert not absent.exists()


def test_particulars_belong_to_their_finding() -> None:
    lines, findings = parse_dump(
        "Dumping a/0.index\noffset: 1 position: 2\nMismatches in :a/0.index\n"
        "  Index offset: 1, log offset: 0\n"
    )
    assert [(line.kind, line.number("position")) for line in lines] == [("offset-index", 2)]
    assert findings == ("Mismatches in :a/0.index Index offset: 1, log offset: 0",)


def test_missing_jars_say_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path))
    with pytest.raises(KafkaToolsError, match="are not there") as missing:
        KafkaTools()
    assert "make kafka-jars" in missing.value.advice
    with pytest.raises(KafkaToolsError, match="not compiled"):
        JavaProcess(tmp_path)


def test_a_process_that_does_not_answer_is_replaced(kafka_tools: KafkaTools) -> None:
    with KafkaTools(kafka_tools.home) as tools:
        with pytest.raises(KafkaToolsError, match="no answer from Java within 0"):
            tools.call({"op": "ping"}, timeout_s=0)
        assert tools.call({"op": "ping"})["ok"]
