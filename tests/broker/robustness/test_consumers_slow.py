"""A consumer that is slow, hangs or is dead is alone in that: nobody else waits for it.

Not the producers, not other groups, not the other members of its group, not the other consumers of
its queue. (Where a topic's `overflow` is `block` and names a group its producers do wait; that is
tested with the rest of overload.)
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.testing.history import History, Place
from tests.broker import requests as rq
from tests.broker.raw import RawClient
from tests.broker.robustness.consumers_crew import Child, Event, Scene, Source
from tests.broker.robustness.consumers_pipeline import SESSION
from tests.broker.shares.members import lag_of, set_group
from tests.harness.profiles import SLOW_RECORDS

TOPIC: Final = "news"
PARTITIONS: Final = 4
CLASSIC: Final = {"session.timeout.ms": 2_000, "heartbeat.interval.ms": 150}


class Readers:
    """What the members of each group have read, and what each of them owns."""

    def __init__(self, scene: Scene) -> None:
        self.read: dict[str, Counter[tuple[int, int]]] = {}
        self.owned: dict[str, set[int]] = {}
        self._scene = scene

    def start(self, group: str, name: str, **config: Any) -> Child:
        counter = self.read.setdefault(group, Counter())

        owned = self.owned.setdefault(name, set())

        def on_event(_: Child, event: Event) -> None:
            if event["event"] == "read":
                counter.update((number, offset) for number, offset in event["records"])
            elif event["event"] == "assigned":
                owned.update(event["partitions"])
            elif event["event"] in ("revoked", "lost"):
                owned.difference_update(event["partitions"])

        config = {"group.id": group, "max.poll.interval.ms": 2_500, **config}
        return self._scene.start("member", name, on_event, topic=TOPIC, **config)

    def share(self, group: str, count: int) -> bool:
        """Whether so many members share all partitions."""
        shares = [self.owned[f"{group}-{number}"] for number in range(count)]
        return all(shares) and sorted(n for s in shares for n in s) == list(range(PARTITIONS))

    def has_all(self, source: Source, *groups: str) -> bool:
        return all(len(self.read[group]) == source.count for group in groups)


def deaf_reader(scene: Scene) -> RawClient:
    """A client that asks for far more than fits into its socket, and takes none of it."""
    deaf = RawClient(scene.broker.bootstrap)
    for _ in range(200):
        deaf.send(rq.fetch("big", {0: 0}), 12)
    return deaf


@pytest.mark.processes
def test_other_groups_members_and_producers_go_on(tmp_path: Path, seed: int) -> None:
    with Scene(tmp_path / "data", seed) as scene:
        scene.make_topic(TOPIC, PARTITIONS)
        scene.make_topic("big", 1)
        with RawClient(scene.broker.bootstrap) as client:
            answer = client.call(rq.produce("big", rq.batch(bytes(900_000))), 9)
            assert not rq.one(answer).error_code
        set_group(scene.broker, "newer", **SESSION)
        readers, history = Readers(scene), History()
        with deaf_reader(scene), Source(scene, history, TOPIC, PARTITIONS, SLOW_RECORDS) as source:
            newer = {"group.protocol": "consumer"}
            for group, config in (("older", CLASSIC), ("newer", newer), ("well", CLASSIC)):
                for number in range(3 if group != "well" else 1):
                    readers.start(group, f"{group}-{number}", **config)
            source.allow(SLOW_RECORDS // 4)
            first = ("older", "newer", "well")
            scene.wait_for(
                lambda: source.count == SLOW_RECORDS // 4 and readers.has_all(source, *first),
                "all groups have begun",
            )
            for group in ("older", "newer"):
                scene.wait_for(lambda: readers.share(group, 3), "they share the work")  # noqa: B023
            # In both groups one member hangs and one is as good as dead.
            for group in ("older", "newer"):
                scene.children[f"{group}-0"].say("hang")
                scene.children[f"{group}-1"].hold()
            source.finish()
            scene.wait_for(lambda: readers.has_all(source, "well"), "the other group goes on")
            scene.wait_for(
                lambda: readers.has_all(source, "older", "newer"), "the other members go on"
            )
        for number in range(PARTITIONS):
            place = Place(TOPIC, number)
            found = scene.read(place, committed=True)
            history.verify(place, found, end=history.end(place))
        scene.end_children()
        scene.stop_cleanly()


@pytest.mark.processes
def test_other_consumers_of_a_queue_go_on(tmp_path: Path, seed: int) -> None:
    """One takes records and hangs, one is killed with some: the others get all the rest, and
    theirs once they are given up."""
    with Scene(tmp_path / "data", seed) as scene:
        scene.make_topic(TOPIC, PARTITIONS)
        set_group(
            scene.broker,
            "queue",
            share_auto_offset_reset="earliest",
            share_record_lock_duration_ms="3000",
            share_session_timeout_ms="3000",
            share_heartbeat_interval_ms="200",
        )
        taken: Counter[str] = Counter()
        done: Counter[tuple[int, int]] = Counter()

        def on_event(child: Child, event: Event) -> None:
            if event["event"] == "delivered":
                taken[child.name] += len(event["records"])
            elif event["event"] == "confirmed":
                done.update(
                    (int(number), offset)
                    for number, answers in event["answers"].items()
                    for offset, _ in answers
                )

        config = {"group.id": "queue", "max.poll.records": 10, "reject_share": 0.0}
        for name in ("hanging", "dead"):
            # They release all that they take, so that none of it is done by them.
            scene.start("share", name, on_event, topic=TOPIC, release_share=1.0, **config)
        with Source(scene, History(), TOPIC, PARTITIONS, SLOW_RECORDS) as source:
            source.allow(40)
            scene.wait_for(lambda: len(taken) == 2, "both have taken something")
            scene.children["hanging"].hold()
            scene.kill_child("dead")
            for name in ("one", "other"):
                scene.start("share", name, on_event, topic=TOPIC, release_share=0.0, **config)
            source.finish()
            scene.wait_for(lambda: len(done) == SLOW_RECORDS, "the others do all the work")
        scene.wait_for(lambda: not lag_of(scene.broker, "queue"), "the queue is empty")
        assert set(done.values()) == {1}, json.dumps(sorted(done.items())[:20])
        scene.end_children()
        scene.stop_cleanly()
