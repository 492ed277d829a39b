"""A group of a Kafka Streams application (KIP-1071): each task is active in one member at a time.

The group has an *epoch*, which is raised by whatever may call for other tasks: a member that comes,
goes or says something new of itself, a topic of the application that is made, deleted or given
partitions, another number of standbys. The next heartbeat of anyone computes the *target*, which
tasks each member is to run in the end. Two things delay that, and members are told so: a group
waits a while for more members after its first, and a while after each target before the next.

There is a target only while all topics of the application are there. Source topics are the user's;
internal ones are made by the broker, which finds in the answer what is `missing`.

Each member is led towards its target by its own heartbeats, as `ownership` says. One that does not
give up tasks within its rebalance time-out, or falls silent, is removed.

All of this is durable, so members go on after a restart of the broker as if nothing had happened.
Not durable are deadlines, who asked for a shutdown, and the version of the endpoints.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Final

from penstock.broker.catalog import ApiError
from penstock.broker.groups.group import (
    NO_GENERATION,
    NO_MEMBER,
    GroupContext,
    GroupDescription,
    Kind,
    MemberDescription,
)
from penstock.broker.groups.members import JOINING, LEAVING, PROFILE, STANDING, Heading
from penstock.broker.groups.streams.answers import Directory, statuses_for
from penstock.broker.groups.streams.assignor import STICKY, Candidate, assign
from penstock.broker.groups.streams.internal_topics import (
    ConfiguredTopology,
    InvalidTopologyError,
    configure,
)
from penstock.broker.groups.streams.members import (
    StreamsAnswer,
    StreamsBeat,
    StreamsMember,
    StreamsProfile,
    StreamsStanding,
)
from penstock.broker.groups.streams.ownership import Ownership
from penstock.broker.groups.streams.pace import Pace
from penstock.broker.groups.streams.tasks import NOTHING, Tasks
from penstock.broker.groups.streams.topology import Topology
from penstock.broker.journal import Entry, Key
from penstock.broker.timers import Timers
from penstock.wire.errors import ErrorCode

log = logging.getLogger(__name__)

EMPTY: Final = "Empty"
NOT_READY: Final = "NotReady"
ASSIGNING: Final = "Assigning"
RECONCILING: Final = "Reconciling"
STABLE: Final = "Stable"

MEMBER: Final = "streams-member"
TOPOLOGY: Final = "streams-topology"

# The first epoch of a group; members have the one below while its first target is delayed.
_FIRST_EPOCH: Final = 2
# How long after a change a group is in haste, and how often its members are heard of then.
_HASTE_MS: Final = 5_000
_HASTY_INTERVAL_MS: Final = 100
_HASTY_PER_MEMBER_MS: Final = 2
# When a member that was to be removed is looked at again, in case that could not be written.
_AGAIN_MS: Final = 1_000
# Clients that know of epochs commit offsets with this version or a later one.
_EPOCHS_FROM_VERSION: Final = 9

_SESSION: Final = "session"
_REBALANCE: Final = "rebalance"

Members = Mapping[str, StreamsMember]


class StreamsGroup:
    """One streams group, its topology and its members."""

    kind: Kind = "streams"
    protocol_type: str = "streams"

    def __init__(self, group_id: str, context: GroupContext) -> None:
        self.id = group_id
        self.timers: Timers[tuple[str, str]] = context.timers(group_id)
        self.heading = Heading()
        self.topology: Topology | None = None
        self.members: dict[str, StreamsMember] = {}
        self.ownership = Ownership()
        self._context = context
        # The state of the catalog, the standbys and the topology that the last is for.
        self._configured: tuple[int, int, Topology, ConfiguredTopology] | None = None
        self._pace = Pace()
        self._directory = Directory()
        self._hasty_until_ms = 0
        self._shutdown_by: str | None = None
        self._endpoint_epoch = 0

    # ---- what is asked of every group ------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        return not self.members

    @property
    def idle_since_ms(self) -> int | None:
        return self.heading.idle_since_ms if self.is_empty else None

    @property
    def state(self) -> str:
        if self.is_empty:
            return EMPTY
        configured = self.configured
        if configured is None or not configured.is_ready:
            return NOT_READY
        heading = self.heading
        if heading.epoch > heading.target_epoch:
            return ASSIGNING
        if all(member.reconciled_to(heading.epoch) for member in self.members.values()):
            return STABLE
        return RECONCILING

    @property
    def configured(self) -> ConfiguredTopology | None:
        """The topology with what follows from the topics that there are now."""
        if self.topology is None:
            return None
        try:
            return self._configure(self.topology)
        except ApiError:
            return None

    def touch(self, member_id: str, elapsed_ms: int) -> None:
        """Only heartbeats count."""

    def subscribed_to(self, topic: str) -> bool:
        return not self.is_empty and self.topology is not None and topic in self.topology.sources

    def describe(self) -> GroupDescription:
        members = tuple(
            MemberDescription(member.id, None, member.profile.client_id, member.profile.client_host)
            for member in self.members.values()
        )
        return GroupDescription(self.id, self.kind, self.state, self.protocol_type, STICKY, members)

    def dismiss(self, code: ErrorCode) -> None:
        """Nobody waits here."""

    # ---- heartbeats ------------------------------------------------------------------------

    def heartbeat(
        self, beat: StreamsBeat, now_ms: int, elapsed_ms: int
    ) -> tuple[StreamsAnswer, list[Entry]]:
        """A member is heard of, or joins; ApiError if it must not be."""
        before = self.members.get(beat.member_id)
        self._check_epoch(before, beat)
        member = (before or StreamsMember(beat.member_id)).updated(beat)
        rejoins = before is not None and beat.epoch == JOINING
        if rejoins:
            # It begins anew: what it may still have on its way with an earlier epoch is fenced.
            member = replace(member, standing=replace(member.standing, since={}))
        topology = self._topology_of(beat)
        self._check_room(member, before, topology)
        configured = self._configure(topology)
        if beat.owned is not None:
            configured.check_tasks(beat.owned)
        heading = self._raised(None if rejoins else before, member, configured, elapsed_ms)
        members: Members = {**self.members, member.id: member}
        delay = None
        if heading.epoch > heading.target_epoch:
            delay = self._pace.delay(elapsed_ms)
            if delay is None:
                spent_s = self._context.spent_s()
                heading, members = self._assigned(heading, members, configured)
                interval_ms = self._context.settings(self.id).streams_assignment_interval_ms
                self._pace.rest(elapsed_ms, interval_ms, self._context.spent_s() - spent_s)
        member = members[member.id]
        standing = self.ownership.lead(member, beat, max(heading.target_epoch, _FIRST_EPOCH - 1))
        if standing != member.standing:
            self._log_assignment(member, standing)
            member = replace(member, standing=standing)
        entries = self._entries(topology, heading, members, member)
        self.timers.set((_SESSION, member.id), elapsed_ms + self._session_timeout_ms)
        self._time_revocation(member, elapsed_ms)
        if entries:
            self._hasty_until_ms = max(self._hasty_until_ms, elapsed_ms + _HASTE_MS)
        if beat.shuts_down:
            self._ask_for_shutdown(member.id)
        answer = self._answer(beat, before, member, configured, elapsed_ms)
        statuses = statuses_for(member, topology, configured, delay, self._shutdown_by)
        return replace(answer, statuses=statuses), entries

    def _answer(
        self,
        beat: StreamsBeat,
        before: StreamsMember | None,
        member: StreamsMember,
        configured: ConfiguredTopology,
        elapsed_ms: int,
    ) -> StreamsAnswer:
        standing = member.standing
        changed = before is None or standing.assigned != before.standing.assigned
        if member.profile.endpoint is not None and (changed or beat.epoch == JOINING):
            self._endpoint_epoch += 1
        tell = (
            before is None
            or changed
            or beat.epoch != before.standing.epoch
            # It runs something else than it has been told: that answer may never have reached it.
            or (beat.owned is not None and beat.owned != standing.assigned)
        )
        served = None
        if beat.endpoint_epoch != self._endpoint_epoch:
            served = self._directory.served_by(
                self.members, member, configured, self._context.catalog
            )
        return StreamsAnswer(
            member.id,
            standing.epoch,
            self._interval_ms(elapsed_ms),
            standing.assigned if tell else None,
            served=served,
            endpoint_epoch=self._endpoint_epoch,
            missing=configured.missing,
        )

    def _log_assignment(self, member: StreamsMember, new: StreamsStanding) -> None:
        if new.assigned == member.standing.assigned or not log.isEnabledFor(logging.INFO):
            return
        log.info(
            "group %s: member %s of client %s is assigned, in epoch %d: %d active tasks, %d "
            "standbys, %d warm-ups",
            self.id, member.id, member.profile.client_id, new.epoch, len(new.assigned.active),
            len(new.assigned.standby), len(new.assigned.warmup),
        )  # fmt: skip

    def _ask_for_shutdown(self, member_id: str) -> None:
        if self._shutdown_by is None:
            log.warning("group %s: member %s asks all to shut down", self.id, member_id)
            self._shutdown_by = member_id

    @property
    def _session_timeout_ms(self) -> int:
        return self._context.settings(self.id).streams_session_timeout_ms

    def _interval_ms(self, elapsed_ms: int) -> int:
        usual_ms = self._context.settings(self.id).streams_heartbeat_interval_ms
        if elapsed_ms >= self._hasty_until_ms:
            return usual_ms
        return min(usual_ms, max(_HASTY_INTERVAL_MS, _HASTY_PER_MEMBER_MS * len(self.members)))

    def _time_revocation(self, member: StreamsMember, elapsed_ms: int) -> None:
        """A member that does not give up what it must in time is taken for dead."""
        key = (_REBALANCE, member.id)
        known = self.members.get(member.id)
        if not member.standing.revoking:
            self.timers.cancel(key)
        elif known is None or known.standing.revoking != member.standing.revoking:
            self.timers.set(key, elapsed_ms + member.profile.rebalance_timeout_ms)

    # ---- what is refused -------------------------------------------------------------------

    def _check_epoch(self, member: StreamsMember | None, beat: StreamsBeat) -> None:
        """ApiError unless this is the member's epoch, or the last one with what it has since."""
        if beat.epoch == JOINING:
            return
        if member is None:
            raise _unknown(beat.member_id)
        standing = member.standing
        if beat.epoch == standing.epoch:
            return
        lags = beat.epoch == standing.previous_epoch
        if lags and beat.owned is not None and beat.owned <= standing.assigned:
            return
        raise ApiError(
            ErrorCode.FENCED_MEMBER_EPOCH,
            f"the member's epoch is {standing.epoch}, not {beat.epoch}; it must join again",
        )

    def _check_room(
        self, member: StreamsMember, before: StreamsMember | None, topology: Topology
    ) -> None:
        """ApiError if a member, or its topology, is too much to hold."""
        if member is before and topology is self.topology:
            return
        limits = self._context.config.limits
        if member.profile.size > limits.max_member_bytes:
            raise ApiError(ErrorCode.INVALID_REQUEST, "what the member says of itself is too large")
        if topology.size > limits.max_group_bytes:
            raise ApiError(ErrorCode.INVALID_REQUEST, "the topology is too large")
        if before is None and len(self.members) >= limits.max_group_size:
            raise ApiError(
                ErrorCode.GROUP_MAX_SIZE_REACHED,
                f"a group has at most {limits.max_group_size} members",
            )
        others = sum(one.profile.size for one in self.members.values() if one is not before)
        if others + member.profile.size > limits.max_group_bytes:
            raise ApiError(
                ErrorCode.GROUP_MAX_SIZE_REACHED, "the members of the group are too much to hold"
            )

    # ---- the topology ----------------------------------------------------------------------

    def _topology_of(self, beat: StreamsBeat) -> Topology:
        """The group's topology after a heartbeat; ApiError if a member comes with another."""
        told, present = beat.topology, self.topology
        if present is None:
            if told is None:
                raise ApiError(ErrorCode.INVALID_REQUEST, "the group has no topology yet")
            return told
        if told is None or told.epoch < present.epoch or told == present:
            return present
        raise ApiError(ErrorCode.INVALID_REQUEST, "Topology updates are not supported yet.")

    def _configure(self, topology: Topology) -> ConfiguredTopology:
        """The topology with what follows from the topics that there are; ApiError if none can."""
        catalog = self._context.catalog
        standbys = self._context.settings(self.id).streams_num_standby_replicas
        known = self._configured
        if known is not None and known[:2] == (catalog.version, standbys) and known[2] is topology:
            return known[3]
        counts = {
            name: catalog.topics[name].partitions
            for name in topology.topics
            if name in catalog.topics
        }
        try:
            configured = configure(topology, counts)
        except InvalidTopologyError as error:
            raise ApiError(ErrorCode.STREAMS_INVALID_TOPOLOGY, str(error)) from error
        tasks = sum(item.tasks for item in configured.subtopologies or ()) * (1 + standbys)
        if tasks > self._context.config.limits.max_partitions:
            raise ApiError(
                ErrorCode.STREAMS_INVALID_TOPOLOGY,
                f"{tasks} tasks are too many; there are at most as many as partitions, "
                f"{self._context.config.limits.max_partitions}",
            )
        self._configured = (catalog.version, standbys, topology, configured)
        return configured

    # ---- the target ------------------------------------------------------------------------

    def _raised(
        self,
        before: StreamsMember | None,
        member: StreamsMember,
        configured: ConfiguredTopology,
        elapsed_ms: int,
    ) -> Heading:
        """The heading, in a new epoch if another target may be needed."""
        heading = self.heading
        settings = self._context.settings(self.id)
        digest = _digest(configured, settings.streams_num_standby_replicas)
        if before is not None and member.profile == before.profile and digest == heading.topics:
            return heading
        if self.is_empty:
            self._pace.begin(elapsed_ms, settings.streams_initial_rebalance_delay_ms)
            self._hasty_until_ms = self._pace.first_ms + _HASTE_MS
        return replace(
            heading,
            epoch=max(heading.epoch + 1, _FIRST_EPOCH),
            assignor=STICKY,
            topics=digest,
            idle_since_ms=None,
        )

    def _assigned(
        self, heading: Heading, members: Members, configured: ConfiguredTopology
    ) -> tuple[Heading, Members]:
        """The heading and the members with new targets."""
        targets: Mapping[str, Tasks] = {}
        if configured.is_ready and configured.subtopologies is not None:
            settings = self._context.settings(self.id)
            targets = assign(
                {
                    id_: Candidate(one.profile.process_id, one.standing.target)
                    for id_, one in members.items()
                },
                {item.part.id: item.tasks for item in configured.subtopologies},
                {item.part.id for item in configured.subtopologies if item.part.changelogs},
                settings.streams_num_standby_replicas,
            )
        heading = replace(heading, target_epoch=heading.epoch)
        return heading, {
            id_: (
                one
                if targets.get(id_, NOTHING) == one.standing.target
                else replace(one, standing=replace(one.standing, target=targets.get(id_, NOTHING)))
            )
            for id_, one in members.items()
        }

    # ---- entries ---------------------------------------------------------------------------

    def _entries(
        self, topology: Topology, heading: Heading, members: Members, member: StreamsMember
    ) -> list[Entry]:
        """What makes the group's state these members, one of them as given, and the rest."""
        entries: list[Entry] = []
        if topology is not self.topology:
            entries.append(((TOPOLOGY, self.id), topology.to_json()))
        for id_, one in members.items():
            if id_ != member.id and one is not self.members.get(id_):
                entries += self._news(one)
        entries += self._news(member)
        if heading is not self.heading:
            entries.append(self._heading_entry(heading))
        return entries

    def _news(self, member: StreamsMember) -> Iterable[Entry]:
        known = self.members.get(member.id)
        if known is None or known.profile != member.profile:
            yield (MEMBER, self.id, member.id, PROFILE), member.profile.to_json()
        if known is None or known.standing != member.standing:
            yield (MEMBER, self.id, member.id, STANDING), member.standing.to_json()

    def _gone(self, member_id: str) -> Iterable[Entry]:
        for part in (STANDING, PROFILE):
            yield (MEMBER, self.id, member_id, part), None

    def _heading_entry(self, heading: Heading) -> Entry:
        return ("group", self.id), heading.to_json(self.kind)

    # ---- leaving ---------------------------------------------------------------------------

    def leave(
        self, beat: StreamsBeat, now_ms: int, elapsed_ms: int
    ) -> tuple[StreamsAnswer, list[Entry]]:
        """A member goes for good; ApiError if it is none."""
        if beat.member_id not in self.members:
            raise _unknown(beat.member_id)
        if beat.shuts_down:
            self._ask_for_shutdown(beat.member_id)
        return (
            StreamsAnswer(beat.member_id, LEAVING),
            self._remove({beat.member_id}, now_ms, elapsed_ms),
        )

    def _remove(self, ids: set[str], now_ms: int, elapsed_ms: int) -> list[Entry]:
        """Members are gone: what they had is free, and the others get it in a new epoch."""
        if not ids:
            return []
        self._hasty_until_ms = max(self._hasty_until_ms, elapsed_ms + _HASTE_MS)
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
                why = "it was silent" if kind == _SESSION else "it did not give up tasks"
                log.info("group %s: member %s is removed: %s", self.id, member_id, why)
                gone.add(member_id)
                # Off once it is written.
                self.timers.set((kind, member_id), elapsed_ms + _AGAIN_MS)
        return self._remove(gone, now_ms, elapsed_ms)

    def begin(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        """Give every member its time anew."""
        # Members may know any version from before: one that none of them has had.
        self._endpoint_epoch = now_ms // 1_000 % (1 << 30) if self.members else 0
        for member in self.members.values():
            self.timers.set((_SESSION, member.id), elapsed_ms + self._session_timeout_ms)
            if member.standing.revoking:
                due_ms = elapsed_ms + member.profile.rebalance_timeout_ms
                self.timers.set((_REBALANCE, member.id), due_ms)
        return ()

    # ---- offsets ---------------------------------------------------------------------------

    def check_commit(
        self,
        member_id: str,
        generation: int,
        instance_id: str | None,
        *,
        in_transaction: bool,
        version: int,
    ) -> ErrorCode:
        """Whether this member may commit offsets: one that is up to date, or nobody's."""
        if generation <= NO_GENERATION and self.is_empty:
            return ErrorCode.NONE
        anonymous = generation == NO_GENERATION and member_id == NO_MEMBER and instance_id is None
        if in_transaction and anonymous:
            return ErrorCode.NONE
        member = self.members.get(member_id)
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        if not in_transaction and version < _EPOCHS_FROM_VERSION:
            return ErrorCode.UNSUPPORTED_VERSION
        # An earlier epoch is looked at by partition.
        newer = generation > member.standing.epoch
        return ErrorCode.STALE_MEMBER_EPOCH if newer else ErrorCode.NONE

    def check_commit_of(
        self, member_id: str, generation: int, topic: str, partition: int
    ) -> ErrorCode:
        """Whether a member may commit for this partition, though its epoch may have passed.

        It may if it runs the partition's task without a break since the epoch that it names. A
        member that names none is behind, too; in a group without members anyone may.
        """
        member = self.members.get(member_id)
        if member is None or generation == member.standing.epoch:
            return ErrorCode.NONE
        for part in () if self.topology is None else self.topology.readers.get(topic, ()):
            since = member.standing.since.get((part, partition))
            if since is not None and since <= generation:
                return ErrorCode.NONE
        return ErrorCode.STALE_MEMBER_EPOCH

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        """Whether this member may ask for committed offsets."""
        if not member_id and epoch < 0:
            return ErrorCode.NONE
        member = self.members.get(member_id or NO_MEMBER)
        if member is None:
            return ErrorCode.UNKNOWN_MEMBER_ID
        return ErrorCode.NONE if epoch == member.standing.epoch else ErrorCode.STALE_MEMBER_EPOCH

    # ---- replay ----------------------------------------------------------------------------

    def replay(self, key: Key, value: Any) -> None:
        """Apply an entry of this group."""
        if key[0] == "group":
            self.heading = Heading.from_json(value)
            return
        if key[0] == TOPOLOGY:
            self.topology = None if value is None else Topology.from_json(value)
            return
        member_id = str(key[2])
        before = self.members.get(member_id)
        self.ownership.remove(before)
        if value is None:
            self.members.pop(member_id, None)
            for kind in (_SESSION, _REBALANCE):
                self.timers.cancel((kind, member_id))
            if self.is_empty:
                self._shutdown_by = None
            return
        member = before or StreamsMember(member_id)
        if key[3] == PROFILE:
            member = replace(member, profile=StreamsProfile.from_json(value))
        else:
            member = replace(member, standing=StreamsStanding.from_json(value))
        self.members[member_id] = member
        self.ownership.add(member)

    def tombstones(self) -> Iterable[Entry]:
        """The entries that make it gone."""
        for member_id in list(self.members):
            yield from self._gone(member_id)
        if self.topology is not None:
            yield (TOPOLOGY, self.id), None
        yield ("group", self.id), None


def _unknown(member_id: str) -> ApiError:
    return ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"{member_id!r} is no member of the group")


def _digest(configured: ConfiguredTopology, standbys: int) -> str:
    """Different wherever another target may be needed."""
    tasks = ",".join(f"{item.part.id}:{item.tasks}" for item in configured.subtopologies or ())
    problem = configured.problem
    text = f"{tasks};{standbys};{None if problem is None else problem.status}"
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
