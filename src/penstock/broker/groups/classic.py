"""A classic group: its members agree among themselves on who reads what.

The group goes through *generations*. To get from one to the next, all members join (the group is
PREPARING_REBALANCE and holds their answers back), the broker chooses a protocol that all of them
know and a leader, and tells the leader who the members are. Then all members sync (the group is
COMPLETING_REBALANCE): the leader brings an assignment for each, opaque bytes to the broker, and
everybody gets its own. Now the group is STABLE, until a member comes, goes or wants another round.

    EMPTY ──join──▶ PREPARING ──all joined, or time is up──▶ COMPLETING ──leader's sync──▶ STABLE
      ▲                 │  ▲                                     │                           │
      └──nobody is left─┘  └────────── a member comes, goes, or joins again ─────────────────┘

No phase can last for ever: a join phase ends after the longest rebalance time-out of the members,
without those who have not joined; so does the sync phase, by a new round without those who have
not synced; and a member that is silent for its session time-out is removed. A *static* member (one
with an instance id) is not removed for missing a join phase, and who comes with the same instance
id takes its place and its assignment without a new round.

The first join phase of an empty group ends when nobody new has come for a moment, so that members
that are started together make one generation and not ten.

What is durable is the generation with its members and assignments, once it is stable, and the fact
that the group is empty. Applying that entry *is* the step to STABLE: it is when waiting members are
answered. So after a restart of the broker the members go on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.broker.groups.classic_member import (
    JoinAnswer,
    JoinCall,
    JoinReply,
    Member,
    SyncAnswer,
    SyncCall,
    SyncReply,
    assignment_in,
    chosen_protocol,
    common_protocols,
    topics_in,
)
from penstock.broker.groups.group import NO_MEMBER, GroupContext, GroupDescription, Kind
from penstock.broker.journal import Entry, Key
from penstock.broker.timers import Timers
from penstock.wire.errors import ErrorCode

# As Kafka spells them.
EMPTY: Final[str] = "Empty"
PREPARING_REBALANCE: Final[str] = "PreparingRebalance"
COMPLETING_REBALANCE: Final[str] = "CompletingRebalance"
STABLE: Final[str] = "Stable"
DEAD: Final[str] = "Dead"

CONSUMER_PROTOCOL: Final = "consumer"
# Generations are int32 on the wire.
_MAX_GENERATION: Final = 0x7FFFFFFF
# Kafka's: a new member that waits in a join phase is given up after this long.
_NEW_MEMBER_TIMEOUT_MS: Final = 300_000

_JOIN: Final = ("join", "")
_SYNC: Final = ("sync", "")


def _session(member_id: str) -> tuple[str, str]:
    return "session", member_id


class ClassicGroup:
    """One group and all that its members wait for."""

    kind: Kind = "classic"

    def __init__(self, group_id: str, context: GroupContext) -> None:
        self.id = group_id
        self.state = EMPTY
        self.generation = 0
        self.leader: str | None = None
        self.protocol: str | None = None
        self.members: dict[str, Member] = {}
        self.timers: Timers[tuple[str, str]] = context.timers(group_id)
        self._context = context
        self._protocol_type: str | None = None
        # Ids that were handed out to clients which have yet to come back with them.
        self._pending: set[str] = set()
        # Members of this generation that have yet to sync.
        self._unsynced: set[str] = set()
        # Member ids by instance id.
        self._static: dict[str, str] = {}
        self._since_ms: int | None = None
        # Until when the first join phase may last at most; None if this is not one.
        self._initial_until_ms: int | None = None

    @property
    def protocol_type(self) -> str:
        return self._protocol_type or ""

    @property
    def is_empty(self) -> bool:
        return self.state in (EMPTY, DEAD) and not self._pending

    @property
    def idle_since_ms(self) -> int | None:
        return self._since_ms if self.state == EMPTY else None

    # ---- joining ---------------------------------------------------------------------------

    def join(self, call: JoinCall, now_ms: int, elapsed_ms: int, reply: JoinReply) -> list[Entry]:
        """A member joins; it is answered at once or when all have joined."""
        refusal = self._refusal(call)
        if refusal:
            unknown = not call.member_id or refusal == ErrorCode.GROUP_MAX_SIZE_REACHED
            reply(JoinAnswer(refusal, NO_MEMBER if unknown else call.member_id))
            return []
        if call.member_id:
            return self._join_again(call, now_ms, elapsed_ms, reply)
        if call.instance_id is not None:
            old_id = self._static.get(call.instance_id)
            if old_id is not None:
                return self._replace_static(call, old_id, now_ms, elapsed_ms, reply)
        elif call.must_know_id:
            self._pending.add(call.new_member_id)
            self.timers.set(_session(call.new_member_id), elapsed_ms + call.session_timeout_ms)
            self._extend_initial_phase(elapsed_ms)
            reply(JoinAnswer(ErrorCode.MEMBER_ID_REQUIRED, call.new_member_id))
            return []
        return self._add(call, call.new_member_id, now_ms, elapsed_ms, reply)

    def _refusal(self, call: JoinCall) -> ErrorCode:
        """Why someone cannot join, before it is asked who that is."""
        if self.state == DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        limits = self._context.config.limits
        known = call.member_id in self.members or call.member_id in self._pending
        takes_a_place = not known and (call.instance_id or "") not in self._static
        if takes_a_place and len(self.members) + len(self._pending) >= limits.max_group_size:
            return ErrorCode.GROUP_MAX_SIZE_REACHED
        if call.size > limits.max_member_bytes:
            return ErrorCode.INVALID_REQUEST
        if not self._supports(call):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        return ErrorCode.NONE

    def _supports(self, call: JoinCall) -> bool:
        if not call.protocol_type or not call.protocols:
            return False
        if not self.members:
            return True
        common = common_protocols(self.members.values())
        return call.protocol_type == self._protocol_type and not common.isdisjoint(call.protocols)

    def _join_again(
        self, call: JoinCall, now_ms: int, elapsed_ms: int, reply: JoinReply
    ) -> list[Entry]:
        """Someone with a member id joins: one that it was given just now, or a member's."""
        if call.member_id in self._pending and call.instance_id is None:
            return self._add(call, call.member_id, now_ms, elapsed_ms, reply)
        code = self._check_member(call.member_id, call.instance_id)
        if code:
            reply(JoinAnswer(code, call.member_id))
            return []
        member = self.members[call.member_id]
        if self.state == PREPARING_REBALANCE:
            changed = True
        elif self.state == COMPLETING_REBALANCE:
            # One that did not get its answer asks once more.
            changed = not member.sent_the_same(call)
        else:
            # The leader joins again when it sees that there is something new to assign.
            changed = member.id == self.leader or not member.sent_the_same(call)
        if not changed:
            is_leader = member.id == self.leader and self.state == COMPLETING_REBALANCE
            reply(self._join_answer(member, tell_members=is_leader))
            return []
        member.update(call)
        member.answer_join(JoinAnswer(ErrorCode.REBALANCE_IN_PROGRESS, member.id))
        member.join_reply = reply
        return self._prepare_or_complete(now_ms, elapsed_ms)

    def _add(
        self, call: JoinCall, member_id: str, now_ms: int, elapsed_ms: int, reply: JoinReply
    ) -> list[Entry]:
        """A new member; the others have to join again."""
        member = Member.of(call, member_id)
        member.is_new = True
        member.join_reply = reply
        if not self.members:
            self._protocol_type = call.protocol_type
        self._enlist(member)
        self._pending.discard(member_id)
        self.timers.set(_session(member_id), elapsed_ms + _NEW_MEMBER_TIMEOUT_MS)
        self._extend_initial_phase(elapsed_ms)
        return self._prepare_or_complete(now_ms, elapsed_ms)

    def _enlist(self, member: Member) -> None:
        self.members[member.id] = member
        if member.instance_id is not None:
            self._static[member.instance_id] = member.id
        if self.leader is None:
            self.leader = member.id

    def _replace_static(
        self, call: JoinCall, old_id: str, now_ms: int, elapsed_ms: int, reply: JoinReply
    ) -> list[Entry]:
        """A static member was started anew: it takes the place of the one it was before."""
        old, was_leader = self.members[old_id], old_id == self.leader
        # Who is still there under the old id must not go on beside the new one.
        old.answer_join(JoinAnswer(ErrorCode.FENCED_INSTANCE_ID, old_id))
        old.answer_sync(SyncAnswer(ErrorCode.FENCED_INSTANCE_ID))
        member = Member.of(call, call.new_member_id)
        member.assignment = old.assignment
        # In the same place, so that the order of the members stays.
        self.members = {
            (member.id if id_ == old_id else id_): (member if id_ == old_id else one)
            for id_, one in self.members.items()
        }
        self._static[call.instance_id or ""] = member.id
        if was_leader:
            self.leader = member.id
        if old_id in self._unsynced:
            self._unsynced.remove(old_id)
            self._unsynced.add(member.id)
        self.timers.cancel(_session(old_id))
        self._keep_alive(member, elapsed_ms)
        member.join_reply = reply
        if self.state == STABLE and chosen_protocol(self.members.values()) == self.protocol:
            return self._go_on_as_before(member, old_id, call, now_ms)
        if self.state == PREPARING_REBALANCE:
            return self._complete_if_all_joined(now_ms, elapsed_ms)
        return self._prepare(now_ms, elapsed_ms)

    def _go_on_as_before(
        self, member: Member, old_id: str, call: JoinCall, now_ms: int
    ) -> list[Entry]:
        """The static member has its old assignment, and nobody else need know."""
        is_leader = member.id == self.leader
        if call.can_skip_assignment:
            answer = self._join_answer(member, tell_members=is_leader, skip=is_leader)
        else:
            # An older client that is told it leads would assign anew: it is told that the old
            # one leads, which it is not any more.
            answer = self._join_answer(member, leader=old_id if is_leader else self.leader)
        member.answer_join(answer)
        return [self._entry({one.id: one.assignment for one in self.members.values()}, now_ms)]

    def _join_answer(
        self,
        member: Member,
        *,
        tell_members: bool = False,
        skip: bool = False,
        leader: str | None = None,
    ) -> JoinAnswer:
        members = self.members.values() if tell_members else ()
        return JoinAnswer(
            ErrorCode.NONE,
            member.id,
            self.generation,
            self._protocol_type,
            self.protocol,
            leader or self.leader or NO_MEMBER,
            tuple((one.id, one.instance_id, one.metadata(self.protocol)) for one in members),
            skip,
        )

    # ---- the join phase --------------------------------------------------------------------

    def _prepare_or_complete(self, now_ms: int, elapsed_ms: int) -> list[Entry]:
        if self.state == PREPARING_REBALANCE:
            return self._complete_if_all_joined(now_ms, elapsed_ms)
        return self._prepare(now_ms, elapsed_ms)

    def _prepare(self, now_ms: int, elapsed_ms: int) -> list[Entry]:
        """Ask all members to join: they learn of it by their heartbeats."""
        self._refuse_syncs(ErrorCode.REBALANCE_IN_PROGRESS, elapsed_ms)
        self._unsynced.clear()
        self.timers.cancel(_SYNC)
        first = self.state == EMPTY
        self._become(PREPARING_REBALANCE, now_ms)
        if first:
            delay_ms = self._context.config.group_initial_delay_max_ms
            longest_ms = min(delay_ms, self._rebalance_timeout_ms())
            self._initial_until_ms = elapsed_ms + longest_ms
            self._extend_initial_phase(elapsed_ms)
            return []
        if self._all_joined():
            return self._complete_join(now_ms, elapsed_ms)
        self.timers.set(_JOIN, elapsed_ms + self._rebalance_timeout_ms())
        return []

    def _extend_initial_phase(self, elapsed_ms: int) -> None:
        """Someone came, so others may be about to."""
        if self.state == PREPARING_REBALANCE and self._initial_until_ms is not None:
            quiet_ms = self._context.config.group_initial_delay_ms
            self.timers.set(_JOIN, min(elapsed_ms + quiet_ms, self._initial_until_ms))

    def _complete_if_all_joined(self, now_ms: int, elapsed_ms: int) -> list[Entry]:
        waits = self.state == PREPARING_REBALANCE and self._initial_until_ms is None
        return self._complete_join(now_ms, elapsed_ms) if waits and self._all_joined() else []

    def _all_joined(self) -> bool:
        return not self._pending and all(one.join_reply for one in self.members.values())

    def _complete_join(self, now_ms: int, elapsed_ms: int) -> list[Entry]:
        """The join phase is over: go on with those who have joined."""
        self.timers.cancel(_JOIN)
        self._initial_until_ms = None
        for member in list(self.members.values()):
            if member.join_reply is None and member.instance_id is None:
                self._remove(member.id)
        joined = [member for member in self.members.values() if member.join_reply]
        if self.members and not joined:
            # Static members only, and none has come: wait for one, or for their sessions to end.
            self.timers.set(_JOIN, elapsed_ms + self._rebalance_timeout_ms())
            return []
        self.generation = self.generation % _MAX_GENERATION + 1
        self._unsynced.clear()
        if not self.members:
            self.protocol = self.leader = None
            self._become(EMPTY, now_ms)
            return [self._entry({}, now_ms)]
        if self.leader not in {member.id for member in joined}:
            self.leader = joined[0].id
        self.protocol = chosen_protocol(self.members.values())
        self._become(COMPLETING_REBALANCE, now_ms)
        self._unsynced = set(self.members)
        self.timers.set(_SYNC, elapsed_ms + self._rebalance_timeout_ms())
        for member in self.members.values():
            member.is_new = False
            self._keep_alive(member, elapsed_ms)
            member.answer_join(self._join_answer(member, tell_members=member.id == self.leader))
        return []

    def _rebalance_timeout_ms(self) -> int:
        return max((one.rebalance_timeout_ms for one in self.members.values()), default=0)

    # ---- syncing ---------------------------------------------------------------------------

    def sync(self, call: SyncCall, now_ms: int, elapsed_ms: int, reply: SyncReply) -> list[Entry]:
        """A member asks for its assignment; the leader brings all of them."""
        code = self._check_sync(call)
        if code:
            reply(SyncAnswer(code))
            return []
        member = self.members[call.member_id]
        self._unsynced.discard(member.id)
        if self.state == STABLE:
            reply(self._sync_answer(member))
            return []
        member.answer_sync(SyncAnswer(ErrorCode.REBALANCE_IN_PROGRESS))
        member.sync_reply = reply
        if member.id != self.leader:
            return []
        own = {id_: call.assignments.get(id_, b"") for id_ in self.members}
        size = sum(one.size + len(own[one.id]) for one in self.members.values())
        if size > self._context.config.limits.max_group_bytes:
            self._refuse_syncs(ErrorCode.UNKNOWN_SERVER_ERROR, elapsed_ms)
            return self._prepare(now_ms, elapsed_ms)
        for one in self.members.values():
            if one.sync_reply is not None:
                self._keep_alive(one, elapsed_ms)
        return [self._entry(own, now_ms)]

    def _check_sync(self, call: SyncCall) -> ErrorCode:
        code = self._check_member(call.member_id, call.instance_id)
        if code:
            return code
        if call.generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        if call.protocol_type not in (None, self._protocol_type):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if call.protocol not in (None, self.protocol):
            return ErrorCode.INCONSISTENT_GROUP_PROTOCOL
        if self.state == PREPARING_REBALANCE:
            return ErrorCode.REBALANCE_IN_PROGRESS
        return ErrorCode.NONE

    def _sync_answer(self, member: Member) -> SyncAnswer:
        return SyncAnswer(ErrorCode.NONE, self._protocol_type, self.protocol, member.assignment)

    def _refuse_syncs(self, code: ErrorCode, elapsed_ms: int) -> None:
        for member in self.members.values():
            if member.sync_reply is not None:
                self._keep_alive(member, elapsed_ms)
                member.answer_sync(SyncAnswer(code))

    # ---- living and leaving ----------------------------------------------------------------

    def heartbeat(
        self, member_id: str, generation: int, instance_id: str | None, elapsed_ms: int
    ) -> ErrorCode:
        """A member lives, and learns whether it has to join again."""
        code = self._check_member(member_id, instance_id)
        if code:
            return code
        if generation != self.generation:
            return ErrorCode.ILLEGAL_GENERATION
        self._keep_alive(self.members[member_id], elapsed_ms)
        settled = self.state != PREPARING_REBALANCE
        return ErrorCode.NONE if settled else ErrorCode.REBALANCE_IN_PROGRESS

    def leave(
        self, leaving: Sequence[tuple[str, str | None]], now_ms: int, elapsed_ms: int
    ) -> tuple[list[ErrorCode], list[Entry]]:
        """Members leave, or are removed by an administrator, who names them by instance id."""
        codes = [self._leave(member_id, instance_id) for member_id, instance_id in leaving]
        if all(codes):
            return codes, []
        if self.state in (STABLE, COMPLETING_REBALANCE):
            return codes, self._prepare(now_ms, elapsed_ms)
        return codes, self._complete_if_all_joined(now_ms, elapsed_ms)

    def _leave(self, member_id: str, instance_id: str | None) -> ErrorCode:
        if self.state == DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if member_id in self._pending:
            self._pending.remove(member_id)
            self.timers.cancel(_session(member_id))
            return ErrorCode.NONE
        if member_id == NO_MEMBER:
            member_id = self._static.get(instance_id or "", NO_MEMBER)
        code = self._check_member(member_id, instance_id)
        if not code:
            self._remove(member_id)
        return code

    def _remove(self, member_id: str) -> None:
        member = self.members.pop(member_id)
        member.answer_join(JoinAnswer(ErrorCode.UNKNOWN_MEMBER_ID))
        member.answer_sync(SyncAnswer(ErrorCode.UNKNOWN_MEMBER_ID))
        self.timers.cancel(_session(member_id))
        self._unsynced.discard(member_id)
        if member.instance_id is not None:
            self._static.pop(member.instance_id, None)
        if member_id == self.leader:
            self.leader = next(iter(self.members), None)

    def _check_member(self, member_id: str, instance_id: str | None) -> ErrorCode:
        if self.state == DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if instance_id is not None:
            present = self._static.get(instance_id)
            if present is None:
                return ErrorCode.UNKNOWN_MEMBER_ID
            if present != member_id:
                return ErrorCode.FENCED_INSTANCE_ID
        return ErrorCode.NONE if member_id in self.members else ErrorCode.UNKNOWN_MEMBER_ID

    def _keep_alive(self, member: Member, elapsed_ms: int) -> None:
        self.timers.set(_session(member.id), elapsed_ms + member.session_timeout_ms)

    def _become(self, state: str, now_ms: int | None) -> None:
        self.state = state
        self._since_ms = now_ms

    # ---- time ------------------------------------------------------------------------------

    def tick(self, now_ms: int, elapsed_ms: int) -> list[Entry]:
        """End phases that last too long, and the membership of the silent."""
        entries: list[Entry] = []
        for what in self.timers.due(elapsed_ms):
            if what == _JOIN:
                if self.state == PREPARING_REBALANCE:
                    entries += self._complete_join(now_ms, elapsed_ms)
            elif what == _SYNC:
                entries += self._give_up_on_unsynced(now_ms, elapsed_ms)
            elif what not in self.timers:
                # Otherwise it was answered in this very tick, and has time again.
                entries += self._expire(what[1], now_ms, elapsed_ms)
        return entries

    def _give_up_on_unsynced(self, now_ms: int, elapsed_ms: int) -> list[Entry]:
        # Without an assignment nobody is served, even if all have asked: it could not be written.
        if self.state != COMPLETING_REBALANCE and not (self.state == STABLE and self._unsynced):
            return []
        for member_id in list(self._unsynced):
            self._remove(member_id)
        return self._prepare(now_ms, elapsed_ms)

    def _expire(self, member_id: str, now_ms: int, elapsed_ms: int) -> list[Entry]:
        """A session has ended without a sign of life."""
        if member_id in self._pending:
            self._pending.remove(member_id)
            return self._complete_if_all_joined(now_ms, elapsed_ms)
        member = self.members.get(member_id)
        if member is None:
            return []
        waits = member.join_reply is not None or member.sync_reply is not None
        if waits and not member.is_new:
            # It cannot speak: we have not answered. Its time begins anew when we do.
            return []
        self._remove(member_id)
        if self.state in (STABLE, COMPLETING_REBALANCE):
            return self._prepare(now_ms, elapsed_ms)
        return self._complete_if_all_joined(now_ms, elapsed_ms)

    # ---- what others ask -------------------------------------------------------------------

    def check_commit(
        self,
        member_id: str,
        generation: int,
        instance_id: str | None,
        *,
        in_transaction: bool,
        version: int,
    ) -> ErrorCode:
        """A member commits in its generation; nobody's member only while there are none."""
        if self.state == DEAD:
            return ErrorCode.COORDINATOR_NOT_AVAILABLE
        if generation < 0 and self.state == EMPTY:
            return ErrorCode.NONE
        if generation >= 0 or member_id or instance_id is not None:
            code = self._check_member(member_id, instance_id)
            if code:
                return code
            if generation != self.generation:
                return ErrorCode.ILLEGAL_GENERATION
        elif not in_transaction:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if not in_transaction and self.state == COMPLETING_REBALANCE:
            return ErrorCode.REBALANCE_IN_PROGRESS
        return ErrorCode.NONE

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        return ErrorCode.NONE

    def touch(self, member_id: str, elapsed_ms: int) -> None:
        member = self.members.get(member_id)
        if member is not None:
            self._keep_alive(member, elapsed_ms)

    def subscribed_to(self, topic: str) -> bool:
        """Whether a member reads this topic, as far as can be told from what it sent."""
        for member in self.members.values():
            if self._protocol_type != CONSUMER_PROTOCOL or self.protocol is None:
                return True
            topics = topics_in(member.metadata(self.protocol))
            if topics is None or topic in topics:
                return True
        return False

    def describe(self) -> GroupDescription:
        protocol = self.protocol if self.state == STABLE else None
        members = tuple(member.describe(protocol) for member in self.members.values())
        return GroupDescription(
            self.id, self.kind, self.state, self.protocol_type, protocol or "", members
        )

    # ---- entries ---------------------------------------------------------------------------

    def _entry(self, assignments: Mapping[str, bytes], now_ms: int) -> Entry:
        """The group as it is once these assignments hold."""
        value = {
            "kind": self.kind,
            "generation": self.generation,
            "type": self._protocol_type,
            "protocol": self.protocol,
            "leader": self.leader,
            "since_ms": now_ms,
            "members": [member.state(assignments[id_]) for id_, member in self.members.items()],
        }
        return ("group", self.id), value

    def replay(self, key: Key, value: Any) -> None:
        """Be the generation that the entry tells of; members that wait for it are answered."""
        self.generation = value["generation"]
        self._protocol_type = value["type"]
        self.protocol = value["protocol"]
        states = {state["id"]: state for state in value["members"]}
        for member_id in [id_ for id_ in self.members if id_ not in states]:
            self._remove(member_id)
        for member_id, state in states.items():
            if member_id not in self.members:
                self._enlist(Member.from_state(state))
            self.members[member_id].assignment = assignment_in(state)
        self.leader = value["leader"]
        self._become(STABLE if self.members else EMPTY, value["since_ms"])
        for member in self.members.values():
            member.answer_sync(self._sync_answer(member))

    def begin(self, now_ms: int, elapsed_ms: int) -> list[Entry]:
        for member in self.members.values():
            self._keep_alive(member, elapsed_ms)
        return []

    def tombstones(self) -> list[Entry]:
        return [(("group", self.id), None)]

    def dismiss(self, code: ErrorCode) -> None:
        for member in self.members.values():
            member.answer_join(JoinAnswer(code, member.id))
            member.answer_sync(SyncAnswer(code))
        self._become(DEAD, None)
        self.timers.clear()
