"""Features in ApiVersions, from which clients learn what they may do, and tools the version."""

from __future__ import annotations

from typing import Any, Final

from conformance.scenario import scenario
from penstock.wire.messages.api_versions import ApiVersionsRequest
from tests.broker.protocol_client import ProtocolClient

# Those that do not concern controllers and replicas.
OF_CLIENTS: Final = frozenset(
    {
        "metadata.version",
        "group.version",
        "transaction.version",
        "share.version",
        "streams.version",
    }
)


@scenario()
def features_that_concern_clients(client: ProtocolClient) -> Any:
    """Their names and levels are those of Apache Kafka."""
    request = ApiVersionsRequest(client_software_name="test", client_software_version="1")
    answer = client.call(request, 4)
    return [
        sorted(
            (item.name, item.min_version, item.max_version)
            for item in answer.supported_features
            if item.name in OF_CLIENTS
        ),
        sorted(
            (item.name, item.min_version_level, item.max_version_level)
            for item in answer.finalized_features
            if item.name in OF_CLIENTS
        ),
    ]
