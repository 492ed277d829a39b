"""A consumer group whose partitions the broker assigns (KIP-848): each has one reader at a time.

A member is led towards its target in two steps. First it is told to read only what it has of its
target, and keeps its epoch; what it must give up is *revoking* until the member says that it has.
Then it gets the new epoch, and those of its missing partitions that no other member has; the rest
follow with later heartbeats, as others give them up.

A partition belongs to the member that has been told to read it until that member says that it does
not read it any more, or is gone: `owners` is what members have been told, and nobody is given what
someone else owns. Since that is durable before anyone is told, it holds across restarts too. A
member that does not give up what it must within its rebalance time-out is removed, so one that
hangs delays others but does not stop them.

A *static* member (one with an instance id) may be away for the time of its session: its partitions
wait for it, and whoever comes with its instance id gets them. An instance id belongs to one client
at a time; a second one is turned away until the first has said that it goes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, ClassVar

from penstock.broker.catalog import ApiError
from penstock.broker.groups.assigned import AssignedGroup
from penstock.broker.groups.assignors import (
    CONSUMER_ASSIGNORS,
    DEFAULT_ASSIGNOR,
    NOTHING,
    Assignor,
    Partitions,
    TopicPartition,
)
from penstock.broker.groups.group import NO_GENERATION, NO_MEMBER, GroupContext, Kind
from penstock.broker.groups.members import AWAY, JOINING, Answer, Beat, Member, Standing
from penstock.broker.journal import Entry, Key
from penstock.wire.errors import ErrorCode

# Clients that know of epochs commit and fetch offsets with this version or a later one.
_EPOCHS_FROM_VERSION = 9


class ConsumerGroup(AssignedGroup):
    """One consumer group and its members."""

    kind: Kind = "consumer"
    protocol_type: str = "consumer"
    member_kind: ClassVar[str] = "group-member"

    def __init__(self, group_id: str, context: GroupContext) -> None:
        super().__init__(group_id, context)
        self.owners: dict[TopicPartition, str] = {}
        # Member ids by instance id.
        self._static: dict[str, str] = {}

    @property
    def session_timeout_ms(self) -> int:
        return self._context.settings(self.id).consumer_session_timeout_ms

    @property
    def _usual_interval_ms(self) -> int:
        return self._context.settings(self.id).consumer_heartbeat_interval_ms

    # ---- who it is -------------------------------------------------------------------------

    def _find(self, beat: Beat) -> Member | None:
        if beat.instance_id is not None:
            return self._find_static(beat, beat.instance_id)
        member = self.members.get(beat.member_id)
        if member is None and beat.epoch != JOINING:
            raise _unknown(beat.member_id)
        if member is not None:
            self._check_epoch(member, beat)
        return member

    def _find_static(self, beat: Beat, instance_id: str) -> Member | None:
        member = self.members.get(self._static.get(instance_id, ""))
        if beat.epoch != JOINING:
            member = self._known_static(beat.member_id, instance_id)
            self._check_epoch(member, beat)
            return member
        if member is None:
            return self.members.get(beat.member_id)
        if member.standing.epoch != AWAY and member.id != beat.member_id:
            raise ApiError(
                ErrorCode.UNRELEASED_INSTANCE_ID,
                f"the instance id {instance_id!r} is in use by member {member.id!r}",
            )
        if member.id == beat.member_id and member.standing.epoch != AWAY:
            return member
        # It begins anew with what is kept for it.
        standing = replace(member.standing, epoch=JOINING, previous_epoch=JOINING)
        return replace(member, standing=standing)

    def _known_static(self, member_id: str, instance_id: str) -> Member:
        member = self.members.get(self._static.get(instance_id, ""))
        if member is None:
            raise ApiError(
                ErrorCode.UNKNOWN_MEMBER_ID, f"the instance id {instance_id!r} is not known"
            )
        if member.id != member_id:
            raise ApiError(
                ErrorCode.FENCED_INSTANCE_ID,
                f"the instance id {instance_id!r} belongs to member {member.id!r} now",
            )
        return member

    def _may_lag(self, beat: Beat, standing: Standing) -> bool:
        return beat.owned is not None and beat.owned <= standing.assigned

    def _is_full(self, beat: Beat) -> bool:
        return (
            beat.rebalance_timeout_ms is not None
            and (beat.names is not None or beat.regex is not None)
            and beat.owned is not None
        )

    # ---- the way to the target -------------------------------------------------------------

    def _choose_assignor(self, members: Iterable[Member]) -> tuple[str, Assignor]:
        """The one that most members ask for."""
        votes = Counter(one.profile.assignor for one in members if one.profile.assignor)
        # With equal votes the first of the table.
        name = max(CONSUMER_ASSIGNORS, key=lambda name: votes[name]) if votes else DEFAULT_ASSIGNOR
        return name, CONSUMER_ASSIGNORS[name]

    def _lead(self, member: Member, beat: Beat, epoch: int) -> Standing:
        standing = member.standing
        if member.reconciled_to(epoch):
            return standing
        kept = standing.assigned & standing.target
        revoking = standing.assigned - kept
        if _may_read(beat, standing.revoking):
            revoking |= standing.revoking
        if _may_read(beat, revoking):
            # Whatever else it is meant to have waits until it has given these up.
            return replace(standing, assigned=kept, revoking=revoking)
        free = {
            partition
            for partition in standing.target - kept
            if self.owners.get(partition, member.id) == member.id
        }
        previous = standing.previous_epoch if standing.epoch == epoch else standing.epoch
        return Standing(epoch, previous, kept | free, NOTHING, standing.target)

    # ---- leaving ---------------------------------------------------------------------------

    def leave(self, beat: Beat, now_ms: int, elapsed_ms: int) -> tuple[Answer, list[Entry]]:
        """A member goes, for good or, if it is static, for a while."""
        if beat.instance_id is None:
            return super().leave(beat, now_ms, elapsed_ms)
        member = self._known_static(beat.member_id, beat.instance_id)
        if beat.epoch != AWAY:
            return super().leave(beat, now_ms, elapsed_ms)
        standing = replace(member.standing, epoch=AWAY, revoking=NOTHING)
        self._time_revocation(replace(member, standing=standing), elapsed_ms)
        return Answer(member.id, AWAY), list(self._news(replace(member, standing=standing)))

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
        if generation != member.standing.epoch:
            return ErrorCode.STALE_MEMBER_EPOCH
        return ErrorCode.NONE

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
        if key[0] == "group":
            super().replay(key, value)
            return
        member_id = str(key[2])
        self._note(self.members.get(member_id), None)
        super().replay(key, value)
        self._note(None, self.members.get(member_id))

    def _note(self, before: Member | None, after: Member | None) -> None:
        """Keep in step who owns what, and who has which instance id."""
        if before is not None:
            for partition in before.standing.assigned | before.standing.revoking:
                if self.owners.get(partition) == before.id:
                    del self.owners[partition]
            instance_id = before.profile.instance_id
            if instance_id is not None and self._static.get(instance_id) == before.id:
                del self._static[instance_id]
        if after is not None:
            for partition in after.standing.assigned | after.standing.revoking:
                self.owners[partition] = after.id
            if after.profile.instance_id is not None:
                self._static[after.profile.instance_id] = after.id


def _may_read(beat: Beat, partitions: Partitions) -> bool:
    """Whether a member may still be reading one of these; if it does not say, it may."""
    return bool(partitions) and (beat.owned is None or not partitions.isdisjoint(beat.owned))


def _unknown(member_id: str) -> ApiError:
    return ApiError(ErrorCode.UNKNOWN_MEMBER_ID, f"{member_id!r} is no member of the group")
