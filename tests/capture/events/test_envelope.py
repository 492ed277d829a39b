"""Events compared with documents of Debezium, field by field."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture.events.batch import Batch
from penstock.capture.events.settings import OutboxSettings
from penstock.capture.events.table_schemas import SchemaVersion
from penstock.capture.source import (
    NULL,
    UNAVAILABLE,
    CaptureError,
    Change,
    Table,
)
from penstock.client.table_schemas import (
    SchemaRecord,
    TableColumn,
    ValueType,
    event_schema_id,
)
from tests.capture.events.samples import (
    ANNE,
    CUSTOMERS,
    KEYLESS,
    NOW_NS,
    SOURCE,
    SOURCE_BYTES,
    STRING,
    Holding,
    change,
    composed,
    events,
    parsed,
    part,
    records,
)

# The create event of Debezium's documentation of its PostgreSQL connector, with the source block
# of samples, whose order of fields is the one that the connector itself writes.
CREATED: dict[str, Any] = {
    "before": None,
    "after": {
        "id": 1,
        "first_name": "Anne",
        "last_name": "Kretchmar",
        "email": "annek@noanswer.org",
    },
    "source": SOURCE,
    "transaction": None,
    "op": "c",
    "ts_ms": 1559033904863,
    "ts_us": 1559033904863841,
    "ts_ns": NOW_NS,
}


def test_a_create_event_is_the_documented_one() -> None:
    batch = Batch()
    assert events(publish_schemas=False).part(part(change("c", None, ANNE)), batch) == 1
    assert list(records(batch)) == ["PostgreSQL_server.public.customers"]
    ((key, value, headers),) = records(batch)["PostgreSQL_server.public.customers"]
    assert key == b'{"id":1}'
    assert value == orjson.dumps(CREATED)
    assert headers == ()


def test_an_update_has_both_rows() -> None:
    after = (b"1", b'"Anne Marie"', *ANNE[2:])
    (record,) = composed(events(), change("u", ANNE, after))
    assert parsed(record) == {
        "schema_id": event_schema_id(record[1] or b""),
        **CREATED,
        "op": "u",
        "before": CREATED["after"],
        "after": {**CREATED["after"], "first_name": "Anne Marie"},
    }


def test_a_delete_is_followed_by_a_tombstone() -> None:
    gone, tombstone = composed(events(), change("d", (b"1", NULL, NULL, NULL), None))
    assert gone[0] == tombstone[0] == b'{"id":1}'
    assert parsed(gone)["before"] == {
        "id": 1,
        "first_name": None,
        "last_name": None,
        "email": None,
    }
    assert parsed(gone)["after"] is None
    assert parsed(gone)["op"] == "d"
    assert tombstone[1] is None
    (alone,) = composed(events(tombstones=False), change("d", ANNE, None))
    assert alone[1] is not None


def test_a_change_of_the_key_is_a_delete_a_tombstone_and_a_create() -> None:
    gone, tombstone, made = composed(events(), change("u", ANNE, (b"1004", *ANNE[1:])))
    assert gone[0] == tombstone[0] == b'{"id":1}'
    assert made[0] == b'{"id":1004}'
    assert (parsed(gone)["op"], tombstone[1], parsed(made)["op"]) == ("d", None, "c")
    assert parsed(gone)["before"]["id"] == 1
    assert parsed(made)["before"] is None
    assert parsed(made)["after"]["id"] == 1004
    assert gone[2] == (("__debezium.newkey", b'{"id":1004}'),)
    assert made[2] == (("__debezium.oldkey", b'{"id":1}'),)


def test_truncates_are_left_out_unless_asked_for_and_reach_every_partition() -> None:
    assert composed(events(), change("t", None, None)) == []
    batch = Batch()
    made = events(skip=frozenset())
    changes = [change("c", None, ANNE), change("t", None, None), change("c", None, ANNE)]
    assert made.part(part(*changes), batch) == 3
    assert [(run.partition, len(run.keys)) for run in batch.runs] == [
        (None, 1),
        (0, 1),
        (1, 1),
        (2, 1),
        (None, 1),
    ]
    assert batch.runs[1].keys == [b"null"]
    told = orjson.loads(batch.runs[1].values[0] or b"")
    assert (told["op"], told["before"], told["after"]) == ("t", None, None)


def test_rows_of_a_truncated_table_are_deleted_as_the_topic_has_them() -> None:
    """Also those that were written when the table had other columns, or `schemas` was set."""
    held = Holding(
        {
            b'{"id":1}': b'{"after":{"id":1,"last_name":"K","old":5},"op":"c"}',
            b'{"schema":{},"payload":{"id":2}}': b'{"schema":{},"payload":{"after":{"id":2}}}',
            b'{"id":3}': b"",
            b"no json": b"",
            b"null": b"",
        }
    )
    found = composed(events(held), change("t", None, None))
    rows = [parsed(record) for record in found if record[1] is not None]
    # They named no schema, so their deletes name none.
    assert not any("schema_id" in row for row in rows)
    assert [(row["op"], row["before"]["id"], row["before"]["last_name"]) for row in rows] == [
        ("d", 1, "K"),
        ("d", 2, None),
        ("d", 3, None),
    ]
    assert set(rows[0]["before"]) == {column.name for column in CUSTOMERS.columns}
    # What cannot be taken apart has a tombstone only, and the truncate itself is no row.
    assert [record[0] for record in found if record[1] is None] == list(held.known)[:4]


def test_deletes_of_rows_of_another_schema_keep_it() -> None:
    """A decimal with two digits must not be read with four."""
    made = events(mask={"*.email": "x"}, column_exclude=("*.first_name",))
    (known,) = composed(made, change("c", None, ANNE))
    now = event_schema_id(known[1] or b"")
    assert now is not None
    told = b'"after":{"id":1,"last_name":"K","price":"bw==","email":"secret","first_name":"A"}}'
    held = Holding(
        {
            b'{"id":1}': b'{"schema_id":7,' + told,
            b'{"id":2}': b'{"schema_id":7}',
            b'{"id":3}': b'{"schema_id":%d,' % now + told,
            b'{"id":4}': b'{"schema_id":%d}' % now,
        }
    )
    made = events(held, mask={"*.email": "x"}, column_exclude=("*.first_name",))
    found = composed(made, change("t", None, None))
    rows = [parsed(record) for record in found if record[1] is not None]
    of_another = {"id": 1, "last_name": "K", "price": None, "email": None, "first_name": None}
    assert [(row["schema_id"], row["before"]) for row in rows] == [
        (7, of_another),
        (7, {"id": 2, "last_name": None, "email": None}),
        (now, {"id": 1, "last_name": "K", "email": None}),
        (now, {"id": 4, "last_name": None, "email": None}),
    ]
    # With a schema around each event there is no other: only the key is sure.
    inline = composed(events(held, schemas=True), change("t", None, None))
    payload = parsed(inline[0])["payload"]
    assert payload["before"] == {"id": 1, "first_name": None, "last_name": None, "email": None}
    assert "schema_id" not in payload


def test_each_event_begins_with_the_id_of_its_schema() -> None:
    """After an ALTER TABLE it is another one; the schema is in the log before the event."""
    made = events(skip=frozenset())
    batch = Batch()
    made._publish = None
    wider = replace(CUSTOMERS, columns=(*CUSTOMERS.columns, TableColumn("age", ValueType("int16"))))
    heard: list[SchemaVersion] = []
    made._altered = heard.append
    made.part(
        part(
            change("c", None, ANNE),
            change("u", ANNE, ANNE),
            change("c", None, (*ANNE, b"42"), wider),
            change("u", None, (b"1", UNAVAILABLE, *ANNE[2:], b"42"), wider),
            change("d", (*ANNE, b"42"), None, wider),
            change("t", None, None, wider),
        ),
        batch,
    )
    topics = records(batch)
    schemas = [SchemaRecord.decode(value) for _, value, _ in topics.pop("__penstock_schemas")]
    assert [(item.subject, item.version) for item in schemas if item] == [
        ("PostgreSQL_server.public.customers-value", 1),
        ("PostgreSQL_server.public.customers-value", 2),
    ]
    old, new = (item.id for item in schemas if item)
    (found,) = topics.values()
    ids = [event_schema_id(value) for _, value, _ in found if value is not None]
    assert ids == [old] * 2 + [new] * 6
    assert all((value or b"{")[:1] == b"{" for _, value, _ in found)
    (told,) = heard
    assert (told.table, told.version, told.id) == ("public.customers", 2, new)
    assert told.changes == "added age int16"
    assert made.schemas["public.customers"] == told


@pytest.mark.parametrize("more", [{"schemas": True}, {"publish_schemas": False}])
def test_events_without_an_id(more: dict[str, bool]) -> None:
    """Connect's converter takes no third field beside the schema and the payload."""
    made = events(**more)
    (record,) = composed(made, change("c", None, ANNE))
    assert event_schema_id(record[1] or b"") is None
    assert b"schema_id" not in (record[1] or b"")
    # With the schema inline it is published all the same, for whoever asks by topic.
    assert bool(made.schemas) == ("schemas" in more)


def test_what_a_key_does_not_show_is_in_the_schema() -> None:
    made = events(mask={"*.id": "x"}, column_exclude=("*.email",), keys={"*": ("id", "email")})
    (record,) = composed(made, change("c", None, ANNE))
    schema = made._met[event_schema_id(record[1] or b"") or 0]
    assert schema.key == ("id", "email")
    assert [column.type.name for column in schema.key_columns] == ["int32", "string"]
    assert [column.type.name for column in schema.columns] == ["string"] * 3
    assert parsed(record)["after"]["id"] == "x"


def test_a_table_that_shares_its_topic_has_a_subject_of_its_own() -> None:
    made = events(topics={"public.*": "all"})
    composed(made, change("c", None, ANNE))
    (told,) = made.schemas.values()
    assert told.topic == "all"
    assert list(made.registry._subjects) == ["all-PostgreSQL_server.public.customers.Envelope"]


def test_tables_are_published_before_their_first_event() -> None:
    """An empty table has a schema; one that has one keeps it until its events say otherwise."""
    made = events(outbox=OutboxSettings("public.outbox"))
    published: list[SchemaRecord] = []

    def publish() -> None:
        published.extend(made.registry.take_pending())

    made._publish = publish
    box = Table("postgres", "public", "outbox", CUSTOMERS.columns, ("id",))
    made.introduce([CUSTOMERS, box, Table("postgres", "public", "gone", (), ())])
    assert [record.subject for record in published] == ["PostgreSQL_server.public.customers-value"]
    altered = replace(CUSTOMERS, columns=CUSTOMERS.columns[:2])
    made.introduce([altered])
    assert len(published) == 1
    composed(made, change("c", None, ANNE[:2], altered))
    assert [record.version for record in published] == [1, 2]
    assert made.schemas["public.customers"].changes == "dropped last_name, email"


def test_a_truncate_of_a_table_that_is_gone_by_now() -> None:
    """Nobody knows its columns any more; the keys are in the topic."""
    gone = Table("postgres", "public", "customers", (), ())
    made = events(
        Holding({b'{"id":1}': b""}),
        skip=frozenset(),
        keys={"*": ("id",)},
        filters={"*": "row.id > 1"},
    )
    deleted, tombstone, *told = composed(made, change("t", None, None, gone))
    assert (parsed(deleted)["op"], parsed(deleted)["before"]) == ("d", {})
    assert tombstone == (b'{"id":1}', None, ())
    assert [(record[0], parsed(record)["op"]) for record in told] == [(b"null", "t")] * 3


def test_a_table_without_a_key_has_null_keys_in_a_topic_that_is_not_compacted() -> None:
    batch = Batch()
    made = events(skip=frozenset())
    rows = [change("c", None, (b'"x"',), KEYLESS), change("d", (b'"x"',), None, KEYLESS)]
    made.part(part(*rows, change("t", None, None, KEYLESS)), batch)
    (run,) = batch.runs
    assert not run.compacted
    assert run.keys == [None, None, None]
    assert None not in run.values


def test_keys_of_the_users_choice() -> None:
    made = events(keys={"public.*": ("email", "id")})
    (record,) = composed(made, change("c", None, ANNE))
    assert record[0] == b'{"email":"annek@noanswer.org","id":1}'
    # The database told only its own key of the old row: that is no change of ours.
    (record,) = composed(made, change("u", (b"1", NULL, NULL, NULL), ANNE))
    assert parsed(record)["op"] == "u"
    with pytest.raises(CaptureError, match=r"public\.customers.*key") as caught:
        composed(made, change("d", (b"1", NULL, NULL, NULL), None))
    assert "REPLICA IDENTITY FULL" in caught.value.advice
    with pytest.raises(CaptureError, match="'nowhere'"):
        composed(events(keys={"*": ("nowhere",)}), change("c", None, ANNE))


def test_a_changed_table_is_another_object_and_has_another_envelope() -> None:
    made = events()
    composed(made, change("c", None, ANNE))
    wider = Table(
        "postgres", "public", "customers", (*CUSTOMERS.columns, TableColumn("age", STRING)), ("id",)
    )
    (record,) = composed(made, change("c", None, (*ANNE, b"42"), wider))
    assert parsed(record)["after"]["age"] == 42


def test_many_objects_of_a_table_are_forgotten_again() -> None:
    made = events()
    for number in range(20):
        table = Table("postgres", "public", "customers", CUSTOMERS.columns, ("id",))
        (record,) = composed(made, change("c", None, (b"%d" % number, *ANNE[1:]), table))
        assert record[0] == b'{"id":%d}' % number
    assert len(made._composers) == 4


def test_names_that_need_care() -> None:
    table = Table("d", "s", "t%", (TableColumn('a"b%s', STRING), TableColumn("%", STRING)), ("%",))
    (record,) = composed(events(), change("c", None, (b'"1"', b'"%d"'), table))
    assert orjson.loads(record[0] or b"") == {"%": "%d"}
    assert parsed(record)["after"] == {'a"b%s': "1", "%": "%d"}


def test_unavailable_values_are_marked_as_debezium_marks_them() -> None:
    table = Table(
        "d",
        "s",
        "t",
        (
            TableColumn("id", ValueType("int32"), optional=False),
            TableColumn("text", STRING),
            TableColumn("data", ValueType("bytes")),
            TableColumn("tags", ValueType("array", items=STRING)),
            TableColumn("counts", ValueType("array", items=ValueType("int32"))),
        ),
        ("id",),
    )
    gone = (b"1", UNAVAILABLE, UNAVAILABLE, UNAVAILABLE, UNAVAILABLE)
    (record,) = composed(events(), change("u", None, gone, table))
    marker = "__debezium_unavailable_value"
    assert parsed(record)["after"] == {
        "id": 1,
        "text": marker,
        "data": "X19kZWJleml1bV91bmF2YWlsYWJsZV92YWx1ZQ==",
        "tags": [marker],
        "counts": list(marker.encode()),
    }
    # The old row has it.
    full = (b"1", b'"long"', b'"AA=="', b'["a"]', b"[1]")
    (record,) = composed(events(), change("u", full, gone, table))
    assert parsed(record)["after"] == parsed(record)["before"]


VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**53), 2**53),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(),
    st.lists(st.text(), max_size=3),
)


@given(st.dictionaries(st.text(min_size=1, max_size=8), VALUES, min_size=1, max_size=6))
def test_whatever_fragments_are_put_together_can_be_read_again(row: dict[str, Any]) -> None:
    table = Table(
        "d", "s", "t", tuple(TableColumn(name, STRING) for name in row), (next(iter(row)),)
    )
    fragments = tuple(orjson.dumps(value) for value in row.values())
    made = events(schemas=True)
    (record,) = composed(made, change("r", None, fragments, table))
    assert parsed(record)["payload"]["after"] == row
    assert orjson.loads(record[0] or b"")["payload"] == dict([next(iter(row.items()))])


ROWS = st.tuples(
    st.integers(0, 3).map(lambda number: b"%d" % number),
    st.sampled_from([b'"a"', NULL, b'"%b"']),
    st.sampled_from([b'"b"', UNAVAILABLE]),
    st.just(b'"c"'),
)
CHANGES = st.one_of(
    st.builds(lambda row: change("c", None, row), ROWS),
    st.builds(lambda old, new: change("u", old, new), st.none() | ROWS, ROWS),
    st.builds(lambda row: change("d", row, None), ROWS),
    st.just(change("t", None, None)),
    st.builds(lambda text: change("c", None, (text,), KEYLESS), st.just(b'"x"')),
)


@given(st.lists(CHANGES, max_size=12), st.booleans(), st.booleans(), st.booleans())
def test_the_short_way_and_the_long_way_lead_to_the_same(
    changes: list[Change], schemas: bool, tombstones: bool, skips: bool
) -> None:
    """All at once, by templates of whole envelopes, or one by one through the composer."""
    skip = frozenset("t") if skips else frozenset()
    settings = {"schemas": schemas, "tombstones": tombstones, "skip": skip}
    quick, slow = Batch(), Batch()
    count = events(**settings).part(part(*changes), quick)
    one_by_one = events(**settings)
    assert count == sum(one_by_one.change(item, slow) for item in changes)
    assert records(quick) == records(slow)
    # A filter that lets everything pass forces rows of snapshots the long way, too.
    rows = [item.after for item in changes if item.after and item.table is CUSTOMERS]
    filtered = events(schemas=schemas, filters={"*": "op == 'r'"})
    quick, slow = Batch(), Batch()
    events(schemas=schemas).rows(CUSTOMERS, rows, SOURCE_BYTES, quick)
    filtered.rows(CUSTOMERS, rows, SOURCE_BYTES, slow)
    assert records(quick) == records(slow)
