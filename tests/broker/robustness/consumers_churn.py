"""A group whose members come, go, die, hang and are held, while records flow.

Each member is a process that tells what its callbacks say. From that follows who owned which
partition from when to when: no two at once, except where one could not know that it was not the
owner any more. It was told that it has *lost* the partition; or it was held and could not be told;
or the group had removed it as silent, and what its callbacks said then was from before. A client
hands a callback over when the application polls next, so on a busy machine a member may hear that
it has been assigned a partition, or is to give it up, when the group has long removed it and given
the partition to somebody else. So the broker's log is asked whom it has removed, and what it has
assigned to each since.

In the end, whatever happened: every partition has one owner, and was read and committed to its
end.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaException, TopicPartition

from penstock.testing.history import History, Place
from tests.broker.robustness.consumers_child import CALL_TIMEOUT_S
from tests.broker.robustness.consumers_crew import Child, Event, Scene, Source
from tests.broker.robustness.consumers_pipeline import SESSION
from tests.broker.shares.members import set_group

TOPIC: Final = "readings"
GROUP: Final = "readers"
PARTITIONS: Final = 6
MOST_MEMBERS: Final = 5
# So many are always well: the work goes on.
LEAST_MEMBERS: Final = 2
_ORDER: Final = re.compile(
    rf"^(?P<time>\S+ \S+) .*: group {GROUP}: member (?P<member>\S+) "
    r"(?:of client (?P<client>\S+) is assigned, in epoch \d+: (?P<assigned>.*)|is removed: .*)$",
    re.MULTILINE,
)


@dataclass
class Span:
    """A member owned a partition for a time; excused: it could not know that it no longer did."""

    member: str
    partition: int
    begin: float
    end: float | None = None
    excused: bool = False


@dataclass(frozen=True)
class Order:
    """What the broker decided of a member: to remove it, or what it may read from then on."""

    member: str
    at: float
    assigned: frozenset[int] | None


@dataclass
class Ownership:
    """Who owned what when, by the word of the owners."""

    spans: list[Span] = field(default_factory=list)
    owned: dict[str, set[int]] = field(default_factory=dict)
    # In the order of the broker's log.
    orders: list[Order] = field(default_factory=list)

    def assigned(self, member: str, partitions: list[int], at: float) -> None:
        self.owned.setdefault(member, set()).update(partitions)
        for number in partitions:
            self.spans.append(Span(member, number, at))

    def given_up(
        self, member: str, partitions: list[int] | None, at: float, *, excused: bool = False
    ) -> None:
        """Of these partitions, or all, the member is the owner no more."""
        if partitions is None:
            self.owned.pop(member, None)
        else:
            self.owned.get(member, set()).difference_update(partitions)
        self._end(member, partitions, at, excused=excused)

    def suspended(self, member: str, at: float) -> None:
        """The member does nothing from now on, and may not learn what happens."""
        self._end(member, None, at, excused=True)

    def _end(self, member: str, partitions: list[int] | None, at: float, *, excused: bool) -> None:
        for span in self.spans:
            mine = span.member == member and (partitions is None or span.partition in partitions)
            if mine and span.end is None:
                span.end, span.excused = at, excused

    def conflicts(self) -> list[str]:
        """Partitions with two owners at a time."""
        found: list[str] = []
        by_partition = sorted(self.spans, key=lambda span: (span.partition, span.begin))
        for number, spans in itertools.groupby(by_partition, key=lambda span: span.partition):
            for one, other in itertools.combinations(spans, 2):
                overlap = one.end is None or one.end > other.begin
                if not overlap or one.excused or one.member == other.member:
                    continue
                if not self._outdated(one, other.begin) and not self._outdated(other, other.begin):
                    found.append(f"{number}: {one} and {other}")
        return found

    def _outdated(self, span: Span, at: float) -> bool:
        """Whether the group had removed the member, and not assigned it the partition again."""
        removed = False
        for order in self.orders:
            if order.member != span.member or order.at > at:
                continue
            if order.assigned is None:
                removed = True
            elif span.partition in order.assigned:
                removed = False
        return removed

    def is_whole(self, members: set[str]) -> bool:
        """Whether these members, and nobody else, own each partition once."""
        owners = Counter(n for name, numbers in self.owned.items() for n in numbers)
        known = {name for name, numbers in self.owned.items() if numbers} <= members
        return known and owners == Counter(range(PARTITIONS))


def orders(log: str) -> list[Order]:
    """What a broker's log says of the members of a group of the newer protocol.

    Its times are those of the wall clock, and become those that members tell.
    """
    ahead_s = time.time() - time.monotonic()
    clients: dict[str, str] = {}
    found: list[Order] = []
    for line in _ORDER.finditer(log):
        second, _, millisecond = line["time"].partition(",")
        at = time.mktime(time.strptime(second, "%Y-%m-%d %H:%M:%S")) + int(millisecond) / 1e3
        at -= ahead_s
        if line["client"] is not None:
            clients[line["member"]] = line["client"]
            numbers = frozenset(int(n) for n in re.findall(rf"{TOPIC}-(\d+)", line["assigned"]))
            found.append(Order(line["client"], at, numbers))
        elif line["member"] in clients:
            found.append(Order(clients[line["member"]], at, None))
    return found


class Churn:
    """The group, its source, and what its members did."""

    def __init__(
        self, data: Path, seed: int, *, total: int, protocol: str, **settings: Any
    ) -> None:
        self.scene = Scene(data, seed, **settings)
        self.history = History()
        self.source = Source(self.scene, self.history, TOPIC, PARTITIONS, total)
        self.ownership = Ownership()
        self.read: Counter[tuple[int, int]] = Counter()
        self._protocol = protocol
        self._numbers = itertools.count()
        self._hanging: set[str] = set()
        self._held: set[str] = set()

    def run(self, actions: int) -> None:
        """So many comings and goings, then calm, then the judgement."""
        with self.scene as scene, self.source, scene.reader(GROUP) as self._asking:
            scene.make_topic(TOPIC, PARTITIONS)
            set_group(scene.broker, GROUP, **SESSION)
            for _ in range(3):
                self._join()
            share = self.source.total // (actions + 1)
            for _ in range(actions):
                self.source.allow(share)
                target = len(self.read) + share // 3
                scene.wait_for(lambda: len(self.read) >= min(target, self.source.allowed),  # noqa: B023
                               "records are read")  # fmt: skip
                self._act()
            self._settle()
            scene.calm()
            self.source.finish()
            self._await_end()
            self.verify()
            scene.stop_children()
            scene.stop_cleanly()

    # ---- members -------------------------------------------------------------------------

    def _join(self) -> None:
        number = next(self._numbers)
        name = f"member-{number}"
        config: dict[str, Any] = {"group.id": GROUP, "client.id": name}
        if self._protocol == "consumer":
            config["group.protocol"] = "consumer"
        else:
            config |= {
                "session.timeout.ms": 2_000,
                "heartbeat.interval.ms": 150,
                "partition.assignment.strategy": self._protocol,
            }
        config["max.poll.interval.ms"] = 2_500
        if self.scene.rng.random() < 0.25:
            config["group.instance.id"] = name
        self.scene.start("member", name, self._on_event, topic=TOPIC, **config)

    def _on_event(self, child: Child, event: Event) -> None:
        kind, at, name = event["event"], event["at"], child.name
        if kind == "assigned":
            self.ownership.assigned(name, event["partitions"], at)
        elif kind == "revoked":
            self.ownership.given_up(name, event["partitions"], at)
        elif kind == "lost":
            self.ownership.given_up(name, event["partitions"], at, excused=True)
        elif kind == "left":
            self.ownership.given_up(name, None, at)
        elif kind == "hangs":
            self.ownership.suspended(name, at)
        elif kind == "read":
            self.read.update((number, offset) for number, offset in event["records"])

    @property
    def _well(self) -> list[str]:
        unwell = self._hanging | self._held
        return sorted(name for name in self.scene.children if name not in unwell)

    def _act(self) -> None:
        rng, scene = self.scene.rng, self.scene
        kinds = ["broker", "network"]
        if len(scene.children) < MOST_MEMBERS:
            kinds += ["join", "join"]
        if len(self._well) > LEAST_MEMBERS:
            kinds += ["leave", "kill", "kill", "hang", "hold"]
        else:
            kinds += ["join"]
        if self._hanging or self._held:
            kinds += ["recover"]
        kind = rng.choice(kinds)
        scene.faults[kind] += 1
        if kind == "broker":
            scene.kill_broker()
        elif kind == "network":
            scene.disturb_network()
        elif kind == "join":
            self._join()
        elif kind == "recover":
            self._recover(rng.choice(sorted(self._hanging | self._held)))
        else:
            self._harm(kind, rng.choice(self._well))

    def _harm(self, kind: str, name: str) -> None:
        scene, now = self.scene, time.monotonic()
        if kind == "hang" and not self.ownership.owned.get(name):
            # librdkafka does not mind a member that stops polling before its first assignment.
            kind = "leave"
        if kind == "leave":
            scene.children.pop(name).stop()
        elif kind == "kill":
            scene.kill_child(name)
            # It has told all that it will: what it still owned it owned until now.
            self.ownership.given_up(name, None, now)
        elif kind == "hang":
            self._hanging.add(name)
            scene.children[name].say("hang")
        else:
            self._held.add(name)
            scene.children[name].hold()
            self.ownership.suspended(name, now)

    def _recover(self, name: str) -> None:
        child = self.scene.children[name]
        if name in self._held:
            child.let_go()
        else:
            child.say("go")
        self._held.discard(name)
        self._hanging.discard(name)

    def _settle(self) -> None:
        """Everybody is well, and there are some."""
        for name in sorted(self._hanging | self._held):
            self._recover(name)
        while len(self.scene.children) < LEAST_MEMBERS:
            self._join()

    # ---- the judgement -------------------------------------------------------------------

    def _await_end(self) -> None:
        members = set(self.scene.children)
        written = {(p.partition, o) for p, offsets in self.source.written.items() for o in offsets}
        wait_for = self.scene.wait_for
        wait_for(lambda: written <= self.read.keys(), "all is read")
        try:
            wait_for(lambda: self.ownership.is_whole(members), "each partition has one owner")
        except AssertionError as error:
            raise AssertionError(f"{error}: {self.ownership.owned}") from error
        wait_for(self._is_committed, "all is committed")

    def _is_committed(self) -> bool:
        places = [TopicPartition(TOPIC, number) for number in range(PARTITIONS)]
        try:
            found = self._asking.committed(places, CALL_TIMEOUT_S)
        except KafkaException:
            return False
        ends = self.source.ends()
        return {place.partition: place.offset for place in found} == ends

    def verify(self) -> None:
        told = {span.member for span in self.ownership.spans}
        self.ownership.orders = orders(self.scene.broker.log_text())
        if self._protocol == "consumer":
            # The log is understood: whoever has told of partitions so far is in it.
            assert told <= {order.member for order in self.ownership.orders if order.assigned}
        conflicts = self.ownership.conflicts()
        assert not conflicts, "\n".join(conflicts[:10])
        for number in range(PARTITIONS):
            place = Place(TOPIC, number)
            found = self.scene.read(place, committed=True)
            self.history.verify(place, found, end=self.history.end(place))
        unknown = self.read.keys() - {
            (place.partition, offset)
            for place, offsets in self.source.written.items()
            for offset in offsets
        }
        assert not unknown, f"read, but never written: {sorted(unknown)[:10]}"

    def report(self) -> str:
        again = sum(self.read.values()) - len(self.read)
        return (
            f"{len(self.read)} records read, {again} of them again, "
            f"{len(self.ownership.spans)} assignments, {self.scene.kills} broker kills, "
            f"{dict(self.scene.faults)}"
        )
