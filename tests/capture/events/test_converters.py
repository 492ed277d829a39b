"""One converter of Kafka Connect, or one deserializer, reads every record of a capture's topics.

Who subscribes to `shop.*` gets the topics of transactions and messages as well. The converters are
told here as their own code has it: JsonConverter with `schemas.enable` takes nothing but objects of
`schema` and `payload`, AvroConverter nothing that does not begin with a schema's id.
"""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from penstock.capture.events.batch import Batch
from penstock.client.table_schemas import SCHEMAS_TOPIC
from tests.capture.events.samples import (
    ANNE,
    KEYLESS,
    NOW_NS,
    change,
    events,
    part,
    records,
    schema_texts,
)
from tests.capture.events.test_avro import read

PREFIX = "PostgreSQL_server"
FORMATS = [
    {"format": "json"},
    {"format": "json", "schemas": True},
    {"format": "avro"},
]


def converted(data: bytes | None, settings: dict[str, Any], schemas: dict[int, str]) -> Any:
    if data is None:
        return None
    if settings["format"] == "avro":
        return read(schemas, data)
    value = orjson.loads(data)
    if settings.get("schemas"):
        assert set(value) == {"schema", "payload"}
        return value["payload"]
    return value


@pytest.mark.parametrize("settings", FORMATS, ids=["json", "json with schemas", "avro"])
def test_every_record_of_every_topic_is_read_by_one_converter(settings: dict[str, Any]) -> None:
    made = events(transaction_metadata=True, skip=frozenset(), **settings)
    batch = Batch()
    made.part(
        part(
            change("c", None, ANNE),
            change("u", ANNE, (b"2", *ANNE[1:])),
            change("d", ANNE, None),
            change("t", None, None),
            change("c", None, (b'"x"',), KEYLESS),
            messages=[("app.event", b"\x00\xff")],
        ),
        batch,
    )
    # A second transaction needs no schema that is not there.
    made.part(part(messages=[("app.event", b"more")]), batch)
    topics = records(batch)
    schemas = schema_texts(value for _, value, _ in topics.pop(SCHEMAS_TOPIC, []))
    assert {"transaction", "message", "public.customers", "public.notes"} == {
        topic.removeprefix(f"{PREFIX}.") for topic in topics
    }
    read_ = {
        topic: [
            (converted(key, settings, schemas), converted(value, settings, schemas))
            for key, value, _ in listed
        ]
        for topic, listed in topics.items()
    }
    begin, end, *_ = read_[f"{PREFIX}.transaction"]
    assert begin == (
        {"id": "555"},
        {"status": "BEGIN", "id": "555", "event_count": None, "data_collections": None,
         "ts_ms": 1559033904863},
    )  # fmt: skip
    assert end[1]["status"] == "END"
    assert {"data_collection": "public.notes", "event_count": 1} in end[1]["data_collections"]
    (key, told), (_, later) = read_[f"{PREFIX}.message"]
    assert key == {"prefix": "app.event"}
    assert (told["op"], told["ts_ms"]) == ("m", NOW_NS // 10**6)
    assert told["source"]["txId"] == 555
    assert told["source"]["connector"] == "postgresql"
    assert told["transaction"]["id"] == "555"
    content = b"\x00\xff" if settings["format"] == "avro" else "AP8="
    assert told["message"] == {"prefix": "app.event", "content": content}
    assert later["message"]["content"] in {b"more", "bW9yZQ=="}


def test_schemas_of_transactions_are_told_once() -> None:
    made = events(transaction_metadata=True, format="avro")
    first, second = Batch(), Batch()
    made.part(part(change("c", None, ANNE), messages=[("a", b"b")]), first)
    made.part(part(change("c", None, ANNE), messages=[("a", b"b")]), second)
    subjects = {orjson.loads(key or b"")["subject"] for key, _, _ in records(first)[SCHEMAS_TOPIC]}
    assert subjects >= {
        f"{PREFIX}.{name}-{side}"
        for name in ("transaction", "message")
        for side in ("key", "value")
    }
    assert SCHEMAS_TOPIC not in records(second)
