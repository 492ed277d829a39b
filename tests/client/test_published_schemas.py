"""Published schemas read back, from the embedded broker and from Apache Kafka.

The topic of schemas is one for all tests of a broker, so each test has topics of its own names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from uuid import uuid4

import orjson
import pytest

from penstock.capture.delivery.schemas import SchemaTopic
from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.client.table_schemas import (
    AVRO_SCHEMA,
    JSON_SCHEMA,
    SCHEMAS_TOPIC,
    SCHEMAS_TOPIC_CONFIG,
    AmbiguousSchemaError,
    PublishedSchemas,
    SchemaError,
    SchemaRecord,
    TableColumn,
    TableSchema,
    UnknownSchemaError,
    ValueType,
    event_schema_id,
    subject_of,
    topic_of_subject,
)
from penstock.client.writer import LogWriter
from penstock.testing.broker import Broker
from tests.client.conftest import unique

_IDS = count(uuid4().int % 1_000_000_000)


def schema_of(table: str, *columns: str) -> TableSchema:
    return TableSchema(
        table, "sqlite", tuple(TableColumn(name, ValueType("string")) for name in columns), ()
    )


def record(subject: str, version: int, schema: TableSchema, id_: int | None = None) -> SchemaRecord:
    text = orjson.dumps(schema.as_json_schema()).decode()
    return SchemaRecord(subject, version, id_ or next(_IDS), text, JSON_SCHEMA)


def _ensure(cluster: Cluster) -> None:
    topics.create(cluster, SCHEMAS_TOPIC, partitions=1, config=SCHEMAS_TOPIC_CONFIG, exists_ok=True)


def publish(cluster: Cluster, *records: SchemaRecord) -> None:
    _ensure(cluster)
    keys, values = zip(*(each.encode() for each in records), strict=True)
    with LogWriter(cluster) as writer:
        writer.write(SCHEMAS_TOPIC, keys, values)


def test_by_id_by_topic_and_what_comes_later(cluster: Cluster) -> None:
    topic = unique("shop.orders")
    schemas = PublishedSchemas(cluster)
    assert schemas.latest(topic) is None
    assert schemas.history(topic) == ()
    old, new = schema_of("orders", "id"), schema_of("orders", "id", "day")
    first = record(subject_of(topic), 1, old)
    publish(cluster, first)
    latest = schemas.latest(topic)
    assert latest is not None
    assert (latest.id, latest.version, latest.schema) == (first.id, 1, old)
    second = record(subject_of(topic), 2, new)
    with pytest.raises(UnknownSchemaError):
        schemas.by_id(second.id)
    publish(cluster, second)
    # Whoever meets an id that came later finds it.
    assert schemas.by_id(second.id) == new
    assert schemas.by_id(first.id) == old
    # The table is as it was again.
    publish(cluster, record(subject_of(topic), 3, old, first.id))
    latest = schemas.latest(topic)
    assert latest is not None
    assert (latest.id, latest.version) == (first.id, 3)
    assert [(each.version, each.schema) for each in schemas.history(topic)] == [
        (1, old),
        (2, new),
        (3, old),
    ]


def test_nobodys_open_transaction_hides_a_schema(cluster: Cluster) -> None:
    topic = unique("t")
    publish(cluster, record(subject_of(topic), 1, schema_of("t")))
    with LogWriter(cluster, transactional_id=unique("id")) as other:
        other.begin()
        key, value = record(subject_of(unique("other")), 1, schema_of("other")).encode()
        other.write(SCHEMAS_TOPIC, [key], [value])
        other.flush()
        behind = record(subject_of(topic), 2, schema_of("t", "a"))
        publish(cluster, behind)
        schemas = PublishedSchemas(cluster)
        assert schemas.by_id(behind.id) == schema_of("t", "a")
        assert [each.version for each in schemas.history(topic)] == [1, 2]
        other.abort()


def test_a_topic_of_several_tables_has_no_one_schema(cluster: Cluster) -> None:
    topic = unique("all")
    one = record(subject_of(topic, "shop.public.a-b"), 1, schema_of("public.a-b", "id"))
    publish(cluster, one)
    schemas = PublishedSchemas(cluster)
    latest = schemas.latest(topic)
    assert latest is not None
    assert latest.schema.table == "public.a-b"
    two = record(subject_of(topic, "shop.public.c"), 1, schema_of("public.c", "id"))
    publish(cluster, two)
    with pytest.raises(AmbiguousSchemaError, match=r"public\.a-b, public\.c") as caught:
        schemas.latest(topic)
    assert caught.value.tables == ("public.a-b", "public.c")
    assert [each.schema.table for each in schemas.history(topic)] == ["public.a-b", "public.c"]
    assert schemas.by_id(one.id).table == "public.a-b"


def test_other_things_in_the_topic_are_passed_over(cluster: Cluster) -> None:
    topic = unique("t")
    avro = SchemaRecord(subject_of(topic), 1, next(_IDS), '{"type":"record"}', AVRO_SCHEMA)
    foreign = SchemaRecord(subject_of(topic), 2, next(_IDS), '{"type":"object"}', JSON_SCHEMA)
    broken = SchemaRecord(subject_of(topic), 3, next(_IDS), "{", JSON_SCHEMA)
    ours = record(subject_of(topic), 4, schema_of("t"))
    key = record(f"{topic}-key", 1, schema_of("k"))
    publish(cluster, avro, foreign, broken, ours, key)
    with LogWriter(cluster) as writer:
        noise = [b'{"keytype":"NOOP","magic":0}', b"null", b"x"]
        writer.write(SCHEMAS_TOPIC, noise, [None, b"7", b"\x00\xff"])
    schemas = PublishedSchemas(cluster)
    assert [each.version for each in schemas.history(topic)] == [4]
    for other in (avro, foreign, broken, key):
        with pytest.raises(UnknownSchemaError):
            schemas.by_id(other.id)


def test_few_are_kept_and_all_are_found(cluster: Cluster) -> None:
    topic = unique("t")
    wanted = {}
    for version in range(1, 30):
        schema = schema_of("t", *(f"c{number}" for number in range(version)))
        made = record(subject_of(topic), version, schema)
        wanted[made.id] = schema
        publish(cluster, made)
    schemas = PublishedSchemas(cluster, cached_max=3)
    for id_ in [*wanted, *wanted]:
        assert schemas.by_id(id_) == wanted[id_]
    assert len(schemas._cached) == 3
    assert [each.schema for each in schemas.history(topic)] == list(wanted.values())


def test_what_captures_publish_is_read(cluster: Cluster) -> None:
    """Two that know nothing of each other, and a session that comes later."""
    topic = unique("shop.orders")
    subject = subject_of(topic)
    schemas = [schema_of("orders", *"abc"[:n]) for n in (1, 2, 3)]
    first, second = (SchemaTopic(cluster, lambda: _ensure(cluster)) for _ in range(2))
    ids = []
    for capture, schema in zip((first, second, first), schemas, strict=True):
        ids.append(capture.registry.id_of(subject, schema.as_json_schema(), JSON_SCHEMA))
        capture.publish()
        assert not capture.registry.pending
    published = PublishedSchemas(cluster)
    assert [published.by_id(id_) for id_ in ids] == schemas
    assert {each.id for each in published.history(topic)} == set(ids)
    assert len({each.version for each in published.history(topic)}) == 3
    later = SchemaTopic(cluster, lambda: None)
    assert later.registry.id_of(subject, schemas[2].as_json_schema(), JSON_SCHEMA) == ids[2]
    assert not later.registry.pending


@pytest.fixture
def own() -> Iterator[Cluster]:
    """A cluster whose topic of schemas is the test's own."""
    with Broker() as broker, Cluster(broker.bootstrap) as cluster:
        yield cluster


def test_two_schemas_with_one_id_are_an_error(own: Cluster) -> None:
    """Two clusters that were merged: nothing is read with the wrong one."""
    first = record(subject_of("a"), 1, schema_of("a"))
    publish(own, first, record(subject_of("b"), 1, schema_of("b"), first.id))
    schemas = PublishedSchemas(own)
    for look in (schemas.by_id, schemas.by_id, lambda _: schemas.latest("a")):
        with pytest.raises(SchemaError, match=f"two schemas with the id {first.id}"):
            look(first.id)
    # Others are not concerned.
    other = record(subject_of("c"), 1, schema_of("c"))
    publish(own, other)
    assert schemas.by_id(other.id) == schema_of("c")


def test_a_topic_that_is_made_anew(own: Cluster) -> None:
    schemas = PublishedSchemas(own)
    with pytest.raises(UnknownSchemaError) as caught:
        schemas.by_id(7)
    assert "penstock capture snapshot --all" in caught.value.advice
    publish(own, *(record(subject_of("t"), number, schema_of("t")) for number in range(1, 6)))
    assert len(schemas.history("t")) == 5
    topics.delete(own, [SCHEMAS_TOPIC])
    assert not Metadata(own).topics([SCHEMAS_TOPIC])
    again = record(subject_of("u"), 1, schema_of("u"))
    publish(own, again)
    assert schemas.by_id(again.id) == schema_of("u")


def test_subjects() -> None:
    assert subject_of("shop.orders") == "shop.orders-value"
    for topic in ("a", "a-b", "a-value", "x.Envelope"):
        assert topic_of_subject(subject_of(topic)) == topic
        assert topic_of_subject(subject_of(topic, "p-q.s.t-value")) == topic
    assert topic_of_subject("shop.orders-key") is None
    assert topic_of_subject("shop.orders-truncate") is None


@pytest.mark.parametrize(
    ("value", "id_"),
    [
        (b'{"schema_id":7,"before":null}', 7),
        (b'{"schema_id":2147483647}', 2147483647),
        (b'{"schema_id":"7","before":null}', None),
        (b'{"before":null,"schema_id":7}', None),
        (b'{"schema":{},"payload":{}}', None),
        (b"", None),
        (b"\x00\x00\x00\x00\x07", None),
    ],
)
def test_the_id_of_an_event(value: bytes, id_: int | None) -> None:
    assert event_schema_id(value) == id_
