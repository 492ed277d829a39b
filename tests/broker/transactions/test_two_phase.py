"""Transactions that somebody else decides (KIP-939), in the coordinator alone."""

from __future__ import annotations

import pytest

from penstock.broker.transactions.state import LAST_EPOCH, NO_IDS, NO_TIMEOUT_MS, Ids, State
from penstock.wire.errors import ErrorCode
from tests.broker.transactions.machine import (
    FIRST_ID,
    TIMEOUT_MS,
    A,
    Machine,
    opened,
    set_epoch,
)

BOTH_FORMS = pytest.mark.parametrize("bumps", [False, True], ids=["older", "newer"])


@pytest.fixture
def machine() -> Machine:
    return Machine()


def test_a_prepared_transaction_outlasts_time_and_loss(machine: Machine) -> None:
    ids = opened(machine, two_phase=True)
    assert machine.coordinator.endures("t")
    assert machine.of("t").shown_timeout_ms == NO_TIMEOUT_MS
    machine.pass_time(10 * 86_400_000)
    machine.restart(lost=True)
    machine.pass_time(10 * 86_400_000)
    assert machine.state("t") == State.ONGOING
    assert machine.end("t", ids).code == ErrorCode.NONE
    assert machine.state("t") == State.COMPLETE_COMMIT


@BOTH_FORMS
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_it_is_resumed_and_ended_from_another_process(
    machine: Machine, bumps: bool, commit: bool
) -> None:
    ids = opened(machine, two_phase=True)
    resumed = machine.init("t", keep_prepared=True, two_phase=True)
    assert resumed.ongoing == ids
    assert resumed.ids == (ids.producer_id, ids.epoch + 1)
    assert machine.state("t") == State.ONGOING
    assert machine.of("t").shown_ids == ids
    # The one before is fenced, the new one may only end it.
    assert machine.write_to("t", ids, A) == ErrorCode.INVALID_PRODUCER_EPOCH
    assert machine.end("t", ids).code == ErrorCode.PRODUCER_FENCED
    assert machine.write_to("t", resumed.ids, A) == ErrorCode.INVALID_TXN_STATE
    assert machine.add_group("t", resumed.ids, "g") == ErrorCode.INVALID_TXN_STATE
    outcome = machine.decide("t", resumed.ids, commit=commit, bumps=bumps)
    assert machine.finish() == {"t": (outcome.ids, commit)}
    assert outcome.ids.epoch == resumed.ids.epoch + bumps
    assert machine.write_to("t", outcome.ids, A) == ErrorCode.NONE


def test_it_may_be_resumed_again_and_again(machine: Machine) -> None:
    ids = opened(machine, two_phase=True)
    for count in (1, 2, 3):
        resumed = machine.init("t", keep_prepared=True, two_phase=True)
        assert (resumed.ongoing, resumed.ids.epoch) == (ids, ids.epoch + count)
        machine.restart(lost=True)
    machine.end("t", resumed.ids)
    assert machine.state("t") == State.COMPLETE_COMMIT


def test_resuming_at_the_last_epoch_takes_a_new_id(machine: Machine) -> None:
    first = machine.init("t", two_phase=True).ids
    set_epoch(machine, "t", LAST_EPOCH)
    last = Ids(first.producer_id, LAST_EPOCH)
    machine.write_to("t", last, A)
    resumed = machine.init("t", keep_prepared=True, two_phase=True)
    assert (resumed.ongoing, resumed.ids) == (last, Ids(first.producer_id + 1, 0))
    machine.decide("t", resumed.ids)
    assert machine.finish() == {"t": (Ids(first.producer_id, LAST_EPOCH + 1), True)}


def test_with_nothing_to_resume_it_is_an_ordinary_beginning(machine: Machine) -> None:
    ids = machine.init("t", keep_prepared=True, two_phase=True)
    assert (ids.ids, ids.ongoing) == (Ids(FIRST_ID, 0), NO_IDS)
    assert machine.init("t", keep_prepared=True).ids.epoch == 1


def test_without_keeping_it_is_aborted(machine: Machine) -> None:
    opened(machine, two_phase=True)
    machine.init("t", two_phase=True)
    assert machine.state("t") == State.EMPTY


def test_a_kept_transaction_of_one_phase_still_has_its_time(machine: Machine) -> None:
    opened(machine)
    machine.init("t", keep_prepared=True)
    machine.pass_time(TIMEOUT_MS)
    assert machine.state("t") == State.PREPARE_ABORT


def test_what_follows_a_kept_transaction_is_as_its_producer_asked(machine: Machine) -> None:
    opened(machine, two_phase=True)
    resumed = machine.init("t", keep_prepared=True, two_phase=False)
    machine.pass_time(TIMEOUT_MS)
    assert machine.state("t") == State.ONGOING
    ids = machine.end("t", resumed.ids).ids
    machine.write_to("t", ids, A)
    assert not machine.coordinator.endures("t")
    machine.pass_time(TIMEOUT_MS)
    assert machine.state("t") == State.PREPARE_ABORT


def test_the_broker_may_forbid_it() -> None:
    machine = Machine(two_phase_commit=False)
    refused = machine.init("t", two_phase=True)
    assert refused.code == ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


def test_its_timeout_does_not_matter(machine: Machine) -> None:
    assert not machine.init("t", two_phase=True, timeout_ms=0x7FFFFFFF).code
