"""Apache Kafka's Java share consumer, as an object: poll, acknowledge, commit.

It lives in the Java process of a `JavaClient`, under a name of its own, until it is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from uuid import uuid4

from penstock.testing.java import DEFAULT_TIMEOUT_S
from penstock.testing.java_client import JavaClient, Received, received


@dataclass(frozen=True, slots=True)
class Taken:
    """A record in the hands of a share consumer."""

    record: Received
    delivery_count: int


class JavaShareConsumer:
    """One member of a share group. A context manager that leaves it."""

    def __init__(
        self,
        client: JavaClient,
        group: str,
        topics: Iterable[str],
        config: Mapping[str, str] | None = None,
        *,
        explicit: bool = True,
    ) -> None:
        mode = "explicit" if explicit else "implicit"
        self._client = client
        self._name = uuid4().hex
        self._topics = list(topics)
        self._config = {"group.id": group, "share.acknowledgement.mode": mode, **(config or {})}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def poll(self, timeout_s: float = 30.0) -> list[Taken]:
        """What comes next; nothing if nothing comes in time."""
        answer = self._call("share_poll", timeout_ms=int(timeout_s * 1000), topics=self._topics)
        return [Taken(received(item), item["delivery_count"]) for item in answer["records"]]

    def acknowledge(self, *answers: tuple[Taken, str]) -> None:
        """Answer for records: `accept`, `release`, `reject` or `renew` each."""
        nodes = [
            {
                "topic": taken.record.topic,
                "partition": taken.record.partition,
                "offset": taken.record.offset,
                "type": kind,
            }
            for taken, kind in answers
        ]
        self._call("share_acknowledge", answers=nodes)

    def commit(self) -> dict[str, str | None]:
        """Send the answers and wait: for each partition None or the error's name."""
        results: dict[str, str | None] = self._call("share_commit")["results"]
        return results

    def close(self) -> None:
        self._call("share_close")

    def _call(self, op: str, **arguments: Any) -> dict[str, Any]:
        timeout_s = DEFAULT_TIMEOUT_S + 30
        return self._client.call(
            op, self._config, timeout_s=timeout_s, consumer=self._name, **arguments
        )
