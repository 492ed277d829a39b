"""The tests of all stores, with the budgets of the profile, on servers that processes share."""

from __future__ import annotations

from typing import ClassVar
from uuid import uuid4

import pytest

from penstock.testing.sinks import SinkKit, Store
from tests.harness.forks import preload
from tests.harness.profiles import STORE_BATCHES, STORE_KILLS, STORE_LIMITS

preload()


class StoreKit(SinkKit):
    """As `SinkKit`, which is for users; how often it does things is said by the profile."""

    kills: ClassVar[int] = STORE_KILLS
    batches: ClassVar[int] = STORE_BATCHES
    limits: ClassVar[int] = STORE_LIMITS

    @pytest.mark.processes
    def test_killed_inside_of_open(self, store: Store, seed: int) -> None:
        super().test_killed_inside_of_open(store, seed)

    @pytest.mark.processes
    def test_killed_at_any_moment(self, store: Store, seed: int) -> None:
        super().test_killed_at_any_moment(store, seed)


def new_name() -> str:
    """Of a table, an index or keys: no other process has it."""
    return f"t{uuid4().hex[:12]}"
