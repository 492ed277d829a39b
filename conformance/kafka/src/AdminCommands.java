import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.AlterConfigOp;
import org.apache.kafka.clients.admin.Config;
import org.apache.kafka.clients.admin.ConfigEntry;
import org.apache.kafka.clients.admin.CreatePartitionsOptions;
import org.apache.kafka.clients.admin.CreateTopicsOptions;
import org.apache.kafka.clients.admin.CreateTopicsResult;
import org.apache.kafka.clients.admin.DescribeClusterResult;
import org.apache.kafka.clients.admin.ListOffsetsOptions;
import org.apache.kafka.clients.admin.ListTopicsOptions;
import org.apache.kafka.clients.admin.LogDirDescription;
import org.apache.kafka.clients.admin.NewPartitions;
import org.apache.kafka.clients.admin.NewTopic;
import org.apache.kafka.clients.admin.OffsetSpec;
import org.apache.kafka.clients.admin.ProducerState;
import org.apache.kafka.clients.admin.RecordsToDelete;
import org.apache.kafka.clients.admin.TopicDescription;
import org.apache.kafka.common.IsolationLevel;
import org.apache.kafka.common.KafkaFuture;
import org.apache.kafka.common.Node;
import org.apache.kafka.common.TopicCollection;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.TopicPartitionInfo;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.common.config.ConfigResource;

/**
 * The admin half of {@link JavaClient}: one method per operation.
 *
 * <p>An operation on several things answers {"results": {name: what came back, or the error}}.
 */
final class AdminCommands {
    private AdminCommands() {}

    static void run(Admin admin, String op, JsonNode request, ObjectNode answer) throws Exception {
        switch (op) {
            case "create_topics" -> createTopics(admin, request, answer);
            case "delete_topics" -> deleteTopics(admin, request, answer);
            case "list_topics" -> listTopics(admin, request, answer);
            case "describe_topics" -> describeTopics(admin, request, answer);
            case "create_partitions" -> createPartitions(admin, request, answer);
            case "describe_configs" -> describeConfigs(admin, request, answer);
            case "alter_configs" -> alterConfigs(admin, request, answer);
            case "list_offsets" -> listOffsets(admin, request, answer);
            case "delete_records" -> deleteRecords(admin, request, answer);
            case "describe_cluster" -> describeCluster(admin, answer);
            case "describe_log_dirs" -> describeLogDirs(admin, request, answer);
            case "describe_producers" -> describeProducers(admin, request, answer);
            default -> throw new IllegalArgumentException("unknown op: " + op);
        }
    }

    private static ObjectNode empty() {
        return JavaClient.JSON.createObjectNode();
    }

    private static <K> void done(ObjectNode answer, Map<K, KafkaFuture<Void>> futures) {
        ObjectNode results = answer.putObject("results");
        futures.forEach((key, future) -> {
            String name = key instanceof Uuid id ? hex(id) : key.toString();
            results.set(name, JavaClient.attempt(() -> {
                future.get();
                return empty();
            }));
        });
    }

    // ---- topics --------------------------------------------------------------------------------

    private static void createTopics(Admin admin, JsonNode request, ObjectNode answer) {
        List<NewTopic> topics = new ArrayList<>();
        for (JsonNode node : request.path("topics")) {
            Optional<Integer> partitions = node.hasNonNull("partitions")
                ? Optional.of(node.get("partitions").asInt()) : Optional.empty();
            Optional<Short> replicas = node.hasNonNull("replication_factor")
                ? Optional.of((short) node.get("replication_factor").asInt()) : Optional.empty();
            Map<String, String> configs = new HashMap<>();
            node.path("configs").properties()
                .forEach(entry -> configs.put(entry.getKey(), entry.getValue().asText()));
            topics.add(new NewTopic(node.get("name").asText(), partitions, replicas).configs(configs));
        }
        CreateTopicsResult created = admin.createTopics(
            topics, new CreateTopicsOptions().validateOnly(request.path("validate_only").asBoolean()));
        ObjectNode results = answer.putObject("results");
        for (String name : created.values().keySet()) {
            results.set(name, JavaClient.attempt(() -> {
                ObjectNode node = empty()
                    .put("topic_id", hex(created.topicId(name).get()))
                    .put("partitions", created.numPartitions(name).get())
                    .put("replication_factor", created.replicationFactor(name).get());
                node.set("configs", configNode(created.config(name).get()));
                return node;
            }));
        }
    }

    private static void deleteTopics(Admin admin, JsonNode request, ObjectNode answer) {
        if (request.has("topic_ids")) {
            done(answer, admin.deleteTopics(TopicCollection.ofTopicIds(ids(request))).topicIdValues());
        } else {
            done(answer, admin.deleteTopics(names(request)).topicNameValues());
        }
    }

    private static void listTopics(Admin admin, JsonNode request, ObjectNode answer) throws Exception {
        ListTopicsOptions options =
            new ListTopicsOptions().listInternal(request.path("internal").asBoolean());
        ObjectNode results = answer.putObject("results");
        admin.listTopics(options).listings().get().forEach(listing ->
            results.set(listing.name(), empty()
                .put("topic_id", hex(listing.topicId()))
                .put("internal", listing.isInternal())));
    }

    private static void describeTopics(Admin admin, JsonNode request, ObjectNode answer) {
        ObjectNode results = answer.putObject("results");
        if (request.has("topic_ids")) {
            admin.describeTopics(TopicCollection.ofTopicIds(ids(request))).topicIdValues()
                .forEach((id, future) ->
                    results.set(hex(id), JavaClient.attempt(() -> topicNode(future.get()))));
        } else {
            admin.describeTopics(names(request)).topicNameValues().forEach((name, future) ->
                results.set(name, JavaClient.attempt(() -> topicNode(future.get()))));
        }
    }

    private static ObjectNode topicNode(TopicDescription topic) {
        ObjectNode node = empty()
            .put("name", topic.name())
            .put("topic_id", hex(topic.topicId()))
            .put("internal", topic.isInternal());
        ArrayNode partitions = node.putArray("partitions");
        for (TopicPartitionInfo partition : topic.partitions()) {
            ObjectNode entry = partitions.addObject()
                .put("partition", partition.partition())
                .put("leader", partition.leader() == null ? -1 : partition.leader().id());
            ArrayNode replicas = entry.putArray("replicas");
            partition.replicas().forEach(replica -> replicas.add(replica.id()));
            ArrayNode inSync = entry.putArray("isr");
            partition.isr().forEach(replica -> inSync.add(replica.id()));
        }
        return node;
    }

    private static void createPartitions(Admin admin, JsonNode request, ObjectNode answer) {
        Map<String, NewPartitions> counts = new HashMap<>();
        request.path("counts").properties().forEach(entry ->
            counts.put(entry.getKey(), NewPartitions.increaseTo(entry.getValue().asInt())));
        boolean validateOnly = request.path("validate_only").asBoolean();
        done(answer, admin.createPartitions(
            counts, new CreatePartitionsOptions().validateOnly(validateOnly)).values());
    }

    /** A topic id as 32 hexadecimal digits, the form of Python's `UUID.hex`. */
    private static String hex(Uuid id) {
        return String.format(
            "%016x%016x", id.getMostSignificantBits(), id.getLeastSignificantBits());
    }

    private static List<Uuid> ids(JsonNode request) {
        List<Uuid> ids = new ArrayList<>();
        request.path("topic_ids").forEach(node -> ids.add(new Uuid(
            Long.parseUnsignedLong(node.asText().substring(0, 16), 16),
            Long.parseUnsignedLong(node.asText().substring(16), 16))));
        return ids;
    }

    private static List<String> names(JsonNode request) {
        List<String> names = new ArrayList<>();
        request.path("topics").forEach(node -> names.add(node.asText()));
        return names;
    }

    // ---- configs -------------------------------------------------------------------------------

    private static ConfigResource resource(JsonNode request) {
        String type = request.path("resource_type").asText("topic").toUpperCase();
        return new ConfigResource(
            ConfigResource.Type.valueOf(type), request.path("resource").asText());
    }

    private static ObjectNode configNode(Config config) {
        ObjectNode node = empty();
        for (ConfigEntry entry : config.entries()) {
            node.set(entry.name(), empty()
                .put("value", entry.value())
                .put("source", entry.source().name())
                // Absent where the configs come with a created topic.
                .put("type", entry.type() == null ? null : entry.type().name())
                .put("read_only", entry.isReadOnly())
                .put("sensitive", entry.isSensitive()));
        }
        return node;
    }

    private static void describeConfigs(Admin admin, JsonNode request, ObjectNode answer)
            throws Exception {
        ConfigResource resource = resource(request);
        Config config = admin.describeConfigs(List.of(resource)).values().get(resource).get();
        answer.set("configs", configNode(config));
    }

    private static void alterConfigs(Admin admin, JsonNode request, ObjectNode answer)
            throws Exception {
        List<AlterConfigOp> operations = new ArrayList<>();
        for (JsonNode node : request.path("operations")) {
            operations.add(new AlterConfigOp(
                new ConfigEntry(node.get("name").asText(), node.path("value").asText(null)),
                AlterConfigOp.OpType.valueOf(node.get("operation").asText().toUpperCase())));
        }
        admin.incrementalAlterConfigs(Map.of(resource(request), operations)).all().get();
    }

    // ---- offsets and records -------------------------------------------------------------------

    private static void listOffsets(Admin admin, JsonNode request, ObjectNode answer) {
        Map<TopicPartition, OffsetSpec> wanted = new HashMap<>();
        request.path("partitions").forEach(node ->
            wanted.put(JavaClient.partition(node), offsetSpec(node.get("at"))));
        IsolationLevel isolation = request.path("read_committed").asBoolean()
            ? IsolationLevel.READ_COMMITTED : IsolationLevel.READ_UNCOMMITTED;
        var listed = admin.listOffsets(wanted, new ListOffsetsOptions(isolation));
        ObjectNode results = answer.putObject("results");
        for (TopicPartition partition : wanted.keySet()) {
            results.set(partition.toString(), JavaClient.attempt(() -> {
                var info = listed.partitionResult(partition).get();
                return empty()
                    .put("offset", info.offset())
                    .put("timestamp", info.timestamp())
                    .put("leader_epoch", info.leaderEpoch().orElse(-1));
            }));
        }
    }

    private static OffsetSpec offsetSpec(JsonNode at) {
        if (at.isNumber()) {
            return OffsetSpec.forTimestamp(at.asLong());
        }
        return switch (at.asText()) {
            case "earliest" -> OffsetSpec.earliest();
            case "latest" -> OffsetSpec.latest();
            case "max_timestamp" -> OffsetSpec.maxTimestamp();
            case "earliest_local" -> OffsetSpec.earliestLocal();
            case "latest_tiered" -> OffsetSpec.latestTiered();
            default -> throw new IllegalArgumentException("unknown place in the log: " + at);
        };
    }

    private static void deleteRecords(Admin admin, JsonNode request, ObjectNode answer) {
        Map<TopicPartition, RecordsToDelete> wanted = new HashMap<>();
        request.path("partitions").forEach(node -> wanted.put(
            JavaClient.partition(node), RecordsToDelete.beforeOffset(node.get("before").asLong())));
        ObjectNode results = answer.putObject("results");
        admin.deleteRecords(wanted).lowWatermarks().forEach((partition, future) ->
            results.set(partition.toString(), JavaClient.attempt(() ->
                empty().put("low_watermark", future.get().lowWatermark()))));
    }

    // ---- the cluster ---------------------------------------------------------------------------

    private static void describeCluster(Admin admin, ObjectNode answer) throws Exception {
        DescribeClusterResult cluster = admin.describeCluster();
        answer.put("cluster_id", cluster.clusterId().get());
        Node controller = cluster.controller().get();
        answer.put("controller", controller == null ? -1 : controller.id());
        ArrayNode nodes = answer.putArray("nodes");
        for (Node node : cluster.nodes().get()) {
            nodes.addObject().put("id", node.id()).put("host", node.host()).put("port", node.port());
        }
    }

    private static void describeLogDirs(Admin admin, JsonNode request, ObjectNode answer)
            throws Exception {
        List<Integer> brokers = new ArrayList<>();
        request.path("brokers").forEach(node -> brokers.add(node.asInt()));
        ObjectNode results = answer.putObject("results");
        var described = admin.describeLogDirs(brokers).allDescriptions().get();
        for (var broker : described.entrySet()) {
            ObjectNode directories = results.putObject(broker.getKey().toString());
            for (var entry : broker.getValue().entrySet()) {
                directories.set(entry.getKey(), logDirNode(entry.getValue()));
            }
        }
    }

    private static ObjectNode logDirNode(LogDirDescription description) {
        ObjectNode node = empty()
            .put("error", description.error() == null ? null : description.error().toString())
            .put("total_bytes", description.totalBytes().orElse(-1))
            .put("usable_bytes", description.usableBytes().orElse(-1));
        ObjectNode replicas = node.putObject("partitions");
        description.replicaInfos().forEach((partition, replica) ->
            replicas.set(partition.toString(), empty()
                .put("size_bytes", replica.size())
                .put("offset_lag", replica.offsetLag())
                .put("future", replica.isFuture())));
        return node;
    }

    private static void describeProducers(Admin admin, JsonNode request, ObjectNode answer) {
        List<TopicPartition> wanted = new ArrayList<>();
        request.path("partitions").forEach(node -> wanted.add(JavaClient.partition(node)));
        var described = admin.describeProducers(wanted);
        ObjectNode results = answer.putObject("results");
        for (TopicPartition partition : wanted) {
            results.set(partition.toString(), JavaClient.attempt(() -> {
                ObjectNode node = empty();
                ArrayNode producers = node.putArray("producers");
                for (ProducerState state : described.partitionResult(partition).get().activeProducers()) {
                    producers.addObject()
                        .put("producer_id", state.producerId())
                        .put("producer_epoch", state.producerEpoch())
                        .put("last_sequence", state.lastSequence())
                        .put("last_timestamp", state.lastTimestamp())
                        .put("transaction_start_offset",
                            state.currentTransactionStartOffset().orElse(-1));
                }
                return node;
            }));
        }
    }
}
