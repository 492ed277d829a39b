"""The sink on both brokers: the embedded one, and Apache Kafka."""

from __future__ import annotations

import pytest

_KAFKA_MARKS = [pytest.mark.java]


@pytest.fixture(params=["penstock", pytest.param("kafka", marks=_KAFKA_MARKS)], scope="module")
def bootstrap(request: pytest.FixtureRequest) -> str:
    """The address of a broker that is shared, of each kind."""
    name = "log_broker" if request.param == "penstock" else "apache_kafka"
    address: str = request.getfixturevalue(name).bootstrap
    return address
