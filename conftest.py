"""What `tests/` and `conformance/` share: Apache Kafka's own code, as a judge.

A test that takes `kafka_tools` or `apache_kafka` needs Java and the jars. Without them it fails,
it is not skipped: a green run means that the foreign judges have spoken.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.testing.apache_kafka import FOR_TESTS, SMALL_JVM_OPTIONS, ApacheKafka
from penstock.testing.kafka_tools import KafkaTools

JAR_FIXTURES = {"kafka_tools", "apache_kafka"}


# First, because the workers' plugin reads the marks in this hook too.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the jars, and keep on one worker what shares a server."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & JAR_FIXTURES:
            item.add_marker(pytest.mark.kafka_jars)
        if "apache_kafka" in fixtures:
            item.add_marker(pytest.mark.xdist_group("apache-kafka"))


@pytest.fixture(scope="session")
def kafka_tools() -> Iterator[KafkaTools]:
    """Apache Kafka's dump tool and Java client, in one Java process for all tests."""
    with KafkaTools() as tools:
        yield tools


@pytest.fixture(scope="session")
def apache_kafka() -> Iterator[ApacheKafka]:
    """A real Apache Kafka that tests share; each uses topics of its own."""
    with ApacheKafka(FOR_TESTS, jvm_options=SMALL_JVM_OPTIONS) as kafka:
        yield kafka
