"""A node dies in the middle of the work, on three nodes of Apache Kafka and on our one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest

from conformance.failover import RECORDS, survive
from conformance.scenario import Cluster
from penstock.testing.apache_kafka import ApacheKafkaCluster
from penstock.testing.kafka_tools import KafkaTools
from penstock.testing.process import BrokerProcess

EXPECTED: Final[dict[str, Any]] = {
    "acknowledged": RECORDS,
    "stored as acknowledged": True,
    "read by the group": True,
    "passed on once, in order": True,
}


# Three Java processes take their time to start.
@pytest.mark.proof
@pytest.mark.timeout(300)
@pytest.mark.java
def test_three_nodes_of_kafka_lose_one(kafka_tools: KafkaTools) -> None:
    quick = {"offsets.topic.num.partitions": "3", "transaction.state.log.num.partitions": "3"}
    with ApacheKafkaCluster(quick) as kafka, Cluster(kafka.bootstrap, kafka_tools) as cluster:
        # It leads one of the three partitions of every topic, and is not started again.
        assert survive(cluster, kafka.nodes[2].kill, lambda: None) == EXPECTED


def test_our_one_node_dies_and_comes_back(kafka_tools: KafkaTools, tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", durability="disk") as broker:
        with Cluster(broker.bootstrap, kafka_tools) as cluster:
            assert survive(cluster, broker.kill, broker.start) == EXPECTED
