"""Apache Kafka's Java client, as an object: produce, consume and the admin operations.

Each method is one call of the Java client against one broker. Bytes are bytes here; on the way to
Java they are base64. An error of the client comes as `JavaClientError`, which carries Kafka's code;
where an operation names several things, the first error among them is raised, and `call` gives the
answer with all of them instead. Producers live on in the Java process until `close()`, so an
idempotent producer goes on where it was.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self
from uuid import UUID

from penstock.testing.java import DEFAULT_TIMEOUT_S, JavaClientError

Call = Callable[[Mapping[str, Any], float], dict[str, Any]]
Header = tuple[str, bytes | None]
# What `list_offsets` takes beside a timestamp in milliseconds.
PLACES: Final = ("earliest", "latest", "max_timestamp", "earliest_local", "latest_tiered")


@dataclass(frozen=True, slots=True)
class NewRecord:
    """A record to produce; what is None is left to the client."""

    value: bytes | None
    key: bytes | None = None
    headers: Sequence[Header] = ()
    timestamp_ms: int | None = None
    partition: int | None = None


@dataclass(frozen=True, slots=True)
class Sent:
    """Where a produced record went."""

    partition: int
    offset: int
    timestamp_ms: int


@dataclass(frozen=True, slots=True)
class Received:
    """A consumed record."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    timestamp_type: str
    leader_epoch: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]


@dataclass(frozen=True, slots=True)
class ListedOffset:
    """One answer of `list_offsets`; offset and timestamp are -1 where there is none."""

    offset: int
    timestamp_ms: int
    leader_epoch: int


class JavaClient:
    """The Java client at one broker. A context manager that closes what it opened there."""

    def __init__(self, call: Call, bootstrap: str, config: Mapping[str, str]) -> None:
        self._call = call
        self._config = {"bootstrap.servers": bootstrap, **config}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the producers and admin clients of this broker in the Java process."""
        self.call("close")

    def call(
        self,
        op: str,
        config: Mapping[str, str] | None = None,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        **arguments: Any,
    ) -> dict[str, Any]:
        """One operation as the Java side takes it, its answer as it comes."""
        request = {"op": op, "config": {**self._config, **(config or {})}, **arguments}
        return self._call(request, timeout_s)

    def _results(self, op: str, **arguments: Any) -> dict[str, Any]:
        results: dict[str, Any] = self.call(op, **arguments)["results"]
        for result in results.values():
            _raise_error(result)
        return results

    # ---- records ---------------------------------------------------------------------------

    def produce(
        self,
        topic: str,
        records: Iterable[NewRecord],
        config: Mapping[str, str] | None = None,
        *,
        transaction: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> list[Sent]:
        """Send records with one producer and wait for all their acknowledgements.

        `config` says how (`acks`, `compression.type`, `enable.idempotence`, ...); the same config
        is the same producer as before. `transaction` is `commit` or `abort`, with a
        `transactional.id` in the config.
        """
        nodes = [
            {
                "partition": record.partition,
                "timestamp": record.timestamp_ms,
                "key": _encode(record.key),
                "value": _encode(record.value),
                "headers": [[name, _encode(value)] for name, value in record.headers],
            }
            for record in records
        ]
        answer = self.call(
            "produce",
            config,
            timeout_s=timeout_s,
            topic=topic,
            records=nodes,
            transaction=transaction or "",
        )
        for result in answer["results"]:
            _raise_error(result)
        return [
            Sent(result["partition"], result["offset"], result["timestamp"])
            for result in answer["results"]
        ]

    def consume(
        self,
        topic: str,
        starts: Mapping[int, int] | Iterable[int] = (0,),
        config: Mapping[str, str] | None = None,
        *,
        max_records: int | None = None,
        read_committed: bool = False,
        timeout_s: float = 30.0,
    ) -> list[Received]:
        """Read partitions, each from an offset (a mapping) or from its beginning.

        Stops after `max_records`, or, without it, at the end the partitions had at the start.
        Raises `TimeoutError` when that does not come in time.
        """
        assignments: list[dict[str, Any]] = [
            {"topic": topic, "partition": partition} for partition in starts
        ]
        if isinstance(starts, Mapping):
            for assignment in assignments:
                assignment["offset"] = starts[assignment["partition"]]
        isolation = "read_committed" if read_committed else "read_uncommitted"
        answer = self.call(
            "consume",
            {"isolation.level": isolation, "auto.offset.reset": "none", **(config or {})},
            timeout_s=timeout_s + DEFAULT_TIMEOUT_S,
            assignments=assignments,
            to_end=max_records is None,
            timeout_ms=int(timeout_s * 1000),
            **({} if max_records is None else {"max_records": max_records}),
        )
        records = [received(record) for record in answer["records"]]
        if not answer["done"]:
            raise TimeoutError(f"only {len(records)} records of {topic} within {timeout_s} s")
        return records

    # ---- topics ----------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        partitions: int | None = None,
        configs: Mapping[str, str] | None = None,
        *,
        replication_factor: int | None = None,
        validate_only: bool = False,
    ) -> dict[str, Any]:
        """Create a topic; the answer has its `topic_id`, `partitions` and `configs`."""
        topic = {
            "name": name,
            "partitions": partitions,
            "replication_factor": replication_factor,
            "configs": dict(configs or {}),
        }
        results = self._results("create_topics", topics=[topic], validate_only=validate_only)
        created: dict[str, Any] = results[name]
        return created

    def delete_topics(self, *topics: str | UUID) -> None:
        """Delete topics, all by name or all by id."""
        self._results("delete_topics", **_names_or_ids(topics))

    def list_topics(self, *, internal: bool = False) -> dict[str, UUID]:
        """The names of all topics and their ids."""
        results = self._results("list_topics", internal=internal)
        return {name: UUID(result["topic_id"]) for name, result in results.items()}

    def describe_topic(self, topic: str | UUID) -> dict[str, Any]:
        """A topic by name or id: `name`, `topic_id`, `partitions` with leader, replicas, isr."""
        results = self._results("describe_topics", **_names_or_ids((topic,)))
        description: dict[str, Any] = next(iter(results.values()))
        return description

    def create_partitions(self, topic: str, count: int, *, validate_only: bool = False) -> None:
        """Grow a topic to `count` partitions in all."""
        self._results("create_partitions", counts={topic: count}, validate_only=validate_only)

    # ---- configs ---------------------------------------------------------------------------

    def describe_configs(
        self, resource: str, *, resource_type: str = "topic"
    ) -> dict[str, dict[str, Any]]:
        """Every config of a topic or broker: `value`, `source`, `type`, `read_only`, ..."""
        answer = self.call("describe_configs", resource=resource, resource_type=resource_type)
        configs: dict[str, dict[str, Any]] = answer["configs"]
        return configs

    def alter_configs(
        self, resource: str, *operations: tuple[str, str, str | None], resource_type: str = "topic"
    ) -> None:
        """Change configs by steps: (`set` | `delete` | `append` | `subtract`, name, value)."""
        steps = [
            {"operation": operation, "name": name, "value": value}
            for operation, name, value in operations
        ]
        self.call("alter_configs", resource=resource, resource_type=resource_type, operations=steps)

    # ---- offsets ---------------------------------------------------------------------------

    def list_offset(
        self, topic: str, partition: int, at: str | int, *, read_committed: bool = False
    ) -> ListedOffset:
        """The offset at a place (one of `PLACES`) or of the first record since a time in ms."""
        results = self._results(
            "list_offsets",
            partitions=[{"topic": topic, "partition": partition, "at": at}],
            read_committed=read_committed,
        )
        result = results[f"{topic}-{partition}"]
        return ListedOffset(result["offset"], result["timestamp"], result["leader_epoch"])

    def delete_records(self, topic: str, partition: int, before: int) -> int:
        """Delete what is before an offset (-1: everything); the answer is where the log starts."""
        results = self._results(
            "delete_records",
            partitions=[{"topic": topic, "partition": partition, "before": before}],
        )
        return int(results[f"{topic}-{partition}"]["low_watermark"])

    # ---- the cluster -----------------------------------------------------------------------

    def describe_cluster(self) -> dict[str, Any]:
        """`cluster_id`, `controller`, `nodes` with id, host and port."""
        return self.call("describe_cluster")

    def describe_log_dirs(self, broker: int) -> dict[str, dict[str, Any]]:
        """Each data directory of a broker: `partitions` with their size, total and usable bytes."""
        answer = self.call("describe_log_dirs", brokers=[broker])
        directories: dict[str, dict[str, Any]] = answer["results"][str(broker)]
        return directories

    def describe_producers(self, topic: str, partition: int) -> list[dict[str, int]]:
        """The idempotent producers that a partition remembers."""
        results = self._results(
            "describe_producers", partitions=[{"topic": topic, "partition": partition}]
        )
        producers: list[dict[str, int]] = results[f"{topic}-{partition}"]["producers"]
        return producers


def _encode(data: bytes | None) -> str | None:
    return None if data is None else b64encode(data).decode()


def _decode(text: str | None) -> bytes | None:
    return None if text is None else b64decode(text)


def received(record: Mapping[str, Any]) -> Received:
    return Received(
        record["topic"],
        record["partition"],
        record["offset"],
        record["timestamp"],
        record["timestamp_type"],
        record["leader_epoch"],
        _decode(record["key"]),
        _decode(record["value"]),
        tuple((name, _decode(value)) for name, value in record["headers"]),
    )


def _names_or_ids(topics: Sequence[str | UUID]) -> dict[str, list[str]]:
    ids = [topic.hex for topic in topics if isinstance(topic, UUID)]
    return {"topic_ids": ids} if ids else {"topics": [str(topic) for topic in topics]}


def _raise_error(result: Any) -> None:
    if isinstance(result, dict) and result.get("error") is not None:
        raise JavaClientError(result)
