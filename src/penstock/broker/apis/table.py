"""Every API that this broker answers, with the versions it answers."""

from __future__ import annotations

from typing import Final

from penstock.broker.apis import cluster, configs, coordinators, fetch, offsets, produce, topics
from penstock.broker.apis.context import Endpoint

ENDPOINTS: Final[dict[int, Endpoint]] = {
    endpoint.api_key: endpoint
    for endpoint in (
        # librdkafka before 2.11 compresses only if version 0 is on offer, though it sends 7+.
        Endpoint(0, 3, 13, hot=produce.handle, advertised_min=0),
        Endpoint(1, 4, 18, hot=fetch.handle),
        Endpoint(2, 1, 10, offsets.list_offsets),
        Endpoint(3, 0, 13, cluster.metadata),
        Endpoint(10, 0, 6, coordinators.find_coordinator),
        Endpoint(18, 0, 4, cluster.api_versions),
        Endpoint(19, 2, 7, topics.create_topics),
        Endpoint(20, 1, 6, topics.delete_topics),
        Endpoint(21, 0, 2, topics.delete_records),
        Endpoint(22, 0, 5, coordinators.init_producer_id),
        Endpoint(23, 2, 4, offsets.offset_for_leader_epoch),
        Endpoint(32, 1, 4, configs.describe_configs),
        Endpoint(33, 0, 2, configs.alter_configs),
        Endpoint(35, 1, 4, cluster.describe_log_dirs),
        Endpoint(37, 0, 3, topics.create_partitions),
        Endpoint(44, 0, 1, configs.incremental_alter_configs),
        Endpoint(60, 0, 2, cluster.describe_cluster),
        Endpoint(61, 0, 0, offsets.describe_producers),
        Endpoint(75, 0, 0, cluster.describe_topic_partitions),
    )
}
