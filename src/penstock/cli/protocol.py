"""Single requests of the Kafka protocol, for the few things that librdkafka cannot ask.

They go through `penstock.client`; here it is told of librdkafka's settings that a user has given.
A cluster that wants proof of another kind than certificates and passwords is not asked
(`reachable` says so), and whoever calls must do without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from penstock.client.connection import Cluster, Connection
from penstock.client.security import Security, SecurityError

CLIENT_ID: Final = "penstock-cli"


def reachable(settings: Mapping[str, str]) -> bool:
    """Whether a cluster with these client settings can be asked from here."""
    try:
        Security.from_options(settings)
    except SecurityError:
        return False
    return True


def peer(host: str, port: int, settings: Mapping[str, str]) -> Connection:
    """A connection to one broker; ClientError if there is none."""
    return Connection((host, port), client_id=CLIENT_ID, security=Security.from_options(settings))


def cluster(bootstrap: str, settings: Mapping[str, str]) -> Cluster:
    """The brokers that the bootstrap servers lead to; they are connected to when they are asked."""
    return Cluster(bootstrap, client_id=CLIENT_ID, security=Security.from_options(settings))
