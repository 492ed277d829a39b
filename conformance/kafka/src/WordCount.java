import java.io.IOException;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Properties;
import org.apache.kafka.common.serialization.Serdes;
import org.apache.kafka.streams.KafkaStreams;
import org.apache.kafka.streams.StreamsBuilder;
import org.apache.kafka.streams.errors.StreamsUncaughtExceptionHandler.StreamThreadExceptionResponse;
import org.apache.kafka.streams.kstream.Consumed;
import org.apache.kafka.streams.kstream.Grouped;
import org.apache.kafka.streams.kstream.Materialized;
import org.apache.kafka.streams.kstream.Produced;
import org.apache.kafka.streams.state.Stores;

/**
 * A Kafka Streams application that counts words: a repartition topic, state, and its changelog.
 *
 * <p>Arguments: the topic of lines, the topic of counts, and settings as name=value. Each count is
 * written as text, whenever it changes. On stdout it tells its state; it closes when stdin does.
 */
public final class WordCount {
    private static final Duration CLOSING = Duration.ofSeconds(20);

    private WordCount() {
    }

    public static void main(String[] args) throws IOException {
        Properties settings = new Properties();
        for (String setting : Arrays.copyOfRange(args, 2, args.length)) {
            int at = setting.indexOf('=');
            settings.put(setting.substring(0, at), setting.substring(at + 1));
        }
        StreamsBuilder builder = new StreamsBuilder();
        builder.stream(args[0], Consumed.with(Serdes.String(), Serdes.String()))
            .flatMapValues(line -> List.of(line.split(" ")))
            .groupBy((key, word) -> word, Grouped.with("words", Serdes.String(), Serdes.String()))
            .count(Materialized.<String, Long>as(Stores.inMemoryKeyValueStore("counts"))
                .withKeySerde(Serdes.String()).withValueSerde(Serdes.Long()))
            .toStream()
            .mapValues(count -> Long.toString(count))
            .to(args[1], Produced.with(Serdes.String(), Serdes.String()));
        try (KafkaStreams streams = new KafkaStreams(builder.build(settings), settings)) {
            streams.setStateListener((now, before) -> System.out.println(now));
            streams.setUncaughtExceptionHandler(error -> {
                error.printStackTrace();
                return StreamThreadExceptionResponse.SHUTDOWN_CLIENT;
            });
            streams.start();
            while (System.in.read() >= 0) {
                // Whoever started it holds stdin open.
            }
            streams.close(CLOSING);
        }
    }
}
