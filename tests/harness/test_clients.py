"""What tests leave behind is collected when it has many threads, and not after each test."""

from __future__ import annotations

import gc

import pytest

from tests.harness.clients import THREADS_MORE, Collector


def test_it_collects_when_there_are_many_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = [10]
    collections = []

    def collect() -> int:
        collections.append(threads[0])
        threads[0] = 12
        return 0

    monkeypatch.setattr(gc, "collect", collect)
    collector = Collector(lambda: threads[0])
    for count in (10 + THREADS_MORE, 11 + THREADS_MORE, 12 + THREADS_MORE, 13 + THREADS_MORE):
        threads[0] = count
        collector.look()
    assert collections == [11 + THREADS_MORE, 13 + THREADS_MORE]
    # Those that have ended by themselves count no more.
    threads[0] = 3
    collector.look()
    threads[0] = 4 + THREADS_MORE
    collector.look()
    assert len(collections) == 3
