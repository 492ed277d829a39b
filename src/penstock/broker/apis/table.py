"""Every API that this broker answers, with the versions it answers."""

from __future__ import annotations

from typing import Final

from penstock.broker.apis import (
    cluster,
    configs,
    consumer_groups,
    coordinators,
    fetch,
    group_offsets,
    groups,
    offsets,
    produce,
    quorum,
    quotas,
    replicas,
    share_offsets,
    shares,
    streams_groups,
    telemetry,
    topics,
    transactions,
)
from penstock.broker.apis.context import Endpoint

ENDPOINTS: Final[dict[int, Endpoint]] = {
    endpoint.api_key: endpoint
    for endpoint in (
        # librdkafka before 2.11 compresses only if version 0 is on offer, though it sends 7+.
        Endpoint(0, 3, 13, hot=produce.handle, advertised_min=0),
        Endpoint(1, 4, 18, hot=fetch.handle),
        Endpoint(2, 1, 10, offsets.list_offsets),
        Endpoint(3, 0, 13, cluster.metadata),
        Endpoint(8, 2, 10, hot=group_offsets.offset_commit),
        Endpoint(9, 1, 10, group_offsets.offset_fetch),
        Endpoint(10, 0, 6, coordinators.find_coordinator),
        Endpoint(11, 0, 9, groups.join_group),
        Endpoint(12, 0, 4, groups.heartbeat),
        Endpoint(13, 0, 5, groups.leave_group),
        Endpoint(14, 0, 5, groups.sync_group),
        Endpoint(15, 0, 6, groups.describe_groups),
        Endpoint(16, 0, 5, groups.list_groups),
        Endpoint(18, 0, 4, cluster.api_versions),
        Endpoint(19, 2, 7, topics.create_topics),
        Endpoint(20, 1, 6, topics.delete_topics),
        Endpoint(21, 0, 2, topics.delete_records),
        # Version 6 is KIP-939's, which Kafka still calls unstable.
        Endpoint(22, 0, 6, transactions.init_producer_id),
        Endpoint(23, 2, 4, offsets.offset_for_leader_epoch),
        Endpoint(24, 0, 5, transactions.add_partitions_to_txn),
        Endpoint(25, 0, 4, transactions.add_offsets_to_txn),
        Endpoint(26, 0, 5, transactions.end_txn),
        Endpoint(27, 1, 2, transactions.write_txn_markers),
        Endpoint(28, 0, 5, transactions.txn_offset_commit),
        Endpoint(32, 1, 4, configs.describe_configs),
        Endpoint(33, 0, 2, configs.alter_configs),
        Endpoint(34, 1, 2, replicas.alter_replica_log_dirs),
        Endpoint(35, 1, 4, cluster.describe_log_dirs),
        Endpoint(37, 0, 3, topics.create_partitions),
        Endpoint(42, 0, 2, groups.delete_groups),
        Endpoint(43, 0, 2, replicas.elect_leaders),
        Endpoint(44, 0, 1, configs.incremental_alter_configs),
        Endpoint(45, 0, 1, replicas.alter_partition_reassignments),
        Endpoint(46, 0, 0, replicas.list_partition_reassignments),
        Endpoint(47, 0, 0, group_offsets.offset_delete),
        Endpoint(48, 0, 1, quotas.describe_client_quotas),
        Endpoint(49, 0, 1, quotas.alter_client_quotas),
        Endpoint(55, 0, 2, quorum.describe_quorum),
        Endpoint(60, 0, 2, cluster.describe_cluster),
        Endpoint(61, 0, 0, offsets.describe_producers),
        Endpoint(65, 0, 0, transactions.describe_transactions),
        Endpoint(66, 0, 2, transactions.list_transactions),
        Endpoint(68, 0, 1, consumer_groups.consumer_group_heartbeat),
        Endpoint(69, 0, 1, consumer_groups.consumer_group_describe),
        # Hidden by Kafka as well, unless it has a plugin that receives the metrics of clients.
        Endpoint(71, 0, 0, telemetry.get_telemetry_subscriptions, is_advertised=False),
        Endpoint(72, 0, 0, telemetry.push_telemetry, is_advertised=False),
        Endpoint(74, 0, 1, configs.list_config_resources),
        Endpoint(75, 0, 0, cluster.describe_topic_partitions),
        Endpoint(76, 1, 1, consumer_groups.share_group_heartbeat),
        Endpoint(77, 1, 1, consumer_groups.share_group_describe),
        # librdkafka 2.16 needs version 1 on offer.
        Endpoint(78, 1, 2, hot=shares.fetch),
        Endpoint(79, 1, 2, shares.share_acknowledge),
        Endpoint(88, 0, 0, streams_groups.streams_group_heartbeat),
        Endpoint(89, 0, 0, streams_groups.streams_group_describe),
        Endpoint(90, 0, 1, share_offsets.describe),
        Endpoint(91, 0, 0, share_offsets.alter),
        Endpoint(92, 0, 0, share_offsets.delete),
    )
}
