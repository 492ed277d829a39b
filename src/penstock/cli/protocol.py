"""Single requests of the Kafka protocol, for the few things that librdkafka cannot ask.

They go through `penstock.client`; here it is told of librdkafka's settings that a user has given.
A connection is plain or, with `security.protocol=SSL`, encrypted by the certificates that the
settings name; a cluster that wants passwords is not asked (`reachable` says so), and whoever calls
must do without.
"""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from typing import Final

from penstock.client.connection import ClientError, Cluster, Connection

CLIENT_ID: Final = "penstock-cli"


def _security(settings: Mapping[str, str]) -> str:
    return settings.get("security.protocol", "plaintext").lower()


def reachable(settings: Mapping[str, str]) -> bool:
    """Whether a cluster with these client settings can be asked from here."""
    return _security(settings) in ("plaintext", "ssl")


def peer(host: str, port: int, settings: Mapping[str, str]) -> Connection:
    """A connection to one broker; ClientError if there is none."""
    return Connection((host, port), client_id=CLIENT_ID, tls=_tls(settings))


def cluster(bootstrap: str, settings: Mapping[str, str]) -> Cluster:
    """The brokers that the bootstrap servers lead to; they are connected to when they are asked."""
    return Cluster(bootstrap, client_id=CLIENT_ID, tls=_tls(settings))


def _tls(settings: Mapping[str, str]) -> ssl.SSLContext | None:
    if _security(settings) != "ssl":
        return None
    try:
        context = ssl.create_default_context(cafile=settings.get("ssl.ca.location"))
        certificate = settings.get("ssl.certificate.location")
        if certificate is not None:
            key = settings.get("ssl.key.location")
            context.load_cert_chain(certificate, key, settings.get("ssl.key.password"))
    except OSError as error:
        raise ClientError(f"the certificates cannot be used: {error}") from error
    if settings.get("ssl.endpoint.identification.algorithm") == "none":
        context.check_hostname = False
    if settings.get("enable.ssl.certificate.verification", "true").lower() == "false":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context
