import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import org.apache.kafka.clients.consumer.AcknowledgeType;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaShareConsumer;
import org.apache.kafka.common.KafkaException;
import org.apache.kafka.common.TopicIdPartition;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * Share consumers of {@link JavaClient}: each has a name and lives until it is closed.
 *
 * <p>Operations: share_poll (opens the consumer if need be), share_acknowledge, share_commit,
 * share_close.
 */
final class ShareCommands {
    static final Set<String> OPERATIONS =
        Set.of("share_poll", "share_acknowledge", "share_commit", "share_close");

    private final Map<String, KafkaShareConsumer<byte[], byte[]>> consumers = new HashMap<>();
    /** What a consumer has in its hands, by consumer, partition and offset. */
    private final Map<String, ConsumerRecord<byte[], byte[]>> taken = new HashMap<>();

    void run(String op, Map<String, Object> config, JsonNode request, ObjectNode answer) {
        String name = request.path("consumer").asText();
        switch (op) {
            case "share_poll" -> poll(name, config, request, answer);
            case "share_acknowledge" -> acknowledge(name, request);
            case "share_commit" -> commit(name, answer);
            case "share_close" -> {
                taken.keySet().removeIf(key -> key.startsWith(name + "/"));
                KafkaShareConsumer<byte[], byte[]> consumer = consumers.remove(name);
                if (consumer != null) {
                    consumer.close();
                }
            }
            default -> throw new IllegalArgumentException("unknown op: " + op);
        }
    }

    void close() {
        consumers.values().forEach(consumer -> consumer.close(Duration.ofSeconds(1)));
        consumers.clear();
    }

    private KafkaShareConsumer<byte[], byte[]> open(
            String name, Map<String, Object> config, JsonNode request) {
        return consumers.computeIfAbsent(name, key -> {
            var consumer = new KafkaShareConsumer<>(
                config, new ByteArrayDeserializer(), new ByteArrayDeserializer());
            List<String> topics = new ArrayList<>();
            request.path("topics").forEach(node -> topics.add(node.asText()));
            consumer.subscribe(topics);
            return consumer;
        });
    }

    private static String key(String name, String topic, int partition, long offset) {
        return name + "/" + topic + "-" + partition + "@" + offset;
    }

    /** Polls until something comes or the time is over. */
    private void poll(
            String name, Map<String, Object> config, JsonNode request, ObjectNode answer) {
        KafkaShareConsumer<byte[], byte[]> consumer = open(name, config, request);
        long deadline = System.nanoTime() + request.path("timeout_ms").asLong(30_000) * 1_000_000L;
        ArrayNode records = answer.putArray("records");
        do {
            for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(200))) {
                taken.put(
                    key(name, record.topic(), record.partition(), record.offset()), record);
                records.add(JavaClient.recordNode(record)
                    .put("delivery_count", record.deliveryCount().orElse((short) -1)));
            }
        } while (records.isEmpty() && System.nanoTime() < deadline);
    }

    private void acknowledge(String name, JsonNode request) {
        KafkaShareConsumer<byte[], byte[]> consumer = consumers.get(name);
        for (JsonNode node : request.path("answers")) {
            String key = key(
                name,
                node.get("topic").asText(),
                node.get("partition").asInt(),
                node.get("offset").asLong());
            consumer.acknowledge(
                taken.get(key),
                AcknowledgeType.valueOf(node.get("type").asText().toUpperCase()));
        }
    }

    /** {"results": {partition: null or the error's name}}. */
    private void commit(String name, ObjectNode answer) {
        ObjectNode results = answer.putObject("results");
        Map<TopicIdPartition, Optional<KafkaException>> outcome = consumers.get(name).commitSync();
        outcome.forEach((partition, error) -> results.put(
            partition.topicPartition().toString(),
            error.map(failure -> Errors.forException(failure).name()).orElse(null)));
    }
}
