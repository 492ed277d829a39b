"""Members of streams groups to play, beside `machine`: one heartbeat at a time, without a broker.

A `Worker` does what a thread of a Kafka Streams application does: it joins, runs what it is told,
gives up what it is told to when it has finished with it, and joins again when it is fenced. Its
answers may get lost. `runs` is what it runs right now, whatever the broker believes. `Streams` is
the world around them: it makes the internal topics that the group misses.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.broker.catalog import ApiError
from penstock.broker.groups.members import JOINING, LEAVING
from penstock.broker.groups.streams.group import StreamsGroup
from penstock.broker.groups.streams.members import StreamsAnswer, StreamsBeat
from penstock.broker.groups.streams.tasks import NOTHING, TaskId, Tasks
from penstock.broker.groups.streams.topology import InternalTopic, Subtopology, Topology
from penstock.wire.errors import ErrorCode
from tests.broker.groups.machine import GROUP
from tests.broker.groups.readers import World

REBALANCE_MS: Final = 60_000
SESSION_MS: Final = 45_000
INTERVAL_MS: Final = 5_000
# Without the delays, which have tests of their own.
AT_ONCE: Final = {
    "streams.initial.rebalance.delay.ms": "0",
    "streams.assignment.interval.ms": "0",
}
FENCED: Final = (ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID)


def word_count(source: str = "lines", epoch: int = 0) -> Topology:
    """A repartition topic between two subtopologies; the second has state."""
    return Topology(
        epoch,
        (
            Subtopology("0", (source,), repartition_sinks=("words",)),
            Subtopology(
                "1",
                repartition_sources=(InternalTopic("words"),),
                changelogs=(InternalTopic("counts"),),
            ),
        ),
    )


class Streams(World):
    """A coordinator, a catalog of topics, and a broker that makes internal topics."""

    def __init__(self, settings: dict[str, str] | None = None, **config: Any) -> None:
        super().__init__(**config)
        self.configure({**AT_ONCE, **(settings or {})})
        self.makes_topics = True

    def configure(self, settings: dict[str, str]) -> None:
        self.write(self.groups.change_settings(GROUP, settings))

    @property
    def streams(self) -> StreamsGroup:
        group = self.groups.get(GROUP)
        assert isinstance(group, StreamsGroup)
        return group

    def make_missing(self, topics: Iterable[InternalTopic]) -> None:
        for topic in topics:
            if self.makes_topics and topic.name not in self.catalog.topics:
                self.make(topic.name, topic.partitions)

    def all_tasks(self) -> frozenset[TaskId]:
        configured = self.streams.configured
        assert configured is not None
        return frozenset(
            (item.part.id, number)
            for item in configured.subtopologies or ()
            for number in range(item.tasks)
        )


@dataclass
class Worker:
    """One thread of an application."""

    world: Streams
    id: str
    process: str = ""
    topology: Topology = field(default_factory=word_count)
    epoch: int = JOINING
    # What it runs, and what it has been told to run.
    runs: Tasks = NOTHING
    told: Tasks = NOTHING
    # What it has last said that it runs; None: it must say everything anew.
    said: Tasks | None = None
    slow: bool = False
    answer: StreamsAnswer | None = None

    def __post_init__(self) -> None:
        self.process = self.process or self.id

    def beat(self, *, lose_answer: bool = False, **changes: Any) -> StreamsAnswer | None:
        """One heartbeat; None if it was fenced, or the answer got lost."""
        try:
            answer = self.send(self.next_beat(**changes))
        except ApiError as error:
            # The last: it runs tasks that went with their topics, which ends a client.
            if error.code not in (*FENCED, ErrorCode.INVALID_REQUEST) or self.epoch == JOINING:
                raise
            self.abandon()
            return None
        if lose_answer:
            # What it has not begun to run it does not begin: it will be told anew.
            self.said = None
            self.told &= self.runs
            return None
        self.epoch, self.answer = answer.epoch, answer
        if answer.assigned is not None:
            self.told = answer.assigned
            self.said = None
        if not self.slow:
            self.settle()
        return answer

    def next_beat(self, **changes: Any) -> StreamsBeat:
        fields: dict[str, Any] = {}
        if self.epoch == JOINING:
            fields = {
                "topology": self.topology,
                "owned": NOTHING,
                "process_id": self.process,
                "rebalance_timeout_ms": REBALANCE_MS,
            }
        elif self.said != self.runs:
            fields = {"owned": self.runs}
        self.said = self.runs
        return StreamsBeat(self.id, self.epoch, **{**fields, **changes})

    def send(self, beat: StreamsBeat) -> StreamsAnswer:
        world = self.world
        group = (
            world.groups.get_or_make(GROUP, "streams")
            if beat.epoch == JOINING
            else world.groups.groups[GROUP]
        )
        assert isinstance(group, StreamsGroup)
        handle = group.leave if beat.epoch == LEAVING else group.heartbeat
        try:
            answer, entries = handle(beat, world.now_ms, world.elapsed_ms)
        except ApiError:
            world.groups.drop_if_void(GROUP)
            raise
        world.write(entries)
        world.make_missing(answer.missing)
        return answer

    def settle(self) -> None:
        """Give up what it must, then run what it is to run."""
        self.runs = self.told

    def abandon(self) -> None:
        """It is no member any more: it runs nothing, and joins again."""
        self.runs = self.told = NOTHING
        self.said, self.epoch = None, JOINING

    def leave(self) -> None:
        self.runs = NOTHING
        self.send(StreamsBeat(self.id, LEAVING))
        self.abandon()


def settle(workers: Iterable[Worker], rounds: int = 40) -> None:
    """Everybody beats and does what it is told, until nobody is told anything new."""
    workers = list(workers)
    quiet = 0
    for worker in workers:
        worker.slow = False
        worker.settle()
    for _ in range(rounds):
        before = [(worker.epoch, worker.runs) for worker in workers]
        for worker in workers:
            worker.beat()
        quiet = quiet + 1 if before == [(one.epoch, one.runs) for one in workers] else 0
        if quiet == 2:
            return
    raise AssertionError(f"not settled after {rounds} rounds")
