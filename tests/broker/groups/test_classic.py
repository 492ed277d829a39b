"""The state machine of classic groups, step by step, in times that are numbers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from penstock.broker.config import Limits
from penstock.broker.groups.classic import (
    COMPLETING_REBALANCE,
    DEAD,
    EMPTY,
    PREPARING_REBALANCE,
    STABLE,
)
from penstock.broker.groups.offsets import NewOffset
from penstock.wire.errors import ErrorCode
from tests.broker.groups.machine import (
    GROUP,
    QUIET_MS,
    REBALANCE_MS,
    SESSION_MS,
    Client,
    Machine,
    settle,
    stable,
)

NONE = ErrorCode.NONE


@pytest.fixture
def machine() -> Machine:
    made = Machine()
    made.topic("t")
    return made


def subscription(*topics: str) -> bytes:
    """What a consumer sends when it joins."""
    names = b"".join(len(name).to_bytes(2) + name.encode() for name in topics)
    return b"\0\3" + len(topics).to_bytes(4) + names + b"\xff\xff\xff\xff"


# ---- joining -----------------------------------------------------------------------------------


def test_members_that_start_together_make_one_generation(machine: Machine) -> None:
    clients = [Client(machine) for _ in range(10)]
    for client in clients:
        client.send_join()
        machine.pass_time(QUIET_MS - 1)
        assert not client.joins
    assert machine.group().state == PREPARING_REBALANCE
    machine.pass_time(1)
    assert [client.generation for client in clients] == [1] * 10
    assert machine.group().state == COMPLETING_REBALANCE
    assert [client.leads for client in clients] == [True] + [False] * 9
    told = [[id_ for id_, _, _ in client.joins[0].members] for client in clients]
    assert told == [[client.member_id for client in clients]] + [[]] * 9
    settle(clients)
    assert machine.group().state == STABLE
    assert [c.assignment for c in clients] == [f"for {c.member_id}".encode() for c in clients]


def test_the_first_join_phase_ends_even_if_members_keep_coming() -> None:
    machine = Machine(group_initial_delay_max_ms=200)
    clients = [Client(machine) for _ in range(20)]
    for client in clients:
        client.send_join()
        machine.pass_time(QUIET_MS - 10)
    assert clients[0].generation == 1


def test_the_first_join_phase_is_no_longer_than_the_rebalance_timeout(machine: Machine) -> None:
    client = Client(machine, rebalance_ms=10)
    client.send_join()
    machine.pass_time(10)
    assert client.generation == 1


def test_a_client_that_must_know_its_id_is_given_one_first(machine: Machine) -> None:
    client = Client(machine)
    group = client.group
    client.send_join()
    assert client.member_id == "member-1"
    assert list(group.members) == ["member-1"]


def test_old_clients_are_members_at_once(machine: Machine) -> None:
    client = Client(machine, version=3)
    client.send_join()
    machine.pass_time(QUIET_MS)
    assert client.joins[0].code == NONE
    assert client.generation == 1


def test_who_never_comes_back_with_its_id_is_forgotten(machine: Machine) -> None:
    member = Client(machine)
    stable(machine, [member])
    group = member.group
    shy = Client(machine)
    shy.protocols = {"range": b"shy"}
    # As one that asks for an id and dies.
    group._pending.add("gone")
    group.timers.set(("session", "gone"), machine.elapsed_ms + SESSION_MS)
    member.protocols = {"range": b"new"}
    member.send_join()
    assert group.state == PREPARING_REBALANCE
    machine.pass_time(SESSION_MS)
    assert group.state == COMPLETING_REBALANCE
    assert member.generation == 2


def test_a_new_member_makes_the_others_join_again(machine: Machine) -> None:
    first, second = Client(machine), Client(machine)
    stable(machine, [first])
    second.send_join()
    assert first.group.state == PREPARING_REBALANCE
    assert first.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
    assert not second.joins
    first.send_join()
    assert (first.generation, second.generation) == (2, 2)
    settle([first, second])
    assert first.heartbeat() == NONE


def test_who_does_not_join_again_in_time_is_left_out(machine: Machine) -> None:
    clients = [Client(machine) for _ in range(3)]
    stable(machine, clients)
    clients[1].protocols = {"range": b"changed"}
    clients[1].send_join()
    for _ in range(REBALANCE_MS // 1000):
        machine.pass_time(1000)
        # They live, but do nothing about it.
        if clients[0].heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID:
            break
        clients[2].heartbeat()
    assert clients[1].generation == 2
    assert list(machine.group().members) == [clients[1].member_id]
    assert clients[1].leads
    assert clients[0].heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_the_leader_may_ask_for_a_new_round_without_anything_new(machine: Machine) -> None:
    leader, follower = Client(machine), Client(machine)
    stable(machine, [leader, follower])
    follower.send_join()
    assert (follower.generation, machine.group().state) == (1, STABLE)
    follower.send_sync()
    assert follower.syncs[-1].assignment == follower.assignment
    leader.send_join()
    assert machine.group().state == PREPARING_REBALANCE


def test_an_answer_that_was_lost_is_given_again(machine: Machine) -> None:
    leader, follower = Client(machine), Client(machine)
    for client in (leader, follower):
        client.send_join()
    machine.pass_time(QUIET_MS)
    for client in (leader, follower):
        client.send_join()
        assert client.joins[-1].generation == 1
    assert leader.joins[0] == leader.joins[1]
    follower.protocols = {"range": b"else"}
    follower.send_join()
    assert machine.group().state == PREPARING_REBALANCE


def test_a_join_that_is_sent_twice_is_answered_twice(machine: Machine) -> None:
    client = Client(machine)
    client.send_join()
    client.send_join()
    machine.pass_time(QUIET_MS)
    assert [answer.code for answer in client.joins] == [ErrorCode.REBALANCE_IN_PROGRESS, NONE]


@pytest.mark.parametrize(
    ("sent", "chosen"),
    [
        ([{"a": b""}, {"a": b"", "b": b""}], "a"),
        ([{"a": b"", "b": b""}, {"b": b"", "a": b""}, {"b": b"", "a": b""}], "b"),
        ([{"a": b"", "b": b""}, {"b": b"", "a": b""}], "a"),
        ([{"x": b"", "b": b"", "a": b""}, {"a": b"", "b": b""}, {"b": b"", "a": b""}], "b"),
    ],
)
def test_the_protocol_is_chosen_by_votes(
    machine: Machine, sent: list[Mapping[str, bytes]], chosen: str
) -> None:
    clients = [Client(machine, protocols=protocols) for protocols in sent]
    stable(machine, clients)
    assert {client.joins[-1].protocol for client in clients} == {chosen}


def test_no_protocol_in_common(machine: Machine) -> None:
    stable(machine, [Client(machine, protocols={"a": b"", "b": b""})])
    for stranger in (
        Client(machine, protocols={"c": b""}),
        Client(machine, protocols={}),
        Client(machine, protocol_type="connect", protocols={"a": b""}),
        Client(machine, protocol_type="", protocols={"a": b""}),
    ):
        stranger.send_join()
        assert stranger.joins[0].code == ErrorCode.INCONSISTENT_GROUP_PROTOCOL
    assert machine.group().state == STABLE


def test_an_empty_group_may_take_up_another_protocol(machine: Machine) -> None:
    consumer = Client(machine)
    stable(machine, [consumer])
    consumer.leave()
    worker = Client(machine, protocol_type="connect", protocols={"sessioned": b""})
    stable(machine, [worker])
    assert machine.group().protocol_type == "connect"
    assert worker.generation == 3


# ---- syncing -----------------------------------------------------------------------------------


def test_followers_wait_for_the_leader(machine: Machine) -> None:
    leader, follower = Client(machine), Client(machine)
    for client in (leader, follower):
        client.send_join()
    machine.pass_time(QUIET_MS)
    follower.send_sync()
    assert not follower.syncs
    leader.send_sync({follower.member_id: b"all of it", "nobody": b"nothing"})
    assert (leader.assignment, follower.assignment) == (b"", b"all of it")


def test_a_sync_in_the_wrong_generation_or_protocol(machine: Machine) -> None:
    client = Client(machine)
    client.send_join()
    machine.pass_time(QUIET_MS)
    client.generation = 7
    client.send_sync()
    client.generation, client.member_id = 1, "stranger"
    client.send_sync()
    assert [answer.code for answer in client.syncs] == [
        ErrorCode.ILLEGAL_GENERATION,
        ErrorCode.UNKNOWN_MEMBER_ID,
    ]


def test_a_leader_that_does_not_sync_is_left_out(machine: Machine) -> None:
    leader, follower = Client(machine), Client(machine)
    for client in (leader, follower):
        client.send_join()
    machine.pass_time(QUIET_MS)
    follower.send_sync()
    for _ in range(REBALANCE_MS // 1000):
        machine.pass_time(1000)
        leader.heartbeat()
    assert [answer.code for answer in follower.syncs] == [ErrorCode.REBALANCE_IN_PROGRESS]
    follower.send_join()
    assert follower.generation == 2
    assert follower.leads


def test_a_member_that_comes_while_others_sync(machine: Machine) -> None:
    first, second, late = Client(machine), Client(machine), Client(machine)
    for client in (first, second):
        client.send_join()
    machine.pass_time(QUIET_MS)
    second.send_sync()
    late.send_join()
    assert [answer.code for answer in second.syncs] == [ErrorCode.REBALANCE_IN_PROGRESS]
    first.send_sync()
    assert first.syncs[-1].code == ErrorCode.REBALANCE_IN_PROGRESS
    for client in (first, second):
        client.send_join()
    settle([first, second, late])
    assert {client.generation for client in (first, second, late)} == {2}


def test_assignments_that_are_too_large_are_refused() -> None:
    machine = Machine(limits=Limits(max_group_bytes=2_000))
    leader = Client(machine)
    leader.send_join()
    machine.pass_time(QUIET_MS)
    leader.send_sync({leader.member_id: b"x" * 2_000})
    assert leader.syncs[-1].code == ErrorCode.UNKNOWN_SERVER_ERROR
    assert machine.group().state == PREPARING_REBALANCE
    leader.send_join()
    leader.send_sync({leader.member_id: b"x"})
    assert machine.group().state == STABLE


# ---- living and leaving ------------------------------------------------------------------------


def test_a_silent_member_is_removed_and_the_others_go_on(machine: Machine) -> None:
    clients = [Client(machine) for _ in range(3)]
    stable(machine, clients)
    dead, *living = clients
    for _ in range(10):
        machine.pass_time(SESSION_MS // 9)
        codes = [client.heartbeat() for client in living]
        if codes[0]:
            break
    assert codes == [ErrorCode.REBALANCE_IN_PROGRESS] * 2
    for client in living:
        client.send_join()
    settle(living)
    assert [client.generation for client in living] == [2, 2]
    assert dead.heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_commits_are_signs_of_life(machine: Machine) -> None:
    client = Client(machine)
    stable(machine, [client])
    for _ in range(3):
        machine.pass_time(SESSION_MS - 1)
        assert client.commit("t", 1) == NONE
    machine.pass_time(SESSION_MS)
    assert machine.group().state == EMPTY


def test_one_that_waits_for_us_is_not_silent(machine: Machine) -> None:
    leader, follower, dead = Client(machine), Client(machine), Client(machine)
    for client in (leader, follower, dead):
        client.send_join()
    machine.pass_time(QUIET_MS)
    follower.send_sync()
    for _ in range(5):
        machine.pass_time(SESSION_MS // 2)
        leader.heartbeat()
    # The death of one ends the waiting of the other, and its time begins then.
    assert follower.syncs[-1].code == ErrorCode.REBALANCE_IN_PROGRESS
    assert set(machine.group().members) == {leader.member_id}
    assert follower.heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID


def test_the_time_of_one_that_waited_begins_when_it_is_answered(machine: Machine) -> None:
    leader, follower = Client(machine), Client(machine)
    for client in (leader, follower):
        client.send_join()
    machine.pass_time(QUIET_MS)
    follower.send_sync()
    machine.pass_time(SESSION_MS)
    assert set(machine.group().members) == {follower.member_id}
    machine.pass_time(SESSION_MS - 1)
    assert follower.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS


def test_who_leaves_is_gone_at_once(machine: Machine) -> None:
    first, second = Client(machine), Client(machine)
    stable(machine, [first, second])
    assert first.leave() == NONE
    assert first.leave() == ErrorCode.UNKNOWN_MEMBER_ID
    assert second.heartbeat() == ErrorCode.REBALANCE_IN_PROGRESS
    second.send_join()
    assert second.leads
    settle([second])
    assert second.leave() == NONE
    assert (machine.group().state, machine.group().generation) == (EMPTY, 3)


def test_leaving_while_waiting_for_others(machine: Machine) -> None:
    first, second = Client(machine), Client(machine)
    stable(machine, [first])
    second.send_join()
    assert second.member_id
    assert second.leave() == NONE
    assert second.joins[-1].code == ErrorCode.UNKNOWN_MEMBER_ID
    first.send_join()
    assert first.generation == 2


def test_a_full_group_takes_nobody_in() -> None:
    machine = Machine(limits=Limits(max_group_size=2))
    members = [Client(machine), Client(machine, instance_id="static")]
    stable(machine, members)
    for stranger in (Client(machine), Client(machine, version=3), Client(machine, instance_id="s")):
        stranger.send_join()
        assert stranger.joins[0].code == ErrorCode.GROUP_MAX_SIZE_REACHED
    # A static member that comes back takes its own place.
    again = Client(machine, instance_id="static")
    again.send_join()
    assert again.joins[0].code == NONE


def test_members_that_send_too_much_are_refused() -> None:
    machine = Machine(limits=Limits(max_member_bytes=100))
    client = Client(machine, protocols={"a": b"x" * 60, "b": b"y" * 60})
    client.send_join()
    assert client.joins[0].code == ErrorCode.INVALID_REQUEST


# ---- static members ----------------------------------------------------------------------------


def test_a_static_member_comes_back_without_a_new_round(machine: Machine) -> None:
    leader, other = Client(machine, instance_id="a"), Client(machine, instance_id="b")
    stable(machine, [leader, other])
    again = Client(machine, instance_id="b")
    again.send_join()
    assert (machine.group().state, again.generation) == (STABLE, 1)
    again.send_sync()
    assert again.assignment == other.assignment
    assert other.heartbeat() == ErrorCode.FENCED_INSTANCE_ID
    assert other.commit("t", 1) == ErrorCode.FENCED_INSTANCE_ID
    assert again.commit("t", 1) == NONE
    assert leader.heartbeat() == NONE


@pytest.mark.parametrize("version", [5, 9])
def test_a_static_leader_that_comes_back_need_not_assign_again(
    machine: Machine, version: int
) -> None:
    leader, other = Client(machine, instance_id="a"), Client(machine, instance_id="b")
    stable(machine, [leader, other])
    again = Client(machine, instance_id="a", version=version)
    again.send_join()
    answer = again.joins[-1]
    assert answer.skip_assignment == (version >= 9)
    # An older one does not learn that it leads: it would assign.
    assert again.leads == (version >= 9)
    again.send_sync()
    assert again.assignment == leader.assignment
    assert machine.group().leader == again.member_id


def test_a_static_member_that_changes_the_protocol_makes_a_new_round(machine: Machine) -> None:
    both = {"a": b"", "b": b""}
    first = Client(machine, instance_id="1", protocols=both)
    second = Client(machine, instance_id="2", protocols=both)
    stable(machine, [first, second])
    again = Client(machine, instance_id="2", protocols={"b": b""})
    again.send_join()
    assert machine.group().state == PREPARING_REBALANCE
    first.send_join()
    assert again.joins[-1].protocol == "b"


def test_a_static_member_is_not_left_out_of_a_round_it_misses(machine: Machine) -> None:
    static, other = Client(machine, instance_id="s", session_ms=600_000), Client(machine)
    stable(machine, [static, other])
    third = Client(machine)
    third.send_join()
    machine.pass_time(1_000)
    other.send_join()
    machine.pass_time(REBALANCE_MS)
    assert (other.generation, third.generation) == (2, 2)
    assert static.member_id in machine.group().members
    assert third.leads or other.leads


def test_a_static_member_that_is_gone_for_its_session_is_removed(machine: Machine) -> None:
    static, other = Client(machine, instance_id="s"), Client(machine)
    stable(machine, [static, other])
    for _ in range(4):
        machine.pass_time(SESSION_MS // 3)
        code = other.heartbeat()
    assert code == ErrorCode.REBALANCE_IN_PROGRESS
    assert static.member_id not in machine.group().members


def test_a_fenced_member_that_waits_is_told(machine: Machine) -> None:
    waiting = Client(machine, instance_id="s")
    waiting.send_join()
    newer = Client(machine, instance_id="s")
    newer.send_join()
    assert waiting.joins[-1].code == ErrorCode.FENCED_INSTANCE_ID
    machine.pass_time(QUIET_MS)
    assert newer.generation == 1


def test_a_static_member_under_a_wrong_id(machine: Machine) -> None:
    static = Client(machine, instance_id="s")
    stable(machine, [static])
    assert Client(machine, instance_id="s", member_id="x", generation=1).heartbeat() == (
        ErrorCode.FENCED_INSTANCE_ID
    )
    assert Client(machine, instance_id="x", member_id=static.member_id).heartbeat() == (
        ErrorCode.UNKNOWN_MEMBER_ID
    )


def test_an_administrator_removes_a_static_member_by_its_instance(machine: Machine) -> None:
    static = Client(machine, instance_id="s")
    stable(machine, [static])
    codes, entries = static.group.leave([("", "s"), ("", "x"), ("", None)], 0, 0)
    machine.write(entries)
    assert codes == [NONE, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.UNKNOWN_MEMBER_ID]
    assert machine.group().state == EMPTY


# ---- restarts ----------------------------------------------------------------------------------


def test_members_go_on_after_a_restart_of_the_broker(machine: Machine) -> None:
    clients = [Client(machine), Client(machine, instance_id="s")]
    stable(machine, clients)
    machine.restart()
    assert machine.group().state == STABLE
    assert [client.heartbeat() for client in clients] == [NONE, NONE]
    assert clients[0].commit("t", 5) == NONE
    clients[1].send_sync()
    assert clients[1].syncs[-1].assignment == clients[1].assignment
    # And they still have to be heard of.
    machine.pass_time(SESSION_MS)
    assert machine.group().state == EMPTY


def test_generations_never_go_back(machine: Machine) -> None:
    for generation in (1, 3, 5):
        client = Client(machine)
        stable(machine, [client])
        assert client.generation == generation
        client.leave()
        machine.restart()
    assert machine.group().state == EMPTY


def test_who_waits_when_the_broker_goes_is_told(machine: Machine) -> None:
    first, second = Client(machine), Client(machine)
    stable(machine, [first])
    second.send_join()
    group = machine.group()
    machine.groups.dismiss_all()
    assert second.joins[-1].code == ErrorCode.COORDINATOR_NOT_AVAILABLE
    assert group.state == DEAD
    assert first.heartbeat() == ErrorCode.COORDINATOR_NOT_AVAILABLE


def test_a_round_that_was_under_way_begins_anew_after_a_restart(machine: Machine) -> None:
    first, second = Client(machine), Client(machine)
    stable(machine, [first])
    second.send_join()
    first.send_join()
    machine.restart()
    # The broker has forgotten the second generation: nobody had an assignment in it.
    assert first.heartbeat() == ErrorCode.ILLEGAL_GENERATION
    assert second.heartbeat() == ErrorCode.UNKNOWN_MEMBER_ID


# ---- what others ask ---------------------------------------------------------------------------


def test_what_a_group_tells_of_itself(machine: Machine) -> None:
    client = Client(machine, instance_id="s", protocols={"range": b"sent"})
    client.send_join()
    told = machine.group().describe()
    assert (told.state, told.protocol, told.members[0].metadata) == (PREPARING_REBALANCE, "", b"")
    machine.pass_time(QUIET_MS)
    settle([client])
    told = machine.group().describe()
    assert (told.state, told.protocol_type, told.protocol) == (STABLE, "consumer", "range")
    (member,) = told.members
    assert (member.instance_id, member.client_host) == ("s", "/127.0.0.1")
    assert (member.metadata, member.assignment) == (b"sent", client.assignment)


def test_what_members_subscribe_to(machine: Machine) -> None:
    client = Client(machine, protocols={"range": subscription("a", "b")})
    stable(machine, [client])
    assert [client.group.subscribed_to(topic) for topic in "abc"] == [True, True, False]
    client.leave()
    assert not client.group.subscribed_to("a")


@pytest.mark.parametrize("sent", [b"", b"\0", b"\0\0\0\0\0\1\0\5abc", b"\0\0\0\0\0\1\xff\xff"])
def test_what_cannot_be_read_may_be_anything(machine: Machine, sent: bytes) -> None:
    stable(machine, [Client(machine, protocols={"range": sent})])
    assert machine.group().subscribed_to("a")


def test_commits_by_state(machine: Machine) -> None:
    by_hand = NewOffset("t", 0, 1)
    assert machine.commit(by_hand) == [NONE]
    client = Client(machine)
    client.send_join()
    assert machine.commit(by_hand) == [ErrorCode.UNKNOWN_MEMBER_ID]
    machine.pass_time(QUIET_MS)
    assert client.commit("t", 1) == ErrorCode.REBALANCE_IN_PROGRESS
    in_transaction = {"member_id": client.member_id, "generation": client.generation}
    assert machine.commit_in_transaction(1, by_hand, **in_transaction) == [NONE]  # type: ignore[arg-type]
    settle([client])
    assert client.commit("t", 2) == NONE
    client.generation = 0
    assert client.commit("t", 3) == ErrorCode.ILLEGAL_GENERATION
    assert machine.groups.committed(GROUP, "t", 0) == 2
