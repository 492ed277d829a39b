"""The rules of the transaction coordinator, one by one; what they are follows Kafka's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.broker.catalog import Topic
from penstock.broker.journal import Entry
from penstock.broker.transactions.coordinator import (
    EXPIRY_INTERVAL_MS,
    MAX_GROUPS,
    MAX_NAME_LENGTH,
    Then,
)
from penstock.broker.transactions.state import (
    LAST_EPOCH,
    Ids,
    State,
    Transaction,
)
from penstock.wire.errors import ErrorCode
from tests.broker.transactions.machine import (
    FIRST_ID,
    TIMEOUT_MS,
    A,
    B,
    Machine,
    opened,
    set_epoch,
)

BOTH_FORMS = pytest.mark.parametrize("bumps", [False, True], ids=["older", "newer"])


@pytest.fixture
def machine() -> Machine:
    return Machine()


# ---- beginning ---------------------------------------------------------------------------


def test_a_new_transactional_id_gets_a_new_producer_id(machine: Machine) -> None:
    assert machine.ask_init("t").then == Then.NEW_ID
    assert machine.init("t").ids == Ids(FIRST_ID, 0)
    assert machine.init("u").ids == Ids(FIRST_ID + 1, 0)


def test_each_producer_of_an_id_fences_the_one_before(machine: Machine) -> None:
    first = machine.init("t").ids
    second = machine.init("t").ids
    assert second == (first.producer_id, first.epoch + 1)
    assert machine.write_to("t", first, A) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert machine.add("t", first, (A, 0)) == ErrorCode.PRODUCER_FENCED
    assert machine.add_group("t", first, "g") == ErrorCode.PRODUCER_FENCED
    assert machine.commit_offsets("t", first, "g") == ErrorCode.INVALID_PRODUCER_EPOCH
    assert machine.end("t", first).code == ErrorCode.PRODUCER_FENCED
    assert machine.write_to("t", second, A) == ErrorCode.NONE


def test_what_the_one_before_left_open_is_aborted_first(machine: Machine) -> None:
    first = opened(machine)
    outcome = machine.ask_init("t")
    assert outcome.then == Then.FINISH
    # Who asks in the meantime waits for the same.
    assert machine.ask_init("t") == machine.ask_init("t")
    assert machine.finish() == {"t": (Ids(first.producer_id, first.epoch + 1), False)}
    assert machine.state("t") == State.COMPLETE_ABORT
    assert machine.init("t").ids.epoch == first.epoch + 2


def test_what_one_request_names_becomes_part_of_the_transaction_together(machine: Machine) -> None:
    ids = machine.init("t").ids
    code, entries = machine.coordinator.admit_write(
        "t", ids, A, 0, implicit=True, now_ms=1, elapsed_ms=1, others=[(A, 0), (A, 2), (B, 1)]
    )
    assert (code, len(entries)) == (ErrorCode.NONE, 1)
    machine.write(entries)
    for where, number in ((A, 0), (A, 2), (B, 1)):
        assert machine.of("t").holds(where.id, number)
    assert not machine.of("t").holds(B.id, 0)
    before = len(machine.journal)
    assert machine.write_to("t", ids, B, 1) == ErrorCode.NONE
    assert len(machine.journal) == before


@pytest.mark.parametrize("name", ["", "x" * (MAX_NAME_LENGTH + 1)])
def test_names_have_bounds(machine: Machine, name: str) -> None:
    assert machine.init(name).code == ErrorCode.INVALID_REQUEST


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_timeouts_have_bounds(machine: Machine, timeout_ms: int) -> None:
    outcome = machine.init("t", timeout_ms=timeout_ms)
    assert outcome.code == ErrorCode.INVALID_TRANSACTION_TIMEOUT
    assert not machine.journal


def test_epochs_run_out(machine: Machine) -> None:
    first = machine.init("t").ids
    set_epoch(machine, "t", LAST_EPOCH)
    assert machine.init("t").ids == Ids(first.producer_id + 1, 0)


def test_a_producer_fenced_at_the_last_epoch_is_followed_by_a_new_id(machine: Machine) -> None:
    first = machine.init("t").ids
    set_epoch(machine, "t", LAST_EPOCH)
    assert machine.write_to("t", Ids(first.producer_id, LAST_EPOCH), A) == ErrorCode.NONE
    assert machine.init("t").ids == Ids(first.producer_id + 1, 0)


# ---- going on after an error: KIP-360 ----------------------------------------------------


def test_a_producer_that_says_who_it_is_gets_the_next_epoch(machine: Machine) -> None:
    first = machine.init("t").ids
    second = machine.init("t", expected=first).ids
    assert second == (first.producer_id, first.epoch + 1)
    # It did not hear the answer.
    assert machine.init("t", expected=first).ids == second


def test_a_producer_that_was_replaced_is_told_so(machine: Machine) -> None:
    first = machine.init("t").ids
    machine.init("t")
    assert machine.init("t", expected=first).code == ErrorCode.PRODUCER_FENCED
    stranger = Ids(first.producer_id + 77, first.epoch)
    assert machine.init("t", expected=stranger).code == ErrorCode.PRODUCER_FENCED


def test_who_goes_on_after_its_own_mistake_is_not_fenced_by_it(machine: Machine) -> None:
    ids = opened(machine)
    again = machine.init("t", expected=ids)
    assert not again.code
    assert again.ids == (ids.producer_id, ids.epoch + 1)
    assert machine.write_to("t", ids, A) == ErrorCode.INVALID_PRODUCER_EPOCH


def test_it_gets_a_new_id_after_the_last_epoch_and_may_ask_again(machine: Machine) -> None:
    first = machine.init("t").ids
    set_epoch(machine, "t", LAST_EPOCH)
    last = Ids(first.producer_id, LAST_EPOCH)
    given = machine.init("t", expected=last).ids
    assert given == (first.producer_id + 1, 0)
    assert machine.init("t", expected=last).ids == given


def test_an_unknown_id_with_known_ids_is_given_new_ones(machine: Machine) -> None:
    assert machine.init("t", expected=Ids(77, 3)).ids == Ids(FIRST_ID, 0)


# ---- writing -----------------------------------------------------------------------------


def test_the_newer_form_adds_a_partition_by_writing_to_it(machine: Machine) -> None:
    ids = machine.init("t").ids
    assert machine.write_to("t", ids, A, 0) == ErrorCode.NONE
    assert machine.write_to("t", ids, B, 1) == ErrorCode.NONE
    written = len(machine.journal)
    assert machine.write_to("t", ids, A, 0) == ErrorCode.NONE
    assert len(machine.journal) == written
    txn = machine.of("t")
    assert txn.state == State.ONGOING
    assert txn.holds(A.id, 0)
    assert txn.holds(B.id, 1)
    assert not txn.holds(A.id, 1)


def test_the_older_form_must_say_so_first(machine: Machine) -> None:
    ids = machine.init("t").ids
    assert machine.write_to("t", ids, A, implicit=False) == ErrorCode.TRANSACTION_ABORTABLE
    assert machine.commit_offsets("t", ids, "g", implicit=False) == ErrorCode.TRANSACTION_ABORTABLE
    assert machine.add("t", ids, (A, 0), (A, 1)) == ErrorCode.NONE
    assert machine.add_group("t", ids, "g") == ErrorCode.NONE
    assert machine.write_to("t", ids, A, 1, implicit=False) == ErrorCode.NONE
    assert machine.commit_offsets("t", ids, "g", implicit=False) == ErrorCode.NONE
    assert machine.write_to("t", ids, B, 0, implicit=False) == ErrorCode.TRANSACTION_ABORTABLE


def test_a_late_write_does_not_slip_into_the_next_transaction(machine: Machine) -> None:
    ids = opened(machine)
    machine.end("t", ids, bumps=False)
    assert machine.write_to("t", ids, A, implicit=False) == ErrorCode.TRANSACTION_ABORTABLE
    ids = machine.init("t").ids
    machine.write_to("t", ids, A)
    machine.end("t", ids, bumps=True)
    assert machine.write_to("t", ids, A) == ErrorCode.INVALID_PRODUCER_EPOCH


def test_strangers_are_refused(machine: Machine) -> None:
    ids = machine.init("t").ids
    foreign = Ids(ids.producer_id + 5, 0)
    assert machine.write_to("t", foreign, A) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert machine.write_to("u", ids, A) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert machine.add("u", ids, (A, 0)) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert machine.end("u", ids).code == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert machine.end("t", foreign).code == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert machine.add("", ids, (A, 0)) == ErrorCode.INVALID_REQUEST
    assert machine.end("", ids).code == ErrorCode.INVALID_REQUEST


def test_nothing_is_written_while_a_decision_is_carried_out(machine: Machine) -> None:
    ids = opened(machine)
    machine.decide("t", ids, bumps=False)
    assert machine.write_to("t", ids, A) == ErrorCode.CONCURRENT_TRANSACTIONS
    assert machine.add("t", ids, (B, 0)) == ErrorCode.CONCURRENT_TRANSACTIONS


def test_the_groups_of_a_transaction_have_a_bound(machine: Machine) -> None:
    ids = machine.init("t").ids
    for number in range(MAX_GROUPS):
        assert machine.add_group("t", ids, f"g{number}") == ErrorCode.NONE
    assert machine.add_group("t", ids, "one more") == ErrorCode.INVALID_REQUEST


def test_verification_adds_nothing(machine: Machine) -> None:
    ids = opened(machine)
    assert machine.coordinator.holds("t", ids, A, 0) == ErrorCode.NONE
    assert machine.coordinator.holds("t", ids, A, 1) == ErrorCode.TRANSACTION_ABORTABLE
    assert not machine.of("t").holds(A.id, 1)


def test_a_deleted_topic_leaves_its_transactions(machine: Machine) -> None:
    ids = opened(machine)
    machine.write_to("t", ids, B)
    machine.write(machine.coordinator.topic_deleted(A))
    assert not machine.of("t").holds(A.id, 0)
    assert machine.of("t").holds(B.id, 0)


# ---- ending ------------------------------------------------------------------------------


@BOTH_FORMS
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_an_end_is_carried_out_and_may_be_repeated(
    machine: Machine, bumps: bool, commit: bool
) -> None:
    ids = opened(machine)
    outcome = machine.decide("t", ids, commit=commit, bumps=bumps)
    expected = Ids(ids.producer_id, ids.epoch + 1) if bumps else ids
    assert (outcome.then, outcome.ids) == (Then.FINISH, expected)
    # The answer was not heard, and the markers are not there yet.
    assert machine.decide("t", ids, commit=commit, bumps=bumps) == replace(outcome, entries=())
    wrong = machine.decide("t", ids, commit=not commit, bumps=bumps)
    assert wrong.code == ErrorCode.INVALID_TXN_STATE
    assert machine.finish() == {"t": (expected, commit)}
    again = machine.decide("t", ids, commit=commit, bumps=bumps)
    assert (again.then, again.code, again.ids) == (Then.ANSWER, ErrorCode.NONE, expected)
    wrong = machine.decide("t", ids, commit=not commit, bumps=bumps)
    assert wrong.code == ErrorCode.INVALID_TXN_STATE
    txn = machine.of("t")
    assert txn.state == (State.COMPLETE_COMMIT if commit else State.COMPLETE_ABORT)
    assert not txn.partitions
    assert not txn.groups


def test_the_older_form_cannot_end_what_was_not_begun(machine: Machine) -> None:
    ids = machine.init("t").ids
    for commit in (True, False):
        outcome = machine.end("t", ids, commit=commit, bumps=False)
        assert outcome.code == ErrorCode.INVALID_TXN_STATE


def test_the_newer_form_may_abort_nothing_but_not_commit_it(machine: Machine) -> None:
    ids = machine.init("t").ids
    assert machine.end("t", ids, commit=True).code == ErrorCode.INVALID_TXN_STATE
    after = machine.end("t", ids, commit=False)
    assert not after.code
    assert after.ids == (ids.producer_id, ids.epoch + 1)
    assert machine.end("t", after.ids, commit=False).ids.epoch == ids.epoch + 2
    machine.write_to("t", Ids(ids.producer_id, ids.epoch + 2), A)
    done = machine.end("t", Ids(ids.producer_id, ids.epoch + 2))
    assert machine.end("t", done.ids).code == ErrorCode.INVALID_TXN_STATE


def test_the_newer_form_gives_a_new_id_when_epochs_run_out(machine: Machine) -> None:
    first = machine.init("t").ids
    set_epoch(machine, "t", LAST_EPOCH)
    last = Ids(first.producer_id, LAST_EPOCH)
    machine.write_to("t", last, A)
    outcome = machine.decide("t", last)
    assert outcome.ids == (first.producer_id + 1, 0)
    # The old id is closed with the epoch that no client ever holds.
    assert machine.finish() == {"t": (Ids(first.producer_id, LAST_EPOCH + 1), True)}
    assert machine.end("t", last).ids == outcome.ids
    assert machine.write_to("t", last, A) == ErrorCode.INVALID_PRODUCER_ID_MAPPING
    assert machine.write_to("t", outcome.ids, A) == ErrorCode.NONE


# ---- time --------------------------------------------------------------------------------


def test_a_transaction_that_takes_too_long_is_aborted_and_its_producer_fenced(
    machine: Machine,
) -> None:
    ids = opened(machine)
    machine.pass_time(TIMEOUT_MS - 1)
    assert machine.state("t") == State.ONGOING
    machine.pass_time(1)
    assert machine.state("t") == State.PREPARE_ABORT
    assert machine.finish() == {"t": (Ids(ids.producer_id, ids.epoch + 1), False)}
    assert machine.write_to("t", ids, A) == ErrorCode.INVALID_PRODUCER_EPOCH
    for commit in (False, True):
        assert machine.end("t", ids, commit=commit, bumps=False).code == ErrorCode.PRODUCER_FENCED
    # As in Kafka the newer form may abort what is aborted, and go on.
    assert machine.end("t", ids, commit=True).code == ErrorCode.INVALID_TXN_STATE
    assert machine.end("t", ids, commit=False).ids == (ids.producer_id, ids.epoch + 1)
    assert machine.init("t", expected=ids).ids == (ids.producer_id, ids.epoch + 1)
    assert machine.init("t").ids == (ids.producer_id, ids.epoch + 2)
    assert machine.end("t", ids, commit=False).code == ErrorCode.PRODUCER_FENCED


def test_after_the_last_epoch_there_is_no_going_on(machine: Machine) -> None:
    first = machine.init("t").ids
    set_epoch(machine, "t", LAST_EPOCH)
    last = Ids(first.producer_id, LAST_EPOCH)
    machine.write_to("t", last, A)
    machine.pass_time(TIMEOUT_MS)
    machine.finish()
    assert machine.end("t", last, commit=False).code == ErrorCode.PRODUCER_FENCED
    assert machine.init("t").ids == (first.producer_id + 1, 0)


def test_each_transaction_has_the_whole_time(machine: Machine) -> None:
    ids = opened(machine)
    machine.pass_time(TIMEOUT_MS - 1)
    ids = machine.end("t", ids).ids
    machine.pass_time(1)
    machine.write_to("t", ids, A)
    machine.pass_time(TIMEOUT_MS - 1)
    assert machine.state("t") == State.ONGOING
    machine.pass_time(1)
    assert machine.state("t") == State.PREPARE_ABORT


def test_a_deadline_that_could_not_be_written_stays_due(machine: Machine) -> None:
    opened(machine)
    machine.now_ms += TIMEOUT_MS
    entries = list(machine.coordinator.tick(machine.now_ms, machine.now_ms))
    assert entries
    assert machine.coordinator.next_due_ms is not None
    assert machine.coordinator.next_due_ms <= machine.now_ms + 1_000
    machine.pass_time(1_000)
    assert machine.state("t") == State.PREPARE_ABORT


def test_deadlines_go_on_over_a_restart(machine: Machine) -> None:
    opened(machine)
    machine.pass_time(TIMEOUT_MS - 10)
    machine.restart()
    machine.pass_time(9)
    assert machine.state("t") == State.ONGOING
    machine.pass_time(1)
    assert machine.state("t") == State.PREPARE_ABORT


def test_silent_ids_are_forgotten_but_never_an_open_transaction() -> None:
    machine = Machine(expiration_ms=1_000_000)
    machine.init("idle")
    opened(machine, "open", two_phase=True)
    done = opened(machine, "done")
    machine.end("done", done)
    machine.pass_time(EXPIRY_INTERVAL_MS)
    assert set(machine.coordinator.transactions) == {"idle", "open", "done"}
    machine.pass_time(EXPIRY_INTERVAL_MS)
    assert set(machine.coordinator.transactions) == {"open"}
    # A producer that comes back has to begin again.
    assert machine.write_to("done", done, A) == ErrorCode.INVALID_PRODUCER_ID_MAPPING


def test_the_number_of_ids_is_bounded() -> None:
    machine = Machine(max_transactional_ids=3)
    for name in "abc":
        machine.now_ms += 1
        opened(machine, name)
    assert machine.init("d").code == ErrorCode.POLICY_VIOLATION
    machine.end("b", machine.of("b").ids)
    assert not machine.init("d").code
    assert set(machine.coordinator.transactions) == {"a", "c", "d"}


# ---- restarts ----------------------------------------------------------------------------


def test_everything_survives_a_restart(machine: Machine) -> None:
    opened(machine, "ongoing")
    done = opened(machine, "done", two_phase=True)
    machine.end("done", done)
    opened(machine, "kept", two_phase=True)
    machine.init("kept", keep_prepared=True)
    decided = opened(machine, "decided")
    machine.commit_offsets("decided", decided, "g")
    machine.decide("decided", decided)
    before = dict(machine.coordinator.transactions)
    machine.restart()
    assert machine.coordinator.transactions == before
    assert machine.coordinator.undone == {"decided"}


def test_after_a_loss_open_transactions_are_aborted_and_all_are_fenced(machine: Machine) -> None:
    ongoing = opened(machine, "ongoing")
    idle = machine.init("idle").ids
    done = opened(machine, "done")
    machine.end("done", done, bumps=False)
    decided = opened(machine, "decided")
    machine.decide("decided", decided, bumps=False)
    machine.restart(lost=True)
    assert machine.finish() == {
        "decided": (decided, True),
        "ongoing": (Ids(ongoing.producer_id, ongoing.epoch + 1), False),
    }
    for name, ids in {"ongoing": ongoing, "idle": idle, "done": done}.items():
        assert machine.write_to(name, ids, A) == ErrorCode.INVALID_PRODUCER_EPOCH
        assert machine.end(name, ids, bumps=False).code == ErrorCode.PRODUCER_FENCED


def test_a_commit_whose_transaction_was_lost_is_never_confirmed(machine: Machine) -> None:
    ids = opened(machine)
    machine.end("t", ids, bumps=False)
    assert machine.add("t", ids, (A, 0)) == ErrorCode.NONE
    machine.restart(lost=True, without_last=1)
    # Without the fence this would be taken for the repeated end of the one before.
    assert machine.end("t", ids, bumps=False).code == ErrorCode.PRODUCER_FENCED


def test_a_repeated_end_in_the_newer_form_is_confirmed_after_a_loss(machine: Machine) -> None:
    ids = opened(machine)
    after = machine.end("t", ids).ids
    machine.restart(lost=True)
    again = machine.end("t", ids)
    assert not again.code
    assert again.ids.epoch > after.epoch
    assert machine.write_to("t", after, A) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert machine.write_to("t", again.ids, A) == ErrorCode.NONE


def test_a_lost_completion_does_not_end_the_next_transaction_too(machine: Machine) -> None:
    ids = opened(machine)
    after = machine.end("t", ids).ids
    machine.write_to("t", after, A)
    machine.restart(lost=True, without_last=2)
    assert machine.coordinator.undone == {"t"}
    # What is carried out once more is told from what was begun since by its epoch.
    assert machine.of("t").txn_ids == ids
    assert machine.finish() == {"t": (after, True)}
    assert machine.coordinator.adopt(A, 0, after, machine.now_ms) == (False, [])
    # Of the next transaction a part may be lost: its producer must not end it.
    assert machine.write_to("t", after, A) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert machine.end("t", after).code == ErrorCode.PRODUCER_FENCED


def test_nor_where_the_next_endures(machine: Machine) -> None:
    ids = opened(machine, two_phase=True)
    after = machine.end("t", ids).ids
    machine.write_to("t", after, A)
    machine.restart(lost=True, without_last=2)
    assert machine.finish() == {"t": (after, True)}
    # This write was not acknowledged; it will be repeated, and is in the transaction by then.
    ours, entries = machine.coordinator.adopt(A, 0, after, machine.now_ms)
    assert ours
    machine.write(entries)
    assert machine.state("t") == State.ONGOING
    assert machine.coordinator.endures("t")
    assert machine.end("t", after).code == ErrorCode.NONE


def test_the_older_form_opens_only_after_what_is_durable(machine: Machine) -> None:
    ids = opened(machine)
    assert not machine.coordinator.would_open("t")
    machine.end("t", ids, bumps=False)
    assert machine.coordinator.would_open("t")
    machine.add("t", ids, (A, 0))
    assert machine.durable == len(machine.journal) - 1


def test_what_is_open_in_a_partition_is_adopted_or_nobodys(machine: Machine) -> None:
    ids = opened(machine)

    def adopt(where: Topic, number: int, ids: Ids) -> tuple[bool, list[Entry]]:
        return machine.coordinator.adopt(where, number, ids, machine.now_ms)

    assert adopt(A, 0, ids) == (True, [])
    ours, entries = adopt(B, 2, ids)
    assert ours
    machine.write(entries)
    assert machine.of("t").holds(B.id, 2)
    assert adopt(B, 0, Ids(ids.producer_id, ids.epoch - 1)) == (False, [])
    assert adopt(B, 0, Ids(ids.producer_id + 9, 0)) == (False, [])


# ---- questions ---------------------------------------------------------------------------


def test_listing_filters(machine: Machine) -> None:
    machine.init("idle")
    old = opened(machine, "old", two_phase=True)
    machine.now_ms += 5_000
    opened(machine, "young")

    def names(found: list[Transaction]) -> set[str]:
        return {txn.name for txn in found}

    def listed(**filters: object) -> set[str]:
        found = machine.coordinator.listed(now_ms=machine.now_ms + 10, **filters)  # type: ignore[arg-type]
        return names(found)

    assert listed() == {"idle", "old", "young"}
    assert listed(states=["Ongoing"]) == {"old", "young"}
    assert listed(states=["Nonsense"]) == set()
    assert listed(producer_ids=[old.producer_id]) == {"old"}
    assert listed(states=["Ongoing"], longer_than_ms=1_000) == {"old"}
    assert listed(matches=lambda name: name.startswith("y")) == {"young"}
