"""Members of streams groups over the wire: heartbeats as a Kafka Streams client sends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any, Final

from penstock.wire import Message
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.streams_group_heartbeat import (
    CopartitionGroup,
    KeyValue,
    RequestTaskIds,
    StreamsGroupHeartbeatRequest,
    Subtopology,
    TopicInfo,
    Topology,
)

PATIENCE_S: Final = 60.0
# No shorter than what Apache Kafka's broker is told to allow.
REBALANCE_MS: Final = 60_000

Call = Callable[[Message], Any]
# Active, standby and warm-up tasks by subtopology.
Owned = list[dict[str, list[int]]]


def word_count(app: str, source: str, *, epoch: int = 0) -> Topology:
    """A repartition topic between two subtopologies; the second has state."""
    words = TopicInfo(name=f"{app}-words", topic_configs=[])
    settings = [KeyValue(key="cleanup.policy", value="compact")]
    counts = TopicInfo(name=f"{app}-counts", topic_configs=settings)
    return Topology(
        epoch=epoch,
        subtopologies=[
            subtopology("0", [source], sinks=[words.name]),
            subtopology("1", [], repartition=[words], changelogs=[counts]),
        ],
    )


def subtopology(
    id_: str,
    sources: Sequence[str],
    *,
    repartition: Sequence[TopicInfo] = (),
    sinks: Sequence[str] = (),
    changelogs: Sequence[TopicInfo] = (),
    together: Sequence[tuple[list[int], list[int]]] = (),
) -> Subtopology:
    """`together` are groups of topics that are joined: sources and repartition topics by index."""
    return Subtopology(
        subtopology_id=id_,
        source_topics=list(sources),
        source_topic_regex=[],
        repartition_source_topics=list(repartition),
        repartition_sink_topics=list(sinks),
        state_changelog_topics=list(changelogs),
        copartition_groups=[
            CopartitionGroup(
                source_topics=of_sources,
                source_topic_regex=[],
                repartition_source_topics=of_repartition,
            )
            for of_sources, of_repartition in together
        ],
    )


def stateless(*sources: str, epoch: int = 0) -> Topology:
    return Topology(epoch=epoch, subtopologies=[subtopology("0", sources)])


class StreamsClient:
    """One member of a group, as far as its side of the conversation goes."""

    def __init__(
        self,
        call: Call,
        group: str,
        id_: str,
        topology: Topology | None = None,
        *,
        process: str | None = None,
        **more: Any,
    ) -> None:
        self.call, self.group, self.id, self.topology = call, group, id_, topology
        self.process = id_ if process is None else process
        self.more = more
        self.epoch = 0
        self.owned: Owned = [{}, {}, {}]
        self.statuses: list[tuple[int, str]] = []

    def request(self, **fields: Any) -> StreamsGroupHeartbeatRequest:
        request = StreamsGroupHeartbeatRequest(
            group_id=self.group, member_id=self.id, member_epoch=self.epoch, **self.more
        )
        if self.epoch == 0:
            request.rebalance_timeout_ms = REBALANCE_MS
            request.topology = self.topology
            request.process_id = self.process
            request.active_tasks, request.standby_tasks, request.warmup_tasks = [], [], []
        for name, value in fields.items():
            setattr(request, name, value)
        return request

    def beat(self, **fields: Any) -> Any:
        """One heartbeat, and what it is answered."""
        answer = self.call(self.request(**fields))
        if not answer.error_code:
            self.epoch = answer.member_epoch
            self.statuses = [
                (status.status_code, status.status_detail) for status in answer.status or ()
            ]
            if answer.active_tasks is not None:
                roles = (answer.active_tasks, answer.standby_tasks, answer.warmup_tasks)
                self.owned = [
                    {item.subtopology_id: sorted(item.partitions) for item in role}
                    for role in roles
                ]
        return answer

    def error(self, **fields: Any) -> str:
        """The name of the error that a heartbeat is answered."""
        return ErrorCode(self.beat(**fields).error_code).name

    def own(self, owned: Owned | None = None) -> dict[str, list[RequestTaskIds]]:
        """The fields that say what it runs."""
        names = ("active_tasks", "standby_tasks", "warmup_tasks")
        return {
            name: [
                RequestTaskIds(subtopology_id=part, partitions=numbers)
                for part, numbers in role.items()
            ]
            for name, role in zip(names, self.owned if owned is None else owned, strict=True)
        }

    def acknowledge(self) -> Any:
        """A heartbeat that says what it runs: all that it was told."""
        return self.beat(**self.own())

    def leave(self) -> str:
        self.owned = [{}, {}, {}]
        return self.error(member_epoch=-1)

    @property
    def active(self) -> list[tuple[str, int]]:
        return sorted((part, number) for part, some in self.owned[0].items() for number in some)

    @property
    def standby(self) -> list[tuple[str, int]]:
        return sorted((part, number) for part, some in self.owned[1].items() for number in some)


def settle(*members: StreamsClient, tasks: int) -> None:
    """All do what they are told until all active tasks are there, and nothing is told anew."""
    deadline = monotonic() + PATIENCE_S
    quiet = 0
    while quiet < 2 or sum(len(member.active) for member in members) != tasks:
        assert monotonic() < deadline, [(member.owned, member.statuses) for member in members]
        before = [(member.epoch, member.owned) for member in members]
        for member in members:
            member.acknowledge()
        is_quiet = before == [(member.epoch, member.owned) for member in members]
        quiet = quiet + 1 if is_quiet and not any(member.statuses for member in members) else 0
