"""The scene for consumers under faults: a broker process, a bad network, and children.

All clients reach the broker through the proxy, which is what the broker tells them to connect to.
Whatever goes wrong follows from the seed: which child is killed, what the network does, when the
broker dies. When the next thing goes wrong follows from progress, not from the clock.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from penstock.testing.history import History, Place, Read
from penstock.testing.ports import lasting_port
from penstock.testing.process import BrokerProcess
from penstock.testing.tcp_proxy import TcpProxy
from tests.broker.raw import RawClient
from tests.broker.robustness.consumers_child import COMMON
from tests.broker.robustness.killing import create

ROOT: Final = Path(__file__).parents[3]
STOP_TIMEOUT_S: Final = 60.0
PATIENCE_S: Final = 60.0

Event = dict[str, Any]
Listener = Callable[["Child", Event], None]


class Child:
    """A process of `consumers_child`, and what it tells."""

    def __init__(self, role: str, name: str, listener: Listener, **settings: Any) -> None:
        self.name = name
        self.counts: Counter[str] = Counter()
        self.troubles: list[str] = []
        self._listener = listener
        self._failure: BaseException | None = None
        settings = {"role": role, "name": name, **settings}
        command = [sys.executable, "-m", "tests.broker.robustness.consumers_child"]
        # Where it was started from does not matter.
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        self._process = subprocess.Popen(
            [*command, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if not line.endswith(b"\n"):
                # It was killed within a word.
                break
            event = json.loads(line)
            self.counts[event["event"]] += 1
            if "error" in event:
                self.troubles.append(event["error"])
            try:
                self._listener(self, event)
            except BaseException as error:
                self._failure = error

    def say(self, word: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(word.encode() + b"\n")
        self._process.stdin.flush()

    def hold(self) -> None:
        """Stop it as if the machine had: it does nothing and knows nothing of it."""
        self._process.send_signal(signal.SIGSTOP)

    def let_go(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """End it at once; all that it has told is known afterwards."""
        self._process.kill()
        self._join()

    def stop(self) -> None:
        """Ask it to stop, and wait."""
        self.ask_to_stop()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._join()
            raise AssertionError(f"{self.name} did not stop: {self.troubles[-3:]}") from None
        self._join()
        assert self._process.returncode == 0, f"{self.name}: {self._process.returncode}"

    def ask_to_stop(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure
        code = self._process.poll()
        assert code in (None, 0, -signal.SIGKILL), f"{self.name} ended with {code}"

    def _join(self) -> None:
        self._process.wait()
        self._thread.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        self.check()


class Scene:
    """A broker process behind a proxy, and the children that use it."""

    def __init__(self, data: Path, seed: int, **settings: Any) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        port, behind = lasting_port(), lasting_port()
        self.broker = BrokerProcess(
            data,
            port=port,
            advertised_host="127.0.0.1",
            advertised_port=behind,
            housekeeping_interval_ms=100,
            **settings,
        )
        self.proxy = TcpProxy(f"127.0.0.1:{port}", behind)
        self.kills = 0
        self.faults: Counter[str] = Counter()
        self.children: dict[str, Child] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self.broker)
        self._stack.enter_context(self.proxy)
        self._stack.callback(self.end_children)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            print(f"faults: {dict(self.faults)}")
            print(f"the broker's last words:\n{self.broker.log_text()[-3000:]}")
        self._stack.close()

    @property
    def bootstrap(self) -> str:
        return self.proxy.address

    def make_topic(self, name: str, partitions: int, **settings: str) -> None:
        request = create(name, settings)
        request.topics[0].num_partitions = partitions
        with RawClient(self.broker.bootstrap) as client:
            (made,) = client.call(request).topics
            assert not made.error_code, made

    # ---- children ------------------------------------------------------------------------

    def start(self, role: str, name: str, listener: Listener, **settings: Any) -> Child:
        settings = {"bootstrap.servers": self.bootstrap, "seed": self.seed, **settings}
        child = self.children[name] = Child(role, name, listener, **settings)
        return child

    def kill_child(self, name: str) -> None:
        self.children.pop(name).kill()

    def stop_children(self) -> None:
        """All of them at once, in peace."""
        children = list(self.children.values())
        self.children.clear()
        for child in children:
            child.ask_to_stop()
        for child in children:
            child.stop()

    def end_children(self) -> None:
        for child in self.children.values():
            child.let_go()
            child.kill()
        self.children.clear()

    def wait_for(
        self, condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S
    ) -> None:
        """Until it holds; a child's failure is the test's."""

        deadline, tick = time.monotonic() + patience_s, threading.Event()
        while True:
            for child in list(self.children.values()):
                child.check()
            if condition():
                return
            if time.monotonic() > deadline:
                told = {n: (dict(c.counts), c.troubles[-3:]) for n, c in self.children.items()}
                raise AssertionError(f"still not so after {patience_s:.0f} s: {what}; {told}")
            tick.wait(0.01)

    # ---- faults --------------------------------------------------------------------------

    def kill_broker(self) -> None:
        """SIGKILL, and a new one on the same data; sometimes it dies while it starts."""
        self.broker.kill()
        self.kills += 1
        while self.rng.random() < 0.2:
            self.broker.launch()
            _pass_time(self.rng.uniform(0.1, 0.6))
            self.broker.kill()
            self.kills += 1
        self.broker.start()
        self.faults["broker killed"] += 1

    def disturb_network(self) -> None:
        """One of the things that networks do, and then it is well again."""
        kind = self.rng.choice(("cut", "slow", "delay", "cut in a request", "cut in an answer",
                                "hold", "swallow", "refuse"))  # fmt: skip
        self.faults[kind] += 1
        proxy, rng = self.proxy, self.rng
        short_s = rng.uniform(0.05, 0.4)
        if kind == "delay":
            proxy.delay_ms = rng.uniform(5, 60)
            _pass_time(2 * short_s)
            proxy.delay_ms = 0
        elif kind == "slow":
            proxy.rate_bytes_per_s = rng.choice((20_000, 100_000))
            _pass_time(2 * short_s)
            proxy.rate_bytes_per_s = None
        elif kind == "hold":
            proxy.pause()
            _pass_time(short_s)
            if rng.random() < 0.5:
                proxy.cut()
            proxy.resume()
        elif kind == "swallow":
            proxy.swallow = True
            _pass_time(short_s)
            # What is missing cannot be made up: nobody could read on.
            proxy.cut()
            proxy.swallow = False
            proxy.cut()
        elif kind == "refuse":
            proxy.refuse = True
            proxy.cut()
            _pass_time(short_s)
            proxy.refuse = False
        else:
            towards: Any = "server" if "request" in kind else "client"
            if kind != "cut":
                proxy.cut_after(rng.randint(50, 3_000), towards=towards, times=rng.randint(1, 4))
            proxy.cut(reset=rng.random() < 0.5)

    def calm(self) -> None:
        """No more faults: what was broken to be is not."""
        self.proxy._cuts.clear()
        self.proxy.delay_ms, self.proxy.rate_bytes_per_s = 0, None
        self.proxy.swallow = self.proxy.refuse = False
        self.proxy.resume()

    # ---- readers -------------------------------------------------------------------------

    def read(self, place: Place, *, committed: bool) -> list[Read]:
        """All records of a partition, as librdkafka gives them out, up to the end it is told."""
        found: list[Read] = []
        for message in self.messages(place, committed=committed):
            key: Any = message.key()
            value: Any = message.value()
            found.append(Read(message.offset() or 0, key, value))
        return found

    def messages(self, place: Place, *, committed: bool) -> list[Message]:
        with self.reader(f"reader-{committed}", committed=committed) as consumer:
            consumer.assign([TopicPartition(place.topic, place.partition, 0)])
            found: list[Message] = []
            ended = False

            def read_on() -> bool:
                nonlocal ended
                for message in consumer.consume(500, 0.1):
                    error = message.error()
                    if error is None:
                        found.append(message)
                        continue
                    ended = error.code() == KafkaError._PARTITION_EOF
                    assert ended or error.retriable(), error
                return ended

            self.wait_for(read_on, f"{place} is read to its end")
            return found

    @contextmanager
    def reader(self, group: str, *, committed: bool = True) -> Iterator[Consumer]:
        consumer = Consumer(
            {
                **COMMON,
                "bootstrap.servers": self.bootstrap,
                "group.id": group,
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "auto.offset.reset": "error",
            }
        )
        try:
            yield consumer
        finally:
            consumer.close()

    def stop_cleanly(self) -> None:
        """The end: a clean stop, and nothing in the log of all its lives that is a bug."""
        assert self.broker.stop() == 0
        log = self.broker.log_text()
        found = log.find("Traceback")
        assert found < 0, log[max(0, found - 500) : found + 3_000]


def _pass_time(seconds: float) -> None:
    """How long a fault lasts."""
    threading.Event().wait(seconds)


class Source:
    """Fills a topic on a thread, record by record, and tells a history of it.

    librdkafka's idempotent producer: each record must be in the log once, whatever happens.
    """

    def __init__(
        self,
        scene: Scene,
        history: History,
        topic: str,
        partitions: int,
        total: int,
        name: str = "source",
    ) -> None:
        self.total = total
        self.name = name
        # How many it was allowed to send so far.
        self.allowed = 0
        self.written: dict[Place, list[int]] = {}
        self._scene = scene
        self._history = history
        self._places = [Place(topic, number) for number in range(partitions)]
        self._failures: list[str] = []
        self._allowed = threading.Semaphore(0)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="source", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self.allow(1)
        self._thread.join()

    def allow(self, count: int) -> None:
        """Let so many more be sent."""
        self.allowed = min(self.allowed + count, self.total)
        self._allowed.release(count)

    @property
    def count(self) -> int:
        return sum(map(len, list(self.written.values())))

    def finish(self) -> None:
        """All of them, as far as they are not sent yet."""
        self.allow(self.total)
        self._scene.wait_for(lambda: self.count >= self.total, "the source is written")
        self._thread.join()
        assert not self._failures, self._failures

    def ends(self) -> dict[int, int]:
        """Where each partition ends that has records."""
        return {place.partition: max(offsets) + 1 for place, offsets in self.written.items()}

    def _run(self) -> None:
        producer = Producer(
            {
                **{name: value for name, value in COMMON.items() if "fetch" not in name},
                "bootstrap.servers": self._scene.bootstrap,
                "enable.idempotence": True,
                "linger.ms": 1,
                "message.timeout.ms": 0,
            }
        )
        for number in range(self.total):
            while not self._allowed.acquire(timeout=0.02):
                producer.poll(0)
            if self._stopping.is_set():
                return
            place = self._places[number % len(self._places)]
            key, value = b"key-%d" % (number % 7), f"{self.name} {number}".encode()
            self._history.sending(self.name, place, key, value)
            producer.produce(
                place.topic, value, key, place.partition, on_delivery=self._on_delivery
            )
            producer.poll(0)
        while producer.flush(0.2) and not self._stopping.is_set():
            pass

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        topic, number, offset = message.topic(), message.partition(), message.offset()
        if error is not None or topic is None or number is None or offset is None:
            self._failures.append(f"{message.value()!r}: {error}")
            return
        key: Any = message.key()
        value: Any = message.value()
        self._history.acknowledged(Place(topic, number), offset, key, value)
        self.written.setdefault(Place(topic, number), []).append(offset)
