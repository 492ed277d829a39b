"""What is more than changes of rows: transactions told of, messages, the outbox, filling in."""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture.events.batch import Batch
from penstock.capture.events.changes import Events
from penstock.capture.events.filling import LastValues
from penstock.capture.events.registry import SchemaRegistry
from penstock.capture.events.settings import (
    ENVELOPE,
    ERROR,
    HEADER,
    EventSettings,
    OutboxSettings,
    Placement,
)
from penstock.capture.source import (
    NULL,
    UNAVAILABLE,
    CaptureError,
    Table,
)
from penstock.client.table_schemas import TableColumn, TableSchema, UnknownSchemaError, ValueType
from tests.capture.events.samples import (
    ANNE,
    CUSTOMERS,
    KEYLESS,
    NOW_NS,
    STRING,
    change,
    composed,
    events,
    parsed,
    part,
    records,
    row_of,
)

TOPIC = "PostgreSQL_server.public.customers"


def test_transactions_are_told_of_across_parts() -> None:
    made = events(transaction_metadata=True)
    batch = Batch()
    moved = change("u", ANNE, (b"2", *ANNE[1:]))
    made.part(part(change("c", None, ANNE), moved, is_last=False), batch)
    made.part(part(change("c", None, (b'"x"',), KEYLESS), is_first=False), batch)
    topics = records(batch)
    begin, end = topics["PostgreSQL_server.transaction"]
    assert begin[0] == end[0] == b'{"id":"555"}'
    assert parsed(begin) == {
        "status": "BEGIN",
        "id": "555",
        "event_count": None,
        "data_collections": None,
        "ts_ms": 1559033904863,
    }
    assert parsed(end) == {
        "status": "END",
        "id": "555",
        "event_count": 4,
        "data_collections": [
            {"data_collection": "public.customers", "event_count": 3},
            {"data_collection": "public.notes", "event_count": 1},
        ],
        "ts_ms": 1559033904863,
    }
    orders = [parsed(item)["transaction"] for item in topics[TOPIC] if item[1]]
    assert [item["total_order"] for item in orders] == [1, 2, 3]
    (note,) = topics["PostgreSQL_server.public.notes"]
    assert parsed(note)["transaction"] == {
        "id": "555",
        "total_order": 4,
        "data_collection_order": 1,
    }


@pytest.mark.parametrize("schemas", [False, True])
def test_messages_have_a_topic_of_their_own(schemas: bool) -> None:
    batch = Batch()
    made = events(transaction_metadata=True, schemas=schemas)
    made.part(part(messages=[("foo", b"bar")]), batch)
    ((key, value, _),) = records(batch)["PostgreSQL_server.message"]
    told_key, told = orjson.loads(key or b""), orjson.loads(value or b"")
    if schemas:
        assert told["schema"]["name"] == "io.debezium.connector.postgresql.MessageValue"
        told_key, told = told_key["payload"], told["payload"]
    assert told_key == {"prefix": "foo"}
    assert told["message"] == {"prefix": "foo", "content": "YmFy"}
    assert (told["op"], told["ts_ms"], told["source"]["txId"]) == ("m", NOW_NS // 10**6, 555)
    assert told["transaction"]["total_order"] == 1
    batch = Batch()
    events(skip=frozenset("m")).part(part(messages=[("foo", b"bar")]), batch)
    assert batch.count == 0


# ---- the outbox --------------------------------------------------------------------------

OUTBOX = Table(
    "d",
    "public",
    "outbox",
    (
        TableColumn("id", ValueType("string", "io.debezium.data.Uuid"), optional=False),
        TableColumn("aggregatetype", STRING, optional=False),
        TableColumn("aggregateid", STRING, optional=False),
        TableColumn("type", STRING, optional=False),
        TableColumn("payload", ValueType("string", "io.debezium.data.Json")),
    ),
    ("id",),
)
EVENT = row_of(
    OUTBOX,
    id="406c07f3-26f0-4eea-a50c-109940064b8f",
    aggregatetype="Order",
    aggregateid="1",
    type="OrderCreated",
    payload='{"id": 1, "items": []}',
)


def outbox(**settings: Any) -> Events:
    return events(outbox=OutboxSettings("public.outbox", **settings))


def sent(made: Events, *changes: Any) -> list[Any]:
    batch = Batch()
    made.part(part(*changes), batch)
    (found,) = records(batch).items() or [("", [])]
    assert found[0] == "outbox.event.Order"
    return found[1]


def test_rows_of_the_outbox_become_events_of_their_aggregate() -> None:
    made = outbox(additional=(Placement("type", HEADER, "eventType"),))
    changes = [change("c", None, EVENT, OUTBOX), change("d", EVENT, None, OUTBOX)]
    ((key, value, headers),) = sent(made, *changes)
    assert key == b"1"
    assert value == b'"{\\"id\\": 1, \\"items\\": []}"'
    assert headers == [
        ("id", b"406c07f3-26f0-4eea-a50c-109940064b8f"),
        ("eventType", b"OrderCreated"),
    ]


def test_a_payload_expanded_and_in_an_envelope() -> None:
    ((_, value, _),) = sent(outbox(expand_json=True), change("c", None, EVENT, OUTBOX))
    assert value == b'{"id": 1, "items": []}'
    made = outbox(expand_json=True, additional=(Placement("type", ENVELOPE, "kind"),))
    ((_, value, _),) = sent(made, change("c", None, EVENT, OUTBOX))
    assert orjson.loads(value) == {"payload": {"id": 1, "items": []}, "kind": "OrderCreated"}
    broken = (*EVENT[:4], b'"{no json"')
    ((_, value, _),) = sent(outbox(expand_json=True), change("c", None, broken, OUTBOX))
    assert value == b'"{no json"'
    empty = (*EVENT[:4], NULL)
    ((_, value, _),) = sent(outbox(tombstone_on_empty=True), change("c", None, empty, OUTBOX))
    assert value is None


def test_an_outbox_is_not_updated_and_has_its_columns() -> None:
    update = change("u", EVENT, EVENT, OUTBOX)
    assert composed(outbox(), update) == []
    with pytest.raises(CaptureError, match=r"public\.outbox was updated"):
        composed(outbox(on_update=ERROR), update)
    with pytest.raises(CaptureError, match=r"public\.outbox has no column 'route'"):
        composed(outbox(route_by="route"), update)
    with pytest.raises(CaptureError, match="no aggregatetype"):
        composed(outbox(), change("c", None, (EVENT[0], NULL, *EVENT[2:]), OUTBOX))


UNAVAILABLE_TEXT = "__debezium_unavailable_value"
MARKER_OF_BYTES = base64.b64encode(UNAVAILABLE_TEXT.encode()).decode()


# ---- filling in --------------------------------------------------------------------------


def filling(
    stored: list[tuple[bytes, bytes | None]],
    schemas: Mapping[int, TableSchema] = MappingProxyType({}),
) -> Events:
    def read(topic: str) -> Iterator[tuple[bytes, bytes | None]]:
        assert topic == TOPIC
        yield from stored

    def schema(id_: int) -> TableSchema:
        if id_ not in schemas:
            raise UnknownSchemaError(str(id_))
        return schemas[id_]

    settings = EventSettings("PostgreSQL_server", unavailable="fill")
    registry = SchemaRegistry()
    return Events(
        settings,
        "postgresql",
        registry=registry,
        publish=registry.pending.clear,
        schema=schema,
        read=read,
        clock_ns=lambda: NOW_NS,
    )


def test_a_value_of_another_type_is_not_filled_in() -> None:
    """The column was text when the topic got its last value; bytes are no text, a wider enum is."""
    rows = [
        (ValueType("string"), "hello"),
        (ValueType("bytes"), MARKER_OF_BYTES),
        (ValueType("string", "io.debezium.data.Json"), UNAVAILABLE_TEXT),
        (ValueType("string", parameters={"allowed": "a,b"}), "hello"),
    ]
    for kind, wanted in rows:
        before, now = (
            replace(CUSTOMERS, columns=(*CUSTOMERS.columns[:3], TableColumn("email", each)))
            for each in (ValueType("string"), kind)
        )
        old = events()
        (record,) = composed(old, change("c", None, (*ANNE[:3], b'"hello"'), before))
        made = filling([(record[0] or b"", record[1])], old._met)
        (filled,) = composed(made, change("u", None, (*ANNE[:3], UNAVAILABLE), now))
        assert email(filled) == wanted
        made.close()
        # What has no schema is taken for what it looks like, a schema that nobody knows is not.
        for text in (b'"schema_id":5', b'"x":5'):
            value = re.sub(rb'"schema_id":\d+', text, record[1] or b"")
            made = filling([(record[0] or b"", value)])
            (filled,) = composed(made, change("u", None, (*ANNE[:3], UNAVAILABLE), before))
            assert email(filled) == ("hello" if b"x" in text else UNAVAILABLE_TEXT)
            made.close()


def email(record: Any) -> Any:
    return parsed(record)["after"]["email"]


def test_what_the_database_did_not_send_is_taken_from_the_topic() -> None:
    old = events()
    known = [(key or b"", value) for key, value, _ in composed(old, change("c", None, ANNE))]
    made = filling(known)
    lacking = (*ANNE[:3], UNAVAILABLE)
    moved = change("u", (b"1", NULL, NULL, NULL), (b"7", *lacking[1:]))
    changes = [change("u", None, lacking), moved, change("u", None, (b"7", *lacking[1:]))]
    first, _, _, second, third = composed(made, *changes)
    assert [email(item) for item in (first, second, third)] == ["annek@noanswer.org"] * 3
    # The old key has no row any more.
    (lost,) = composed(made, change("u", None, lacking))
    assert email(lost) == "__debezium_unavailable_value"
    assert made.missed == 1
    made.close()


def test_with_the_schema_and_with_a_mask() -> None:
    old = events(schemas=True)
    known = [(key or b"", value) for key, value, _ in composed(old, change("c", None, ANNE))]
    made = filling(known)
    # Keys with schemas are other keys; only the value's form matters here.
    made_key = [(b'{"id":1}', known[0][1])]
    made.close()
    made = filling(made_key)
    (record,) = composed(made, change("u", None, (*ANNE[:3], UNAVAILABLE)))
    assert email(record) == "annek@noanswer.org"
    made.close()


@given(
    st.lists(
        st.tuples(
            st.integers(0, 5), st.sampled_from(["put", "touch", "drop"]), st.text(max_size=3)
        ),
        max_size=30,
    )
)
def test_filling_agrees_with_a_dictionary(steps: list[tuple[int, str, str]]) -> None:
    made = filling([])
    model: dict[int, str] = {}
    try:
        for id_, step, text in steps:
            row = (b"%d" % id_, b'"a"', b'"b"', orjson.dumps(text))
            if step == "put":
                composed(made, change("u", None, row))
                model[id_] = text
            elif step == "drop":
                composed(made, change("d", row, None))
                model.pop(id_, None)
            else:
                (record,) = composed(made, change("u", None, (*row[:3], UNAVAILABLE)))
                assert email(record) == model.get(id_, "__debezium_unavailable_value")
    finally:
        made.close()


def test_more_rows_than_memory_holds_at_once() -> None:
    last = LastValues(lambda topic: ())
    composer = events().composer(CUSTOMERS, b"{}")
    assert composer is not None
    values = last.prepare(composer.shape)  # type: ignore[union-attr]
    for number in range(5_000):
        values.keep(TOPIC, b"%d" % number, (b"1", b'"a"', b'"b"', b'"%d"' % number))
    assert values.fill(TOPIC, b"17", (*ANNE[:3], UNAVAILABLE))[3] == b'"17"'
    values.forget_all(TOPIC)
    assert values.fill(TOPIC, b"17", (*ANNE[:3], UNAVAILABLE))[3] == UNAVAILABLE
    last.close()


def test_a_table_before_and_after_it_was_altered_at_once() -> None:
    """The stream and a snapshot may each have an object of their own: columns are not mixed up."""
    columns = CUSTOMERS.columns
    altered = replace(CUSTOMERS, columns=(columns[0], columns[3], columns[1]))
    made = filling([])
    try:
        composed(made, change("c", None, ANNE))
        touched = change("u", None, (b"1", UNAVAILABLE, b'"x"'))._replace(table=altered)
        lacking = change("u", None, (*ANNE[:3], UNAVAILABLE))
        for item in (touched, lacking, touched, lacking):
            (record,) = composed(made, item)
            assert email(record) == "annek@noanswer.org"
        assert parsed(record)["after"]["first_name"] == "Anne"
    finally:
        made.close()
