"""Every scenario on both brokers: as expected, and the same on both.

Both run at the same time, for most of a scenario is waiting.
"""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor

import pytest

import conformance.scenarios  # noqa: F401 - brings the scenarios
from conformance.differences import DIFFERENCES
from conformance.report import PAGE, page
from conformance.scenario import SCENARIOS, Cluster
from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.broker import Broker
from penstock.testing.kafka_tools import KafkaTools


def observe(name: str, bootstrap: str, tools: KafkaTools) -> object:
    with Cluster(bootstrap, tools) as cluster:
        return SCENARIOS[name].run(cluster)


# kafka-python and aiokafka may leave a connection to the collector that was just being made.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <socket:pytest.PytestUnraisableExceptionWarning"
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_both_brokers_do_the_same(
    name: str, embedded: Broker, apache_kafka: ApacheKafka, kafka_tools: KafkaTools
) -> None:
    scenario, difference = SCENARIOS[name], DIFFERENCES.get(name)
    with ThreadPoolExecutor(2) as threads:
        on_kafka = threads.submit(observe, name, apache_kafka.bootstrap, kafka_tools)
        on_penstock = threads.submit(observe, name, embedded.bootstrap, kafka_tools)
    if scenario.area == "foreign":
        # Now, so that it is this test's warning and no other's.
        gc.collect()
    kafka, penstock = on_kafka.result(), on_penstock.result()
    if scenario.has_expectation:
        assert kafka == scenario.expected, "Apache Kafka does not do what the scenario says"
    if difference is None:
        assert penstock == kafka, "the embedded broker does not do what Apache Kafka does"
    else:
        assert penstock == difference.penstock, "the embedded broker does not differ as listed"
        assert penstock != kafka, "there is no difference any more: take it out"


def test_every_difference_belongs_to_a_scenario_and_has_a_reason() -> None:
    assert set(DIFFERENCES) <= set(SCENARIOS)
    assert all(difference.reason.strip() for difference in DIFFERENCES.values())


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text() == page(), "run: python -m conformance.report"
