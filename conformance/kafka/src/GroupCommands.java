import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.HashSet;
import java.util.List;
import java.util.Map;
import java.util.Set;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.admin.ListConsumerGroupOffsetsOptions;
import org.apache.kafka.clients.admin.ListConsumerGroupOffsetsSpec;
import org.apache.kafka.clients.admin.ListShareGroupOffsetsSpec;
import org.apache.kafka.clients.admin.ShareGroupDescription;
import org.apache.kafka.clients.admin.ShareMemberDescription;
import org.apache.kafka.clients.admin.TransactionDescription;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/** What {@link JavaClient} does with groups and transactions: one method per operation. */
final class GroupCommands {
    static final Set<String> OPERATIONS = Set.of(
        "list_group_offsets",
        "delete_group_offsets",
        "describe_share_group",
        "share_group_offsets",
        "delete_share_group",
        "list_transactions",
        "describe_transaction");

    private GroupCommands() {}

    static void run(Admin admin, String op, JsonNode request, ObjectNode answer) throws Exception {
        switch (op) {
            case "list_group_offsets" -> listOffsets(admin, request, answer);
            case "delete_group_offsets" -> deleteOffsets(admin, request, answer);
            case "describe_share_group" -> describeShareGroup(admin, request, answer);
            case "share_group_offsets" -> shareGroupOffsets(admin, request, answer);
            case "delete_share_group" -> deleteShareGroup(admin, request, answer);
            case "list_transactions" -> listTransactions(admin, answer);
            case "describe_transaction" -> describeTransaction(admin, request, answer);
            default -> throw new IllegalArgumentException("unknown op: " + op);
        }
    }

    private static ObjectNode empty() {
        return JavaClient.JSON.createObjectNode();
    }

    // ---- members -------------------------------------------------------------------------------

    /**
     * Joins a group, reads until `count` records have come, commits where told to, and leaves:
     * the records' values in the order in which they came, and the partitions it was given.
     */
    static void consumeAsMember(Map<String, Object> config, JsonNode request, ObjectNode answer) {
        long deadline = System.nanoTime() + request.path("timeout_ms").asLong(30_000) * 1_000_000L;
        int count = request.path("count").asInt();
        List<String> topics = new ArrayList<>();
        request.path("topics").forEach(node -> topics.add(node.asText()));
        ArrayNode records = answer.putArray("records");
        try (KafkaConsumer<byte[], byte[]> consumer =
                 new KafkaConsumer<>(config, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            consumer.subscribe(topics);
            while (records.size() < count && System.nanoTime() < deadline) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
                    records.add(JavaClient.recordNode(record));
                }
            }
            ArrayNode partitions = answer.putArray("partitions");
            consumer.assignment().stream().map(TopicPartition::partition).sorted()
                .forEach(partitions::add);
            if (request.path("commit").asBoolean()) {
                consumer.commitSync();
            }
        }
    }

    // ---- offsets -------------------------------------------------------------------------------

    private static void listOffsets(Admin admin, JsonNode request, ObjectNode answer)
            throws Exception {
        String group = request.path("group").asText();
        var options = new ListConsumerGroupOffsetsOptions()
            .requireStable(request.path("require_stable").asBoolean());
        var found = admin.listConsumerGroupOffsets(
            Map.of(group, new ListConsumerGroupOffsetsSpec()), options);
        ObjectNode offsets = answer.putObject("offsets");
        found.partitionsToOffsetAndMetadata(group).get().forEach((partition, offset) -> {
            if (offset != null) {
                offsets.put(partition.toString(), offset.offset());
            }
        });
    }

    private static void deleteOffsets(Admin admin, JsonNode request, ObjectNode answer) {
        Set<TopicPartition> partitions = new HashSet<>();
        request.path("partitions").forEach(node -> partitions.add(JavaClient.partition(node)));
        var deleted =
            admin.deleteConsumerGroupOffsets(request.path("group").asText(), partitions);
        ObjectNode results = answer.putObject("results");
        for (TopicPartition partition : partitions) {
            results.set(partition.toString(), JavaClient.attempt(() -> {
                deleted.partitionResult(partition).get();
                return empty();
            }));
        }
    }

    // ---- share groups --------------------------------------------------------------------------

    private static void describeShareGroup(Admin admin, JsonNode request, ObjectNode answer)
            throws Exception {
        String group = request.path("group").asText();
        ShareGroupDescription found =
            admin.describeShareGroups(List.of(group)).describedGroups().get(group).get();
        answer.put("state", found.groupState().name());
        ArrayNode members = answer.putArray("members");
        for (ShareMemberDescription member : found.members()) {
            ArrayNode partitions = members.addObject()
                .put("client_id", member.clientId())
                .putArray("partitions");
            member.assignment().topicPartitions()
                .forEach(partition -> partitions.add(partition.toString()));
        }
    }

    private static void shareGroupOffsets(Admin admin, JsonNode request, ObjectNode answer)
            throws Exception {
        String group = request.path("group").asText();
        var found = admin.listShareGroupOffsets(Map.of(group, new ListShareGroupOffsetsSpec()));
        ObjectNode offsets = answer.putObject("offsets");
        found.partitionsToOffsetInfo(group).get().forEach((partition, info) -> {
            if (info != null) {
                offsets.put(partition.toString(), info.startOffset());
            }
        });
    }

    private static void deleteShareGroup(Admin admin, JsonNode request, ObjectNode answer) {
        String group = request.path("group").asText();
        ObjectNode results = answer.putObject("results");
        results.set(group, JavaClient.attempt(() -> {
            admin.deleteShareGroups(List.of(group)).deletedGroups().get(group).get();
            return empty();
        }));
    }

    // ---- transactions --------------------------------------------------------------------------

    private static void listTransactions(Admin admin, ObjectNode answer) throws Exception {
        ObjectNode transactions = answer.putObject("transactions");
        admin.listTransactions().all().get().forEach(listing ->
            transactions.set(listing.transactionalId(), empty()
                .put("state", listing.state().toString())
                .put("producer_id", listing.producerId())));
    }

    private static void describeTransaction(Admin admin, JsonNode request, ObjectNode answer)
            throws Exception {
        String id = request.path("id").asText();
        TransactionDescription found =
            admin.describeTransactions(List.of(id)).description(id).get();
        answer.put("state", found.state().toString());
        answer.put("producer_epoch", found.producerEpoch());
        ArrayNode partitions = answer.putArray("partitions");
        found.topicPartitions().forEach(partition -> partitions.add(partition.toString()));
    }

    static Map<String, Object> withGroup(Map<String, Object> config) {
        Map<String, Object> all = new HashMap<>(config);
        all.putIfAbsent("auto.offset.reset", "earliest");
        all.putIfAbsent("enable.auto.commit", "false");
        return all;
    }
}
