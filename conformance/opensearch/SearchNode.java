import java.nio.file.Path;
import java.util.List;
import java.util.Map;
import org.opensearch.common.logging.LogConfigurator;
import org.opensearch.common.settings.Settings;
import org.opensearch.env.Environment;
import org.opensearch.http.HttpServerTransport;
import org.opensearch.node.InternalSettingsPreparer;
import org.opensearch.node.Node;
import org.opensearch.transport.Netty4Plugin;

/**
 * One node of OpenSearch in this process, on a free port of the loopback: for tests.
 *
 * The server's own start script wants a folder with modules, and refuses to run as root; the node
 * inside of it wants neither. It prints its port when it serves, and ends when its stdin closes.
 */
final class SearchNode extends Node {
    private SearchNode(Environment environment) {
        super(environment, List.of(Netty4Plugin.class), true);
    }

    public static void main(String[] arguments) throws Exception {
        Settings.Builder settings = Settings.builder().put("path.home", arguments[0]);
        settings.put("cluster.name", "penstock").put("node.name", "one");
        settings.put("discovery.type", "single-node").put("network.host", "127.0.0.1");
        settings.put("http.port", arguments[1]).put("transport.port", "0");
        settings.put("node.store.allow_mmap", false).put("node.processors", 2);
        settings.put("cluster.routing.allocation.disk.threshold_enabled", false);
        for (int at = 2; at < arguments.length; at++) {
            String[] parts = arguments[at].split("=", 2);
            settings.put(parts[0], parts[1]);
        }
        LogConfigurator.configureWithoutConfig(settings.build());
        Environment environment = InternalSettingsPreparer.prepareEnvironment(
            settings.build(), Map.of(), Path.of(arguments[0], "config"), () -> "one");
        try (SearchNode node = new SearchNode(environment)) {
            node.start();
            HttpServerTransport http = node.injector().getInstance(HttpServerTransport.class);
            System.out.println(http.boundAddress().publishAddress().getPort());
            while (System.in.read() >= 0) {
                // Nothing is said on stdin; its end is.
            }
        }
    }
}
