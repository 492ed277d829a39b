"""Failures at each point of a micro-batch, where state and output could come out of step."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from penstock.spark.sink.errors import SinkUnavailableError
from penstock.spark.sink.exactly_once import ExactlyOnce


def fail_at(
    points: Iterable[str], is_meant: Callable[[ExactlyOnce], bool], patch: pytest.MonkeyPatch
) -> None:
    """Let one write after the other fail: "before" anything is computed, "between" state and
    output, "after" both, or not ("none"); where the points end, none does."""
    write = ExactlyOnce._write
    left = iter(points)
    point = ["none"]

    def failing_write(self: ExactlyOnce, df: Any, batch_id: int, *more: Any) -> Any:
        point[0] = next(left, "none") if is_meant(self) else "none"
        if point[0] == "before":
            raise SinkUnavailableError("before")
        done = write(self, df, batch_id, *more)
        if point[0] == "after":
            raise SinkUnavailableError("after")
        return done

    def failing(send: Callable[..., Any]) -> Callable[..., Any]:
        def failing_send(self: ExactlyOnce, *args: Any) -> Any:
            sent = send(self, *args)
            if point[0] == "between":
                point[0] = "none"
                raise SinkUnavailableError("between")
            return sent

        return failing_send

    patch.setattr(ExactlyOnce, "_write", failing_write)
    # By stages, and over a plan that is prepared.
    for name in ("_send", "_send_prepared"):
        patch.setattr(ExactlyOnce, name, failing(getattr(ExactlyOnce, name)))
