"""Exactly once, under faults: workers that consume, transform and produce in transactions.

A source topic is filled while workers in processes of their own copy it, record by record, to a
topic with as many partitions. Workers are killed and replaced under their transactional id, the
broker is killed, the network is bad. In the end a reader of committed records must find each
source record once, in order, and nothing of a transaction that was not committed.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaException, Producer, TopicPartition

from penstock.testing.history import History, HistoryError, Place, Problem, Read
from tests.broker.robustness.consumers_child import CALL_TIMEOUT_S, COMMON, patiently
from tests.broker.robustness.consumers_crew import Child, Event, Scene, Source
from tests.broker.shares.members import set_group

SOURCE: Final = "orders"
TARGET: Final = "bills"
GROUP: Final = "billing"
PARTITIONS: Final = 3
WORKERS: Final = 3
# The newer protocol, or the older one with one of its assignors.
PROTOCOLS: Final = ("consumer", "range", "cooperative-sticky")
FAULTS: Final = ("worker", "worker", "broker", "network", "network")
# A worker stops for a while. That takes long: what it has written holds up the others until its
# transaction has timed out.
HOLD: Final = "hold"
# Events of workers that say why they read where they do, and how many of them are kept.
_TELLING: Final = frozenset(
    {"started", "begins", "committed", "consumer error", "refused", "trouble", "ended"}
)
_POSITIONS_SHOWN: Final = 300
# Of the newer protocol; in the older it is the client's to say.
SESSION: Final = {
    "consumer_session_timeout_ms": "2000",
    "consumer_heartbeat_interval_ms": "200",
}


class Pipeline:
    """The workers, their source, and the history of both topics."""

    def __init__(
        self,
        data: Path,
        seed: int,
        *,
        total: int,
        protocol: str,
        faults: Sequence[str] = FAULTS,
    ) -> None:
        self.scene = Scene(data, seed)
        self.history = History()
        self.source = Source(self.scene, self.history, SOURCE, PARTITIONS, total)
        self._protocol = protocol
        self._kinds = faults
        self._held: set[int] = set()
        self.committed = 0
        self.troubles: Counter[str] = Counter()
        # Where workers began to read, and why: shown where something is copied twice.
        self._positions: deque[str] = deque(maxlen=_POSITIONS_SHOWN)

    def run(self, faults: int) -> None:
        """All of it: so many faults while records flow, then calm, then the judgement."""
        with self.running() as scene:
            for number in range(WORKERS):
                self.start_worker(number)
            scene.wait_for(lambda: self.ready() == WORKERS, "the workers are ready")
            share = self.source.total // (faults + 1)
            for _ in range(faults):
                self.source.allow(share)
                self._wait_for_progress(share // 3)
                self._fault()
            self._let_go()
            scene.calm()
            self.source.finish()
            try:
                scene.wait_for(self.is_done, "everything is copied")
            except AssertionError as error:
                ends = self.source.ends()
                raise AssertionError(f"{error}; at {self._offsets} of {ends}") from error
            scene.stop_children()
            self.finish_transactions()
            self.verify()
            scene.stop_cleanly()

    @contextmanager
    def running(self) -> Iterator[Scene]:
        """The scene with its topics and the source; no workers yet."""
        with self.scene as scene, self.source, scene.reader(GROUP) as self._asking:
            scene.make_topic(SOURCE, PARTITIONS)
            scene.make_topic(TARGET, PARTITIONS)
            set_group(scene.broker, GROUP, **SESSION)
            yield scene

    def ready(self) -> int:
        return sum(child.counts["ready"] > 0 for child in self.scene.children.values())

    def start_worker(self, number: int, **options: Any) -> Child:
        # The first has a name in the group and is taken for the same when it comes back.
        instance = f"worker-{number}" if number == 0 else ""
        name = options.pop("name", f"worker-{number}")
        return self.scene.start(
            "transform",
            name,
            self._on_event,
            topic=SOURCE,
            to=TARGET,
            group=GROUP,
            protocol=self._protocol,
            transactional_id=f"billing-{number}",
            batch=8,
            **{"instance": instance, "abort_share": 0.1, "brink": "", **options},
        )

    # ---- what the workers tell -----------------------------------------------------------

    def _on_event(self, child: Child, event: Event) -> None:
        history = self.history
        if event["event"] == "sending":
            for number, value in event["values"]:
                place = Place(TARGET, number)
                history.sending(
                    child.name, place, None, value.encode(), transaction=event["transaction"]
                )
        elif event["event"] == "committing":
            history.committing(event["transaction"])
        elif event["event"] == "ended":
            for number, offset, value in event["written"]:
                history.acknowledged(Place(TARGET, number), offset, None, value.encode())
            history.ended(event["transaction"], committed=event["committed"])
            self.committed += event["committed"]
        elif event["event"] in ("trouble", "refused"):
            self.troubles[event["error"]] += 1
        if event["event"] in _TELLING:
            self._positions.append(f"{child.name}: {event}")

    # ---- faults --------------------------------------------------------------------------

    def _wait_for_progress(self, records: int) -> None:
        """Until some more transactions are through, or all that there is."""
        target = self.committed + max(1, min(records // 8, self.scene.rng.randint(1, 6)))
        self.scene.wait_for(
            lambda: self.committed >= target or self._has_nothing_to_do(), "the pipeline goes on"
        )

    def _has_nothing_to_do(self) -> bool:
        return self.source.count == self.source.allowed and self.is_done()

    def _fault(self) -> None:
        self._let_go()
        kind = self.scene.rng.choice(self._kinds)
        if kind == "broker":
            self.scene.kill_broker()
        elif kind == "network":
            self.scene.disturb_network()
        else:
            number = self.scene.rng.randrange(WORKERS)
            self.scene.faults["worker held" if kind == HOLD else "worker killed"] += 1
            if kind == HOLD:
                self.scene.children[f"worker-{number}"].hold()
                self._held.add(number)
                return
            self.scene.kill_child(f"worker-{number}")
            self.start_worker(number)

    def _let_go(self) -> None:
        for number in self._held:
            self.scene.children[f"worker-{number}"].let_go()
        self._held.clear()

    def is_done(self) -> bool:
        """Whether the group has committed all that the source has."""
        places = [TopicPartition(SOURCE, number) for number in range(PARTITIONS)]
        try:
            found = self._asking.committed(places, CALL_TIMEOUT_S)
        except KafkaException:
            return False
        self._offsets = {place.partition: place.offset for place in found}
        return all(self._offsets[number] == end for number, end in self.source.ends().items())

    def finish_transactions(self) -> None:
        """What the last of the dead have left open is aborted by a successor."""
        for number in range(WORKERS):
            config = {name: value for name, value in COMMON.items() if "fetch" not in name}
            name = f"billing-{number}"
            producer = Producer(
                {**config, "bootstrap.servers": self.scene.bootstrap, "transactional.id": name}
            )
            patiently(producer.init_transactions, CALL_TIMEOUT_S)

    # ---- the judgement -------------------------------------------------------------------

    def verify(self) -> None:
        problems: list[Problem] = []
        for number in range(PARTITIONS):
            place = Place(SOURCE, number)
            found = self.scene.read(place, committed=False)
            problems += self.history.check(place, found, end=self.history.end(place))
            place = Place(TARGET, number)
            everything = self.scene.read(place, committed=False)
            problems += self.history.check(place, everything, end=self.history.end(place))
            seen = self.scene.read(place, committed=True)
            problems += self.history.check(place, seen, end=self.history.end(place), committed=True)
            problems += _copy_problems(place, found, seen)
        problems += self.history.check_transactions()
        if problems:
            error = HistoryError(problems)
            error.add_note("\n".join(self._positions))
            raise error

    def report(self) -> str:
        scene = self.scene
        return (
            f"{self.source.count} records, transactions {self.history.transaction_counts()}, "
            f"{scene.kills} broker kills, faults {dict(scene.faults)}, "
            f"{sum(self.troubles.values())} troubles"
        )


def _copy_problems(place: Place, source: list[Read], target: list[Read]) -> list[Problem]:
    """The copy must hold each record of the source once, in its order."""
    problems: list[Problem] = []
    copied: dict[int, int] = {}
    last = -1
    for item in target:
        assert item.value is not None
        number, offset = map(int, item.value.split(b":")[:2])
        if number != place.partition:
            problems.append(Problem("unknown", place, item.offset, f"comes from {number}"))
        if offset in copied:
            detail = f"source {offset} is also at {copied[offset]}"
            problems.append(Problem("copied twice", place, item.offset, detail))
        elif offset < last:
            detail = f"source {offset} comes after {last}"
            problems.append(Problem("copied out of order", place, item.offset, detail))
        copied.setdefault(offset, item.offset)
        last = max(last, offset)
    problems += [
        Problem("not copied", place, item.offset) for item in source if item.offset not in copied
    ]
    return problems
