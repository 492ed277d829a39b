"""The same tests on both brokers: the embedded one, and Apache Kafka as the judge of the client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from uuid import uuid4

import pytest

from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.testing.broker import Broker
from tests.broker.disks import temporary_files_in_memory

_KAFKA_MARKS = [pytest.mark.java]
# Records of tests may carry times of long ago.
KEEP = {"retention.ms": "-1"}
MakeTopic = Callable[..., str]
_numbers = count()


@pytest.fixture(scope="module", autouse=True)
def _files_in_memory() -> Iterator[None]:
    """Brokers that make their own folder have it in memory."""
    with temporary_files_in_memory():
        yield


@pytest.fixture(scope="session")
def embedded() -> Iterator[Broker]:
    with temporary_files_in_memory(), Broker() as running:
        yield running


@pytest.fixture(params=["penstock", pytest.param("kafka", marks=_KAFKA_MARKS)], scope="module")
def bootstrap(request: pytest.FixtureRequest) -> str:
    """The address of a broker that is shared, of each kind."""
    name = "embedded" if request.param == "penstock" else "apache_kafka"
    address: str = request.getfixturevalue(name).bootstrap
    return address


@pytest.fixture
def cluster(bootstrap: str) -> Iterator[Cluster]:
    with Cluster(bootstrap) as made:
        yield made


def unique(what: str) -> str:
    return f"{what}-{next(_numbers)}-{uuid4().hex[:8]}"


@pytest.fixture
def make_topic(cluster: Cluster) -> MakeTopic:
    """Makes a topic of its own, with so many partitions and these settings."""

    def make(partitions: int = 1, **config: str) -> str:
        name = unique("topic")
        settings = KEEP | {key.replace("_", "."): value for key, value in config.items()}
        topics.create(cluster, name, partitions=partitions, config=settings)
        return name

    return make
