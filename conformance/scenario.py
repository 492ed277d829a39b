"""What a scenario is: a function of a cluster, what it must observe, and where it is kept.

A scenario uses client APIs only and knows nothing of the broker behind the address. It returns
what it observed as plain data (lists, strings, numbers), without names, ids and times that differ
from run to run. The same function runs on Apache Kafka and on the embedded broker; both must give
what stands in its decorator, unless `differences.py` says otherwise and why.

Scenarios share their brokers. Each makes topics and groups of its own, under names that nobody
else has, and leaves them behind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self
from uuid import uuid4

from confluent_kafka import Consumer, Producer, ShareConsumer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourceType,
)

from penstock.testing.java_client import JavaClient
from penstock.testing.kafka_tools import KafkaTools

REQUEST_TIMEOUT_S: Final = 60.0


class Cluster:
    """One broker or cluster as a scenario sees it: clients of it, closed when the scenario ends."""

    def __init__(self, bootstrap: str, tools: KafkaTools) -> None:
        self.bootstrap = bootstrap
        self.tools = tools
        self._stack = ExitStack()
        self._admin: AdminClient | None = None
        self._java: JavaClient | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def at_end(self, close: Callable[[], object]) -> None:
        """Call this when the scenario is over."""
        self._stack.callback(close)

    # ---- names and topics --------------------------------------------------------------------

    @staticmethod
    def name(kind: str = "topic") -> str:
        """A name that nobody else has."""
        return f"{kind}-{uuid4().hex[:12]}"

    def topic(self, partitions: int = 1, config: dict[str, str] | None = None) -> str:
        """A new topic."""
        name = self.name()
        self.create(name, partitions, config)
        return name

    def create(self, name: str, partitions: int = 1, config: dict[str, str] | None = None) -> None:
        new = NewTopic(name, num_partitions=partitions, config=config or {})
        self.admin.create_topics([new])[name].result(REQUEST_TIMEOUT_S)
        self._heard(lambda: self._leaders(name) == partitions, f"topic {name}")

    def _leaders(self, topic: str) -> int:
        found = self.admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics.get(topic)
        return 0 if found is None else sum(part.leader >= 0 for part in found.partitions.values())

    def _heard(self, condition: Callable[[], bool], what: str) -> None:
        """Wait for it: Apache Kafka answers before its brokers have heard of a change."""
        deadline = monotonic() + REQUEST_TIMEOUT_S
        while not condition():
            assert monotonic() < deadline, f"{what} is not known in time"

    def group_config(self, group: str, settings: dict[str, str]) -> None:
        """Set configs of a group."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
        for future in self.admin.incremental_alter_configs([resource]).values():
            future.result(REQUEST_TIMEOUT_S)
        asked = ConfigResource(ResourceType.GROUP, group)

        def in_force() -> bool:
            told = self.admin.describe_configs([asked])[asked].result(REQUEST_TIMEOUT_S)
            return all(told[name].value == value for name, value in settings.items())

        self._heard(in_force, f"the setting of group {group}")

    # ---- clients -----------------------------------------------------------------------------

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            self._admin = AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
        return self._admin

    @property
    def java(self) -> JavaClient:
        if self._java is None:
            self._java = self._stack.enter_context(self.tools.java_client(self.bootstrap))
        return self._java

    def producer(self, **config: Any) -> Producer:
        """A producer; names of settings with `_` for `.`."""
        return Producer(self._config({"linger_ms": 1, **config}))

    def consumer(self, group: str | None = None, **config: Any) -> Consumer:
        """A consumer that starts at the beginning, commits when told to, and is closed."""
        fixed = {
            "group_id": group or self.name("reader"),
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "enable_partition_eof": True,
            "fetch_wait_max_ms": 50,
            "fetch_error_backoff_ms": 20,
            "topic_metadata_refresh_interval_ms": 500,
        }
        consumer = Consumer(self._config({**fixed, **config}))
        self._stack.callback(consumer.close)
        return consumer

    def share_consumer(self, group: str, **config: Any) -> ShareConsumer:
        """A member of a share group that acknowledges each record by itself."""
        fixed = {"group_id": group, "share_acknowledgement_mode": "explicit"}
        consumer = ShareConsumer(self._config({**fixed, **config}))
        self._stack.callback(consumer.close)
        return consumer

    def _config(self, settings: dict[str, Any]) -> dict[str, Any]:
        named = {name.replace("_", "."): value for name, value in settings.items()}
        return {"bootstrap.servers": self.bootstrap, "log_level": 0, **named}


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario: `says` is the promise in a sentence, `expected` what must be observed."""

    area: str
    name: str
    says: str
    run: Callable[[Cluster], Any]
    expected: Any

    @property
    def id(self) -> str:
        return f"{self.area}.{self.name}"


SCENARIOS: Final[dict[str, Scenario]] = {}


def scenario(expected: Any) -> Callable[[Callable[[Cluster], Any]], Callable[[Cluster], Any]]:
    """Keep a function as a scenario; its docstring says what is promised."""

    def keep(run: Callable[[Cluster], Any]) -> Callable[[Cluster], Any]:
        area = run.__module__.rpartition(".")[2]
        says = " ".join((run.__doc__ or "").split())
        found = Scenario(area, run.__name__, says, run, expected)
        assert says, f"{found.id} does not say what it promises"
        assert found.id not in SCENARIOS, f"{found.id} is there twice"
        SCENARIOS[found.id] = found
        return run

    return keep
