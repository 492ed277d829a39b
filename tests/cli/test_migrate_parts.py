"""The parts of a migration that need no cluster: the map of offsets, progress and digests."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.migration.mapping import RUNS_PER_RECORD, Run, Translator, decode, encode, runs_of
from penstock.cli.migration.plan import HOLD, TopicPlan
from penstock.cli.migration.state import (
    EMPTY_DIGEST,
    Copied,
    Place,
    Progress,
    absorb,
    parse_progress,
)
from penstock.errors import PenstockError

PLACE = Place("t", 0)


@given(st.lists(st.tuples(st.integers(1, 3), st.integers(1, 3)), max_size=60), st.data())
def test_every_offset_leads_to_the_next_copied_record(
    steps: list[tuple[int, int]], data: st.DataObject
) -> None:
    """Any gaps on both sides, any cut into transactions."""
    pairs: list[tuple[int, int]] = []
    source = target = -1
    for source_step, target_step in steps:
        source, target = source + source_step, target + target_step
        pairs.append((source, target))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pairs)), max_size=5)))
    translator = Translator((PLACE, offset) for offset in range(source + 3))
    for first, last in zip([0, *cuts], [*cuts, len(pairs)], strict=True):
        runs = runs_of(pairs[first:last])
        for value in encode(PLACE, runs):
            translator.saw(*decode(value))
    for offset in range(source + 3):
        expected = next((there for here, there in pairs if here >= offset), None)
        assert translator.answers.get((PLACE, offset)) == expected


def test_runs_are_as_long_as_they_can_be() -> None:
    assert runs_of([(5, 0), (6, 1), (7, 2), (9, 3), (10, 5)]) == [
        Run(5, 0, 3),
        Run(9, 3, 1),
        Run(10, 5, 1),
    ]


def test_a_record_of_the_map_is_bounded() -> None:
    runs = [Run(2 * n, n, 1) for n in range(RUNS_PER_RECORD + 1)]
    found = [decode(value) for value in encode(PLACE, runs)]
    assert [len(part) for _, part in found] == [RUNS_PER_RECORD, 1]
    assert found[0][1] + found[1][1] == runs


def test_the_digest_sees_everything() -> None:
    record = Copied(b"k", b"v", 1, (("h", b"x"),))
    others = [
        record._replace(key=None),
        record._replace(key=b""),
        record._replace(value=None),
        record._replace(timestamp_ms=2),
        record._replace(headers=()),
        record._replace(headers=(("h", None),)),
        record._replace(headers=(("g", b"x"),)),
        record._replace(key=b"kv", value=b""),
    ]
    digests = {absorb(EMPTY_DIGEST, found) for found in [record, *others]}
    assert len(digests) == 1 + len(others)
    forth = absorb(absorb(EMPTY_DIGEST, record), others[0])
    back = absorb(absorb(EMPTY_DIGEST, others[0]), record)
    assert forth != back


def test_progress_survives_being_stored() -> None:
    record = Copied(b"k", b"v", 1, ())
    progress = Progress("id", 0, 0).with_records([(4, record), (7, record)], 10, 11)
    assert progress.position == 8
    assert parse_progress(PLACE, 8, progress.metadata()) == progress
    more = progress.moved_to(9).with_records([(9, record)], 13, 13)
    assert (more.first_target, more.last_target, more.count) == (10, 13, 3)
    assert more.verified() == Progress("id", 10, 10)


@pytest.mark.parametrize("metadata", ["", "x", "{}", '{"version": 2}', None])
def test_what_is_not_ours_is_refused(metadata: str | None) -> None:
    with pytest.raises(PenstockError, match="cannot be read"):
        parse_progress(PLACE, 3, metadata)


def test_settings_are_held_and_released() -> None:
    plan = TopicPlan("t", "id", 1, 0, {"retention.ms": "5", "segment.bytes": "1048576"})
    assert plan.held() == HOLD
    released = plan.released()
    assert released["retention.ms"] == "5"
    assert released["segment.bytes"] == "1048576"
    assert released["cleanup.policy"] is None
    in_memory = TopicPlan("t", "id", 1, 0, {"durability": "memory"})
    assert in_memory.held()["durability"] == "memory"
    assert "retention.bytes" not in in_memory.held()
    assert "durability" not in in_memory.released()
