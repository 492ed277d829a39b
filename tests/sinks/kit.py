"""The tests of all stores, with the budgets of the profile, on servers that processes share."""

from __future__ import annotations

from typing import ClassVar
from uuid import uuid4

from penstock.testing.sinks import SinkKit
from tests.harness.profiles import STORE_KILLS


class StoreKit(SinkKit):
    """As `SinkKit`, which is for users; how often it kills is said by the profile."""

    kills: ClassVar[int] = STORE_KILLS


def new_name() -> str:
    """Of a table, an index or keys: no other process has it."""
    return f"t{uuid4().hex[:12]}"
