"""What `tests/` and `conformance/` share: Apache Kafka's own code, as a judge; and what is quick.

A test that takes `kafka_tools` or `apache_kafka` needs Java and the jars. Without them it fails,
it is not skipped: a green run means that the foreign judges have spoken.

The order of the files and the options of Java are there for speed only: a run must end well
without them, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final

import pytest

from penstock.testing.apache_kafka import FOR_TESTS, SMALL_JVM_OPTIONS, ApacheKafka
from penstock.testing.kafka_tools import KafkaTools

JAR_FIXTURES = {"kafka_tools", "apache_kafka"}

# Spark in processes that tests start lives for a minute: code compiled once more for speed comes
# too late, and compiling it takes half of the time of a core.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")
# An archive is used where there is one; to make one would take time from the tests.
os.environ.setdefault("PENSTOCK_SPARK_ARCHIVE", "use")

# Files of twenty seconds and more, the longest first. They are begun first: one that is begun last
# is waited for by all other workers.
LONG: Final = (
    "tests/spark/flows/test_one_job.py",
    "tests/capture/scenarios/test_scenarios.py",
    "tests/examples/test_shop.py",
    "tests/spark/state/test_failures.py",
    "conformance/test_cluster.py",
    "tests/spark/test_kills.py",
    "tests/test_docs.py",
    "tests/examples/test_nexmark.py",
    "tests/cli/test_migrate.py",
    "tests/spark/views/test_views_together.py",
    "conformance/test_scenarios.py",
    "tests/cli/test_migrate_faults.py",
    "tests/cli/test_sinks.py",
    "tests/broker/robustness/test_frames.py",
    "tests/spark/flows/test_operated.py",
    "tests/spark/sink/test_exactly_once.py",
    "tests/broker/robustness/test_fuzz.py",
    "tests/cli/test_capture.py",
    "tests/spark/flows/test_flows.py",
    "tests/log/test_crash.py",
    "tests/spark/flows/test_manager.py",
    "tests/cli/test_run_views.py",
    "tests/cli/test_run_cluster.py",
    "tests/cli/test_verify.py",
    "tests/capture/delivery/test_truncated_databases.py",
    "tests/cli/test_produce_consume.py",
    "tests/cli/test_run.py",
    "tests/testing/test_apache_kafka.py",
    "tests/client/test_failover.py",
    "tests/spark/source/test_changes.py",
    "tests/capture/postgres/test_stream.py",
    "tests/cli/test_init.py",
    "conformance/test_failover.py",
    "tests/capture/kit/test_contract.py",
    "tests/spark/sink/test_retries.py",
    "tests/spark/joins/test_enrich.py",
    "tests/spark/sinking/test_feeding.py",
    "tests/spark/standing/test_standing.py",
    "tests/cli/test_verify_truncates.py",
    "tests/capture/mysql/test_servers.py",
    "tests/sinks/test_opensearch.py",
    "tests/spark/windows/test_through_spark.py",
    "tests/sinks/test_server_sinks.py",
    "tests/spark/views/test_views_spark.py",
    "tests/client/test_security.py",
    "tests/capture/sqlite/test_random.py",
)


# First, because the workers' plugin reads the marks in this hook too.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what needs the jars, keep on one worker what shares a server, put long files first."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        if fixtures & JAR_FIXTURES:
            item.add_marker(pytest.mark.kafka_jars)
        if "apache_kafka" in fixtures:
            item.add_marker(pytest.mark.xdist_group("apache-kafka"))
    places = {name: number for number, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.nodeid.partition("::")[0], len(LONG)))


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
