import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.util.HashMap;
import java.util.HashSet;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import java.util.UUID;
import org.apache.kafka.common.Uuid;
import org.apache.kafka.coordinator.group.api.assignor.PartitionAssignor;
import org.apache.kafka.coordinator.group.api.assignor.SubscribedTopicDescriber;
import org.apache.kafka.coordinator.group.api.assignor.SubscriptionType;
import org.apache.kafka.coordinator.group.assignor.RangeAssignor;
import org.apache.kafka.coordinator.group.assignor.SimpleAssignor;
import org.apache.kafka.coordinator.group.assignor.UniformAssignor;
import org.apache.kafka.coordinator.group.modern.Assignment;
import org.apache.kafka.coordinator.group.modern.GroupSpecImpl;
import org.apache.kafka.coordinator.group.modern.MemberSubscriptionAndAssignmentImpl;

/**
 * Kafka's own assignors of the group coordinator, to compare with.
 *
 * <p>{"assignor": name, "topics": {id: partition count}, "members": {id: {"instance", "topics",
 * "held": {topic: numbers}}}} is answered with {"assignments": {member: {topic: numbers}}}.
 */
final class AssignorCommands {
    private AssignorCommands() {}

    static void run(JsonNode request, ObjectNode answer) {
        Map<Uuid, Integer> counts = new HashMap<>();
        request.path("topics").properties()
            .forEach(entry -> counts.put(uuid(entry.getKey()), entry.getValue().asInt()));
        Map<String, MemberSubscriptionAndAssignmentImpl> members = new TreeMap<>();
        Map<Uuid, Map<Integer, String>> owners = new HashMap<>();
        Set<Set<Uuid>> wishes = new HashSet<>();
        request.path("members").properties().forEach(entry -> {
            JsonNode member = entry.getValue();
            Set<Uuid> topics = new HashSet<>();
            member.path("topics").forEach(topic -> topics.add(uuid(topic.asText())));
            wishes.add(topics);
            Map<Uuid, Set<Integer>> held = new HashMap<>();
            member.path("held").properties().forEach(topic -> topic.getValue().forEach(number -> {
                Uuid id = uuid(topic.getKey());
                held.computeIfAbsent(id, key -> new HashSet<>()).add(number.asInt());
                owners.computeIfAbsent(id, key -> new HashMap<>())
                    .put(number.asInt(), entry.getKey());
            }));
            members.put(entry.getKey(), new MemberSubscriptionAndAssignmentImpl(
                Optional.empty(),
                Optional.ofNullable(member.path("instance").textValue()),
                topics,
                new Assignment(held)));
        });
        SubscriptionType type =
            wishes.size() > 1 ? SubscriptionType.HETEROGENEOUS : SubscriptionType.HOMOGENEOUS;
        ObjectNode assignments = answer.putObject("assignments");
        assignor(request.path("assignor").asText())
            .assign(new GroupSpecImpl(members, type, owners), describer(counts))
            .members()
            .forEach((id, assignment) -> {
                ObjectNode topics = assignments.putObject(id);
                assignment.partitions().forEach((topic, numbers) -> new TreeSet<>(numbers)
                    .forEach(topics.withArray("/" + text(topic))::add));
            });
    }

    private static PartitionAssignor assignor(String name) {
        return switch (name) {
            case "range" -> new RangeAssignor();
            case "uniform" -> new UniformAssignor();
            case "simple" -> new SimpleAssignor();
            default -> throw new IllegalArgumentException("unknown assignor: " + name);
        };
    }

    private static SubscribedTopicDescriber describer(Map<Uuid, Integer> counts) {
        return new SubscribedTopicDescriber() {
            @Override
            public int numPartitions(Uuid topic) {
                return counts.getOrDefault(topic, -1);
            }

            @Override
            public Set<String> racksForPartition(Uuid topic, int partition) {
                return Set.of();
            }
        };
    }

    private static Uuid uuid(String text) {
        UUID id = UUID.fromString(text);
        return new Uuid(id.getMostSignificantBits(), id.getLeastSignificantBits());
    }

    private static String text(Uuid id) {
        return new UUID(id.getMostSignificantBits(), id.getLeastSignificantBits()).toString();
    }
}
