"""Which member is to run which tasks: the assignor `sticky`, as Apache Kafka's of that name.

A function of the members (their processes, and what they were last meant to have) and of how many
tasks each subtopology has. A process is an instance of the application; its members are threads.

- Every task is active in one member. It stays where it was, or goes to where it was a standby, as
  long as that member has not more than its share; the rest goes to the processes with the fewest
  tasks per thread, one subtopology after the other, so that equal numbers come together.
- A task with state has as many standbys as wanted, each in another process than its active one and
  than each other. They stay too, and one is kept where the task was active before. Where there are
  not enough processes, there are fewer.
- There are no warm-ups: a task moves at once, and its state is restored where it goes.

Answers are the same for the same arguments, whatever the order of the members.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.broker.groups.streams.tasks import NOTHING, TaskId, Tasks

log = logging.getLogger(__name__)

STICKY: Final = "sticky"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One member: the process it belongs to, and what it was meant to have."""

    process_id: str
    held: Tasks = NOTHING


class _Process:
    """One process and what its members have got so far."""

    def __init__(self, id_: str) -> None:
        self.id = id_
        self.tasks: set[TaskId] = set()
        # How many tasks each member has.
        self.counts: dict[str, int] = {}
        self._total = 0
        # Members by their counts; what does not hold any more is dropped when it comes up.
        self._idlest: list[tuple[int, str]] = []

    def enlist(self, member: str) -> None:
        self.counts[member] = 0
        heapq.heappush(self._idlest, (0, member))

    def give(self, member: str, task: TaskId) -> int:
        """A member gets a task; how many it has by then."""
        self.tasks.add(task)
        self._total += 1
        count = self.counts[member] = self.counts[member] + 1
        heapq.heappush(self._idlest, (count, member))
        return count

    @property
    def load(self) -> float:
        return self._total / len(self.counts)

    @property
    def idlest(self) -> str:
        while self._idlest[0][0] != self.counts[self._idlest[0][1]]:
            heapq.heappop(self._idlest)
        return self._idlest[0][1]


class _Quota:
    """How many tasks a member may have, so that the others get their share, too.

    Where tasks cannot be divided evenly some members get one more. Once enough have that, the
    quota falls for the rest.
    """

    def __init__(self, tasks: int, members: int) -> None:
        self._tasks = tasks
        self._members = members
        self.value = 0
        self._compute()

    def _compute(self) -> None:
        self.value = -(-self._tasks // self._members) if self._members else 0

    def reached(self, count: int) -> None:
        """A member has got its task number `count`."""
        if count == self.value:
            self._members -= 1
            self._tasks -= count
            self._compute()


class _Heap:
    """Processes, the least loaded first."""

    def __init__(self, processes: Collection[_Process]) -> None:
        self._items = [(process.load, process.id, process) for process in processes]
        heapq.heapify(self._items)

    def pop(self) -> _Process | None:
        return heapq.heappop(self._items)[2] if self._items else None

    def push(self, process: _Process) -> None:
        heapq.heappush(self._items, (process.load, process.id, process))


class _Assignment:
    """Tasks on their way to members."""

    def __init__(
        self,
        members: Mapping[str, Candidate],
        counts: Mapping[str, int],
        stateful: Collection[str],
        standbys: int,
    ) -> None:
        self._standbys = standbys
        self._tasks = [(part, number) for part, count in counts.items() for number in range(count)]
        self._stateful = [task for task in self._tasks if task[0] in stateful]
        total = len(self._tasks)
        self._active_quota = _Quota(total, len(members))
        self._quota = _Quota(total + standbys * len(self._stateful), len(members))
        self._process_of: dict[str, _Process] = {}
        self._was_active: dict[TaskId, str] = {}
        self._was_standby: dict[TaskId, list[str]] = {}
        self.active: dict[str, set[TaskId]] = {id_: set() for id_ in members}
        self.standby: dict[str, set[TaskId]] = {id_: set() for id_ in members}
        processes: dict[str, _Process] = {}
        for id_ in sorted(members):
            one = members[id_]
            process = processes.setdefault(one.process_id, _Process(one.process_id))
            process.enlist(id_)
            self._process_of[id_] = process
            self._was_active |= dict.fromkeys(one.held.active, id_)
            for task in one.held.standby:
                self._was_standby.setdefault(task, []).append(id_)
        self._processes = [processes[id_] for id_ in sorted(processes)]

    def _give(self, member: str, task: TaskId, *, active: bool) -> None:
        count = self._process_of[member].give(member, task)
        (self.active if active else self.standby)[member].add(task)
        if active:
            self._active_quota.reached(count)
        self._quota.reached(count)

    def _count(self, member: str) -> int:
        return self._process_of[member].counts[member]

    def _idlest(self, members: list[str], task: TaskId) -> str | None:
        """Of those that had a task as a standby, the least loaded whose process has it not yet."""
        free = [one for one in members if task not in self._process_of[one].tasks]
        return min(
            free, key=lambda one: (self._process_of[one].load, self._count(one), one), default=None
        )

    def assign_active(self) -> None:
        rest: list[TaskId] = []
        for task in sorted(self._tasks, key=_by_number):
            member = self._was_active.get(task)
            if member is not None and self._count(member) < self._active_quota.value:
                self._give(member, task, active=True)
            else:
                rest.append(task)
        left: list[TaskId] = []
        for task in rest:
            member = self._idlest(self._was_standby.get(task, []), task)
            if member is not None and self._count(member) < self._active_quota.value:
                self._give(member, task, active=True)
            else:
                left.append(task)
        heap = _Heap(self._processes)
        for task in sorted(left):
            process = heap.pop()
            if process is None:
                return
            self._give(process.idlest, task, active=True)
            heap.push(process)

    def assign_standbys(self) -> None:
        rest: list[tuple[TaskId, int]] = []
        for task in sorted(self._stateful, key=_by_number, reverse=True):
            missing = self._standbys
            while missing and (member := self._former(task)) is not None:
                self._give(member, task, active=False)
                missing -= 1
            if missing:
                rest.append((task, missing))
        heap = _Heap(self._processes)
        lacking = 0
        for task, missing in sorted(rest, reverse=True):
            given = 0
            while given < missing and self._give_standby(heap, task):
                given += 1
            lacking += given < missing
        if lacking:
            log.warning(
                "%d of %d tasks with state have fewer than %d standbys: there are not enough "
                "processes",
                lacking, len(self._stateful), self._standbys,
            )  # fmt: skip

    def _former(self, task: TaskId) -> str | None:
        """Who had a task before and can take it as a standby."""
        member = self._was_active.get(task)
        if (
            member is not None
            and task not in self._process_of[member].tasks
            and self._count(member) < self._quota.value
        ):
            return member
        member = self._idlest(self._was_standby.get(task, []), task)
        if member is not None and self._count(member) < self._quota.value:
            return member
        return None

    def _give_standby(self, heap: _Heap, task: TaskId) -> bool:
        """To the least loaded process that has it not; False if there is none."""
        passed: list[_Process] = []
        while (process := heap.pop()) is not None and task in process.tasks:
            passed.append(process)
        if process is not None:
            self._give(process.idlest, task, active=False)
            passed.append(process)
        for one in passed:
            heap.push(one)
        return process is not None


def assign(
    members: Mapping[str, Candidate],
    counts: Mapping[str, int],
    stateful: Collection[str],
    standbys: int,
) -> dict[str, Tasks]:
    """What each member is to have; `counts` is how many tasks each subtopology has."""
    assignment = _Assignment(members, counts, stateful, standbys)
    assignment.assign_active()
    if standbys:
        assignment.assign_standbys()
    return {
        id_: Tasks(frozenset(assignment.active[id_]), frozenset(assignment.standby[id_]))
        for id_ in members
    }


def _by_number(task: TaskId) -> tuple[int, str]:
    return task[1], task[0]
