"""A queue under faults: consumers that accept, release and reject, and die in between.

What was confirmed as accepted or rejected must never be delivered again, whoever dies. In the end
every record was finished by somebody or is among the dead letters. A restart and a consumer that
never saw any of it have the last word: it must get only what was written afterwards.
"""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from typing import Any, Final

from penstock.testing.history import History, Place, QueueHistory
from tests.broker.robustness.consumers_crew import Child, Event, Scene, Source
from tests.broker.shares.members import lag_of, set_group

TOPIC: Final = "jobs"
GROUP: Final = "workers"
DEAD: Final = "jobs.dead"
PARTITIONS: Final = 2
CONSUMERS: Final = 3
SETTINGS: Final = {
    "share_auto_offset_reset": "earliest",
    "share_session_timeout_ms": "2000",
    "share_heartbeat_interval_ms": "200",
    "share_record_lock_duration_ms": "2000",
    "share_delivery_count_limit": "4",
    "share_partition_max_record_locks": "100",
    "errors_deadletterqueue_topic_name": DEAD,
}


class QueueTest:
    """The consumers, their source, and what became of each record."""

    def __init__(
        self, data: Path, seed: int, *, total: int, ordered: bool = False, **settings: Any
    ) -> None:
        self.scene = Scene(data, seed, **settings)
        self.history = History()
        self.queue = QueueHistory()
        self.source = Source(self.scene, self.history, TOPIC, PARTITIONS, total)
        self.confirmed = 0
        self.dead_letters = 0
        self.errors: Counter[str] = Counter()
        self._ordered = ordered
        self._numbers = itertools.count()

    def run(self, faults: int) -> None:
        """So many faults while records flow, then calm, then the judgement."""
        with self.scene as scene, self.source:
            scene.make_topic(TOPIC, PARTITIONS)
            scene.make_topic(DEAD, PARTITIONS)
            ordered = str(self._ordered).lower()
            set_group(scene.broker, GROUP, share_ordered_by_key=ordered, **SETTINGS)
            for _ in range(CONSUMERS):
                self._start()
            share = self.source.total // (faults + 1)
            for _ in range(faults):
                self.source.allow(share)
                target = self.confirmed + share // 3
                scene.wait_for(lambda: self._has_come_to(target), "records are accepted")  # noqa: B023
                self._fault()
            scene.calm()
            self.source.finish()
            self._await_empty()
            scene.stop_children()
            self._have_the_last_word()
            self.verify()
            scene.stop_cleanly()

    # ---- consumers -----------------------------------------------------------------------

    def _start(self, **shares: float) -> None:
        shares = {"release_share": 0.1, "reject_share": 0.03, **shares}
        config: dict[str, Any] = {"group.id": GROUP, "max.poll.records": 20, **shares}
        self.scene.start(
            "share", f"consumer-{next(self._numbers)}", self._on_event, topic=TOPIC, **config
        )

    def _on_event(self, child: Child, event: Event) -> None:
        kind = event["event"]
        if kind == "delivered":
            for number, offset, _ in event["records"]:
                self.queue.delivered(
                    child.name, Place(TOPIC, number), offset, asked_at=event["asked_at"]
                )
        elif kind == "answering":
            for place, offset, _ in _answers(event):
                self.queue.answering(place, offset)
        elif kind == "confirmed":
            for place, offset, accepted in _answers(event):
                self.queue.confirmed(place, offset, accepted=accepted, at=event["at"])
                self.confirmed += 1
            self.errors.update(event["errors"])
        elif kind == "refused":
            for place, offset, _ in _answers(event):
                self.queue.refused(place, offset)
        elif kind == "trouble":
            self.errors[event["error"]] += 1

    def _has_come_to(self, confirmed: int) -> bool:
        """So many answers were confirmed, or there is nothing more to answer for."""
        return self.confirmed >= confirmed or bool(
            self.confirmed
            and self.source.count == self.source.allowed
            and not lag_of(self.scene.broker, GROUP)
        )

    def _fault(self) -> None:
        kind = self.scene.rng.choice(("consumer", "consumer", "broker", "broker", "network"))
        if kind == "broker":
            self.scene.kill_broker()
        elif kind == "network":
            self.scene.disturb_network()
        else:
            self.scene.kill_child(self.scene.rng.choice(sorted(self.scene.children)))
            self.scene.faults["consumer killed"] += 1
            self._start()

    # ---- the judgement -------------------------------------------------------------------

    def _await_empty(self) -> None:
        self.scene.wait_for(
            lambda: not lag_of(self.scene.broker, GROUP), "every record is finished"
        )

    def _have_the_last_word(self) -> None:
        """After a restart only what is new comes, and all of it."""
        self.scene.kill_broker()
        self._start(release_share=0.0, reject_share=0.0)
        after = Source(self.scene, self.history, TOPIC, PARTITIONS, 10 * PARTITIONS, "after")
        with after:
            after.finish()
            self._await_empty()
        self.scene.stop_children()
        for source in (self.source, after):
            for place, offsets in source.written.items():
                for offset in offsets:
                    self.queue.written(place, offset)

    def verify(self) -> None:
        dead: set[tuple[Place, int]] = set()
        for number in range(PARTITIONS):
            place = Place(TOPIC, number)
            found = self.scene.read(place, committed=False)
            self.history.verify(place, found, end=self.history.end(place))
            for letter in self.scene.messages(Place(DEAD, number), committed=False):
                told = dict(letter.headers() or ())
                where = Place(_text(told["__dlq.errors.topic"]), _number(told, "partition"))
                dead.add((where, _number(told, "offset")))
        self.dead_letters = len(dead)
        self.queue.verify(dead)

    def report(self) -> str:
        return (
            f"{self.source.count} records, {self.queue.delivery_count} deliveries, "
            f"{self.confirmed} confirmed, {self.dead_letters} dead letters, "
            f"{self.scene.kills} broker kills, {dict(self.scene.faults)}"
        )


def _answers(event: Event) -> list[tuple[Place, int, bool]]:
    return [
        (Place(TOPIC, int(number)), offset, accepted)
        for number, answers in event["answers"].items()
        for offset, accepted in answers
    ]


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _number(told: dict[str, Any], name: str) -> int:
    return int(_text(told[f"__dlq.errors.{name}"]))
