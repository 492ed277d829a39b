"""What a scenario is: a function of what it works with, and what it must observe.

The same function runs on Apache Kafka and on the embedded broker and knows nothing of the broker
behind the address. It returns what it observed as plain data (lists, strings, numbers), without
names, ids and times that differ from run to run. There are two kinds, told apart by what the
function asks for:

- A scenario of a `Cluster` uses the APIs of clients.
- A scenario of a `ProtocolClient` sends single requests, right and wrong ones.

Where the decorator has an expectation, both brokers must meet it. Where it has none, whatever
Apache Kafka answers is the expectation. `differences.py` lists what differs on purpose, and why.

Scenarios share their brokers. Each makes topics and groups of its own, under names that nobody
else has, and leaves them behind.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Any, Final, Self, TypeVar, get_type_hints
from uuid import uuid4

from confluent_kafka import Consumer, Producer, ShareConsumer
from confluent_kafka.admin import (
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ResourceType,
)

from penstock.testing.java_client import JavaClient
from penstock.testing.kafka_tools import KafkaTools
from tests.broker.protocol_client import ProtocolClient

REQUEST_TIMEOUT_S: Final = 60.0


class Cluster:
    """One broker or cluster as a scenario sees it: clients of it, closed when the scenario ends."""

    def __init__(self, bootstrap: str, tools: KafkaTools) -> None:
        self.bootstrap = bootstrap
        self.tools = tools
        self._stack = ExitStack()
        self._admin: AdminClient | None = None
        self._protocol: ProtocolClient | None = None
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
        return self.protocol.topic(partitions, **(config or {}))

    def group_config(self, group: str, settings: dict[str, str]) -> None:
        """Set configs of a group, and wait until Kafka's broker knows of them."""
        entries = [
            ConfigEntry(name, value, incremental_operation=AlterConfigOpType.SET)
            for name, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
        for future in self.admin.incremental_alter_configs([resource]).values():
            future.result(REQUEST_TIMEOUT_S)
        described = ConfigResource(ResourceType.GROUP, group)
        deadline = monotonic() + REQUEST_TIMEOUT_S
        while True:
            future = self.admin.describe_configs([described])[described]
            configs = future.result(REQUEST_TIMEOUT_S)
            if all(configs[name].value == value for name, value in settings.items()):
                return
            assert monotonic() < deadline, f"the settings of group {group} are not known in time"

    # ---- clients -----------------------------------------------------------------------------

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            self._admin = self._stack.enter_context(
                AdminClient({"bootstrap.servers": self.bootstrap, "log_level": 0})
            )
        return self._admin

    @property
    def protocol(self) -> ProtocolClient:
        """A connection for single requests, to the first node."""
        if self._protocol is None:
            self._protocol = ProtocolClient(self.bootstrap.partition(",")[0])
            self._stack.callback(self._protocol.close)
        return self._protocol

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


# The expectation of a scenario that has none of its own.
AS_APACHE_KAFKA: Final = object()
Function = TypeVar("Function", Callable[[Cluster], Any], Callable[[ProtocolClient], Any])


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario: `promise` is a sentence, or empty where the name says it all."""

    area: str
    name: str
    promise: str
    function: Callable[[Any], Any]
    is_protocol: bool
    expected: Any

    @property
    def id(self) -> str:
        return f"{self.area}.{self.name}"

    @property
    def has_expectation(self) -> bool:
        return self.expected is not AS_APACHE_KAFKA

    def run(self, cluster: Cluster) -> Any:
        """What is observed on a cluster."""
        return self.function(cluster.protocol if self.is_protocol else cluster)


SCENARIOS: Final[dict[str, Scenario]] = {}


def scenario(*, expected: Any = AS_APACHE_KAFKA) -> Callable[[Function], Function]:
    """Keep a function as a scenario; its docstring is the promise."""

    def keep(function: Function) -> Function:
        _register(function, expected)
        return function

    return keep


def _register(function: Callable[[Any], Any], expected: Any) -> None:
    area = function.__module__.removeprefix("conformance.scenarios.")
    promise = " ".join((function.__doc__ or "").split())
    (takes,) = (kind for name, kind in get_type_hints(function).items() if name != "return")
    item = Scenario(area, function.__name__, promise, function, takes is ProtocolClient, expected)
    assert item.promise or item.is_protocol, f"{item.id} does not say what it promises"
    assert item.id not in SCENARIOS, f"{item.id} is there twice"
    SCENARIOS[item.id] = item
