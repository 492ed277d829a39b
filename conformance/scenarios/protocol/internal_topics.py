"""What is visible of the topics in which Apache Kafka's coordinators keep their state."""

from __future__ import annotations

from time import monotonic
from typing import Any

from conformance.scenario import scenario
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from penstock.wire.messages.metadata import MetadataRequest
from tests.broker.protocol_client import READY_TIMEOUT_S, ProtocolClient, error_name
from tests.broker.requests import metadata, new_name

NAMES = ("__consumer_offsets", "__transaction_state")


def wait_for_coordinator(client: ProtocolClient, kind: int) -> None:
    """Kafka makes the topic when somebody asks for a coordinator for the first time."""
    deadline = monotonic() + READY_TIMEOUT_S
    request = FindCoordinatorRequest(key_type=kind, coordinator_keys=[new_name()])
    while client.call(request, 4).coordinators[0].error_code:
        assert monotonic() < deadline


@scenario(expected=[("NONE", True, True), ("NONE", True, True)])
def topics_of_the_coordinators(client: ProtocolClient) -> Any:
    """Whether they are in the metadata, marked as internal, and listed among all topics."""
    for kind in (0, 1):
        wait_for_coordinator(client, kind)
    told = client.call(metadata(*NAMES, create_missing=True)).topics
    listed = {topic.name for topic in client.call(MetadataRequest(topics=None)).topics}
    return [
        (error_name(topic.error_code), topic.is_internal, topic.name in listed) for topic in told
    ]
