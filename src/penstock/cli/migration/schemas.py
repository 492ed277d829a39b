"""Schemas of captured tables: events name them by id, so they go where the events go.

They are not copied record by record: the target may have schemas of its own, from captures that
write there. What it lacks is added, each with the id that the events name.
"""

from __future__ import annotations

from penstock.cli.migration.ends import End
from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.security import Security
from penstock.client.table_schemas import SCHEMAS_TOPIC, SCHEMAS_TOPIC_CONFIG, SchemaRecords


def copy_schemas(source: End, target: End, replication: int | None = None) -> int:
    """Have all schemas of the source in the target; how many it lacked."""
    with _cluster(source) as there, _cluster(target) as here:
        found = [record for _, record in SchemaRecords(there).news()]
        if not found:
            return 0

        def ensure() -> None:
            topics.create(
                here,
                SCHEMAS_TOPIC,
                partitions=1,
                replication=replication or topics.DEFAULT,
                config=SCHEMAS_TOPIC_CONFIG,
                exists_ok=True,
            )

        # What it imports is not in the base install, with which there are no captures.
        from penstock.capture.delivery.schemas import SchemaTopic

        topic = SchemaTopic(here, ensure)
        for record in found:
            topic.registry.adopt(record)
        count = len(topic.registry.pending)
        topic.publish()
        return count


def _cluster(end: End) -> Cluster:
    connection = end.connection
    security = Security.from_options(connection.settings)
    return Cluster(connection.bootstrap, client_id="penstock-migrate", security=security)
