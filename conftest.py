"""What `tests/` and `conformance/` share: the harness, and real servers as judges.

A test that needs Java, the jars or a server that is missing fails, it is not skipped: a green run
means that the foreign judges have spoken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.kafka_tools import KafkaTools
from penstock.testing.mariadb import MariaDB
from penstock.testing.mysql import MySQL
from penstock.testing.opensearch import OpenSearch
from penstock.testing.postgres import PostgresServer
from penstock.testing.redis import RedisServer
from tests.harness.profiles import PROFILE, Profile
from tests.harness.servers import servers_key

PostgresOf = Callable[[str], PostgresServer]

pytest_plugins = ["tests.harness.plugin"]

# Spark in processes that tests start lives for a minute: code compiled once more for speed comes
# too late, and compiling it takes half of the time of a core.
os.environ.setdefault(
    "SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:ReservedCodeCacheSize=256m"
)
# An archive is used where there is one; to make one would take time from the tests.
os.environ.setdefault("PENSTOCK_SPARK_ARCHIVE", "use")


@pytest.fixture(scope="session")
def penstock_spark_settings(penstock_spark_settings: dict[str, str]) -> dict[str, str]:
    """In `proof` Spark makes code of queries, as it does for users; else the flows of `penstock
    run` do, in processes of their own."""
    if PROFILE is Profile.PROOF:
        return {k: v for k, v in penstock_spark_settings.items() if not k.startswith("spark.sql.")}
    return penstock_spark_settings


@pytest.fixture(scope="session")
def kafka_tools() -> Iterator[KafkaTools]:
    """Apache Kafka's dump tool and Java client, in one Java process for all tests of a worker."""
    with KafkaTools() as tools:
        yield tools


@pytest.fixture(scope="session")
def apache_kafka(request: pytest.FixtureRequest) -> ApacheKafka:
    """A real Apache Kafka that all tests share; each uses topics of its own."""
    kafka: ApacheKafka = request.config.stash[servers_key].get("kafka")
    return kafka


@pytest.fixture(scope="session")
def opensearch(request: pytest.FixtureRequest) -> OpenSearch:
    """A real OpenSearch that all tests share; each uses indexes of its own."""
    server: OpenSearch = request.config.stash[servers_key].get("opensearch")
    return server


@pytest.fixture(scope="session")
def postgres_of(request: pytest.FixtureRequest) -> PostgresOf:
    """The PostgreSQL of a release, shared by all tests; each has databases of its own."""
    servers = request.config.stash[servers_key]

    def of(release: str) -> PostgresServer:
        server: PostgresServer = servers.get(f"postgres-{release}")
        return server

    return of


@pytest.fixture(scope="session")
def shared_postgres(postgres_of: PostgresOf) -> PostgresServer:
    """The system's PostgreSQL."""
    return postgres_of("system")


@pytest.fixture(scope="session")
def shared_mariadb(request: pytest.FixtureRequest) -> MariaDB:
    """A MariaDB that all tests share; each has databases of its own."""
    server: MariaDB = request.config.stash[servers_key].get("mariadb")
    return server


@pytest.fixture(scope="session")
def shared_mysql(request: pytest.FixtureRequest) -> MySQL:
    """A MySQL 8 that all tests share; each has databases of its own."""
    server: MySQL = request.config.stash[servers_key].get("mysql")
    return server


@pytest.fixture(scope="session")
def shared_redis(request: pytest.FixtureRequest) -> RedisServer:
    """A Redis that all tests share; each uses keys or a database of its own."""
    server: RedisServer = request.config.stash[servers_key].get("redis")
    return server
