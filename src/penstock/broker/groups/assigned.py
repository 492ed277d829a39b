"""What consumer and share groups have in common: the broker decides who reads what.

A group has an *epoch*. Whatever may call for other assignments raises it: a member that comes,
goes or wants something else, a topic that is made, deleted or given partitions. The next heartbeat
of anyone then computes the *target*, what each member is to have in the end, for that epoch. From
there on every member is led towards its target by the answers to its own heartbeats, and has
reached it when it has the group's epoch and its target. How it is led is what the kinds of groups
differ in.

All of this is durable, so after a restart of the broker members go on as if nothing had happened:
an answer is sent only when the journal holds what it says, so no client ever knows more than the
next start will. Not durable are deadlines: members get their time anew.

While a group is changing its members are asked to be heard of more often, so that a rebalance
takes a moment and not several of the usual intervals.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Final
from uuid import UUID

from penstock.broker.catalog import ApiError
from penstock.broker.groups.assignors import Assignor, Subscriber
from penstock.broker.groups.group import (
    GroupContext,
    GroupDescription,
    Kind,
    MemberDescription,
)
from penstock.broker.groups.members import (
    JOINING,
    LEAVING,
    PROFILE,
    STANDING,
    Answer,
    Beat,
    Heading,
    Member,
    Profile,
    Standing,
)
from penstock.broker.groups.patterns import PatternBook, PatternError
from penstock.broker.journal import Entry, Key
from penstock.broker.timers import Timers
from penstock.wire.errors import ErrorCode

log = logging.getLogger(__name__)

EMPTY: Final = "Empty"
ASSIGNING: Final = "Assigning"
RECONCILING: Final = "Reconciling"
STABLE: Final = "Stable"

# How long after a change a group is in haste, and how often its members are heard of then.
_HASTE_MS: Final = 5_000
_HASTY_INTERVAL_MS: Final = 100
# Of each member, so that a large group does not keep the broker busy.
_HASTY_PER_MEMBER_MS: Final = 2

# When a member that was to be removed is looked at again, in case that could not be written.
_AGAIN_MS: Final = 1_000

# Of the names of partitions, in one line of the log.
_LOGGED_CHARACTERS: Final = 1_000

_SESSION: Final = "session"
_REBALANCE: Final = "rebalance"


class AssignedGroup(ABC):
    """A group whose members are told by the broker what to read."""

    kind: Kind
    protocol_type: str
    # The kind of its members' entries.
    member_kind: ClassVar[str]

    def __init__(self, group_id: str, context: GroupContext) -> None:
        self.id = group_id
        self.timers: Timers[tuple[str, str]] = context.timers(group_id)
        self.heading = Heading()
        self.members: dict[str, Member] = {}
        self._context = context
        self._patterns = PatternBook()
        # The state of the catalog that the target is known to fit.
        self._seen_version = -1
        self._hasty_until_ms = 0

    # ---- what the kinds differ in ----------------------------------------------------------

    @abstractmethod
    def _find(self, beat: Beat) -> Member | None:
        """The member whose heartbeat this is, None for a new one; ApiError if it is none."""

    @abstractmethod
    def _lead(self, member: Member, beat: Beat, epoch: int) -> Standing:
        """The next step of a member towards its target for this epoch."""

    @abstractmethod
    def _choose_assignor(self, members: Iterable[Member]) -> tuple[str, Assignor]:
        """By what the next target is computed."""

    @abstractmethod
    def _is_full(self, beat: Beat) -> bool:
        """Whether a member says everything anew, and so wants to be told everything."""

    @abstractmethod
    def check_commit(
        self,
        member_id: str,
        generation: int,
        instance_id: str | None,
        *,
        in_transaction: bool,
        version: int,
    ) -> ErrorCode:
        """Whether this member may commit offsets."""

    @abstractmethod
    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        """Whether this member may ask for committed offsets."""

    @property
    @abstractmethod
    def session_timeout_ms(self) -> int: ...

    @property
    @abstractmethod
    def _usual_interval_ms(self) -> int: ...

    # ---- what is asked of every group ------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self.members

    @property
    def idle_since_ms(self) -> int | None:
        return self.heading.idle_since_ms if self.is_empty else None

    @property
    def state(self) -> str:
        heading = self.heading
        if self.is_empty:
            return EMPTY
        if heading.epoch > heading.target_epoch:
            return ASSIGNING
        if all(member.reconciled_to(heading.epoch) for member in self.members.values()):
            return STABLE
        return RECONCILING

    def touch(self, member_id: str, elapsed_ms: int) -> None:  # noqa: B027
        """Only heartbeats count."""

    def subscribed_to(self, topic: str) -> bool:
        profiles = [member.profile for member in self.members.values()]
        return any(topic in profile.names for profile in profiles) or any(
            self._patterns.matches(regex, topic)
            for regex in {profile.regex for profile in profiles if profile.regex}
        )

    def describe(self) -> GroupDescription:
        members = tuple(
            MemberDescription(
                member.id,
                member.profile.instance_id,
                member.profile.client_id,
                member.profile.client_host,
            )
            for member in self.members.values()
        )
        return GroupDescription(
            self.id, self.kind, self.state, self.protocol_type, self.heading.assignor, members
        )

    def dismiss(self, code: ErrorCode) -> None:  # noqa: B027
        """Nobody waits here."""

    # ---- heartbeats ------------------------------------------------------------------------

    def heartbeat(self, beat: Beat, now_ms: int, elapsed_ms: int) -> tuple[Answer, list[Entry]]:
        """A member is heard of, or joins; ApiError if it must not be."""
        before = self._find(beat)
        replaces = before is not None and before.id != beat.member_id
        member = before or Member(beat.member_id)
        if replaces:
            member = replace(member, id=beat.member_id)
        member = member.updated(beat)
        changed = before is None or not member.profile.wants_the_same(before.profile)
        members: Mapping[str, Member] = self.members
        if member is not self.members.get(member.id):
            self._check_profile(member, before)
            members = {**self.members, member.id: member}
            if replaces and before is not None:
                del members[before.id]
        heading, members = self._aligned(members, changed=changed)
        member = members[member.id]
        standing = self._lead(member, beat, heading.epoch)
        if standing != member.standing:
            self._log_assignment(member, standing)
            member = replace(member, standing=standing)
        entries = self._entries(heading, members, member)
        self.timers.set((_SESSION, member.id), elapsed_ms + self.session_timeout_ms)
        self._time_revocation(member, elapsed_ms)
        if entries:
            self._hasty_until_ms = elapsed_ms + _HASTE_MS
        tell = (
            before is None
            or beat.epoch != before.standing.epoch
            or self._is_full(beat)
            or standing.assigned != before.standing.assigned
            # It reads what it has been told to give up: that answer may never have reached it.
            or (beat.owned is not None and not beat.owned <= standing.assigned)
        )
        assigned = standing.assigned if tell else None
        return Answer(member.id, standing.epoch, self._interval_ms(elapsed_ms), assigned), entries

    def _log_assignment(self, member: Member, new: Standing) -> None:
        if new.assigned == member.standing.assigned or not log.isEnabledFor(logging.INFO):
            return
        topics = self._context.catalog.by_id
        places = [(topics[id_].name, n) for id_, n in new.assigned if id_ in topics]
        text = ", ".join(f"{topic}-{n}" for topic, n in sorted(places)) or "nothing"
        client = member.profile.client_id
        log.info(
            "group %s: member %s of client %s is assigned, in epoch %d: %.*s",
            self.id, member.id, client, new.epoch, _LOGGED_CHARACTERS, text,
        )  # fmt: skip

    def _check_profile(self, member: Member, before: Member | None) -> None:
        """ApiError if a member asks for what cannot be given."""
        limits = self._context.config.limits
        if member.profile.size > limits.max_member_bytes:
            raise ApiError(ErrorCode.INVALID_REQUEST, "the subscription is too large")
        if before is None and len(self.members) >= limits.max_group_size:
            raise ApiError(
                ErrorCode.GROUP_MAX_SIZE_REACHED,
                f"a group has at most {limits.max_group_size} members",
            )
        others = sum(one.profile.size for one in self.members.values() if one is not before)
        if others + member.profile.size > limits.max_group_bytes:
            raise ApiError(
                ErrorCode.GROUP_MAX_SIZE_REACHED, "the subscriptions of the group are too large"
            )
        if member.profile.regex:
            try:
                self._patterns.matching(member.profile.regex, self._context.catalog.topics.keys())
            except PatternError as error:
                raise ApiError(ErrorCode.INVALID_REGULAR_EXPRESSION, str(error)) from error

    def _interval_ms(self, elapsed_ms: int) -> int:
        usual_ms = self._usual_interval_ms
        if elapsed_ms >= self._hasty_until_ms:
            return usual_ms
        return min(usual_ms, max(_HASTY_INTERVAL_MS, _HASTY_PER_MEMBER_MS * len(self.members)))

    def _time_revocation(self, member: Member, elapsed_ms: int) -> None:
        """A member that does not give up what it must in time is taken for dead."""
        key = (_REBALANCE, member.id)
        known = self.members.get(member.id)
        if not member.standing.revoking:
            self.timers.cancel(key)
        elif known is None or known.standing.revoking != member.standing.revoking:
            self.timers.set(key, elapsed_ms + member.profile.rebalance_timeout_ms)

    # ---- the target ------------------------------------------------------------------------

    def _aligned(
        self, members: Mapping[str, Member], *, changed: bool
    ) -> tuple[Heading, Mapping[str, Member]]:
        """The heading and the members with targets that fit what they and the catalog say now."""
        heading, version = self.heading, self._context.catalog.version
        settled = heading.epoch == heading.target_epoch
        if not changed and settled and version == self._seen_version:
            return heading, members
        wanted = self._wanted(members)
        counts = self._counts(wanted)
        digest = _digest(counts)
        name, assignor = self._choose_assignor(members.values())
        self._seen_version = version
        if changed or digest != heading.topics or name != heading.assignor:
            heading = replace(heading, epoch=heading.epoch + 1)
        elif settled:
            return heading, members
        heading = Heading(heading.epoch, heading.epoch, name, digest)
        targets = assignor(
            {
                id_: Subscriber(wanted[id_], one.standing.target, one.profile.instance_id)
                for id_, one in members.items()
            },
            counts,
        )
        return heading, {
            id_: (
                one
                if targets[id_] == one.standing.target
                else replace(one, standing=replace(one.standing, target=targets[id_]))
            )
            for id_, one in members.items()
        }

    def _wanted(self, members: Mapping[str, Member]) -> dict[str, frozenset[UUID]]:
        """The topics that each member wants, of those that there are."""
        topics = self._context.catalog.topics
        self._patterns.retain({one.profile.regex for one in members.values()})
        known: dict[tuple[frozenset[str], str], frozenset[UUID]] = {}
        wanted: dict[str, frozenset[UUID]] = {}
        for id_, one in members.items():
            key = one.profile.names, one.profile.regex
            if key not in known:
                names = key[0] | self._matching(key[1]) if key[1] else key[0]
                known[key] = frozenset(topics[name].id for name in names if name in topics)
            wanted[id_] = known[key]
        return wanted

    def _matching(self, regex: str) -> frozenset[str]:
        try:
            return self._patterns.matching(regex, self._context.catalog.topics.keys())
        except PatternError as error:
            # It could be matched with the topics that were there when it was subscribed with.
            log.warning("group %s: the pattern %.100r: %s", self.id, regex, error)
            return self._patterns.known(regex)

    def _counts(self, wanted: Mapping[str, frozenset[UUID]]) -> dict[UUID, int]:
        """How many partitions each wanted topic has, in the order of their names."""
        by_id = self._context.catalog.by_id
        topics = [by_id[id_] for id_ in frozenset().union(*set(wanted.values()))]
        return {topic.id: topic.partitions for topic in sorted(topics, key=lambda one: one.name)}

    def _entries(
        self, heading: Heading, members: Mapping[str, Member], member: Member
    ) -> list[Entry]:
        """What makes the group's state these members, one of them as given, and this heading."""
        entries: list[Entry] = []
        if members is not self.members:
            for id_ in self.members.keys() - members.keys():
                entries += self._gone(id_)
            for id_, one in members.items():
                if id_ != member.id:
                    entries += self._news(one)
        entries += self._news(member)
        if heading is not self.heading:
            entries.append(self._heading_entry(heading))
        return entries

    def _news(self, member: Member) -> Iterable[Entry]:
        known = self.members.get(member.id)
        if known is None or known.profile != member.profile:
            yield (self.member_kind, self.id, member.id, PROFILE), member.profile.to_json()
        if known is None or known.standing != member.standing:
            yield (self.member_kind, self.id, member.id, STANDING), member.standing.to_json()

    def _gone(self, member_id: str) -> Iterable[Entry]:
        for part in (STANDING, PROFILE):
            yield (self.member_kind, self.id, member_id, part), None

    def _heading_entry(self, heading: Heading) -> Entry:
        return ("group", self.id), heading.to_json(self.kind)

    # ---- leaving ---------------------------------------------------------------------------

    def leave(self, beat: Beat, now_ms: int, elapsed_ms: int) -> tuple[Answer, list[Entry]]:
        """A member goes for good; ApiError if it is none."""
        member = self.members.get(beat.member_id)
        if member is None:
            raise ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"{beat.member_id!r} is no member")
        return Answer(member.id, LEAVING), self._remove({member.id}, now_ms, elapsed_ms)

    def _remove(self, ids: set[str], now_ms: int, elapsed_ms: int) -> list[Entry]:
        """Members are gone: what they had is free, and the others get it in a new epoch."""
        if not ids:
            return []
        self._hasty_until_ms = elapsed_ms + _HASTE_MS
        entries = [entry for id_ in sorted(ids) for entry in self._gone(id_)]
        idle_since_ms = None if self.members.keys() - ids else now_ms
        heading = replace(self.heading, epoch=self.heading.epoch + 1, idle_since_ms=idle_since_ms)
        entries.append(self._heading_entry(heading))
        return entries

    # ---- time ------------------------------------------------------------------------------

    def tick(self, now_ms: int, elapsed_ms: int) -> list[Entry]:
        """Remove members that were silent for too long, or did not do what they were told."""
        gone: set[str] = set()
        for kind, member_id in self.timers.due(elapsed_ms):
            member = self.members.get(member_id)
            if member is not None and (kind == _SESSION or member.standing.revoking):
                why = "it was silent" if kind == _SESSION else "it did not give up partitions"
                log.info("group %s: member %s is removed: %s", self.id, member_id, why)
                gone.add(member_id)
                # Off once it is written.
                self.timers.set((kind, member_id), elapsed_ms + _AGAIN_MS)
        return self._remove(gone, now_ms, elapsed_ms)

    def begin(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        """Give every member its time anew."""
        for member in self.members.values():
            self.timers.set((_SESSION, member.id), elapsed_ms + self.session_timeout_ms)
            if member.standing.revoking:
                due_ms = elapsed_ms + member.profile.rebalance_timeout_ms
                self.timers.set((_REBALANCE, member.id), due_ms)
        return ()

    # ---- replay ----------------------------------------------------------------------------

    def replay(self, key: Key, value: Any) -> None:
        """Apply an entry of this group."""
        if key[0] == "group":
            self.heading = Heading.from_json(value)
            return
        member_id = str(key[2])
        if value is None:
            self.members.pop(member_id, None)
            for kind in (_SESSION, _REBALANCE):
                self.timers.cancel((kind, member_id))
            return
        member = self.members.get(member_id) or Member(member_id)
        if key[3] == PROFILE:
            member = replace(member, profile=Profile.from_json(value))
        else:
            member = replace(member, standing=Standing.from_json(value))
        self.members[member_id] = member

    def tombstones(self) -> Iterable[Entry]:
        """The entries that make it gone."""
        for member_id in list(self.members):
            yield from self._gone(member_id)
        yield ("group", self.id), None

    # ---- epochs ----------------------------------------------------------------------------

    def _check_epoch(self, member: Member, beat: Beat) -> None:
        """ApiError unless this is the member's epoch, or the last one with what it has since."""
        standing = member.standing
        if beat.epoch in (JOINING, standing.epoch):
            return
        if beat.epoch == standing.previous_epoch and self._may_lag(beat, standing):
            return
        raise ApiError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"the member's epoch is {standing.epoch}, not {beat.epoch}; it must join again",
        )

    def _may_lag(self, beat: Beat, standing: Standing) -> bool:
        return True


def _digest(counts: Mapping[UUID, int]) -> str:
    """Different for different topics and partition counts."""
    text = ",".join(sorted(f"{topic}:{count}" for topic, count in counts.items()))
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
