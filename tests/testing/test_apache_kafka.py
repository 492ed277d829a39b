"""A real Apache Kafka starts, serves, stops, and keeps its data and address over a restart."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from penstock.testing.apache_kafka import SMALL_JVM_OPTIONS, ApacheKafka
from penstock.testing.java_client import NewRecord
from penstock.testing.kafka_tools import KafkaTools, KafkaToolsError
from tests.harness.profiles import some

pytestmark = pytest.mark.java


@pytest.mark.parametrize("ends", some([["kill"], ["stop", "kill"]], test=1), ids="-".join)
def test_data_and_address_survive_a_stop_and_a_crash(
    kafka_tools: KafkaTools, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: list[str]
) -> None:
    config = {
        "num.partitions": "3",
        # After a crash the controller waits for the broker's old session to end.
        "broker.session.timeout.ms": "1000",
        "broker.heartbeat.interval.ms": "200",
    }
    kafka = ApacheKafka(config, jvm_options=SMALL_JVM_OPTIONS, data_dir=tmp_path / "kafka")
    with ExitStack() as stack:
        # Ports that somebody has taken are chosen anew.
        with socket.create_server(("127.0.0.1", 0)) as taken:
            free = ApacheKafka.choose_ports()
            choices = iter([(taken.getsockname()[1], free[0]), free])
            monkeypatch.setattr(ApacheKafka, "choose_ports", staticmethod(lambda: next(choices)))
            stack.enter_context(kafka)
        bootstrap = kafka.bootstrap
        assert bootstrap == f"127.0.0.1:{free[0]}"
        with kafka_tools.java_client(bootstrap) as client:
            # The override is in force.
            assert client.create_topic("kept")["partitions"] == 3
        values = [end.encode() for end in ends]
        for end, value in zip(ends, values, strict=True):
            process = psutil.Process(kafka.pid)
            with kafka_tools.java_client(bootstrap) as client:
                client.produce("kept", [NewRecord(value, partition=1)])
                kafka.stop() if end == "stop" else kafka.kill()
                assert not process.is_running()
                kafka.start()
                assert kafka.bootstrap == bootstrap
                records = client.consume("kept", [1])
        assert [record.value for record in records] == values
        assert kafka.startup_s > 0
        last = psutil.Process(kafka.pid)
    assert not last.is_running()
    assert kafka.log_dir.is_dir()


def test_a_start_that_fails_says_why_and_leaves_nothing() -> None:
    config = ApacheKafka({"num.network.threads": "0"})
    with pytest.raises(KafkaToolsError, match=r"(?s)formatting .*Invalid value 0"):
        config.__enter__()
    machine = ApacheKafka(jvm_options=["-XX:+NoSuchOption"])
    with pytest.raises(KafkaToolsError, match=r"(?s)ended with status 1.*NoSuchOption"):
        machine.__enter__()
    assert not config.folder.exists()
    assert not machine.folder.exists()


def test_what_is_not_running_has_no_address_and_no_process(tmp_path: Path) -> None:
    kafka = ApacheKafka(data_dir=tmp_path)
    with pytest.raises(KafkaToolsError, match="not started"):
        _ = kafka.bootstrap
    with pytest.raises(KafkaToolsError, match="not running"):
        _ = kafka.pid
    kafka.stop()
