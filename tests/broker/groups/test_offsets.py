"""Committed offsets without a broker: topics that come and go, transactions, expiry, limits."""

from __future__ import annotations

import pytest

from penstock.broker.catalog import ApiError
from penstock.broker.config import Limits
from penstock.broker.groups.classic import EMPTY
from penstock.broker.groups.offsets import NewOffset
from penstock.wire.errors import ErrorCode
from tests.broker.groups.machine import GROUP, SESSION_MS, Client, Machine, stable
from tests.broker.groups.test_classic import subscription

NONE = ErrorCode.NONE
DAY_MS = 24 * 3_600_000
RETENTION_MS = 7 * DAY_MS
CHECK_MS = 600_000


@pytest.fixture
def machine() -> Machine:
    made = Machine()
    made.topic("t")
    return made


def at(offset: int, *, topic: str = "t", partition: int = 0, metadata: str = "") -> NewOffset:
    return NewOffset(topic, partition, offset, -1, metadata)


def committed(machine: Machine, topic: str = "t", partition: int = 0) -> int | None:
    return machine.groups.committed(GROUP, topic, partition)


# ---- committing --------------------------------------------------------------------------------


def test_an_offset_is_there_after_a_restart(machine: Machine) -> None:
    offset = NewOffset("t", 1, 7, 3, "note")
    assert machine.commit(offset) == [NONE]
    machine.restart()
    found = machine.groups.committed_at(GROUP, "t", 1)
    assert found is not None
    assert (found.offset, found.leader_epoch, found.metadata) == (7, 3, "note")
    assert machine.group().state == EMPTY
    assert machine.group().protocol_type == ""


def test_each_offset_has_its_own_error(machine: Machine) -> None:
    codes = machine.commit(
        at(1),
        at(2, partition=9),
        at(3, partition=-1),
        at(4, topic="nowhere"),
        at(5, partition=1, metadata="x" * 4_096),
        at(6, partition=2, metadata="x" * 4_097),
    )
    unknown = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    too_large = ErrorCode.OFFSET_METADATA_TOO_LARGE
    assert codes == [NONE, unknown, unknown, unknown, NONE, too_large]
    assert [committed(machine, partition=number) for number in range(3)] == [1, 5, None]


@pytest.mark.parametrize(
    ("version", "code"), [(8, ErrorCode.ILLEGAL_GENERATION), (9, ErrorCode.GROUP_ID_NOT_FOUND)]
)
def test_a_member_of_a_group_that_is_not_there(
    machine: Machine, version: int, code: ErrorCode
) -> None:
    assert machine.commit(at(1), member_id="m", generation=1, version=version) == [code]
    assert not machine.groups.groups


def test_a_commit_of_nothing_makes_no_group(machine: Machine) -> None:
    machine.commit()
    machine.commit(at(1, topic="nowhere"))
    machine.commit_in_transaction(1, at(1, topic="nowhere"))
    assert not machine.groups.groups


def test_a_topic_made_anew_does_not_inherit_offsets(machine: Machine) -> None:
    machine.commit(at(100))
    old = machine.catalog.topics["t"]
    machine.topic("t", id_=2)
    assert committed(machine) is None
    machine.commit(at(5), at(6, partition=1))
    # Told late of the old one's end, the new one's offsets stay.
    machine.write(machine.groups.topic_deleted(old))
    assert committed(machine) == 5
    machine.write(machine.groups.topic_deleted(machine.catalog.topics["t"]))
    assert machine.groups.offsets.count == 0


def test_too_many_groups() -> None:
    machine = Machine(limits=Limits(max_groups=2))
    machine.topic("t")
    for name in "ab":
        machine.commit(at(1), group_id=name)
    with pytest.raises(ApiError) as refused:
        machine.commit(at(1), group_id="c")
    assert refused.value.code == ErrorCode.GROUP_MAX_SIZE_REACHED
    assert machine.commit(at(2), group_id="a") == [NONE]


def test_too_many_offsets() -> None:
    machine = Machine(limits=Limits(max_committed_offsets=3))
    machine.topic("t", 10)
    full = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
    codes = machine.commit(*(at(1, partition=number) for number in range(5)))
    assert codes == [NONE] * 3 + [full] * 2
    # What is there may be committed anew.
    assert machine.commit(at(2), at(2, partition=2), at(2, partition=9)) == [NONE, NONE, full]
    assert machine.commit_in_transaction(1, at(2, partition=7)) == [full]


# ---- transactions ------------------------------------------------------------------------------


def test_offsets_of_a_transaction_count_when_it_is_committed(machine: Machine) -> None:
    machine.commit(at(1))
    assert machine.commit_in_transaction(9, at(5), at(6, partition=1)) == [NONE, NONE]
    assert committed(machine) == 1
    assert machine.groups.offsets.is_pending(GROUP, "t", 0)
    machine.restart()
    assert machine.groups.offsets.is_pending(GROUP, "t", 0)
    machine.finish(9, commit=True)
    assert [committed(machine, partition=number) for number in (0, 1)] == [5, 6]
    assert not machine.groups.offsets.is_pending(GROUP, "t", 0)
    assert machine.groups.offsets.count == 2
    machine.restart()
    assert committed(machine) == 5


def test_offsets_of_an_aborted_transaction_are_forgotten(machine: Machine) -> None:
    machine.commit(at(1))
    machine.commit_in_transaction(9, at(5))
    machine.finish(9, commit=False)
    machine.finish(9, commit=True)
    assert committed(machine) == 1
    assert not machine.groups.offsets.pending


def test_two_transactions_for_one_partition(machine: Machine) -> None:
    machine.commit_in_transaction(1, at(5))
    machine.commit_in_transaction(2, at(6))
    machine.finish(2, commit=True)
    assert machine.groups.offsets.is_pending(GROUP, "t", 0)
    machine.finish(1, commit=False)
    assert not machine.groups.offsets.is_pending(GROUP, "t", 0)
    assert committed(machine) == 6


def test_a_newer_commit_outlives_the_transaction(machine: Machine) -> None:
    machine.commit_in_transaction(1, at(5))
    machine.pass_time(10)
    machine.commit(at(8))
    machine.finish(1, commit=True)
    assert committed(machine) == 8


@pytest.mark.parametrize("restart", [False, True], ids=["", "over a restart"])
def test_a_clock_that_is_set_back_loses_no_offset(machine: Machine, restart: bool) -> None:
    """The transaction's records would stay, and what it has read be read again."""
    machine.commit(at(1))
    machine.now_ms -= 60_000
    machine.commit_in_transaction(1, at(5))
    if restart:
        machine.restart()
    machine.finish(1, commit=True)
    assert committed(machine) == 5


@pytest.mark.parametrize("restart", [False, True], ids=["", "over a restart"])
@pytest.mark.parametrize("first", [1, 2])
def test_the_newer_of_two_transactions_counts(machine: Machine, first: int, restart: bool) -> None:
    machine.commit_in_transaction(1, at(5))
    machine.commit_in_transaction(2, at(6))
    machine.finish(first, commit=True)
    if restart:
        machine.restart()
    machine.finish(3 - first, commit=True)
    assert committed(machine) == 6


@pytest.mark.parametrize("most", range(5))
def test_a_completion_may_be_cut_anywhere(machine: Machine, most: int) -> None:
    """It may be larger than a batch of the journal, and a crash come between two."""
    machine.commit_in_transaction(1, at(5), NewOffset("t", 1, 7))
    machine.commit_in_transaction(2, at(6))
    machine.finish(1, commit=True, most=most)
    machine.restart()
    machine.finish(1, commit=True)
    assert [committed(machine), machine.groups.committed(GROUP, "t", 1)] == [5, 7]
    machine.restart()
    machine.finish(2, commit=True)
    assert committed(machine) == 6


def test_offsets_that_were_written_without_turns(machine: Machine) -> None:
    """The order of their entries says which is newer."""
    machine.commit_in_transaction(1, at(5))
    machine.commit(at(8))
    machine.commit_in_transaction(2, at(9))
    machine.journal = {
        key: value[:-1] if "offset" in str(key[0]) else value
        for key, value in machine.journal.items()
    }
    machine.restart()
    machine.finish(1, commit=True)
    assert committed(machine) == 8
    machine.finish(2, commit=True)
    assert committed(machine) == 9


def test_a_transaction_about_a_topic_that_is_gone(machine: Machine) -> None:
    machine.commit_in_transaction(1, at(5))
    machine.topic("t", id_=2)
    machine.finish(1, commit=True)
    assert committed(machine) is None
    machine.commit_in_transaction(1, at(6))
    machine.write(machine.groups.topic_deleted(machine.catalog.topics["t"]))
    assert not machine.groups.offsets.pending


def test_a_transaction_of_a_stranger(machine: Machine) -> None:
    client = Client(machine)
    stable(machine, [client])
    member = client.member_id
    # An old producer says nothing of members, and is believed.
    assert machine.commit_in_transaction(1, at(1)) == [NONE]
    assert machine.commit_in_transaction(1, at(1), member_id=member, generation=1) == [NONE]
    for member_id, generation, code in (
        (member, 0, ErrorCode.ILLEGAL_GENERATION),
        ("stranger", 1, ErrorCode.UNKNOWN_MEMBER_ID),
    ):
        assert machine.commit_in_transaction(
            1, at(1), member_id=member_id, generation=generation
        ) == [code]
    assert machine.commit_in_transaction(1, at(1), generation=1, group_id="none") == [
        ErrorCode.ILLEGAL_GENERATION
    ]


# ---- deleting ----------------------------------------------------------------------------------


def test_offsets_are_deleted_unless_they_are_needed(machine: Machine) -> None:
    machine.topic("u", id_=2)
    client = Client(machine, protocols={"range": subscription("t")})
    stable(machine, [client])
    assert [client.commit(topic, 1) for topic in "tu"] == [NONE, NONE]
    codes, entries = machine.groups.delete_offsets(GROUP, [("t", 0), ("u", 0), ("u", 1), ("v", 0)])
    machine.write(entries)
    assert codes == [
        ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC,
        NONE,
        NONE,
        ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ]
    assert [committed(machine, topic) for topic in "tu"] == [1, None]


def test_deleting_offsets_where_there_are_none(machine: Machine) -> None:
    with pytest.raises(ApiError) as refused:
        machine.groups.delete_offsets("none", [])
    assert refused.value.code == ErrorCode.GROUP_ID_NOT_FOUND
    stable(machine, [Client(machine, protocol_type="connect")])
    with pytest.raises(ApiError) as refused:
        machine.groups.delete_offsets(GROUP, [])
    assert refused.value.code == ErrorCode.NON_EMPTY_GROUP


def test_a_group_is_deleted_with_all_that_belongs_to_it(machine: Machine) -> None:
    client = Client(machine)
    stable(machine, [client])
    client.commit("t", 1)
    machine.commit_in_transaction(1, at(5))
    assert machine.groups.delete(GROUP) == (ErrorCode.NON_EMPTY_GROUP, [])
    client.leave()
    code, entries = machine.groups.delete(GROUP)
    machine.write(entries)
    assert code == NONE
    assert machine.groups.delete(GROUP) == (ErrorCode.GROUP_ID_NOT_FOUND, [])
    assert not machine.journal
    machine.finish(1, commit=True)
    assert machine.groups.offsets.count == 0


# ---- expiry ------------------------------------------------------------------------------------


def test_offsets_outlive_the_last_member_by_the_retention(machine: Machine) -> None:
    client = Client(machine, session_ms=1_800_000)
    stable(machine, [client])
    client.commit("t", 1)
    for _ in range(3 * RETENTION_MS // DAY_MS * 60):
        machine.pass_time(DAY_MS // 60)
        client.heartbeat()
    assert committed(machine) == 1
    client.leave()
    machine.pass_time(RETENTION_MS - CHECK_MS)
    assert committed(machine) == 1
    machine.restart()
    machine.pass_time(2 * CHECK_MS)
    assert committed(machine) is None
    assert not machine.groups.groups
    assert not machine.journal


def test_offsets_committed_by_hand_live_from_their_last_commit(machine: Machine) -> None:
    machine.commit(at(1), at(1, partition=1))
    machine.pass_time(RETENTION_MS // 2)
    machine.commit(at(2))
    machine.pass_time(RETENTION_MS // 2 + CHECK_MS)
    assert [committed(machine, partition=number) for number in (0, 1)] == [2, None]
    machine.pass_time(RETENTION_MS // 2)
    assert not machine.journal


def test_a_commit_by_hand_to_a_group_that_is_empty_for_long(machine: Machine) -> None:
    client = Client(machine)
    stable(machine, [client])
    client.leave()
    machine.commit(at(1))
    machine.pass_time(RETENTION_MS - CHECK_MS)
    machine.commit(at(2))
    machine.pass_time(RETENTION_MS - CHECK_MS)
    assert committed(machine) == 2


def test_a_retention_that_an_old_client_asks_for(machine: Machine) -> None:
    machine.commit(at(1), expire_ms=machine.now_ms + DAY_MS)
    machine.pass_time(DAY_MS + CHECK_MS)
    assert committed(machine) is None


def test_topics_that_are_not_read_any_more_expire_while_others_are_read(machine: Machine) -> None:
    machine.topic("u", id_=2)
    sent = {"range": subscription("t")}
    client = Client(machine, protocols=sent, session_ms=4 * RETENTION_MS)
    stable(machine, [client])
    assert [client.commit(topic, 1) for topic in "tu"] == [NONE, NONE]
    machine.pass_time(RETENTION_MS + CHECK_MS)
    assert [committed(machine, topic) for topic in "tu"] == [1, None]


def test_offsets_of_an_open_transaction_keep_the_group(machine: Machine) -> None:
    machine.commit(at(1))
    machine.commit_in_transaction(1, at(2))
    machine.pass_time(RETENTION_MS + CHECK_MS)
    machine.finish(1, commit=True)
    assert committed(machine) == 2


def test_many_groups_are_looked_after_bit_by_bit(machine: Machine) -> None:
    machine.topic("t", 1_000)
    groups = [f"g{number}" for number in range(25)]
    for group in groups:
        machine.commit(*(at(1, partition=number) for number in range(1_000)), group_id=group)
    machine.now_ms += RETENTION_MS
    machine.pass_time(CHECK_MS)
    # Ten thousand offsets were looked at; the others come after a pause.
    assert 0 < len(machine.groups.groups) < len(groups)
    machine.pass_time(100)
    assert not machine.journal


def test_a_group_that_never_came_to_anything_is_forgotten(machine: Machine) -> None:
    group = machine.group()
    group._pending.add("gone")
    group.timers.set(("session", "gone"), machine.elapsed_ms + SESSION_MS)
    machine.pass_time(SESSION_MS)
    assert not machine.groups.groups


# ---- settings ----------------------------------------------------------------------------------


def test_settings_of_a_group(machine: Machine) -> None:
    assert machine.groups.settings("g").consumer_session_timeout_ms == 45_000
    machine.write(machine.groups.change_settings("g", {"consumer.session.timeout.ms": "60000"}))
    machine.restart()
    assert machine.groups.settings("g").consumer_session_timeout_ms == 60_000
    assert machine.groups.settings("h").consumer_session_timeout_ms == 45_000
    for wrong in ({"no.such": "1"}, {"consumer.session.timeout.ms": "soon"}):
        with pytest.raises(ApiError) as refused:
            machine.groups.change_settings("g", wrong)
        assert refused.value.code == ErrorCode.INVALID_CONFIG
    machine.write(machine.groups.change_settings("g", {}))
    assert machine.groups.settings("g").consumer_session_timeout_ms == 45_000
    assert not machine.journal
