"""Questions and answers: with a plain consumer on the other side, and with a flow."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.client import topics
from penstock.client.asking import (
    ERROR,
    ID,
    REPLY_KEY,
    AnswerError,
    Asker,
    AskingError,
    NoAnswerError,
    TooManyOpenError,
)
from penstock.client.connection import Cluster
from penstock.client.errors import ClientError
from penstock.client.reading import read_all
from penstock.client.writer import LogWriter
from penstock.spark.asking import questions, replies
from penstock.spark.flows.declare import flow, stream, topic
from penstock.spark.flows.errors import DeclarationError
from penstock.testing import Broker
from penstock.testing.flows import FlowTester
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)
PATIENT_S = 60.0


@pytest.fixture
def names(log_broker: Broker, topic: str) -> tuple[str, str]:
    """Topics of a test's own for questions and answers, with several partitions."""
    asked, answered = f"{topic}-q", f"{topic}-a"
    with Cluster(log_broker.bootstrap) as cluster:
        for each in (asked, answered):
            topics.create(cluster, each, partitions=3)
    return asked, answered


class Answerer:
    """Answers questions by hand: twice the number; a question that is no number is wrong."""

    def __init__(self, bootstrap: str, asked: str, answered: str) -> None:
        self._cluster = Cluster(bootstrap)
        self._asked, self._answered = asked, answered
        self._seen: set[tuple[int, int]] = set()

    def answer(self, times: int = 1) -> int:
        """Answer all questions that have come, each so many times; how many there were."""
        fresh = [
            row
            for row in read_all(self._cluster, self._asked)
            if (row.partition, row.offset) not in self._seen
        ]
        with LogWriter(self._cluster) as writer:
            for row in fresh:
                headers = dict(row.headers)
                told: list[tuple[str, bytes | None]] = [(ID, headers[ID])]
                value = None
                try:
                    value = orjson.dumps(orjson.loads(row.value or b"") * 2)
                except orjson.JSONDecodeError:
                    told.append((ERROR, b"no number"))
                for _ in range(times):
                    writer.write(self._answered, [headers[REPLY_KEY]], [value], headers=[told])
        self._seen |= {(row.partition, row.offset) for row in fresh}
        return len(fresh)

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()

        def work() -> None:
            while not ended.wait(0.01):
                self.answer()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(PATIENT_S)
            self.close()

    def close(self) -> None:
        self._cluster.close()


def test_questions_are_answered(log_broker: Broker, names: tuple[str, str]) -> None:
    with (
        Answerer(log_broker.bootstrap, *names).running(),
        Asker(log_broker.bootstrap, requests=names[0], replies=names[1]) as one,
        Asker(log_broker.bootstrap, requests=names[0], replies=names[1]) as other,
    ):
        for number in range(5):
            assert one.ask(number, timeout_s=PATIENT_S).json() == 2 * number
        sent = [other.send(number) for number in range(20)]
        for number, question in reversed(list(enumerate(sent))):
            assert other.wait(question, timeout_s=PATIENT_S).json() == 2 * number
        with pytest.raises(AnswerError, match="no number"):
            one.ask("what?", timeout_s=PATIENT_S)
        assert one.open == other.open == 0
        with pytest.raises(AskingError, match="taken already"):
            other.wait(sent[0])


def test_late_and_second_answers_are_ignored(log_broker: Broker, names: tuple[str, str]) -> None:
    server = Answerer(log_broker.bootstrap, *names)
    with Asker(log_broker.bootstrap, requests=names[0], replies=names[1]) as asker:
        with pytest.raises(NoAnswerError, match=r"within 0\.1 s"):
            asker.ask(1, timeout_s=0.1)
        assert asker.open == 0
        # The answer to the first comes now, and to the second three times.
        question = asker.send(2)
        eventually(lambda: server.answer(times=3))
        assert asker.wait(question, timeout_s=PATIENT_S).json() == 4
        eventually(lambda: _heard(asker) >= 5)
    server.close()


def _heard(asker: Asker) -> int:
    asker._hear(100)
    return asker.ignored


def test_questions_are_bounded_and_need_topics(log_broker: Broker, names: tuple[str, str]) -> None:
    asked, answered = names
    with Asker(log_broker.bootstrap, requests=asked, replies=answered, max_open=3) as asker:
        sent = [asker.send(number) for number in range(3)]
        with pytest.raises(TooManyOpenError, match="3 questions"):
            asker.send(4)
        with pytest.raises(NoAnswerError):
            asker.wait(sent[0], timeout_s=0.01)
        asker.send(5)
    with pytest.raises(ClientError, match="nowhere"):
        Asker(log_broker.bootstrap, requests="nowhere", replies=answered)


@pytest.mark.processes
def test_asking_needs_no_spark() -> None:
    code = "import sys, penstock.client.asking; assert 'pyspark' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENT_S)


def test_a_flow_answers(spark: SparkSession, tmp_path: Path) -> None:
    @flow(inputs=stream("questions"), output=topic("answers", raw=True, partitions=3))
    def double(records: DataFrame) -> DataFrame:
        asked = questions(records, json="number bigint")
        small = F.col("number") < 100
        reason = F.coalesce("_error", F.when(~small, F.lit("too large")))
        return replies(
            asked.withColumn("double", F.col("number") * 2).withColumn("_error", reason),
            columns=["double"],
        )

    with Broker() as broker:
        tester = FlowTester(spark, broker, tmp_path / "data")
        tester.use(double)
        tester.make_topic("questions", partitions=2)
        tester.make_topic("answers", partitions=3)
        tester.feed("questions", ['{"number": 1}'])
        with Asker(broker.bootstrap, requests="questions", replies="answers") as asker:
            good = [asker.send({"number": at}) for at in range(5)]
            wrong, large = asker.send("five"), asker.send({"number": 500})
            tester.run()
            for at, question in enumerate(good):
                answer: Any = asker.wait(question, timeout_s=PATIENT_S).json()
                assert answer == {"double": 2 * at}
            with pytest.raises(AnswerError, match="does not fit number bigint: five"):
                asker.wait(wrong, timeout_s=PATIENT_S)
            with pytest.raises(AnswerError, match="too large"):
                asker.wait(large, timeout_s=PATIENT_S)
        # The record that was no question has no answer.
        assert len(tester.records("answers")) == 7


def test_answers_have_whole_times(spark: SparkSession) -> None:
    asked = "named_struct('id', X'01', 'key', X'02') AS _asked"
    rows = spark.range(1).selectExpr(asked, "timestamp'2026-01-01 00:00:00.000123Z' AS at")
    [row] = replies(rows).collect()
    assert bytes(row["value"]) == b'{"at":"2026-01-01T00:00:00.000123Z"}'


def test_wrong_frames_are_told(spark: SparkSession) -> None:
    rows = spark.range(1)
    with pytest.raises(DeclarationError, match=r"test_asking.py:\d+: questions"):
        questions(rows)
    with pytest.raises(DeclarationError, match=r"test_asking.py:\d+: replies"):
        replies(rows)
