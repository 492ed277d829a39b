"""What is shown of a row, and of which rows: columns, masks, filters, topics."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture.events.batch import Batch
from penstock.capture.events.filters import FilterError, compiled, parse, takes_deletes
from penstock.capture.events.settings import Hash, Route
from penstock.capture.events.shape import cutting, cutting_bytes
from penstock.capture.source import (
    NULL,
    UNAVAILABLE,
    CaptureError,
    Table,
)
from penstock.client.table_schemas import TableColumn, ValueType
from tests.capture.events.samples import (
    ANNE,
    CUSTOMERS,
    STRING,
    change,
    composed,
    events,
    parsed,
    part,
    records,
    row_of,
)


def after(**settings: Any) -> dict[str, Any]:
    (record,) = composed(events(**settings), change("c", None, ANNE))
    assert record[0] == b'{"id":1}'
    told: dict[str, Any] = parsed(record)["after"]
    return told


def test_columns_are_chosen_by_pattern_and_keys_stay_whole() -> None:
    assert after(column_exclude=("public.customers.*name", "*.id")) == {
        "email": "annek@noanswer.org"
    }
    assert after(column_include=("*.email", "*.last_name")) == {
        "last_name": "Kretchmar",
        "email": "annek@noanswer.org",
    }


def test_masks_and_hashes_hide_whatever_is_there() -> None:
    shown = after(
        mask={"*.first_name": 4, "*.last_name": "<hidden>"},
        hash={"*.email": Hash("sha256", "salt")},
    )
    digest = hashlib.sha256(b"salt" + b"annek@noanswer.org").hexdigest()
    assert shown == {"id": 1, "first_name": "****", "last_name": "<hidden>", "email": digest}
    made = events(mask={"*.first_name": 3}, hash={"*": Hash()})
    (record,) = composed(made, change("u", ANNE, (b"1", NULL, NULL, UNAVAILABLE)))
    told = parsed(record)
    # The old row knew the email.
    assert told["before"]["email"] == told["after"]["email"]
    assert told["after"]["first_name"] == "***"
    assert told["after"]["last_name"] is None
    assert told["after"]["id"] == hashlib.sha256(b"1").hexdigest()


def test_a_masked_column_is_text_in_its_schema() -> None:
    made = events(mask={"*.id": 3}, schemas=True)
    (record,) = composed(made, change("c", None, ANNE))
    assert parsed(record)["schema"]["fields"][1]["fields"][0] == {
        "type": "string",
        "optional": False,
        "parameters": {"masked": "true"},
        "field": "id",
    }


@given(st.text(), st.integers(0, 5))
def test_a_text_is_cut_by_characters(text: str, length: int) -> None:
    assert orjson.loads(cutting(length)(orjson.dumps(text))) == text[:length]


def test_bytes_are_cut_by_bytes() -> None:
    assert cutting_bytes(2)(b'"AAECAw=="') == b'"AAE="'
    assert cutting_bytes(2)(NULL) == NULL
    assert after(truncate={"*.first_name": 2, "*.id": 0})["first_name"] == "An"


ORDERS = Table(
    "d",
    "public",
    "orders",
    (
        TableColumn("id", ValueType("int64"), optional=False),
        TableColumn("country", STRING),
        TableColumn("amount", ValueType("double")),
        TableColumn("my state", STRING),
    ),
    ("id",),
)
GERMAN = row_of(ORDERS, id=1, country="DE", amount=5.5)
FRENCH = row_of(ORDERS, id=1, country="FR", amount=50, **{"my state": "Open"})


@pytest.mark.parametrize(
    ("text", "op", "before", "now", "holds"),
    [
        ("op != 'd' and after.country == 'DE'", "c", None, GERMAN, True),
        ("op != 'd' and after.country == 'DE'", "c", None, FRENCH, False),
        ("op != 'd' and after.country == 'DE'", "d", GERMAN, None, False),
        ("row.country == 'DE'", "d", GERMAN, None, True),
        ("after.amount > 10", "c", None, FRENCH, True),
        ("1 < after.amount < 10", "c", None, GERMAN, True),
        ("after['my state'] in ('Open', 'held')", "c", None, FRENCH, True),
        ("after['my state'] not in ('Open',)", "c", None, GERMAN, False),
        ("after['my state'] is None", "c", None, GERMAN, True),
        ("after['my state'] == None or False", "c", None, GERMAN, True),
        ("lower(after['my state']) == 'open'", "c", None, FRENCH, True),
        (
            "startswith(after.country, 'D') and not contains(row.country, 'X')",
            "u",
            None,
            GERMAN,
            True,
        ),
        ("length(after.country) == 2", "c", None, GERMAN, True),
        ("after.country < 5", "c", None, GERMAN, False),
        ("after.amount != -5.5", "c", None, GERMAN, True),
        ("before.amount != 3", "c", None, GERMAN, False),
        ("lower(after.amount) == 'x'", "c", None, GERMAN, False),
    ],
)
def test_filters(text: str, op: str, before: Any, now: Any, holds: bool) -> None:
    assert compiled(text, ORDERS)(op, before, now) is holds


@pytest.mark.parametrize(
    ("text", "takes"),
    [
        ("op != 'd'", False),
        ("op in ('c', 'd')", True),
        ("after.id > 1", False),
        ("op == 'd' or after.id > 1", True),
        # It depends on the row.
        ("before.id > 1 or after.id > 1", True),
        ("row.id > 1", True),
        ("not (row.id > 1)", True),
        ("op != 'd' and row.id > 1", False),
        ("not (op == 'd' or row.id > 1)", False),
        ("op == 'd' or row.id > 1", True),
        ("row.id > 1 and (after.id == 5 or not op == 'd')", False),
    ],
)
def test_whether_deletes_pass(text: str, takes: bool) -> None:
    assert takes_deletes(text, ORDERS) is takes


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("after.x = 1", "after.x >>> = 1"),
        ("after.country == 'DE' and __import__('os')", "and >>> __import__"),
        ("op == 'c' and after.country.upper() == 'X'", "and >>> after.country.upper"),
        ("[x for x in (1,)]", ">>> [x"),
        ("after.amount + 1 > 3", ">>> after.amount + 1"),
        ("lower(after.country, 1) == 'x'", ">>> lower("),
        ("after.country is 'DE'", "is >>> 'DE'"),
        ("after.country in after.amount", "in >>> after.amount"),
        ("(lambda: 1)()", ">>> (lambda"),
        ("after[0] == 1", ">>> after[0]"),
        ("open('x')", ">>> open"),
        ("'ü' == op and nothing", "and >>> nothing"),
        ("", ""),
    ],
)
def test_what_is_no_filter_is_refused_at_its_place(text: str, place: str) -> None:
    with pytest.raises(FilterError, match="my filter") as caught:
        parse(text, "my filter")
    assert place in str(caught.value)


def test_a_filter_that_names_no_column_and_one_too_deep() -> None:
    with pytest.raises(FilterError, match=r">>> after\.nowhere.*'nowhere'.*country"):
        compiled("op == 'c' and after.nowhere == 1", ORDERS)
    with pytest.raises(FilterError):
        parse("not " * 1000 + "True")


@given(st.text(alphabet="opafterbw.=!<>'\"() intodcul0123456789[],-", max_size=40))
def test_no_text_makes_a_filter_fail_otherwise(text: str) -> None:
    try:
        parse(text)
    except FilterError:
        return


def test_filtered_changes_leave_no_event() -> None:
    made = events(filters={"public.orders": "row.country == 'DE'"})
    assert len(composed(made, change("c", None, GERMAN, ORDERS))) == 1
    batch = Batch()
    assert made.part(part(change("c", None, FRENCH, ORDERS)), batch) == 0
    assert batch.count == 0
    assert made.rows(ORDERS, [GERMAN, FRENCH], b"{}", batch) == 1


@pytest.mark.parametrize(
    ("settings", "topic"),
    [
        ({}, "PostgreSQL_server.public.customers"),
        ({"topics": {"public.c*": "people"}}, "people"),
        ({"routes": (Route(re.compile(r".*\.public\.(.*)"), r"all-\1"),)}, "all-customers"),
        ({"routes": (Route(re.compile("nothing"), "x"),)}, "PostgreSQL_server.public.customers"),
    ],
)
def test_topics(settings: dict[str, Any], topic: str) -> None:
    batch = Batch()
    events(**settings).part(part(change("c", None, ANNE)), batch)
    assert list(records(batch)) == [topic]


def test_names_that_no_topic_can_have() -> None:
    odd = Table("d", "schöma", "my table", CUSTOMERS.columns, ("id",))
    batch = Batch()
    events().part(part(change("c", None, ANNE, odd)), batch)
    assert list(records(batch)) == ["PostgreSQL_server.sch_ma.my_table"]
    with pytest.raises(CaptureError, match=r"public\.customers.*'a b'"):
        composed(events(topics={"*": "a b"}), change("c", None, ANNE))
