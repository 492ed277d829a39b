"""Streams groups under everything that can happen to them, in any order.

Members join, beat, lose answers, dawdle, leave, fall silent and come back; topics come, grow and
go; the number of standbys changes; the broker is restarted. At every moment no task is active in
two members, whatever the clients have been told, and no process has a task twice. A replay of the
journal gives the state that there is. And whenever everybody has done what it was told, each task
is active in some member.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations, count
from typing import Any

import orjson
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.broker.groups.streams.group import StreamsGroup
from penstock.broker.groups.streams.tasks import TaskId
from tests.broker.groups.machine import GROUP
from tests.broker.groups.streams_tasks import (
    INTERVAL_MS,
    SESSION_MS,
    Streams,
    Worker,
    settle,
    word_count,
)
from tests.harness.profiles import examples

which = st.integers(0, 11)
# How a heartbeat is sent and taken: mostly without haste.
MANNERS = tuple(
    frozenset(words.split())
    for words in ("", "", "slow", "slow", "slow", "anew", "slow anew", "lost", "slow lost")
)


class StreamsGroups(RuleBasedStateMachine):
    """One group, its members and its topics."""

    def __init__(self) -> None:
        super().__init__()
        self.world = Streams()
        self.world.make("lines", 3)
        self.workers: list[Worker] = []
        self.ids = count(1)
        for process in "PQ":
            self.join(process)

    def one(self, at: int) -> Worker:
        return self.workers[at % len(self.workers)]

    @property
    def group(self) -> StreamsGroup | None:
        group = self.world.groups.get(GROUP)
        return group if isinstance(group, StreamsGroup) else None

    # ---- members -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.workers) < 6)
    @rule(process=st.sampled_from("PQR"))
    def join(self, process: str) -> None:
        worker = Worker(self.world, f"m{next(self.ids)}", process, word_count())
        worker.beat()
        self.workers.append(worker)

    @precondition(lambda self: self.workers)
    @rule(beats=st.lists(st.tuples(which, st.sampled_from(MANNERS)), min_size=1, max_size=12))
    def beat(self, beats: list[tuple[int, frozenset[str]]]) -> None:
        """Several, for most of what can go wrong takes more than one."""
        for at, manner in beats:
            worker = self.one(at)
            worker.slow = "slow" in manner
            if "anew" in manner:
                worker.said = None
            worker.beat(lose_answer="lost" in manner)
            self.tasks_are_in_one_place()

    @precondition(lambda self: self.workers)
    @rule(at=which)
    def finish(self, at: int) -> None:
        self.one(at).settle()

    @precondition(lambda self: self.workers)
    @rule(at=which)
    def leave(self, at: int) -> None:
        worker = self.one(at)
        self.workers.remove(worker)
        if self.group is not None and worker.id in self.group.members:
            worker.leave()

    @precondition(lambda self: self.workers)
    @rule(at=which)
    def die(self, at: int) -> None:
        """It is not heard of any more, and runs nothing."""
        self.workers.remove(self.one(at))

    @precondition(lambda self: self.workers)
    @rule(at=which)
    def crash_and_come_back(self, at: int) -> None:
        """The same thread joins again under its id, with nothing."""
        self.one(at).abandon()

    # ---- the world ---------------------------------------------------------------------------

    @rule(ms=st.sampled_from((100, INTERVAL_MS, INTERVAL_MS, 30_000)))
    def pass_time(self, ms: int) -> None:
        self.world.pass_time(ms)

    @rule(partitions=st.integers(1, 6))
    def change_source(self, partitions: int) -> None:
        """Internal topics are as large as their source: without it they are made anew."""
        topics = self.world.catalog.topics
        if "lines" in topics:
            for name in ("lines", "words", "counts"):
                if name in topics:
                    self.world.delete(name)
        else:
            self.world.make("lines", partitions)

    @rule(standbys=st.integers(0, 2))
    def change_standbys(self, standbys: int) -> None:
        self.world.configure(
            {
                "streams.initial.rebalance.delay.ms": "0",
                "streams.assignment.interval.ms": "0",
                "streams.num.standby.replicas": str(standbys),
            }
        )

    @rule()
    def restart(self) -> None:
        before = self.state()
        self.world.restart()
        assert self.state() == before

    def state(self) -> Any:
        """All that is durable of the group, and what follows from it."""
        group = self.group
        if group is None:
            return None
        members = {
            id_: (one.profile.to_json(), one.standing.to_json())
            for id_, one in sorted(group.members.items())
        }
        topology = None if group.topology is None else group.topology.to_json()
        owners = sorted((task, owner) for task, owner in group.ownership.owners.items())
        parts = (members, topology, group.heading.to_json("streams"), owners, group.state)
        return orjson.loads(orjson.dumps(parts))

    # ---- what always holds -------------------------------------------------------------------

    @invariant()
    def tasks_are_in_one_place(self) -> None:
        group = self.group
        if group is None:
            return
        # Who was removed does not know it yet; what it does is fenced by its epoch.
        alive = [
            worker
            for worker in self.workers
            if worker.id in group.members
            and worker.epoch
            in (
                group.members[worker.id].standing.epoch,
                group.members[worker.id].standing.previous_epoch,
            )
        ]
        for one, other in combinations(alive, 2):
            assert not one.runs.active & other.runs.active, (one, other)
        # No process has the state of a task in two places.
        places = Counter[tuple[str, TaskId]]()
        for worker in alive:
            tasks = (*worker.runs.active, *worker.runs.standby, *worker.runs.warmup)
            places.update((worker.process, task) for task in tasks)
        assert all(number == 1 for number in places.values()), places

    @invariant()
    def targets_are_exclusive(self) -> None:
        group = self.group
        if group is None:
            return
        for pick in ("target", "assigned", "revoking"):
            tasks = [
                task
                for member in group.members.values()
                for task in getattr(member.standing, pick).active
            ]
            assert len(tasks) == len(set(tasks)), pick
        held = {
            task: member.id
            for member in group.members.values()
            for task in member.standing.assigned.active | member.standing.revoking.active
        }
        assert {task: owner for task, (owner, _) in group.ownership.owners.items()} == held

    # ---- in the end --------------------------------------------------------------------------

    def teardown(self) -> None:
        if not self.workers:
            return
        if "lines" not in self.world.catalog.topics:
            self.world.make("lines", 3)
        # For long enough that the dead are found out.
        for _ in range(SESSION_MS // INTERVAL_MS + 1):
            for worker in self.workers:
                worker.slow = False
                worker.settle()
                worker.beat()
            self.world.pass_time(INTERVAL_MS)
        settle(self.workers)
        group = self.world.streams
        assert group.state == "Stable"
        active = [task for worker in self.workers for task in worker.runs.active]
        assert sorted(active) == sorted(self.world.all_tasks())
        self.restart()
        self.check_standbys()

    def check_standbys(self) -> None:
        wanted = self.world.groups.settings(GROUP).streams_num_standby_replicas
        processes = {worker.process for worker in self.workers}
        copies = Counter(task for worker in self.workers for task in worker.runs.standby)
        stateful = [task for task in self.world.all_tasks() if task[0] == "1"]
        assert copies == Counter(stateful * min(wanted, len(processes) - 1))


TestStreamsGroups = StreamsGroups.TestCase
TestStreamsGroups.settings = settings(max_examples=examples(60), stateful_step_count=40)
