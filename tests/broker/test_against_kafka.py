"""The same questions to Penstock and to a real Apache Kafka: the answers must be the same.

The scenarios are in `conformance/scenarios/protocol`; each returns error names, offsets and other
plain values. What differs on purpose is not a scenario: it is tested on its own elsewhere and told
in docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

import conformance.scenarios.protocol  # noqa: F401 - brings the scenarios
from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.broker import Broker
from tests.broker.protocol_client import SCENARIOS, ProtocolClient


@pytest.fixture(scope="module")
def penstock() -> Iterator[Broker]:
    """With the durability that is the default outside of tests."""
    with Broker(durability="disk") as broker:
        yield broker


@pytest.mark.parametrize("name", SCENARIOS)
def test_both_answer_the_same(name: str, penstock: Broker, apache_kafka: ApacheKafka) -> None:
    with closing(ProtocolClient(apache_kafka.bootstrap)) as client:
        expected = SCENARIOS[name](client)
    with closing(ProtocolClient(penstock.bootstrap)) as client:
        assert SCENARIOS[name](client) == expected
