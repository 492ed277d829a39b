"""`penstock transactions`: what it shows, and how it ends transactions of other processes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from uuid import uuid4

import pytest

from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from tests.broker.raw import RawClient
from tests.broker.requests import create
from tests.broker.transactions.raw_producer import RawProducer, read
from tests.cli.runner import run


@pytest.fixture
def client(broker: Broker, at: str) -> Iterator[RawClient]:
    with RawClient(at) as raw:
        yield raw


@pytest.fixture
def name() -> str:
    return f"txn-{uuid4().hex[:8]}"


def opened(client: RawClient, name: str, topic: str, *, two_phase: bool) -> RawProducer:
    client.call(create(topic, 2))
    producer = RawProducer(client, name)
    producer.init(two_phase=two_phase)
    assert producer.send(topic, b"x", number=1) == ErrorCode.NONE
    return producer


def test_transactions_are_listed(client: RawClient, name: str, topic: str) -> None:
    producer = opened(client, name, topic, two_phase=True)
    rows = {row["transactional_id"]: row for row in run("transactions", "list", "--json").ok().json}
    row = rows[name]
    assert (row["producer_id"], row["producer_epoch"]) == producer.ids
    assert (row["state"], row["two_phase"], row["timeout_ms"]) == ("Ongoing", True, None)
    assert row["partitions"] == {topic: [1]}
    assert row["started_ms"] > 0
    shown = run("transactions", "list", "--state", "ongoing").ok().out
    assert re.search(rf"{name} +Ongoing .* none ", shown)
    young = run("transactions", "list", "--longer-than", "1d", "--json").ok().json
    assert young == []
    producer.end()
    ended = run("transactions", "list", "--state", "CompleteCommit", "--json").ok().json
    assert name in {row["transactional_id"] for row in ended}


def test_one_is_described(client: RawClient, name: str, topic: str) -> None:
    producer = opened(client, name, topic, two_phase=False)
    ran = run("transactions", "describe", name).ok()
    assert f"{producer.ids.producer_id}:{producer.ids.epoch}" in ran.out
    assert "timeout           1m" in ran.out
    assert f"partitions        {topic}: 1" in ran.out
    told = run("transactions", "describe", name, "--json").ok().json
    assert (told["state"], told["timeout_ms"], told["two_phase"]) == ("Ongoing", 60_000, False)
    producer.end()


@pytest.mark.parametrize("outcome", ["commit", "abort"])
def test_a_prepared_transaction_is_ended_by_its_id(
    client: RawClient, name: str, topic: str, outcome: str
) -> None:
    producer = opened(client, name, topic, two_phase=True)
    prepared = f"{producer.ids.producer_id}:{producer.ids.epoch}"
    wrong = run("transactions", outcome, name, "--prepared", "1:1")
    assert wrong.status == 1
    assert "not 1:1" in wrong.err
    assert read(client, topic, 1) == []
    run("transactions", outcome, name, "--prepared", prepared).ok()
    assert read(client, topic, 1) == ([b"x"] if outcome == "commit" else [])
    # Its producer is fenced.
    assert producer.send(topic, b"y", number=1) == ErrorCode.INVALID_PRODUCER_EPOCH
    again = run("transactions", outcome, name)
    assert again.status == 1
    assert "no open transaction" in again.err


def test_an_ordinary_transaction_is_aborted_but_committed_only_by_force(
    client: RawClient, name: str, topic: str
) -> None:
    opened(client, name, topic, two_phase=False)
    refused = run("transactions", "commit", name)
    assert refused.status == 1
    assert "--force" in refused.err
    ended = run("transactions", "abort", name, "--json").ok().json
    assert ended == {"transactional_id": name, "outcome": "aborted"}
    after = run("transactions", "describe", name, "--json").ok().json
    assert (after["state"], after["timeout_ms"]) == ("CompleteAbort", 60_000)
    opened(client, name, topic, two_phase=False)
    run("transactions", "commit", name, "--force").ok()
    assert read(client, topic, 1) == [b"x"]


def test_what_is_wrong_is_said(at: str) -> None:
    unknown = run("transactions", "describe", "nobody")
    assert unknown.status == 1
    assert "TRANSACTIONAL_ID_NOT_FOUND" in unknown.err
    assert run("transactions", "list", "--state", "Odd").status == 2
    assert run("transactions", "list", "--longer-than", "soon").status == 2
    assert run("transactions", "commit", "t", "--prepared", "7").status == 2
    nobody = run("transactions", "list", "--bootstrap", "127.0.0.1:1")
    assert nobody.status == 1
    assert "penstock up" in nobody.err
