"""Alerts of sinks to a URL, as the broker sends those of groups: one when a sink begins to be too
far behind or has failed, one when that has ended."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from penstock.broker.lag.webhook import Webhook

if TYPE_CHECKING:
    from penstock.spark.sinking.manager import SinkStatus


class SinkAlerts:
    """What a manager calls when an alarm begins or ends. `urls` are those of the sinks, by name."""

    def __init__(self, urls: Mapping[str, str]) -> None:
        made = {url: Webhook(url) for url in set(urls.values()) if url}
        self._webhooks = {name: made[url] for name, url in urls.items() if url}

    def __call__(self, status: SinkStatus) -> None:
        webhook = self._webhooks.get(status.name)
        if webhook is not None:
            webhook.post(message_of(status))


def message_of(status: SinkStatus) -> dict[str, Any]:
    """An alert as it is sent."""
    from penstock.spark.sinking.manager import in_words

    return {
        "alert": "sink-failed" if status.state == "failed" else "sink-lag",
        "state": "firing" if status.alarming else "ended",
        "sink": status.name,
        "topic": status.topic,
        "store": status.store,
        "records_behind": status.lag,
        "seconds_behind": status.lag_s,
        "error": status.error,
        "timestamp_ms": time.time_ns() // 1_000_000,
        "text": in_words(status),
    }
