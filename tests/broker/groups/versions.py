"""What `test_versions` asks of the APIs of classic groups and committed offsets.

Groups are named like the subject's topic, so each version has one of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from penstock.wire import Message
from tests.broker.group_requests import (
    commit,
    committed,
    delete_groups,
    describe,
    forget,
    heartbeat,
    join,
    leave,
    list_groups,
    offsets_of,
    sync,
)

_OLD_JOIN: Final = 3
_MUST_KNOW_ID: Final = 4
_BY_ID: Final = 10


def _member(subject: Any) -> tuple[str, int]:
    """A member that has not synced yet."""
    answer = subject.client.call(join(subject.topic), _OLD_JOIN)
    return answer.member_id, answer.generation_id


def _synced(subject: Any) -> tuple[str, int]:
    member, generation = _member(subject)
    subject.client.call(sync(subject.topic, member, generation, {member: b"all"}))
    return member, generation


def _named(subject: Any, version: int) -> Any:
    return subject.id if version >= _BY_ID else subject.topic


def _join(subject: Any, version: int) -> Message:
    if version < _MUST_KNOW_ID:
        return join(subject.topic)
    return join(subject.topic, subject.client.call(join(subject.topic), version).member_id)


def _sync(subject: Any, version: int) -> Message:
    member, generation = _member(subject)
    return sync(subject.topic, member, generation, {member: b"all"})


def _fetch(subject: Any, version: int) -> Message:
    subject.client.call(commit(subject.topic, subject.topic, {0: 7}), 9)
    return committed(subject.topic, _named(subject, version), 0)


def _leave(subject: Any, version: int) -> Message:
    return leave(subject.topic, (_synced(subject)[0], None))


def _describe(subject: Any, version: int) -> Message:
    _synced(subject)
    return describe(subject.topic)


def _committed_before(request: Callable[[Any], Message]) -> Callable[[Any, int], Message]:
    def ask(subject: Any, version: int) -> Message:
        subject.client.call(commit(subject.topic, subject.topic, {0: 7}), 9)
        return request(subject)

    return ask


def _is_described(subject: Any, answer: Any) -> bool:
    (group,) = answer.groups
    told = group.group_state, [member.member_assignment for member in group.members]
    return bool(told == ("Stable", [b"all"]))


ASKED_OF_GROUPS: Final[dict[int, tuple[Any, Any]]] = {
    8: (
        lambda s, v: commit(s.topic, _named(s, v), {0: 5}),
        lambda s, a: a.topics[0].partitions[0].partition_index == 0,
    ),
    9: (_fetch, lambda s, a: offsets_of(a) == [(0, [(0, 7, "", 0)])]),
    11: (_join, lambda s, a: a.generation_id == 1 and a.leader == a.member_id),
    12: (lambda s, v: heartbeat(s.topic, *_synced(s)), lambda s, a: True),
    13: (_leave, lambda s, a: True),
    14: (_sync, lambda s, a: a.assignment == b"all"),
    15: (_describe, _is_described),
    16: (
        _committed_before(lambda s: list_groups()),
        lambda s, a: s.topic in {group.group_id for group in a.groups},
    ),
    42: (
        _committed_before(lambda s: delete_groups(s.topic)),
        lambda s, a: a.results[0].group_id == s.topic,
    ),
    47: (
        _committed_before(lambda s: forget(s.topic, s.topic, 0)),
        lambda s, a: a.topics[0].partitions[0].partition_index == 0,
    ),
}
