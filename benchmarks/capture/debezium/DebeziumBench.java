import io.debezium.engine.ChangeEvent;
import io.debezium.engine.DebeziumEngine;
import io.debezium.engine.format.Json;
import java.io.BufferedReader;
import java.io.FileReader;
import java.io.InputStreamReader;
import java.lang.management.ManagementFactory;
import java.time.Instant;
import java.time.temporal.ChronoUnit;
import java.util.Arrays;
import java.util.List;
import java.util.Properties;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;

/**
 * Debezium's embedded engine with the settings of a file, counting what comes.
 *
 * <p>A line on stdin is a question: "report" is answered with one line of JSON (events so far, the
 * times of the first and the last of them, processor time, lags), "clear" forgets what came so
 * far. It ends when its stdin does. The lag of an event is the time now less the one that the row
 * says it was written at, in its column written_us; it is looked for after the word "stamp" only.
 */
public final class DebeziumBench {
    private static final String STAMP = "\"written_us\":";
    private static final int MOST_LAGS = 4_000_000;

    private long count;
    private long firstUs;
    private long firstCpuUs;
    private long lastUs;
    private final long[] lags = new long[MOST_LAGS];
    private int lagCount;
    private boolean isStamping;

    private DebeziumBench() {}

    public static void main(String[] arguments) throws Exception {
        Properties settings = new Properties();
        try (FileReader file = new FileReader(arguments[0])) {
            settings.load(file);
        }
        DebeziumBench bench = new DebeziumBench();
        DebeziumEngine<ChangeEvent<String, String>> engine =
                DebeziumEngine.create(Json.class)
                        .using(settings)
                        .using(
                                (success, message, error) -> {
                                    if (!success) {
                                        System.err.println(message);
                                    }
                                })
                        .notifying(bench::take)
                        .build();
        ExecutorService threads = Executors.newSingleThreadExecutor();
        threads.execute(engine);
        try (BufferedReader questions =
                new BufferedReader(new InputStreamReader(System.in))) {
            for (String line = questions.readLine(); line != null; line = questions.readLine()) {
                if (line.equals("clear")) {
                    bench.clear();
                }
                if (line.equals("stamp")) {
                    bench.stamp();
                }
                System.out.println(bench.report());
            }
        }
        engine.close();
        threads.shutdown();
        threads.awaitTermination(30, TimeUnit.SECONDS);
        System.exit(0);
    }

    private static long nowUs() {
        return ChronoUnit.MICROS.between(Instant.EPOCH, Instant.now());
    }

    private void take(
            List<ChangeEvent<String, String>> events,
            DebeziumEngine.RecordCommitter<ChangeEvent<String, String>> committer)
            throws InterruptedException {
        synchronized (this) {
            long now = nowUs();
            for (ChangeEvent<String, String> event : events) {
                // Tombstones, heartbeats and schema changes are no changes of rows.
                String value = event.value();
                if (value == null || !value.contains("\"op\":")) {
                    continue;
                }
                if (count++ == 0) {
                    firstUs = now;
                    firstCpuUs = cpuUs();
                }
                lastUs = now;
                int at = isStamping ? value.lastIndexOf(STAMP) : -1;
                if (at >= 0 && lagCount < MOST_LAGS) {
                    lags[lagCount++] = now - number(value, at + STAMP.length());
                }
            }
        }
        for (ChangeEvent<String, String> event : events) {
            committer.markProcessed(event);
        }
        committer.markBatchFinished();
    }

    private static long number(String text, int from) {
        long value = 0;
        for (int at = from; at < text.length() && Character.isDigit(text.charAt(at)); at++) {
            value = value * 10 + (text.charAt(at) - '0');
        }
        return value;
    }

    private synchronized void clear() {
        count = 0;
        lagCount = 0;
    }

    private synchronized void stamp() {
        isStamping = true;
    }

    private static long cpuUs() {
        if (ManagementFactory.getOperatingSystemMXBean()
                instanceof com.sun.management.OperatingSystemMXBean system) {
            return system.getProcessCpuTime() / 1000;
        }
        return 0;
    }

    private synchronized String report() {
        long[] sorted = Arrays.copyOf(lags, lagCount);
        Arrays.sort(sorted);
        long p50 = sorted.length == 0 ? -1 : sorted[sorted.length / 2];
        long p99 = sorted.length == 0 ? -1 : sorted[(int) (sorted.length * 0.99)];
        return String.format(
                "{\"count\":%d,\"first_us\":%d,\"last_us\":%d,\"cpu_us\":%d,"
                        + "\"first_cpu_us\":%d,"
                        + "\"lag_p50_us\":%d,\"lag_p99_us\":%d}",
                count, firstUs, lastUs, cpuUs(), firstCpuUs, p50, p99);
    }
}
