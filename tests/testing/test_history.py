"""The judge of histories must see every kind of broken promise, and nothing where there is none."""

from __future__ import annotations

import pytest

from penstock.testing.history import History, HistoryError, Place, Read

PLACE = Place("t", 0)


def told(*values: bytes, acknowledged: int | None = None, may_repeat: bool = False) -> History:
    """A history of values at offsets from 0, of which the first ones were acknowledged."""
    history = History()
    for at, value in enumerate(values):
        history.sending("p", PLACE, None, value, may_repeat=may_repeat)
        if acknowledged is None or at < acknowledged:
            history.acknowledged(PLACE, at, None, value)
    return history


def reads(*items: tuple[int, bytes]) -> list[Read]:
    return [Read(offset, None, value) for offset, value in items]


def kinds(history: History, records: list[Read], log_start: int = 0) -> list[str]:
    end = history.end(PLACE)
    return [p.kind for p in history.check(PLACE, records, end=end, log_start=log_start)]


def test_what_is_there_as_it_was_is_no_problem() -> None:
    history = told(b"a", b"b", b"c")
    records = reads((0, b"a"), (1, b"b"), (2, b"c"))
    assert kinds(history, records) == []
    assert history.acknowledged_count == 3
    assert history.unacknowledged() == 0


def test_what_was_not_acknowledged_may_be_there_or_not() -> None:
    assert kinds(told(b"a", b"b", acknowledged=1), reads((0, b"a"))) == []
    assert kinds(told(b"a", b"b", acknowledged=1), reads((0, b"a"), (1, b"b"))) == []
    assert told(b"a", b"b", acknowledged=1).unacknowledged() == 1


def test_lost() -> None:
    assert kinds(told(b"a", b"b", b"c"), reads((0, b"a"), (2, b"c"))) == ["lost"]
    assert kinds(told(b"a", b"b", b"c"), reads((0, b"a"))) == ["lost", "lost"]
    assert kinds(told(b"a"), []) == ["lost"]


def test_what_a_reader_has_seen_must_stay() -> None:
    history = told(b"a", b"b", acknowledged=1)
    assert kinds(history, reads((0, b"a"), (1, b"b"))) == []
    assert kinds(history, reads((0, b"a"))) == ["lost"]


def test_what_retention_has_taken_is_not_lost() -> None:
    assert kinds(told(b"a", b"b", b"c"), reads((2, b"c")), log_start=2) == []
    assert kinds(told(b"a", b"b", b"c"), reads((2, b"c")), log_start=1) == ["lost"]


def test_changed() -> None:
    history = told(b"a", b"b", b"c", acknowledged=2)
    assert "changed" in kinds(history, reads((0, b"a"), (1, b"c")))


def test_duplicated() -> None:
    records = reads((0, b"a"), (1, b"b"), (2, b"b"))
    assert kinds(told(b"a", b"b"), records) == ["duplicated"]
    assert kinds(told(b"a", b"b", may_repeat=True), records) == []


def test_reordered() -> None:
    history = told(b"a", b"b", acknowledged=0)
    assert kinds(history, reads((0, b"b"), (1, b"a"))) == ["reordered"]
    assert kinds(told(b"a", b"b"), reads((1, b"b"), (0, b"a")))[0] == "reordered"


def test_the_order_of_different_producers_does_not_matter() -> None:
    history = History()
    for producer in ("p", "q"):
        for at in range(2):
            history.sending(producer, PLACE, None, b"%s%d" % (producer.encode(), at))
    assert kinds(history, reads((0, b"q0"), (1, b"p0"), (2, b"q1"), (3, b"p1"))) == []


def test_reused() -> None:
    history = told(b"a", b"b")
    history.sending("p", PLACE, None, b"c")
    history.acknowledged(PLACE, 1, None, b"c")
    assert "reused" in kinds(history, reads((0, b"a"), (1, b"c")))


def test_an_acknowledgement_may_come_twice() -> None:
    history = told(b"a")
    history.acknowledged(PLACE, 0, None, b"a")
    assert kinds(history, reads((0, b"a"))) == []


def test_unknown() -> None:
    assert kinds(told(b"a"), reads((0, b"a"), (1, b"who?"))) == ["unknown"]


def test_records_of_a_deleted_topic_are_unknown() -> None:
    history = told(b"a")
    history.forget("t")
    assert history.places() == []
    assert kinds(history, reads((0, b"a"))) == ["unknown"]


def test_a_compacted_log_keeps_the_last_of_each_key() -> None:
    history = History()
    for at, key in enumerate((b"k", b"l", b"k", b"l")):
        history.sending("p", PLACE, key, b"%d" % at)
        history.acknowledged(PLACE, at, key, b"%d" % at)
    whole = [Read(2, b"k", b"2"), Read(3, b"l", b"3")]
    assert history.check(PLACE, whole, end=4, compacted=True) == []
    (problem,) = history.check(PLACE, whole[1:], end=4, compacted=True)
    assert (problem.kind, problem.offset) == ("lost", 2)


def test_a_record_may_go_for_one_that_is_only_read_yet() -> None:
    history = History()
    history.sending("p", PLACE, b"k", b"old")
    history.acknowledged(PLACE, 0, b"k", b"old")
    history.sending("p", PLACE, b"k", b"new")
    assert history.check(PLACE, [Read(1, b"k", b"new")], end=1, compacted=True) == []


def test_key_and_value_are_told_apart() -> None:
    history = History()
    history.sending("p", PLACE, b"ab", b"c")
    history.sending("p", PLACE, b"a", b"bc")
    history.sending("p", PLACE, None, b"abc")
    history.sending("p", PLACE, b"abc", None)
    history.acknowledged(PLACE, 0, b"ab", b"c")
    assert "changed" in [p.kind for p in history.check(PLACE, [Read(0, b"a", b"bc")], end=1)]


def test_verify_says_what_is_wrong_and_where() -> None:
    with pytest.raises(HistoryError, match="lost t-0@0") as caught:
        told(b"a").verify(PLACE, [], end=1)
    assert len(caught.value.problems) == 1
