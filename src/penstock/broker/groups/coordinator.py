"""All groups, their settings and their committed offsets.

A group's id belongs to one group, of one kind. An empty group may be replaced by one of another
kind, which takes over its offsets: so an application changes from the classic protocol to the
newer one between two of its starts. A group without members, offsets and entries is nothing, and
is forgotten.

Commands return what to answer and the entries to write; see `penstock.broker.coordination`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from penstock.broker.catalog import ApiError, Catalog, Topic
from penstock.broker.config import BrokerConfig
from penstock.broker.groups.classic import ClassicGroup
from penstock.broker.groups.consumer import ConsumerGroup
from penstock.broker.groups.group import (
    NO_GENERATION,
    PART_KINDS,
    Group,
    GroupContext,
    GroupDescription,
    Kind,
    Maker,
    MemberDescription,
)
from penstock.broker.groups.members import Heading
from penstock.broker.groups.offsets import (
    OFFSET,
    PENDING,
    Committed,
    NewOffset,
    Offsets,
    Place,
)
from penstock.broker.groups.settings import DEFAULT_SETTINGS, GroupSettings, group_settings
from penstock.broker.groups.share import ShareGroup
from penstock.broker.groups.streams.group import StreamsGroup
from penstock.broker.journal import Entry, Key
from penstock.broker.timers import Timers
from penstock.errors import ConfigError
from penstock.wire.errors import ErrorCode

__all__ = [
    "Committed",
    "Group",
    "GroupContext",
    "GroupCoordinator",
    "GroupDescription",
    "MemberDescription",
    "NewOffset",
]

MAKERS: Final[dict[Kind, Maker]] = {
    "classic": ClassicGroup,
    "consumer": ConsumerGroup,
    "share": ShareGroup,
    "streams": StreamsGroup,
}

# The key of the deadline for looking after old offsets; group ids that clients use may be empty.
_EXPIRY: Final = None
# How many offsets are looked at in one go for old ones, and the pause until the next.
_CHECKED_AT_ONCE: Final = 10_000
_CHECK_PAUSE_MS: Final = 10
# What kinds of groups say which topics they read.
_PROTOCOLS_WITH_TOPICS: Final = ("consumer", "streams")
# From this version on clients know that a group may not be there.
_NOT_FOUND_FROM_VERSION: Final = 9


class GroupCoordinator:
    """The groups of one broker."""

    kinds: Final = frozenset({"group", "group-config", OFFSET, PENDING, *PART_KINDS})

    def __init__(
        self,
        config: BrokerConfig,
        catalog: Catalog,
        spent_s: Callable[[], float] = time.thread_time,
    ) -> None:
        """`spent_s` says how much of the processor's time the event loop has used."""
        self.groups: dict[str, Group] = {}
        self.offsets = Offsets()
        # What was set by hand, by group; a group need not exist to have settings.
        self.configs: dict[str, Mapping[str, str]] = {}
        self.context = GroupContext(config, catalog, self.settings, self._on_earlier, spent_s)
        self._config = config
        self._catalog = catalog
        self._settings: dict[str, GroupSettings] = {}
        # Groups that have an entry of their own.
        self._recorded: set[str] = set()
        self._timers: Timers[str | None] = Timers()
        # Groups whose old offsets were not looked for yet in this round.
        self._unchecked: list[str] = []

    # ---- groups ----------------------------------------------------------------------------

    def get(self, group_id: str) -> Group | None:
        return self.groups.get(group_id)

    def get_or_make(self, group_id: str, kind: Kind) -> Group:
        """The group of this kind; a new one, if there is none or an empty one of another kind.

        ApiError if the id belongs to a group of another kind, or there are too many groups.
        """
        group = self.groups.get(group_id)
        if group is not None:
            if group.kind == kind:
                return group
            if not group.is_empty:
                raise ApiError(
                    ErrorCode.GROUP_ID_NOT_FOUND, f"{group_id!r} is a {group.kind} group"
                )
        else:
            self._check_room()
        return self._make(group_id, kind)

    def _check_room(self) -> None:
        most = self._config.limits.max_groups
        if len(self.groups) >= most:
            raise ApiError(
                ErrorCode.GROUP_MAX_SIZE_REACHED, f"the broker holds at most {most} groups"
            )

    def found_share_group(self, group_id: str, now_ms: int) -> list[Entry]:
        """Entries by which a share group is there before it has members; none if it is.

        ApiError if there are too many groups. A group of another kind must not have this id.
        """
        if group_id in self.groups:
            return []
        self._check_room()
        return [(("group", group_id), Heading(idle_since_ms=now_ms).to_json("share"))]

    def drop(self, group_id: str, code: ErrorCode = ErrorCode.COORDINATOR_NOT_AVAILABLE) -> None:
        """Forget a group; who waits for it is answered with the error."""
        group = self.groups.pop(group_id, None)
        self._timers.cancel(group_id)
        self._recorded.discard(group_id)
        if group is not None:
            group.dismiss(code)

    def drop_if_void(self, group_id: str) -> None:
        """Forget a group that nothing is known of: a member asked to join and never came."""
        group = self.groups.get(group_id)
        if (
            group is not None
            and group.is_empty
            and group_id not in self._recorded
            and not self.offsets.has_any(group_id)
        ):
            self.drop(group_id)

    def dismiss_all(self) -> None:
        """The broker stops, or reads its state again: answer everybody who waits."""
        for group in self.groups.values():
            group.dismiss(ErrorCode.COORDINATOR_NOT_AVAILABLE)

    def _make(self, group_id: str, kind: Kind) -> Group:
        self.drop(group_id)
        group = MAKERS[kind](group_id, self.context)
        self.groups[group_id] = group
        return group

    # ---- settings --------------------------------------------------------------------------

    def settings(self, group_id: str) -> GroupSettings:
        """The settings of a group, whether it is there or not."""
        return self._settings.get(group_id, DEFAULT_SETTINGS)

    def change_settings(self, group_id: str, settings: Mapping[str, str]) -> list[Entry]:
        """Give a group these settings, and no others; ApiError if one is wrong."""
        try:
            group_settings(settings)
        except ConfigError as error:
            raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from error
        limits = self._config.limits
        if group_id not in self.configs and len(self.configs) >= limits.max_groups:
            raise ApiError(
                ErrorCode.POLICY_VIOLATION,
                f"the broker holds settings of at most {limits.max_groups} groups",
            )
        return [(("group-config", group_id), dict(settings) or None)]

    # ---- offsets ---------------------------------------------------------------------------

    def committed(self, group_id: str, topic: str, partition: int) -> int | None:
        """How far a group has come in a partition; None if it has not said."""
        found = self.committed_at(group_id, topic, partition)
        return None if found is None else found.offset

    def committed_at(self, group_id: str, topic: str, partition: int) -> Committed | None:
        found = self.offsets.get(group_id, topic, partition)
        if found is None or not self._is_current(topic, found.topic_id):
            return None
        return found

    def commit(
        self,
        group_id: str,
        member_id: str,
        generation: int,
        instance_id: str | None,
        offsets: Sequence[NewOffset],
        *,
        version: int,
        now_ms: int,
        elapsed_ms: int,
        expire_ms: int | None = None,
    ) -> tuple[list[ErrorCode], list[Entry]]:
        """Commit offsets; for each an error code, and the entries for those without one."""
        group = self._committing_group(group_id, generation)
        if group is None:
            known = version >= _NOT_FOUND_FROM_VERSION
            code = ErrorCode.GROUP_ID_NOT_FOUND if known else ErrorCode.ILLEGAL_GENERATION
        else:
            code = group.check_commit(
                member_id, generation, instance_id, in_transaction=False, version=version
            )
        if group is None or code:
            self.drop_if_void(group_id)
            return [code] * len(offsets), []
        group.touch(member_id, elapsed_ms)
        stale = _stale(group, member_id, generation, offsets)
        return self._accept((OFFSET, group_id), offsets, now_ms, expire_ms, stale)

    def commit_in_transaction(
        self,
        producer_id: int,
        group_id: str,
        member_id: str,
        generation: int,
        instance_id: str | None,
        offsets: Sequence[NewOffset],
        *,
        version: int,
        now_ms: int,
    ) -> tuple[list[ErrorCode], list[Entry]]:
        """Offsets that a producer's open transaction carries; they are pending until it ends."""
        group = self._committing_group(group_id, generation)
        code, stale = ErrorCode.ILLEGAL_GENERATION, dict[Place, ErrorCode]()
        if group is not None:
            code = group.check_commit(
                member_id, generation, instance_id, in_transaction=True, version=version
            )
            if code == ErrorCode.STALE_MEMBER_EPOCH:
                # Producers do not know that one.
                code = ErrorCode.ILLEGAL_GENERATION
            gone = _stale(group, member_id, generation, offsets)
            stale = dict.fromkeys(gone, ErrorCode.ILLEGAL_GENERATION)
        if code:
            self.drop_if_void(group_id)
            return [code] * len(offsets), []
        return self._accept((PENDING, producer_id, group_id), offsets, now_ms, None, stale)

    def finish_transaction(self, producer_id: int, commit: bool, now_ms: int) -> list[Entry]:
        """The entries by which the offsets that a transaction carried are committed or dropped."""
        return list(self.offsets.finish(producer_id, self._is_current, commit=commit))

    def delete_offsets(
        self, group_id: str, places: Sequence[tuple[str, int]]
    ) -> tuple[list[ErrorCode], list[Entry]]:
        """Forget committed offsets of topics that the group does not read; a code for each.

        ApiError if that cannot be for any.
        """
        group = self.groups.get(group_id)
        if group is None:
            raise ApiError(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no group {group_id!r}")
        if not group.is_empty and group.protocol_type not in _PROTOCOLS_WITH_TOPICS:
            raise ApiError(ErrorCode.NON_EMPTY_GROUP, f"group {group_id!r} has members")
        codes, gone = [], []
        for topic, partition in places:
            known = self._catalog.topics.get(topic)
            if known is None or not 0 <= partition < known.partitions:
                codes.append(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)
            elif group.subscribed_to(topic):
                codes.append(ErrorCode.GROUP_SUBSCRIBED_TO_TOPIC)
            else:
                codes.append(ErrorCode.NONE)
                gone.append((topic, partition))
        return codes, list(self.offsets.forget(group_id, gone))

    def delete(self, group_id: str) -> tuple[ErrorCode, list[Entry]]:
        """Make a group gone, with its offsets; only one without members may go."""
        group = self.groups.get(group_id)
        if group is None:
            return ErrorCode.GROUP_ID_NOT_FOUND, []
        if not group.is_empty:
            return ErrorCode.NON_EMPTY_GROUP, []
        return ErrorCode.NONE, list(self._tombstones(group))

    def _tombstones(self, group: Group) -> Iterator[Entry]:
        yield from self.offsets.forget_group(group.id)
        yield from group.tombstones()

    def _committing_group(self, group_id: str, generation: int) -> Group | None:
        """The group whose offsets are committed; a new one for whoever is in none."""
        group = self.groups.get(group_id)
        if group is None and generation <= NO_GENERATION:
            return self.get_or_make(group_id, "classic")
        return group

    def _accept(
        self,
        kind: Key,
        offsets: Sequence[NewOffset],
        now_ms: int,
        expire_ms: int | None,
        refused: Mapping[Place, ErrorCode],
    ) -> tuple[list[ErrorCode], list[Entry]]:
        """Entries for the offsets that can be committed; their keys begin with `kind`."""
        limits, topics = self._config.limits, self._catalog.topics
        room = limits.max_committed_offsets - self.offsets.count
        group_id = str(kind[-1])
        codes: list[ErrorCode] = []
        entries: list[Entry] = []
        for topic, partition, offset, epoch, metadata in offsets:
            known, code = topics.get(topic), ErrorCode.NONE
            if known is None or not 0 <= partition < known.partitions:
                code = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            elif (topic, partition) in refused:
                code = refused[topic, partition]
            elif metadata and len(metadata) > limits.max_offset_metadata_bytes:
                code = ErrorCode.OFFSET_METADATA_TOO_LARGE
            elif len(entries) >= room and self.offsets.get(group_id, topic, partition) is None:
                code = ErrorCode.INVALID_COMMIT_OFFSET_SIZE
            else:
                turn = self.offsets.next_turn()
                value = (offset, epoch, metadata or "", known.id_text, now_ms, expire_ms, turn)
                entries.append(((*kind, topic, partition), value))
            codes.append(code)
        if not entries:
            self.drop_if_void(group_id)
        return codes, entries

    def _is_current(self, topic: str, topic_id: str) -> bool:
        known = self._catalog.topics.get(topic)
        return known is not None and known.id_text == topic_id

    # ---- time ------------------------------------------------------------------------------

    def begin(self, now_ms: int, elapsed_ms: int, *, lost: bool) -> Iterable[Entry]:
        """Everything is replayed: members get the time of their session to be heard of."""
        entries: list[Entry] = []
        for group in list(self.groups.values()):
            entries += group.begin(now_ms, elapsed_ms)
            self._schedule(group)
        self._timers.set(_EXPIRY, elapsed_ms + self._config.offsets_check_interval_ms)
        return entries

    def tick(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        entries: list[Entry] = []
        for group_id in self._timers.due(elapsed_ms):
            if group_id is None:
                entries += self._expire_some(now_ms, elapsed_ms)
                continue
            group = self.groups.get(group_id)
            if group is not None:
                news = list(group.tick(now_ms, elapsed_ms))
                entries += news
                self._schedule(group)
                if not news:
                    self.drop_if_void(group_id)
        return entries

    @property
    def next_due_ms(self) -> int | None:
        return self._timers.next_ms

    def _on_earlier(self, group_id: str) -> None:
        group = self.groups.get(group_id)
        if group is not None:
            self._schedule(group)

    def _schedule(self, group: Group) -> None:
        next_ms = group.timers.next_ms
        if next_ms is None:
            self._timers.cancel(group.id)
        else:
            self._timers.set(group.id, next_ms)

    def _expire_some(self, now_ms: int, elapsed_ms: int) -> list[Entry]:
        """Look after the next groups, but not for so long that clients have to wait."""
        if not self._unchecked:
            self._unchecked = list(self.groups)
        entries: list[Entry] = []
        room = _CHECKED_AT_ONCE
        while self._unchecked and room > 0:
            group = self.groups.get(self._unchecked.pop())
            if group is not None and group.kind != "share":
                room -= 1 + len(self.offsets.of(group.id))
                entries += self._expire(group, now_ms)
        pause_ms = _CHECK_PAUSE_MS if self._unchecked else self._config.offsets_check_interval_ms
        self._timers.set(_EXPIRY, elapsed_ms + pause_ms)
        return entries

    def _expire(self, group: Group, now_ms: int) -> Iterator[Entry]:
        """Entries by which offsets that were not needed for long are gone; a void group too."""
        offsets = self.offsets.of(group.id)
        old = [
            place
            for place, committed in offsets.items()
            if self._is_old(group, place[0], committed, now_ms)
            and not self.offsets.is_pending(group.id, *place)
        ]
        if group.is_empty and len(old) == len(offsets) and not self._has_pending(group.id):
            return self._tombstones(group)
        return self.offsets.forget(group.id, old)

    def _is_old(self, group: Group, topic: str, committed: Committed, now_ms: int) -> bool:
        if not self._is_current(topic, committed.topic_id):
            return True
        since_ms = committed.commit_ms
        if not group.is_empty:
            if group.subscribed_to(topic):
                return False
        elif group.idle_since_ms is not None:
            since_ms = max(since_ms, group.idle_since_ms)
        if committed.expire_ms is not None:
            return now_ms >= committed.expire_ms
        return now_ms - since_ms >= self._config.offsets_retention_ms

    def _has_pending(self, group_id: str) -> bool:
        return bool(self.offsets.pending_places(group_id))

    def topic_deleted(self, topic: Topic) -> Iterable[Entry]:
        return list(self.offsets.forget_topic(topic.name, topic.id))

    # ---- replay ----------------------------------------------------------------------------

    def replay(self, key: Key, value: Any) -> None:
        """Apply one entry."""
        kind, group_id = key[0], str(key[1])
        if kind == OFFSET:
            self.offsets.replay(key, value)
            if value is not None and group_id not in self.groups:
                self._make(group_id, "classic")
        elif kind == PENDING:
            self.offsets.replay_pending(key, value)
            if value is not None and str(key[2]) not in self.groups:
                self._make(str(key[2]), "classic")
        elif kind == "group-config":
            self._replay_settings(group_id, value)
        elif kind == "group":
            self._replay_group(group_id, key, value)
        else:
            self._replay_part(group_id, key, value)

    def reset(self) -> None:
        """Be as new: everything is about to be replayed."""
        self.dismiss_all()
        self.groups.clear()
        self._recorded.clear()
        self.offsets.clear()
        self.configs.clear()
        self._settings.clear()
        self._timers.clear()

    def _replay_settings(self, group_id: str, value: Any) -> None:
        self._settings.pop(group_id, None)
        self.configs.pop(group_id, None)
        if value is not None:
            self.configs[group_id] = value
            try:
                self._settings[group_id] = group_settings(value)
            except ConfigError:
                # Written by another version, which knew settings that this one does not.
                self._settings[group_id] = DEFAULT_SETTINGS

    def _replay_group(self, group_id: str, key: Key, value: Any) -> None:
        if value is None:
            self.drop(group_id, ErrorCode.GROUP_ID_NOT_FOUND)
            return
        kind: Kind = value["kind"]
        group = self.groups.get(group_id)
        if group is None or group.kind != kind:
            if kind not in MAKERS:
                return
            group = self._make(group_id, kind)
        group.replay(key, value)
        self._recorded.add(group_id)

    def _replay_part(self, group_id: str, key: Key, value: Any) -> None:
        """Parts may come before their group: the journal is compacted."""
        kind = PART_KINDS[str(key[0])]
        group = self.groups.get(group_id)
        if group is None or group.kind != kind:
            if value is None or kind not in MAKERS:
                return
            group = self._make(group_id, kind)
        group.replay(key, value)


def _stale(
    group: Group, member_id: str, generation: int, offsets: Sequence[NewOffset]
) -> dict[Place, ErrorCode]:
    """The partitions that a member may not commit any more, though it may commit others."""
    if not isinstance(group, StreamsGroup):
        return {}
    codes = {
        (topic, partition): group.check_commit_of(member_id, generation, topic, partition)
        for topic, partition, *_ in offsets
    }
    return {place: code for place, code in codes.items() if code}
