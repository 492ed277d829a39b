"""The kit's change events, beside those that capture itself writes of the same changes."""

from __future__ import annotations

from typing import Any

import orjson

from penstock.capture.events.batch import Batch
from penstock.testing.change_events import ChangeEvents
from tests.capture.events.samples import ANNE, change, events, part, records

ROW = {"id": 1, "first_name": "Anne", "last_name": "Kretchmar", "email": "annek@noanswer.org"}
TOPIC = "PostgreSQL_server.public.customers"


def captured(*changes: Any) -> list[dict[str, Any]]:
    batch = Batch()
    events().part(part(*changes), batch)
    (found,) = records(batch).values()
    return [orjson.loads(value) for _, value, _ in found if value is not None]


def shape(event: dict[str, Any]) -> dict[str, Any]:
    """What must be equal: all but where and when."""
    told = {name: value for name, value in event.items() if not name.startswith("ts_")}
    told.pop("schema_id", None)
    source = told.pop("source")
    names = {name: source[name] for name in ("connector", "schema", "table")}
    return {**told, **names, "source": set(source), "times": set(event) - set(told) - {"schema_id"}}


def test_the_kit_writes_what_capture_writes() -> None:
    table = ChangeEvents(TOPIC, ["id"])
    own = [
        table.upsert(ROW, 1),
        table.upsert(ROW, 2),
        table.delete({"id": 1}, 3),
    ]
    theirs = captured(change("c", None, ANNE), change("u", ANNE, ANNE), change("d", ANNE, None))
    assert [shape(each) for each in own] == [shape(each) for each in theirs]
    # The table is empty again.
    assert table.upsert(ROW, 4)["op"] == "c"


def test_without_full_identity_there_is_no_old_row() -> None:
    table = ChangeEvents("shop.customers", ["id"], full_identity=False)
    assert table.upsert(ROW, 1, snapshot=True)["op"] == "r"
    updated = table.upsert({**ROW, "email": "x"}, 2)
    assert (updated["op"], updated["before"], updated["after"]["email"]) == ("u", None, "x")
    gone = table.delete({"id": 1}, 3)
    assert gone["before"] == {"id": 1, "first_name": None, "last_name": None, "email": None}
