"""Classic groups under clients that come, go, die, hang, lose answers and come back, at random.

What must hold at every moment: a partition has at most one owner in a generation, only members of
the present generation can commit, and once a stable group has given everybody its assignment no
partition is without an owner. What must come to pass: however the clients behaved, once those that
live keep to the protocol, the group is stable with exactly them, or empty, after a bounded time.
"""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from penstock.broker.groups.classic import EMPTY, STABLE
from penstock.broker.groups.classic_member import JoinAnswer, SyncAnswer
from penstock.wire.errors import ErrorCode
from tests.broker.groups.machine import SESSION_MS, Client, Machine
from tests.harness.profiles import examples

PARTITIONS = 7
MAX_CLIENTS = 8
HEARTBEAT_MS = 3_000
# By then every time-out of every phase is over, several times.
PATIENCE_MS = 900_000

FORGET_ID = (ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.GROUP_MAX_SIZE_REACHED)
JOIN_AGAIN = (
    ErrorCode.REBALANCE_IN_PROGRESS,
    ErrorCode.ILLEGAL_GENERATION,
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
)


class Consumer(Client):
    """A client that does the next thing that the protocol asks for, when it is told to act."""

    def __init__(self, machine: Machine, **options: Any) -> None:
        super().__init__(machine, **options)
        # What it waits for: "", "join" or "sync".
        self.waits = ""
        # What it has to do next: "join", "sync" or "heartbeat".
        self.next = "join"
        self.alive = True
        # Whether it only sends heartbeats, whatever it is told: its application hangs.
        self.hangs = False
        # The call that it is listening to; answers to earlier ones are lost.
        self._call = 0

    def act(self) -> None:
        if not self.alive or self.waits:
            return
        if self.hangs:
            self.heartbeat()
        elif self.next == "heartbeat":
            self._obey(self.heartbeat())
        elif self.next == "sync":
            self.waits = "sync"
            self.send_sync(self._plan() if self.leads else {})
        else:
            self.waits, self.joins = "join", []
            self.send_join()

    def lose_answer(self) -> None:
        """The connection breaks while it waits: it asks again, as far as it knows the same."""
        self.waits = ""
        self._call += 1

    def _plan(self) -> dict[str, bytes]:
        members = [id_ for id_, _, _ in self.joins[-1].members]
        shares: dict[str, list[int]] = {id_: [] for id_ in members}
        for number in range(PARTITIONS):
            shares[members[number % len(members)]].append(number)
        return {id_: bytes(numbers) for id_, numbers in shares.items()}

    def send_join(self) -> None:
        self._call += 1
        super().send_join()

    def send_sync(self, assignments: Any = None) -> None:
        self._call += 1
        super().send_sync(assignments)

    @property
    def _joined(self) -> Any:
        return self._listen(self._on_join)

    @property
    def _synced(self) -> Any:
        return self._listen(self._on_sync)

    def _listen(self, then: Any) -> Any:
        call = self._call

        def hear(answer: Any) -> None:
            if call == self._call and self.alive:
                self.waits = ""
                then(answer)

        return hear

    def _on_join(self, answer: JoinAnswer) -> None:
        self.joins.append(answer)
        if answer.code == ErrorCode.MEMBER_ID_REQUIRED:
            self.member_id = answer.member_id
        elif answer.code:
            self._obey(answer.code)
        else:
            self.member_id, self.generation = answer.member_id, answer.generation
            self.assignment, self.next = None, "sync"

    def _on_sync(self, answer: SyncAnswer) -> None:
        if answer.code:
            self._obey(answer.code)
        else:
            self.assignment, self.next = answer.assignment, "heartbeat"

    def _obey(self, code: ErrorCode) -> None:
        if code == ErrorCode.NONE:
            return
        self.assignment, self.next = None, "join"
        if code in FORGET_ID:
            self.member_id, self.generation = "", -1
        elif code == ErrorCode.FENCED_INSTANCE_ID:
            self.alive = False
        else:
            assert code in JOIN_AGAIN, code


class ClassicGroupMachine(RuleBasedStateMachine):
    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.machine.topic("t")
        self.everybody: list[Consumer] = []
        # Who was given a partition in a generation.
        self.owners: dict[tuple[int, int], str] = {}

    @rule(
        target=clients,
        instance=st.sampled_from([None, None, "a", "b"]),
        version=st.sampled_from([3, 5, 9]),
        protocols=st.sampled_from(["r", "rs", "sr"]),
    )
    def start_client(self, instance: str | None, version: int, protocols: str) -> Any:
        if sum(client.alive for client in self.everybody) >= MAX_CLIENTS:
            return multiple()
        client = Consumer(
            self.machine,
            instance_id=instance,
            version=version,
            protocols=dict.fromkeys(protocols, b""),
        )
        self.everybody.append(client)
        return client

    @rule(client=clients)
    def act(self, client: Consumer) -> None:
        client.act()

    @rule()
    def all_act(self) -> None:
        for client in self.everybody:
            client.act()

    @rule(client=clients)
    def die(self, client: Consumer) -> None:
        client.alive = False

    @rule(client=clients)
    def hang(self, client: Consumer) -> None:
        client.hangs = client.instance_id is None

    @rule(client=clients)
    def lose_answer(self, client: Consumer) -> None:
        client.lose_answer()

    @rule(client=clients)
    def leave(self, client: Consumer) -> None:
        if client.alive and client.member_id:
            client.leave()
            client.alive = False

    @rule(client=clients, protocols=st.sampled_from(["r", "rs"]))
    def want_another_round(self, client: Consumer, protocols: str) -> None:
        if not client.waits:
            client.protocols = dict.fromkeys(protocols, b"new")
            client.next = "join"

    @rule(ms=st.sampled_from([1, 49, 50, 1_000, 9_999, 10_000, 60_000]))
    def pass_time(self, ms: int) -> None:
        self.machine.pass_time(ms)

    @rule()
    def restart_broker(self) -> None:
        self.machine.restart()

    @rule(client=clients, generation=st.integers(-1, 4))
    def commit(self, client: Consumer, generation: int) -> None:
        """Of all that ever were members, only those of now can commit."""
        group = self.machine.group()
        member = group.members.get(client.member_id)
        right = member is not None and group.generation == generation
        nobody = generation < 0 and group.state == EMPTY
        client.generation, kept = generation, client.generation
        code = client.commit("t", 1)
        client.generation = kept
        assert not code or code != ErrorCode.UNKNOWN_SERVER_ERROR
        assert (code == ErrorCode.NONE) <= (right or nobody)

    @rule()
    def calm_down(self) -> None:
        """From now on those that live keep to the protocol: the group comes to rest."""
        end_ms = self.machine.elapsed_ms + PATIENCE_MS
        while not self._at_rest():
            assert self.machine.elapsed_ms < end_ms, "the group does not come to rest"
            self._one_heartbeat()
        generation = self.machine.group().generation
        for _ in range(2 * SESSION_MS // HEARTBEAT_MS):
            self._one_heartbeat()
        assert self._at_rest()
        assert self.machine.group().generation == generation

    def _one_heartbeat(self) -> None:
        for client in self.everybody:
            client.act()
        self.machine.pass_time(HEARTBEAT_MS)

    def _at_rest(self) -> bool:
        group = self.machine.group()
        living = [client for client in self.everybody if client.alive and not client.hangs]
        if group.state == EMPTY:
            return not living
        if group.state != STABLE:
            return False
        # One that hangs may be in it, for as long as nothing has changed.
        hanging = {client.member_id for client in self.everybody if client.alive and client.hangs}
        ids = {client.member_id for client in living}
        idle = all(client.next == "heartbeat" and not client.waits for client in living)
        return idle and ids <= set(group.members) <= ids | hanging

    @invariant()
    def one_owner_at_most(self) -> None:
        for client in self.everybody:
            for number in client.assignment or b"":
                who = client.instance_id or client.member_id
                owner = self.owners.setdefault((client.generation, number), who)
                assert owner == who, (client.generation, number)

    @invariant()
    def none_is_orphaned(self) -> None:
        group = self.machine.group()
        if group.state == STABLE:
            given = sorted(b"".join(member.assignment for member in group.members.values()))
            assert given == list(range(PARTITIONS))

    def teardown(self) -> None:
        self.calm_down()
        self.one_owner_at_most()
        self.none_is_orphaned()
        for client in self.everybody:
            client.alive = False
        self.calm_down()
        assert self.machine.group().state == EMPTY


TestClassicGroups = ClassicGroupMachine.TestCase
TestClassicGroups.settings = settings(max_examples=examples(50), stateful_step_count=40)
