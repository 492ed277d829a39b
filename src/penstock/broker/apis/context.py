"""What a handler knows of a request besides its body."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.wire import Message

if TYPE_CHECKING:
    from penstock.broker.connection import Connection
    from penstock.broker.quotas import ClientQuota
    from penstock.broker.server import Broker


@dataclass(slots=True)
class RequestContext:
    """Who asks, and which API in which version."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    connection: Connection
    # How long the client is told to wait before it asks again.
    throttle_ms: int = 0
    # What the client may use, where it has a quota.
    quota: ClientQuota | None = None


Handler = Callable[["Broker", Any, RequestContext], Message | Awaitable[Message]]
HotHandler = Callable[["Broker", memoryview, int, RequestContext], None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One API as this broker offers it."""

    api_key: int
    min_version: int
    max_version: int
    handler: Handler | None = None
    hot: HotHandler | None = None
    # What ApiVersions says, where that differs from what is answered.
    advertised_min: int | None = None
    is_advertised: bool = True
