"""The parts of a migration that need no cluster: the map of offsets, progress, digests, Ctrl-C."""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.migrate import RATE_OVER_S, Pace, _ctrl_c
from penstock.cli.migration.plan import HOLD, TopicPlan
from penstock.cli.migration.state import (
    EMPTY_DIGEST,
    Copied,
    Progress,
    absorb,
    parse_progress,
)
from penstock.client.migration_map import (
    RUNS_PER_RECORD,
    Place,
    Run,
    Translator,
    decode,
    decode_group,
    encode,
    encode_group,
    runs_of,
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
    assert [len(part) for _, part, _ in found] == [RUNS_PER_RECORD, 1]
    assert found[0][1] + found[1][1] == runs


def test_a_topic_made_anew_in_the_target_is_mapped_anew() -> None:
    translator = Translator([(PLACE, 3), (PLACE, 9)])
    # Two records of the map: only the first of them begins anew.
    old = [Run(2 * n, 100 + n, 1) for n in range(RUNS_PER_RECORD + 1)]
    for value in encode(PLACE, old, anew=True):
        translator.saw(*decode(value))
    assert translator.answers == {(PLACE, 3): 102, (PLACE, 9): 105}
    for value in encode(PLACE, [Run(0, 0, 5)], anew=True):
        translator.saw(*decode(value))
    assert translator.answers == {(PLACE, 3): 3}


def test_the_offsets_of_a_group_are_kept_in_bounded_records() -> None:
    offsets = {Place("t", number): number * 7 for number in range(RUNS_PER_RECORD + 1)}
    found = [decode_group(value) for value in encode_group("g", offsets)]
    assert [len(part) for _, part in found] == [RUNS_PER_RECORD, 1]
    assert found[0][1] | found[1][1] == offsets


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
    progress = Progress("id", 0, 0).with_records([(4, record), (7, record)], 11)
    assert progress.position == 8
    assert parse_progress(PLACE, 8, progress.metadata()) == progress
    more = progress.moved_to(9).with_records([(9, record)], 13)
    assert (more.window_target, more.last_target, more.count) == (0, 13, 3)
    # The next window begins right behind what was compared, whoever writes there.
    assert more.verified() == Progress("id", 10, 10, window_target=14, last_target=13)
    assert parse_progress(PLACE, 10, more.verified().metadata()) == more.verified()


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


def test_a_bound_that_blocks_is_held_too() -> None:
    blocking = {"overflow": "block", "overflow.groups": "g", "retention.bytes": "1048576"}
    plan = TopicPlan("t", "id", 1, 1, blocking, knows_overflow=True)
    assert plan.held() == {**HOLD, "overflow": "discard-oldest"}
    assert plan.released().items() >= blocking.items()
    assert TopicPlan("t", "id", 1, 1, {}, knows_overflow=True).released()["overflow"] is None


# ---- what a person sees ------------------------------------------------------------------


def test_the_time_left_does_not_jump_with_bursts() -> None:
    """Transactions of 10,000 every two seconds, and slices without any between them."""
    pace = Pace(0.0, 1_000_000)
    assert pace.left_s(1.0, 0) is None
    done, found = 0, []
    for tenth in range(1, 601):
        now = tenth / 10
        done += 10_000 if tenth % 20 == 0 else 0
        pace.saw(now, done)
        left_s = pace.left_s(now, done)
        if now > RATE_OVER_S and left_s is not None:
            found.append(left_s * 5000 / (1_000_000 - done))
    assert len(found) > 400
    assert min(found) > 0.75
    assert max(found) < 1.35


def test_the_pace_keeps_few_samples() -> None:
    pace = Pace(0.0, None)
    for number in range(100_000):
        pace.saw(number / 1000, number)
    assert len(pace._seen) < 120
    assert pace.rate == pytest.approx(1000, rel=0.01)
    assert pace.left_s(100.0, 100_000) is None


@pytest.mark.parametrize("follow", [False, True])
def test_an_interruption_that_the_client_library_loses_is_one(follow: bool) -> None:
    migration: Any = SimpleNamespace()

    def flush() -> None:
        if follow:
            signal.raise_signal(signal.SIGINT)
            assert (migration.cut_over(), migration.stopped()) == (True, False)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert migration.stopped()
        raise SystemError("<method 'flush'> returned NULL without setting an exception")

    with pytest.raises(KeyboardInterrupt), _ctrl_c(migration, follow=follow):
        flush()


def test_any_other_failure_is_none() -> None:
    migration: Any = SimpleNamespace()
    with pytest.raises(SystemError), _ctrl_c(migration, follow=False):
        raise SystemError("something else")
