"""Run a broker until it is told to stop."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from penstock.broker.config import BrokerConfig, Limits
from penstock.broker.server import Broker
from penstock.log.clock import Clock
from penstock.log.disk import Disk

__all__ = ["Broker", "BrokerConfig", "Limits", "run_loop", "serve"]

T = TypeVar("T")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where there is one, on asyncio's own loop elsewhere."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    return uvloop.run(main)


def serve(
    config: BrokerConfig,
    on_ready: Callable[[Broker], None],
    *,
    on_stopping: Callable[[], None] | None = None,
    disk: Disk | None = None,
    clock: Clock | None = None,
) -> bool:
    """Start a broker, say when it is ready, and stop it on SIGTERM or Ctrl-C.

    `on_stopping` is called, on a thread of its own, while the broker still serves: whoever runs
    beside it can write what it has. Whether the stop was clean: everything is on disk, and the
    next start need not recover.
    """
    return run_loop(_serve(config, on_ready, on_stopping, disk, clock))


async def _serve(
    config: BrokerConfig,
    on_ready: Callable[[Broker], None],
    on_stopping: Callable[[], None] | None,
    disk: Disk | None,
    clock: Clock | None,
) -> bool:
    broker = Broker(config, disk=disk, clock=clock)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    await broker.start()
    # What was built at the start stays: the collector need not look at it again and again.
    gc.freeze()
    gc.enable()
    gc.set_threshold(50_000, 20, 20)
    try:
        on_ready(broker)
        await stop.wait()
    finally:
        if on_stopping is not None:
            await loop.run_in_executor(None, on_stopping)
        clean = await broker.stop()
    return clean
