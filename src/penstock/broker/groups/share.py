"""The members of a share group (KIP-932): consumers that take records from a queue.

Several members may read a partition at once; which records are in whose hands is the business of
`penstock.broker.shares`. So a member gets its target, and its epoch, with its next heartbeat, and
nobody waits for anybody to give anything up.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from penstock.broker.catalog import ApiError
from penstock.broker.groups.assigned import EMPTY, STABLE, AssignedGroup
from penstock.broker.groups.assignors import (
    NOTHING,
    SHARE_ASSIGNOR,
    Assignor,
    Partitions,
    simple,
)
from penstock.broker.groups.group import Kind
from penstock.broker.groups.members import JOINING, Beat, Member, Standing
from penstock.wire.errors import ErrorCode


class ShareGroup(AssignedGroup):
    """One share group and its members."""

    kind: Kind = "share"
    protocol_type: str = "share"
    member_kind: ClassVar[str] = "share-member"

    @property
    def state(self) -> str:
        """Kafka knows no others for share groups."""
        return EMPTY if self.is_empty else STABLE

    @property
    def session_timeout_ms(self) -> int:
        return self._context.settings(self.id).share_session_timeout_ms

    @property
    def _usual_interval_ms(self) -> int:
        return self._context.settings(self.id).share_heartbeat_interval_ms

    def is_member(self, member_id: str) -> bool:
        return member_id in self.members

    def partitions_of(self, member_id: str) -> Partitions:
        """What a member has been told to read; nothing if it is none."""
        member = self.members.get(member_id)
        return NOTHING if member is None else member.standing.assigned

    def check_commit(
        self,
        member_id: str,
        generation: int,
        instance_id: str | None,
        *,
        in_transaction: bool,
        version: int,
    ) -> ErrorCode:
        """A share group has no committed offsets."""
        return ErrorCode.GROUP_ID_NOT_FOUND

    def check_fetch(self, member_id: str | None, epoch: int) -> ErrorCode:
        return ErrorCode.GROUP_ID_NOT_FOUND

    def _find(self, beat: Beat) -> Member | None:
        member = self.members.get(beat.member_id)
        if member is not None:
            self._check_epoch(member, beat)
        elif beat.epoch != JOINING:
            raise ApiError(
                ErrorCode.UNKNOWN_MEMBER_ID, f"{beat.member_id!r} is no member of the group"
            )
        return member

    def _is_full(self, beat: Beat) -> bool:
        return beat.names is not None

    def _choose_assignor(self, members: Iterable[Member]) -> tuple[str, Assignor]:
        return SHARE_ASSIGNOR, simple

    def _lead(self, member: Member, beat: Beat, epoch: int) -> Standing:
        standing = member.standing
        if member.reconciled_to(epoch):
            return standing
        previous = standing.previous_epoch if standing.epoch == epoch else standing.epoch
        return Standing(epoch, previous, standing.target, NOTHING, standing.target)
