"""Settings of a broker: frozen, validated, with units in their names and a bound on everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from penstock.errors import ConfigError
from penstock.log.config import Durability, TopicConfig, topic_config

NODE_ID: Final = 1
DEFAULT_PORT: Final = 9092
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class Limits:
    """How much any client, or all of them together, may make the broker hold."""

    max_connections: int = 10_000
    # Kafka's socket.request.max.bytes.
    max_request_bytes: int = 100 << 20
    # What all receive buffers together may take beyond their first size.
    max_buffered_bytes: int = 512 << 20
    # Requests of one connection that wait for their answers; beyond it is not read from.
    max_inflight_requests: int = 1_000
    # Answers that a connection does not take; beyond it is not read from.
    max_unsent_bytes: int = 16 << 20
    # Kafka's fetch.max.bytes: the most that one fetch answers, but for a first larger batch.
    max_fetch_bytes: int = 55 << 20
    # Kafka's max.incremental.fetch.session.cache.slots.
    max_fetch_sessions: int = 1_000
    # Kafka's connections.max.idle.ms.
    max_idle_ms: int = 600_000
    # How long one request may take to arrive: its buffer is not there for others meanwhile.
    max_request_ms: int = 120_000
    max_topics: int = 20_000
    max_partitions: int = 50_000


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """How a broker runs. Everything but the data directory has a sensible default."""

    data: str
    host: str = "127.0.0.1"
    # 0: any free port.
    port: int = DEFAULT_PORT
    # What clients are told to connect to, where that differs from what is listened on.
    advertised_host: str | None = None
    advertised_port: int | None = None
    durability: Durability = "disk"
    # Where closed segments of archived topics go: a directory or an s3:// URL.
    archive: str | None = None
    auto_create_topics: bool = True
    default_partitions: int = 1
    # Topic settings that hold where a topic does not say otherwise, by Kafka's names.
    topic_defaults: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    limits: Limits = field(default_factory=Limits)
    # How often old segments are looked for, and closed logs for compaction.
    housekeeping_interval_ms: int = 5_000

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535")
        if self.default_partitions < 1:
            raise ConfigError("default_partitions must be at least 1")
        self.topic_config({})

    def topic_config(self, overrides: Mapping[str, str]) -> TopicConfig:
        """The settings of a topic: its own, the broker's defaults, the built-in ones."""
        return topic_config({**self.effective_defaults, **overrides})

    @property
    def effective_defaults(self) -> dict[str, str]:
        return {"durability": self.durability, **self.topic_defaults}

    @property
    def is_loopback(self) -> bool:
        return self.host in LOOPBACK
