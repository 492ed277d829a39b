"""Testing flows: feed rows, run to the end of what is there, read rows. No sleeping.

    def test_visits(penstock_flows):
        penstock_flows.load("flows.py")
        penstock_flows.feed("clicks", [{"user": "ann", "page": "/"}])
        penstock_flows.run()
        assert penstock_flows.rows("visits") == [{"user": "ann", "page": "/"}]

The fixture `penstock_flows` has a broker of its own, empty at the start of each test, and the one
Spark session of the whole run. Each `run` reads all that is there, as the same flows would in
production, and remembers how far it came: feed and run again for the next micro-batch.

**Time.** `now` is the tester's clock; records are stamped with it, rows can use it, and only
`advance` moves it. A window closes when a row arrives whose time is past its end and lateness, as
in production: advance, feed a row, run.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson
from confluent_kafka import KafkaError, Producer
from confluent_kafka.admin import AdminClient, NewTopic
from pyspark.sql.types import StructType

from penstock.client.table_schemas import SCHEMA_ID
from penstock.errors import PenstockError
from penstock.spark.flows.declare import Collected, Flow, physical
from penstock.spark.flows.folder import Folder
from penstock.spark.flows.load import load
from penstock.spark.flows.manager import Manager, Status
from penstock.spark.flows.overseeing import Settings
from penstock.spark.flows.supervisor import Policy
from penstock.testing import captured_rows
from penstock.testing.reading import TopicRecord, read_topic

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from penstock.testing.broker import Broker

START: Final = datetime(2026, 1, 1, tzinfo=UTC)
TIMEOUT_S: Final = 60.0
LOOK_S: Final = 0.03
# What Spark says when it has not waited long enough, and how often it is asked again.
TOO_SLOW: Final = "failed to connect back"
BUSY_TRIES: Final = 5


class FlowFailedError(PenstockError):
    """A flow under test has failed for good; the message is what `penstock run` would say."""


Value = Mapping[str, Any] | str | bytes | None


@dataclass(slots=True)
class FlowTester:
    """Flows, a broker and a session, put together for a test."""

    spark: SparkSession
    broker: Broker
    data: Path
    now: datetime = START
    flows: Collected = field(default_factory=Collected)
    partitions: int = 1

    # ---- flows ---------------------------------------------------------------------------

    def load(self, file: str | Path) -> Collected:
        """Take the flows of a file; those of before are forgotten, what they kept is not."""
        self.flows = load(Path(file))
        return self.flows

    def use(self, *flows: Flow) -> Collected:
        """Take flows that are declared in the test itself."""
        self.flows = Collected.of(flows)
        return self.flows

    def run(self, *only: str, tries: int = 0) -> dict[str, Status]:
        """Run the flows until all that is there has been read; FlowFailedError if one fails.

        A flow that reads what another writes runs after it. One that fails is started again up to
        `tries` times, if its error says that this may help.
        """
        self._make_inputs()
        found: dict[str, Status] = {}
        for flow in self._in_order():
            if only and flow.name not in only:
                continue
            for status in self._run_patiently(flow, tries):
                if status.state == "failed":
                    raise FlowFailedError(f"flow {flow.name!r}: {status.error}",
                                          advice=status.advice)  # fmt: skip
                found[status.name] = status
        return found

    def _run_patiently(self, flow: Flow, tries: int) -> list[Status]:
        """Spark gives a Python process ten seconds to start: on a busy machine that is too few."""
        for _ in range(BUSY_TRIES):
            found = self._run_one(flow, tries)
            if not any(each.state == "failed" and TOO_SLOW in each.error for each in found):
                break
        return found

    def _run_one(self, flow: Flow, tries: int) -> list[Status]:
        settings = Settings(
            self.broker.bootstrap,
            once=True,
            policy=Policy(first_pause_s=0.05, longest_pause_s=1.0, max_tries=tries),
        )
        folder = Folder(self.data)
        manager = Manager(self.spark, Collected([flow]), folder, settings, known=self.flows)
        with folder.locked():
            try:
                manager.start()
                # More often than where flows run for days: a test waits for the end of each.
                while not manager.step():
                    time.sleep(LOOK_S)
                return manager.status()
            finally:
                manager.close()

    def reset(self, name: str) -> dict[str, Status]:
        """Build the outputs of a flow anew, as `penstock flows reset` does."""
        folder = Folder(self.data)
        record = folder.record(name)
        folder.write(replace(record, rebuilding=record.next_generation()))
        return self.run(name)

    def _in_order(self) -> list[Flow]:
        """Who writes before who reads."""
        left, ordered = list(self.flows), list[Flow]()
        while left:
            pending = {each.name for flow in left for each in flow.topics}
            ready = [
                flow for flow in left if not pending & {each.topic for each in flow.inputs}
            ] or left
            ordered += ready
            left = [flow for flow in left if flow not in ready]
        return ordered

    def _make_inputs(self) -> None:
        written = {each.name for flow in self.flows for each in flow.topics}
        for name in {each.topic for flow in self.flows for each in flow.inputs} - written:
            self.make_topic(name)
        # What a flow reads of another one may not have been written yet.
        for flow in self.flows:
            for each in flow.inputs:
                if each.topic in written:
                    self.make_topic(each.topic)

    # ---- time ----------------------------------------------------------------------------

    def advance(self, by: timedelta | float) -> datetime:
        """Let time pass: a timedelta, or seconds."""
        self.now += by if isinstance(by, timedelta) else timedelta(seconds=by)
        return self.now

    # ---- records -------------------------------------------------------------------------

    def make_topic(self, name: str, partitions: int | None = None) -> None:
        """Make a topic, unless it is there. It keeps records however old they are."""
        admin = AdminClient({"bootstrap.servers": self.broker.bootstrap, "log_level": 0})
        if name in admin.list_topics(timeout=TIMEOUT_S).topics:
            return
        wanted = NewTopic(name, partitions or self.partitions, config={"retention.ms": "-1"})
        made = admin.create_topics([wanted])
        made[name].result(TIMEOUT_S)

    def feed(
        self,
        topic: str,
        rows: Iterable[Value],
        *,
        key: str | Sequence[str] | None = None,
        partition: int | None = None,
    ) -> None:
        """Write rows to a topic: dicts as JSON, text and bytes as they are, None as a tombstone.

        `key` is the field that is the record's key, or as many keys as there are rows.
        """
        values = list(rows)
        keys = _keys(topic, values, key)
        self.make_topic(topic)
        producer = Producer(
            {"bootstrap.servers": self.broker.bootstrap, "linger.ms": 0, "log_level": 0}
        )
        failures: list[KafkaError] = []
        for own, value in zip(keys, values, strict=True):
            producer.produce(
                topic,
                _bytes(value),
                own,
                timestamp=int(self.now.timestamp() * 1000),
                on_delivery=lambda error, _: failures.append(error) if error else None,
                partition=-1 if partition is None else partition,
            )
        producer.flush(TIMEOUT_S)
        if failures:
            raise PenstockError(f"feeding {topic}: {failures[0].str()}")

    def feed_table(
        self,
        topic: str,
        rows: Iterable[Mapping[str, Any]],
        *,
        key: str | Sequence[str],
        deleted: bool = False,
        schema: str | None = None,
    ) -> None:
        """Write rows of a table as capture does: change events, with the columns `key` as the key.

        With `deleted` they are deletions. `schema`, such as "id bigint, price decimal(10,2), day
        date", is published as capture does it, so that a flow may leave it out: the values are
        then those of Python, Decimal("1.10") or a date. Without it a flow says how it reads them,
        as in `table(..., debezium=...)`.
        """
        columns = [key] if isinstance(key, str) else list(key)
        keys, events = list[str](), list[Value]()
        told: dict[str, Any] = {}
        if schema is not None:
            row_type = StructType.fromDDL(schema)
            assert isinstance(row_type, StructType)
            table = captured_rows.table_schema(topic, row_type, columns)
            told = {SCHEMA_ID: captured_rows.publish(self.broker.bootstrap, topic, table)}
            rows = [captured_rows.written(row, table) for row in rows]
        for row in rows:
            wanted = {name: _field(topic, row, name) for name in columns}
            keys.append(json.dumps(wanted, default=_plain, separators=(",", ":")))
            before, after = (row, None) if deleted else (None, row)
            stamp = int(self.now.timestamp() * 1000)
            op = "d" if deleted else "c"
            event = {**told, "before": before, "after": after, "op": op, "ts_ms": stamp}
            # Readers look for the schema where a capture writes it, without any blank.
            events.append(orjson.dumps(event) if told else event)
        self.feed(topic, events, key=keys)

    def records(self, topic: str) -> list[TopicRecord]:
        """All records of a topic that are committed, by partition and offset.

        Of what was rebuilt those of its present generation.
        """
        return read_topic(self.broker.bootstrap, self._physical(topic))

    def rows(self, topic: str) -> list[Any]:
        """The values of a topic, from JSON; None for tombstones."""
        return [each.json() for each in self.records(topic)]

    def table(self, topic: str) -> dict[str, Any]:
        """The last value of each key of a topic, without those that are deleted."""
        last: dict[str, Any] = {}
        for each in self.records(topic):
            key = "" if each.key is None else each.key.decode()
            last[key] = each.json()
        return {key: value for key, value in last.items() if value is not None}

    def _physical(self, topic: str) -> str:
        writer = self.flows.writer(topic)
        record = None if writer is None else Folder(self.data).find(writer.name)
        return topic if record is None else physical(topic, record.generation)


def _keys(
    topic: str, values: Sequence[Value], key: str | Sequence[str] | None
) -> Sequence[str | None]:
    """The key of each row."""
    if key is None:
        return [None] * len(values)
    if isinstance(key, str):
        return [
            str(_field(topic, each, key)) if isinstance(each, Mapping) else None for each in values
        ]
    if len(key) != len(values):
        raise PenstockError(
            f"feeding {topic}: {len(values)} rows have {len(key)} keys",
            advice="Give a key for each row, or the name of the field that is the key.",
        )
    return key


def _field(topic: str, row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise PenstockError(
            f"feeding {topic}: a row has no field {name!r}, which is to be its key; it has "
            f"{', '.join(map(repr, row)) or 'none'}",
            advice="Name a field of the rows, or give as many keys as there are rows. Rows of a "
            "captured table are fed with feed_table.",
        )
    return row[name]


def _bytes(value: Value) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return json.dumps(value, default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{value!r} cannot be written as JSON")
