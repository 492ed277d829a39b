"""What is answered about client quotas: who has them, which can be set."""

from __future__ import annotations

from time import monotonic
from typing import Any, Final

from conformance.scenario import scenario
from penstock.wire.messages.alter_client_quotas import RequestEntryData
from tests.broker.protocol_client import READY_TIMEOUT_S, ProtocolClient, error_name
from tests.broker.quota_requests import (
    ANY,
    CLIENT,
    DEFAULT,
    EXACT,
    USER,
    alter,
    change,
    describe,
)
from tests.broker.requests import new_name

# Far above what any test uses: other scenarios run on the same broker.
PLENTY: Final = 1_000_000_000_000.0


def altered(client: ProtocolClient, *entries: RequestEntryData, **more: bool) -> list[str]:
    return [error_name(r.error_code) for r in client.call(alter(*entries, **more)).entries]


def described(
    client: ProtocolClient,
    *parts: tuple[str, int, str | None],
    strict: bool = False,
    suffix: str = "",
) -> Any:
    """Entities with their quotas in a fixed order; `suffix` is cut off their names."""
    answer = client.call(describe(*parts, strict=strict))
    if answer.error_code:
        return error_name(answer.error_code)
    return sorted(
        (
            sorted((p.entity_type, (p.entity_name or "<default>").removesuffix(suffix))
                   for p in entry.entity),
            sorted((v.key, v.value) for v in entry.values),
        )
        for entry in answer.entries
    )  # fmt: skip


def wait_for(client: ProtocolClient, count: int, *parts: tuple[str, int, str | None]) -> None:
    """Kafka's broker learns of a change a moment after its controller has answered."""
    deadline = monotonic() + READY_TIMEOUT_S
    while len(client.call(describe(*parts)).entries or ()) != count:
        assert monotonic() < deadline


@scenario()
def quotas_are_set_described_and_removed(client: ProtocolClient) -> Any:
    """Quotas of users, clients, both together and defaults, found by exact and by loose filters."""
    end = new_name("-")
    alice, app = f"alice{end}", f"app{end}"
    outcomes = [
        altered(
            client,
            change([(USER, alice)], producer_byte_rate=PLENTY),
            change([(USER, alice), (CLIENT, app)], producer_byte_rate=PLENTY + 1,
                   consumer_byte_rate=PLENTY + 2),
            change([(USER, alice), (CLIENT, None)], consumer_byte_rate=PLENTY + 3),
            change([(CLIENT, app)], consumer_byte_rate=PLENTY + 4),
        )
    ]  # fmt: skip
    wait_for(client, 3, (USER, EXACT, alice))
    wait_for(client, 2, (CLIENT, EXACT, app))
    filters: list[tuple[list[tuple[str, int, str | None]], bool]] = [
        ([(USER, EXACT, alice)], False),
        ([(USER, EXACT, alice)], True),
        ([(CLIENT, EXACT, app)], False),
        ([(CLIENT, EXACT, app)], True),
        ([(USER, EXACT, alice), (CLIENT, EXACT, app)], True),
        ([(USER, EXACT, alice), (CLIENT, DEFAULT, None)], True),
        ([(USER, EXACT, alice), (CLIENT, ANY, None)], False),
        ([(USER, EXACT, f"bob{end}")], False),
        ([(USER, EXACT, alice), ("ip", ANY, None)], False),
    ]
    outcomes += [described(client, *parts, strict=strict, suffix=end) for parts, strict in filters]
    outcomes.append(altered(client, change([(USER, alice)], producer_byte_rate=None)))
    wait_for(client, 2, (USER, EXACT, alice))
    outcomes.append(described(client, (USER, EXACT, alice), suffix=end))
    outcomes.append(
        altered(
            client,
            change([(USER, alice), (CLIENT, app)], producer_byte_rate=None,
                   consumer_byte_rate=PLENTY),
            change([(USER, alice), (CLIENT, None)], consumer_byte_rate=None),
            change([(CLIENT, app)], consumer_byte_rate=None, producer_byte_rate=None),
        )
    )  # fmt: skip
    wait_for(client, 1, (USER, EXACT, alice))
    outcomes.append(described(client, (USER, EXACT, alice), suffix=end))
    altered(client, change([(USER, alice), (CLIENT, app)], consumer_byte_rate=None))
    wait_for(client, 0, (USER, EXACT, alice))
    return outcomes


@scenario()
def quotas_that_cannot_be_set(client: ProtocolClient) -> Any:
    """Unknown entities and quotas, empty names, fractions; validation changes nothing."""
    name = new_name()
    rate = {"producer_byte_rate": PLENTY}
    return [
        altered(client, change([], **rate)),
        altered(client, change([("planet", name)], **rate)),
        altered(client, change([(USER, "")], **rate)),
        altered(client, change([(USER, name)], no_such_quota=1)),
        altered(client, change([(USER, name)], producer_byte_rate=1.5)),
        altered(client, change([(USER, name), ("ip", "127.0.0.1")], **rate)),
        altered(client, change([(USER, name)], **rate), validate_only=True),
        described(client, (USER, EXACT, name)),
    ]


@scenario()
def filters_that_are_refused(client: ProtocolClient) -> Any:
    """Unknown and repeated entities, and names where none or one is needed."""
    return [
        described(client, ("", ANY, None)),
        described(client, ("planet", ANY, None)),
        described(client, (USER, ANY, None), (USER, ANY, None)),
        described(client, (USER, EXACT, None)),
        described(client, (USER, DEFAULT, "name")),
        described(client, (USER, ANY, "name")),
        described(client, (USER, 7, None)),
        described(client, strict=True),
    ]
