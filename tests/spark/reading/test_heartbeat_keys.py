"""Heartbeats in a topic of change events: read by whoever reads the events."""

from __future__ import annotations

import io
import struct

import fastavro
import orjson
import pytest

from penstock.capture.events.registry import SchemaRegistry
from penstock.client.connection import Cluster
from penstock.client.reading import last_values
from penstock.client.table_schemas import SCHEMAS_TOPIC
from penstock.client.topics import create
from penstock.spark.flows.heartbeats import HEADER, Heartbeats
from penstock.spark.flows.inputs import Place
from penstock.spark.reading import heartbeat_keys
from penstock.spark.reading.heartbeat_keys import AVRO_HEARTBEAT, HEARTBEAT, NAME
from penstock.testing.broker import Broker
from penstock.testing.reading import read_topic


def test_json_converters_take_the_key() -> None:
    """With `schemas.enable` JsonConverter wants these two fields, and a type that it knows."""
    told = orjson.loads(HEARTBEAT)
    assert told == {"schema": {"type": "string", "optional": False}, "payload": NAME}


def test_the_avro_key_has_a_schema_that_captures_know() -> None:
    registry = SchemaRegistry()
    magic, id_ = struct.unpack(">bi", AVRO_HEARTBEAT[:5])
    assert (magic, id_) == (0, registry.id_of(f"{NAME}-key", "string"))
    (record,) = registry.take_pending()
    assert record == heartbeat_keys.schema_record()
    schema = fastavro.parse_schema(orjson.loads(record.text))
    assert fastavro.schemaless_reader(io.BytesIO(AVRO_HEARTBEAT[5:]), schema) == NAME


@pytest.mark.parametrize("with_schemas", [True, False])
def test_they_are_written_in_the_format_of_the_topic(with_schemas: bool) -> None:
    with Broker() as broker, Cluster(broker.bootstrap) as cluster:
        names = ["json", "avro", *([SCHEMAS_TOPIC] if with_schemas else [])]
        for name in names:
            create(cluster, name, config={"cleanup.policy": "compact"})
        place = Place(broker.bootstrap, {}, str)
        idle_us = {"json": 1, "avro": 1}
        beats = Heartbeats(place, idle_us, avro=["avro"], clock_ms=lambda: 1_234_567)
        # What is there at the first look was news just now.
        assert beats.beat(cluster) == 0
        assert beats.beat(cluster) == 2
        for topic, key in (("json", HEARTBEAT), ("avro", AVRO_HEARTBEAT)):
            (found,) = read_topic(broker.bootstrap, topic)
            assert (found.key, found.value) == (key, None)
            assert found.headers[HEADER] == b"1234567"
        if with_schemas:
            key, value = heartbeat_keys.schema_record().encode()
            assert last_values(cluster, SCHEMAS_TOPIC) == {key: value}
