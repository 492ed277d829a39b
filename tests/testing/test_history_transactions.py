"""The judges of transactions and of queues must see every broken promise."""

from __future__ import annotations

import pytest

from penstock.testing.history import History, HistoryError, Place, QueueHistory, Read

A, B = Place("t", 0), Place("t", 1)


def kinds(history: History, place: Place, *items: tuple[int, bytes]) -> list[str]:
    records = [Read(offset, None, value) for offset, value in items]
    found = history.check(place, records, end=history.end(place), committed=True)
    return [problem.kind for problem in found]


def told(end: str) -> History:
    """A transaction of a record in each of two partitions, and how it ended."""
    history = History()
    for place in (A, B):
        history.sending("p", place, None, b"x", transaction="x")
        history.acknowledged(place, 0, None, b"x")
    if end in ("committing", "committed", "refused"):
        history.committing("x")
    if end in ("committed", "aborted", "refused"):
        history.ended("x", committed=end == "committed")
    return history


def test_what_is_committed_is_there() -> None:
    history = told("committed")
    assert kinds(history, A, (0, b"x")) == []
    assert kinds(history, B) == ["lost"]
    assert history.check_transactions() == []
    assert history.transaction_counts()["committed"] == 1


@pytest.mark.parametrize("end", ["open", "aborted", "refused"])
def test_what_is_not_committed_is_not_there(end: str) -> None:
    history = told(end)
    assert kinds(history, A) == []
    assert kinds(history, B, (0, b"x")) == ["aborted"]


@pytest.mark.parametrize("end", ["open", "aborted", "refused"])
def test_other_readers_may_see_it(end: str) -> None:
    history = told(end)
    assert history.check(A, [Read(0, None, b"x")], end=1) == []
    # What was acknowledged stays in the log, whatever became of its transaction.
    assert [problem.kind for problem in history.check(A, [], end=1)] == ["lost"]


def test_nobody_knows_how_it_ended() -> None:
    history = told("committing")
    assert kinds(history, A, (0, b"x")) == []
    assert kinds(history, B, (0, b"x")) == []
    assert history.check_transactions() == []
    history = told("committing")
    assert kinds(history, A) == []
    assert kinds(history, B) == []
    assert history.check_transactions() == []


def test_torn() -> None:
    history = told("committing")
    assert kinds(history, A, (0, b"x")) == []
    assert kinds(history, B) == []
    (problem,) = history.check_transactions()
    assert (problem.kind, problem.place, problem.offset) == ("torn", A, 0)


def test_what_was_visible_stays_visible() -> None:
    history = told("committing")
    assert kinds(history, A, (0, b"x")) == []
    assert kinds(history, A) == ["lost"]


def test_order_and_repetition_within_transactions() -> None:
    history = History()
    for number in range(3):
        name = f"x{number}"
        history.sending("p", A, None, b"%d" % number, transaction=name)
        history.committing(name)
        if number != 1:
            history.ended(name, committed=True)
    assert kinds(history, A, (0, b"0"), (2, b"2")) == []
    assert kinds(history, A, (0, b"2"), (2, b"0")) == ["reordered", "changed", "changed"]
    assert kinds(history, A, (0, b"0"), (2, b"2"), (4, b"0")) == [
        "reordered", "changed", "changed", "duplicated",
    ]  # fmt: skip


def test_records_outside_of_transactions_and_before_the_start() -> None:
    history = told("committed")
    history.sending("q", A, None, b"plain")
    history.acknowledged(A, 2, None, b"plain")
    history.sending("q", A, None, b"never acknowledged")
    assert kinds(history, A, (0, b"x"), (2, b"plain")) == []
    assert kinds(history, A, (0, b"x")) == ["lost"]
    left = history.check(A, [Read(2, None, b"plain")], end=3, log_start=1, committed=True)
    assert left == []


# ---- queues ------------------------------------------------------------------------------------


def queue(*offsets: int) -> QueueHistory:
    history = QueueHistory()
    for offset in offsets:
        history.written(A, offset)
    return history


def found(history: QueueHistory, *dead: int) -> list[tuple[str, int]]:
    return [(p.kind, p.offset) for p in history.check([(A, offset) for offset in dead])]


def test_each_record_is_accepted_or_buried() -> None:
    history = queue(0, 1, 2, 3)
    for offset in (0, 1, 2, 3):
        history.delivered("c", A, offset, asked_at=1.0)
    history.answering(A, 0)
    history.confirmed(A, 0, accepted=True, at=2.0)
    # An answer that got lost may have arrived or not.
    history.answering(A, 1)
    history.answering(A, 2)
    history.confirmed(A, 2, accepted=False, at=2.0)
    assert found(history, 2, 3) == []
    assert history.unfinished() == 2
    assert history.delivery_count == 4


def test_lost_from_a_queue() -> None:
    history = queue(0, 1, 2)
    history.delivered("c", A, 1, asked_at=1.0)
    history.answering(A, 2)
    history.confirmed(A, 2, accepted=False, at=2.0)
    history.answering(A, 1)
    history.refused(A, 1)
    assert found(history) == [("lost", 0), ("lost", 1), ("lost", 2)]


def test_redelivered_whoever_tells_first() -> None:
    for early in (True, False):
        history = queue(0)
        history.answering(A, 0)
        if early:
            history.confirmed(A, 0, accepted=True, at=2.0)
        history.delivered("c", A, 0, asked_at=1.0)
        history.delivered("d", A, 0, asked_at=2.5)
        if not early:
            history.confirmed(A, 0, accepted=True, at=2.0)
        assert found(history) == [("redelivered", 0)]


def test_a_delivery_that_was_asked_for_before_is_none_after() -> None:
    history = queue(0)
    history.answering(A, 0)
    history.confirmed(A, 0, accepted=True, at=2.0)
    history.delivered("c", A, 0, asked_at=1.9)
    assert found(history) == []


def test_buried_alive_and_unknown() -> None:
    history = queue(0)
    history.answering(A, 0)
    history.confirmed(A, 0, accepted=True, at=2.0)
    assert found(history, 0, 7) == [("buried", 0), ("unknown", 7)]
    with pytest.raises(HistoryError, match="buried t-0@0"):
        history.verify([(A, 0)])
