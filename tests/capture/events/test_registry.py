"""The registry: ids that need no talking, versions that nobody overwrites."""

from __future__ import annotations

import random
from collections.abc import Callable

import orjson
import pytest

from penstock.capture.events.registry import SchemaRegistry
from penstock.client.table_schemas import AVRO_SCHEMA, JSON_SCHEMA, SchemaError, SchemaRecord

INT, TEXT, DATE = ({"type": name} for name in ("integer", "string", "date"))


def test_schemas_have_ids_that_everybody_agrees_on() -> None:
    first, second = SchemaRegistry(), SchemaRegistry()
    assert first.id_of("a", {"type": "string"}) == second.id_of("b", {"type": "string"})
    assert first.id_of("a", {"type": "string"}) != first.id_of("a", {"type": "int"})
    (one, two) = first.take_pending()
    assert [orjson.loads(part) for part in one.encode()] == [
        {"keytype": "SCHEMA", "subject": "a", "version": 1, "magic": 1},
        {
            "subject": "a",
            "version": 1,
            "id": second.id_of("a", {"type": "string"}),
            "schema": '{"type":"string"}',
            "deleted": False,
        },
    ]
    assert two.version == 2
    again = SchemaRegistry([one, two])
    again.id_of("a", {"type": "int"})
    assert not again.pending


def test_a_text_whose_id_is_taken_gets_the_next() -> None:
    taken = SchemaRegistry().id_of("x", "string")
    registry = SchemaRegistry([SchemaRecord("s", 1, taken, '"int"', AVRO_SCHEMA)])
    assert registry.id_of("x", "string") == taken + 1


def test_a_json_schema_that_comes_again_is_the_last_version_again() -> None:
    """An ALTER TABLE that is taken back; a new session adds nothing."""
    registry = SchemaRegistry()
    ids = [registry.id_of("a", schema, JSON_SCHEMA) for schema in (INT, INT, TEXT, INT, INT)]
    assert ids[0] == ids[1] == ids[3] != ids[2]
    written = registry.take_pending()
    assert [(record.version, record.id) for record in written] == [
        (1, ids[0]),
        (2, ids[2]),
        (3, ids[0]),
    ]
    read = [SchemaRecord.decode(record.encode()[1]) for record in written]
    assert read == written
    again = SchemaRegistry(written)
    assert again.id_of("a", INT, JSON_SCHEMA) == ids[0]
    assert not again.pending


def test_avro_and_json_of_one_topic_do_not_clash() -> None:
    """Somebody changes `format`."""
    registry = SchemaRegistry()
    avro = registry.id_of("a", {"type": "record"})
    json = registry.id_of("a", INT, JSON_SCHEMA)
    assert avro != json
    assert registry.id_of("a", {"type": "record"}) == avro
    assert [record.version for record in registry.take_pending()] == [1, 2]


def test_what_is_pending_is_written_until_it_is_seen() -> None:
    registry = SchemaRegistry()
    registry.id_of("a", INT, JSON_SCHEMA)
    (record,) = registry.pending.values()
    registry.learn([SchemaRecord("b", 1, record.id, record.text, JSON_SCHEMA)])
    assert list(registry.pending.values()) == [record]
    registry.learn([record])
    assert not registry.pending


def test_versions_of_another_cluster_keep_their_ids() -> None:
    """Moved twice they are there once; where the target has other versions, behind those."""
    there, here = SchemaRegistry(), SchemaRegistry()
    for schema in (INT, TEXT, INT):
        there.id_of("a", schema, JSON_SCHEMA)
    moved = there.take_pending()
    for _ in range(2):
        for record in moved:
            here.adopt(record)
    assert here.take_pending() == moved
    own = SchemaRegistry()
    own.id_of("a", DATE, JSON_SCHEMA)
    own.take_pending()
    for _ in range(2):
        for record in moved:
            own.adopt(record)
    added = own.take_pending()
    assert {record.id for record in moved} <= {record.id for record in added}
    assert 1 not in [record.version for record in added]
    with pytest.raises(SchemaError, match="another one here"):
        own.adopt(moved[0]._replace(text="{}"))


class Capture:
    """One of several that publish at the same time, step by step."""

    def __init__(self, log: list[SchemaRecord]) -> None:
        self._log = log
        self._at = 0
        self.registry = SchemaRegistry()

    def look(self) -> None:
        self.registry.learn(self._log[self._at :])
        self._at = len(self._log)

    def write(self) -> None:
        self._log += self.registry.pending.values()


def compacted(log: list[SchemaRecord]) -> dict[tuple[str, int], int]:
    return {(record.subject, record.version): record.id for record in log}


def test_no_schema_is_overwritten_however_captures_race(seed: int) -> None:
    """Two captures with one prefix: each ALTER TABLE of either is found in the end, whatever order
    they look and write in."""
    dice = random.Random(seed)
    for _ in range(300):
        log: list[SchemaRecord] = []
        captures = [Capture(log) for _ in range(2)]
        wanted: set[int] = set()
        for _ in range(3):
            steps: list[Callable[[], None]] = []
            for capture in captures:
                schema = {"type": "object", "title": str(dice.randrange(6))}
                wanted.add(capture.registry.id_of("a", schema, JSON_SCHEMA))
                # What `SchemaTopic.publish` does, until nothing is pending.
                steps += [capture.look, capture.write] * 6
            while any(capture.registry.pending for capture in captures):
                dice.choice(steps)()
        for capture in captures * 3:
            capture.look()
            capture.write()
        assert wanted <= set(compacted(log).values())
