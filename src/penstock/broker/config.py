"""Settings of a broker: frozen, validated, with units in their names and a bound on everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from penstock.errors import ConfigError
from penstock.log.config import DAY_MS, HOUR_MS, Durability, TopicConfig, topic_config

NODE_ID: Final = 1
DEFAULT_PORT: Final = 9092
LOOPBACK: Final = frozenset({"127.0.0.1", "::1", "localhost"})


@dataclass(frozen=True, slots=True)
class Limits:
    """How much any client, or all of them together, may make the broker hold."""

    max_connections: int = 10_000
    # Kafka's socket.request.max.bytes.
    max_request_bytes: int = 100 << 20
    # What all receive buffers together may take beyond 256 KiB each.
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
    # How long a produce request for a full topic, or one that waits for a thread to compress it
    # anew, is held before it is answered with an error.
    max_hold_ms: int = 1_000
    max_topics: int = 20_000
    max_partitions: int = 50_000
    # The longest idle make room for new ones.
    max_transactional_ids: int = 50_000
    max_groups: int = 20_000
    # Kafka's group.max.size: members of one classic group.
    max_group_size: int = 1_000
    # What one member, or all members of a classic group, may send and be assigned.
    max_member_bytes: int = 1 << 20
    max_group_bytes: int = 8 << 20
    # Kafka's group.min.session.timeout.ms (6 s there; tests have no time) and its maximum.
    min_session_timeout_ms: int = 1_000
    max_session_timeout_ms: int = 1_800_000
    # Of all groups together, with those that transactions carry.
    max_committed_offsets: int = 1_000_000
    # Kafka's offset.metadata.max.bytes.
    max_offset_metadata_bytes: int = 4_096
    # Offsets of groups whose lag is watched, and how many of them and of partitions the metrics
    # tell of one by one; the others are put together.
    max_watched_lags: int = 20_000
    max_metric_lags: int = 1_000
    max_metric_partitions: int = 1_000


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
    # How often the lag of groups is measured; 0: never.
    lag_interval_ms: int = 5_000
    # How long before a group loses records there is an alert; 0: none.
    alert_before_loss_ms: int = HOUR_MS
    # Where alerts are sent: a URL that takes JSON by POST.
    alert_webhook: str | None = None
    # Where metrics are served over HTTP; no port: not at all, 0: any free one.
    metrics_host: str = "127.0.0.1"
    metrics_port: int | None = None
    # The first members of a group are waited for until none has come for this long, ...
    group_initial_delay_ms: int = 50
    # ... but not longer than Kafka's group.initial.rebalance.delay.ms is.
    group_initial_delay_max_ms: int = 3_000
    # Kafka's offsets.retention.minutes: how long offsets outlive the last member of their group.
    offsets_retention_ms: int = 7 * DAY_MS
    # Kafka's offsets.retention.check.interval.ms.
    offsets_check_interval_ms: int = 600_000

    # Kafka's transaction.max.timeout.ms: the longest that a producer may ask for.
    transaction_max_timeout_ms: int = 900_000
    # Kafka's transactional.id.expiration.ms.
    transactional_id_expiration_ms: int = 7 * DAY_MS
    # Kafka's transaction.two.phase.commit.enable: whether producers may leave the decision about
    # their transactions to somebody else, who may take any time for it.
    two_phase_commit: bool = True
    # Kafka's feature transaction.version. With 2 clients that can do so take the newer form of
    # transactions (KIP-890), with less the older.
    transaction_version: int = 2

    def __post_init__(self) -> None:
        if self.transaction_version not in (0, 1, 2):
            raise ConfigError(f"transaction_version {self.transaction_version} is not 0, 1 or 2")
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port {self.port} is not between 0 and 65535")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65_535:
            raise ConfigError(f"metrics_port {self.metrics_port} is not between 0 and 65535")
        if self.alert_webhook is not None and not is_web_address(self.alert_webhook):
            raise ConfigError(
                f"alerts cannot be sent to {self.alert_webhook!r}",
                advice="Give a URL that begins with http:// or https://.",
            )
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

    @property
    def serves_metrics_here(self) -> bool:
        """Whether only this machine can ask for the metrics."""
        return self.metrics_host in LOOPBACK


def is_web_address(text: str) -> bool:
    """Whether it is a URL that something can be posted to."""
    scheme, _, rest = text.partition("://")
    return scheme in ("http", "https") and bool(rest.strip("/"))
