"""The zero uuid, which Kafka uses for "no id"."""

from __future__ import annotations

from uuid import UUID

ZERO_UUID = UUID(int=0)
