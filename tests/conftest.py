"""What all tests share: settings of hypothesis, seeds, Apache Kafka's own code.

A test that takes `kafka_tools` or `apache_kafka` needs Java and the jars. Without them it fails,
it is not skipped: a green run means that the foreign judges have spoken.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import settings

from penstock.testing.apache_kafka import SMALL_JVM_OPTIONS, ApacheKafka
from penstock.testing.kafka_tools import KafkaTools

SEED_VARIABLE = "PENSTOCK_SEED"
JAR_FIXTURES = {"kafka_tools", "apache_kafka"}

# A loaded machine is slow, not wrong: time is bounded per test, not per example.
settings.register_profile("penstock", deadline=None, print_blob=True)
settings.load_profile("penstock")


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


@pytest.fixture
def seed() -> int:
    """A seed for randomness of the test's own; pytest shows it when the test fails."""
    value = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().getrandbits(32))
    print(f"seed {value}; to repeat: {SEED_VARIABLE}={value}")
    return value


@pytest.fixture(scope="session")
def kafka_tools() -> Iterator[KafkaTools]:
    """Apache Kafka's dump tool and Java client, in one Java process for all tests."""
    with KafkaTools() as tools:
        yield tools


@pytest.fixture(scope="session")
def apache_kafka() -> Iterator[ApacheKafka]:
    """A real Apache Kafka that tests share; each uses topics of its own."""
    with ApacheKafka(jvm_options=SMALL_JVM_OPTIONS) as kafka:
        yield kafka
