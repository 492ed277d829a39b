"""Who has which task, and how a member comes to the tasks that it is meant to have.

A member is first told to run only what it has of its target, and keeps its epoch; what it must give
up is *revoking* until it says that it has. Then it gets the new epoch and those of its missing
tasks that are free; the rest follows with later heartbeats, as others give tasks up.

An active task is free while nobody runs it. Any task is free for a member only while its process
has it in no other role, for a process keeps the state of a task in one place. A task belongs to the
member that has been told to run it until that says that it does not run it any more, or is gone.
"""

from __future__ import annotations

from collections import Counter

from penstock.broker.groups.streams.members import StreamsBeat, StreamsMember, StreamsStanding
from penstock.broker.groups.streams.tasks import NOTHING, TaskId, Tasks


class Ownership:
    """Who has which task in one group."""

    def __init__(self) -> None:
        # The member and the process that have been told to run an active task.
        self.owners: dict[TaskId, tuple[str, str]] = {}
        # How often each process has a task as a standby or a warm-up.
        self._copies: dict[TaskId, Counter[str]] = {}

    def add(self, member: StreamsMember) -> None:
        """A member has what its standing says."""
        process = member.profile.process_id
        for tasks in (member.standing.assigned, member.standing.revoking):
            self.owners |= dict.fromkeys(tasks.active, (member.id, process))
            for task in (*tasks.standby, *tasks.warmup):
                self._copies.setdefault(task, Counter())[process] += 1

    def remove(self, member: StreamsMember | None) -> None:
        """What was added of a member holds no longer."""
        if member is None:
            return
        for tasks in (member.standing.assigned, member.standing.revoking):
            for task in tasks.active:
                if self.owners.get(task, ("", ""))[0] == member.id:
                    del self.owners[task]
            for task in (*tasks.standby, *tasks.warmup):
                copies = self._copies[task]
                copies[member.profile.process_id] -= 1
                if not +copies:
                    del self._copies[task]

    def lead(self, member: StreamsMember, beat: StreamsBeat, epoch: int) -> StreamsStanding:
        """The next step of a member towards its target for this epoch."""
        standing = member.standing
        if member.reconciled_to(epoch):
            return standing
        own_epoch = standing.epoch
        if standing.revoking:
            if _may_run(beat, standing.revoking):
                return standing
            # If there is more to give up, it has come one epoch further all the same.
            own_epoch = min(own_epoch + 1, epoch)
        kept = standing.assigned & standing.target
        revoking = standing.assigned - kept
        if _may_run(beat, revoking):
            return standing.at(own_epoch, kept, revoking)
        # Until its entry is written, its standing still counts it among those that it has.
        freed = revoking | standing.revoking
        return standing.at(epoch, kept | self._free(member, standing.target - kept, freed))

    def _free(self, member: StreamsMember, wanted: Tasks, freed: Tasks) -> Tasks:
        """Those of these tasks that a member may be given; `freed` is what it has just given up."""
        process = member.profile.process_id

        def is_here(task: TaskId) -> bool:
            """Whether the member's process has the task in some role."""
            copies = self._copies.get(task)
            count = 0 if copies is None else copies[process]
            count -= (task in freed.standby) + (task in freed.warmup)
            owner = self.owners.get(task)
            runs = owner is not None and owner[1] == process and task not in freed.active
            return count > 0 or runs

        return Tasks(
            frozenset(
                task
                for task in wanted.active
                if (task not in self.owners or task in freed.active) and not is_here(task)
            ),
            frozenset(task for task in wanted.standby if not is_here(task)),
            frozenset(task for task in wanted.warmup if not is_here(task)),
        )


def _may_run(beat: StreamsBeat, tasks: Tasks) -> bool:
    """Whether a member may still be running one of these; if it does not say, it may."""
    return tasks != NOTHING and (beat.owned is None or bool(beat.owned & tasks))
