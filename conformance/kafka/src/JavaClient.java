import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.CompletionException;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.Future;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.consumer.OffsetAndTimestamp;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.clients.producer.RecordMetadata;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.errors.RetriableException;
import org.apache.kafka.common.header.Header;
import org.apache.kafka.common.protocol.Errors;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.utils.Exit;
import org.apache.kafka.tools.DumpLogSegments;

/**
 * Apache Kafka's own Java client and segment dump, driven over pipes by tests in another language.
 *
 * <p>One JSON object per line comes in on stdin: {"op": ..., "config": {...}, ...}; one goes out on
 * stdout: {"ok": true, ...}, or {"ok": false, "error": class, "code": Kafka's error code,
 * "message": ..., "retriable": ...}. Keys, values and header values are base64, null stays null.
 * Requests are answered strictly in order. A producer or an admin client is kept for as long as the
 * same config is used, so that a producer id and its sequence numbers go on from call to call;
 * {"op": "close"} ends them. What cannot be parsed ends the process: its driver is broken.
 */
public final class JavaClient {
    static final ObjectMapper JSON = new ObjectMapper();

    private final Map<Map<String, Object>, KafkaProducer<byte[], byte[]>> producers = new HashMap<>();
    private final Map<Map<String, Object>, Admin> admins = new HashMap<>();
    private final ShareCommands shareConsumers = new ShareCommands();

    public static void main(String[] args) throws IOException {
        PrintStream answers = new PrintStream(System.out, true, StandardCharsets.UTF_8);
        // Only answers may reach stdout, whatever a library prints.
        System.setOut(System.err);
        JavaClient client = new JavaClient();
        BufferedReader requests =
            new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = requests.readLine(); line != null; line = requests.readLine()) {
            answers.println(client.answer(JSON.readTree(line)));
        }
        client.close(null);
    }

    private String answer(JsonNode request) {
        ObjectNode answer = JSON.createObjectNode().put("ok", true);
        try {
            dispatch(request, answer);
        } catch (Exception failure) {
            return error(failure).put("ok", false).toString();
        }
        return answer.toString();
    }

    private void dispatch(JsonNode request, ObjectNode answer) throws Exception {
        Map<String, Object> config = config(request);
        String op = request.path("op").asText();
        switch (op) {
            case "ping" -> answer.put("java", Runtime.version().toString());
            case "close" -> close(config.get("bootstrap.servers"));
            case "dump" -> dump(request, answer);
            case "assign" -> AssignorCommands.run(request, answer);
            case "produce" -> produce(config, request, answer);
            case "consume" -> consume(config, request, answer);
            case "consume_as_member" ->
                GroupCommands.consumeAsMember(GroupCommands.withGroup(config), request, answer);
            default -> {
                if (ShareCommands.OPERATIONS.contains(op)) {
                    shareConsumers.run(op, config, request, answer);
                    return;
                }
                Admin admin = admins.computeIfAbsent(config, Admin::create);
                if (GroupCommands.OPERATIONS.contains(op)) {
                    GroupCommands.run(admin, op, request, answer);
                } else {
                    AdminCommands.run(admin, op, request, answer);
                }
            }
        }
    }

    private static Map<String, Object> config(JsonNode request) {
        Map<String, Object> config = new HashMap<>();
        request.path("config").properties()
            .forEach(entry -> config.put(entry.getKey(), entry.getValue().asText()));
        return config;
    }

    /** Ends the clients that talk to one address, or all of them when it is null. */
    private void close(Object bootstrap) {
        if (bootstrap == null) {
            shareConsumers.close();
        }
        producers.entrySet().removeIf(entry -> {
            boolean ends = bootstrap == null || bootstrap.equals(entry.getKey().get("bootstrap.servers"));
            if (ends) {
                entry.getValue().close(Duration.ZERO);
            }
            return ends;
        });
        admins.entrySet().removeIf(entry -> {
            boolean ends = bootstrap == null || bootstrap.equals(entry.getKey().get("bootstrap.servers"));
            if (ends) {
                entry.getValue().close(Duration.ZERO);
            }
            return ends;
        });
    }

    // ---- produce -------------------------------------------------------------------------------

    private void produce(Map<String, Object> config, JsonNode request, ObjectNode answer) {
        KafkaProducer<byte[], byte[]> producer = producers.computeIfAbsent(config, JavaClient::producer);
        String transaction = request.path("transaction").asText("");
        if (!transaction.isEmpty()) {
            producer.beginTransaction();
        }
        List<Future<RecordMetadata>> sent = new ArrayList<>();
        for (JsonNode record : request.path("records")) {
            sent.add(producer.send(producerRecord(request.path("topic").asText(), record)));
        }
        producer.flush();
        ArrayNode results = answer.putArray("results");
        for (Future<RecordMetadata> future : sent) {
            results.add(attempt(() -> {
                RecordMetadata metadata = future.get();
                return JSON.createObjectNode()
                    .put("partition", metadata.partition())
                    .put("offset", metadata.offset())
                    .put("timestamp", metadata.timestamp());
            }));
        }
        if (transaction.equals("commit")) {
            producer.commitTransaction();
        } else if (transaction.equals("abort")) {
            producer.abortTransaction();
        }
    }

    private static KafkaProducer<byte[], byte[]> producer(Map<String, Object> config) {
        KafkaProducer<byte[], byte[]> producer =
            new KafkaProducer<>(config, new ByteArraySerializer(), new ByteArraySerializer());
        if (config.containsKey("transactional.id")) {
            producer.initTransactions();
        }
        return producer;
    }

    private static ProducerRecord<byte[], byte[]> producerRecord(String topic, JsonNode record) {
        ProducerRecord<byte[], byte[]> result = new ProducerRecord<>(
            topic,
            record.hasNonNull("partition") ? record.get("partition").asInt() : null,
            record.hasNonNull("timestamp") ? record.get("timestamp").asLong() : null,
            bytes(record.path("key")),
            bytes(record.path("value")));
        for (JsonNode header : record.path("headers")) {
            result.headers().add(header.get(0).asText(), bytes(header.get(1)));
        }
        return result;
    }

    private static byte[] bytes(JsonNode node) {
        try {
            return node.isNull() || node.isMissingNode() ? null : node.binaryValue();
        } catch (IOException notBase64) {
            throw new IllegalArgumentException(notBase64);
        }
    }

    // ---- consume -------------------------------------------------------------------------------

    /**
     * Reads the assigned partitions until `max_records` have come, until the end that each had at
     * the start (`to_end`), or until `timeout_ms` have passed; `done` says whether it was the last.
     */
    private static void consume(Map<String, Object> config, JsonNode request, ObjectNode answer) {
        int maxRecords = request.path("max_records").asInt(Integer.MAX_VALUE);
        boolean toEnd = request.path("to_end").asBoolean(false);
        long deadline = System.nanoTime() + request.path("timeout_ms").asLong(30_000) * 1_000_000L;
        ArrayNode records = answer.putArray("records");
        try (KafkaConsumer<byte[], byte[]> consumer =
                 new KafkaConsumer<>(config, new ByteArrayDeserializer(), new ByteArrayDeserializer())) {
            assign(consumer, request.path("assignments"));
            Map<TopicPartition, Long> ends =
                toEnd ? consumer.endOffsets(consumer.assignment()) : Map.of();
            boolean done = finished(consumer, toEnd, ends);
            while (!done && records.size() < maxRecords && System.nanoTime() < deadline) {
                for (ConsumerRecord<byte[], byte[]> record : consumer.poll(Duration.ofMillis(100))) {
                    if (records.size() < maxRecords) {
                        records.add(recordNode(record));
                    }
                }
                done = finished(consumer, toEnd, ends);
            }
            ObjectNode positions = answer.putObject("positions");
            for (TopicPartition partition : consumer.assignment()) {
                positions.put(partition.toString(), consumer.position(partition));
            }
            answer.put("done", done || records.size() >= maxRecords);
        }
    }

    private static boolean finished(
            KafkaConsumer<byte[], byte[]> consumer, boolean toEnd, Map<TopicPartition, Long> ends) {
        return toEnd && ends.entrySet().stream()
            .allMatch(entry -> consumer.position(entry.getKey()) >= entry.getValue());
    }

    private static void assign(KafkaConsumer<byte[], byte[]> consumer, JsonNode assignments) {
        List<TopicPartition> partitions = new ArrayList<>();
        assignments.forEach(assignment -> partitions.add(partition(assignment)));
        consumer.assign(partitions);
        for (JsonNode assignment : assignments) {
            TopicPartition partition = partition(assignment);
            if (assignment.has("offset")) {
                consumer.seek(partition, assignment.get("offset").asLong());
            } else if (assignment.has("timestamp")) {
                OffsetAndTimestamp found = consumer
                    .offsetsForTimes(Map.of(partition, assignment.get("timestamp").asLong()))
                    .get(partition);
                if (found == null) {
                    consumer.seekToEnd(List.of(partition));
                } else {
                    consumer.seek(partition, found.offset());
                }
            } else if (assignment.path("at").asText().equals("end")) {
                consumer.seekToEnd(List.of(partition));
            } else {
                consumer.seekToBeginning(List.of(partition));
            }
        }
    }

    static TopicPartition partition(JsonNode node) {
        return new TopicPartition(node.get("topic").asText(), node.get("partition").asInt());
    }

    static ObjectNode recordNode(ConsumerRecord<byte[], byte[]> record) {
        ObjectNode node = JSON.createObjectNode()
            .put("topic", record.topic())
            .put("partition", record.partition())
            .put("offset", record.offset())
            .put("timestamp", record.timestamp())
            .put("timestamp_type", record.timestampType().toString())
            .put("leader_epoch", record.leaderEpoch().orElse(-1))
            .put("key", record.key())
            .put("value", record.value());
        ArrayNode headers = node.putArray("headers");
        for (Header header : record.headers()) {
            headers.addArray().add(header.key()).add(header.value());
        }
        return node;
    }

    // ---- dump ----------------------------------------------------------------------------------

    /** Runs the dump tool as its script would, in this process: what it printed, how it failed. */
    private static void dump(JsonNode request, ObjectNode answer) {
        List<String> arguments = new ArrayList<>();
        request.path("arguments").forEach(argument -> arguments.add(argument.asText()));
        ByteArrayOutputStream printed = new ByteArrayOutputStream();
        PrintStream savedOut = System.out;
        PrintStream savedErr = System.err;
        try (PrintStream page = new PrintStream(printed, false, StandardCharsets.UTF_8)) {
            System.setOut(page);
            System.setErr(page);
            Exit.setExitProcedure((status, message) -> {
                throw new IllegalStateException("ended with status " + status + ": " + message);
            });
            DumpLogSegments.main(arguments.toArray(new String[0]));
        } catch (Exception failure) {
            answer.put("failure", failure.toString());
        } finally {
            System.setOut(savedOut);
            System.setErr(savedErr);
            Exit.resetExitProcedure();
        }
        answer.put("text", printed.toString(StandardCharsets.UTF_8));
    }

    // ---- answers -------------------------------------------------------------------------------

    /** What a step gives, or the error it ends in, so that one bad entry does not hide the others. */
    static ObjectNode attempt(Step step) {
        try {
            return step.run();
        } catch (Exception failure) {
            return error(failure);
        }
    }

    interface Step {
        ObjectNode run() throws Exception;
    }

    private static ObjectNode error(Exception failure) {
        Throwable cause = failure;
        while ((cause instanceof ExecutionException || cause instanceof CompletionException)
                && cause.getCause() != null) {
            cause = cause.getCause();
        }
        return JSON.createObjectNode()
            .put("error", cause.getClass().getSimpleName())
            .put("code", Errors.forException(cause).code())
            .put("message", String.valueOf(cause.getMessage()))
            .put("retriable", cause instanceof RetriableException);
    }
}
