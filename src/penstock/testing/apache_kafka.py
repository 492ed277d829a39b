"""A real Apache Kafka beside us: one node, KRaft, from the jars, on free ports of 127.0.0.1.

For scenarios that must give the same result on both brokers, and for benchmarks. It is formatted
with Kafka's own storage tool, runs as Kafka's own main class with the options of Kafka's start
script, and counts as ready when it answers a Metadata request with itself in the list: from then
on it serves whatever a client asks.

Stopped and started again, it keeps its ports and its data.
"""

from __future__ import annotations

import shutil
import signal
import socket
import struct
import subprocess
import tempfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Self
from uuid import uuid4

from penstock.testing.java import KafkaToolsError, java_command, kafka_home

# What Kafka's own start script passes to Java, heap included.
SCRIPT_JVM_OPTIONS: Final = (
    "-Xms1G",
    "-Xmx1G",
    "-server",
    "-XX:+UseG1GC",
    "-XX:MaxGCPauseMillis=20",
    "-XX:InitiatingHeapOccupancyPercent=35",
    "-XX:+ExplicitGCInvokesConcurrent",
    "-Djava.awt.headless=true",
)
# Starts sooner and takes less memory; for tests, not for measurements.
SMALL_JVM_OPTIONS: Final = (
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-Djava.awt.headless=true",
)
LOGGING_OPTIONS: Final = (
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=info",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
)
# One node holds every replica there is, and a group need not wait for members to gather.
ONE_NODE: Final = {
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.replication.factor": "1",
    "transaction.state.log.min.isr": "1",
    "share.coordinator.state.topic.replication.factor": "1",
    "share.coordinator.state.topic.min.isr": "1",
    "group.initial.rebalance.delay.ms": "0",
}
# Someone else may take a free port between our choice and Kafka's start.
PORT_ATTEMPTS: Final = 3
POLL_S: Final = 0.02
LOG_LINES: Final = 20


class ApacheKafka:
    """A one-node Apache Kafka. A context manager; or `start()` and `stop()`.

    `config` overrides or adds server properties. `data_dir` holds the configuration, the log of
    the process and, in `data/`, the segments; without it a temporary folder does, removed at the
    end of the context.
    """

    def __init__(
        self,
        config: Mapping[str, str] | None = None,
        *,
        jvm_options: Sequence[str] = SCRIPT_JVM_OPTIONS,
        data_dir: Path | None = None,
        home: Path | None = None,
        start_timeout_s: float = 60.0,
    ) -> None:
        self._home = kafka_home() if home is None else home
        self._config = dict(config or {})
        self._jvm_options = tuple(jvm_options)
        self._start_timeout_s = start_timeout_s
        self._temporary = data_dir is None
        self.folder = Path(tempfile.mkdtemp(prefix="kafka-")) if data_dir is None else data_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._ports: tuple[int, int] | None = None
        self.startup_s = 0.0

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self._remove_temporary()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()
        self._remove_temporary()

    @staticmethod
    def choose_ports() -> tuple[int, int]:
        """Two ports that are free now, for clients and for the controller."""
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            second.bind(("127.0.0.1", 0))
            return first.getsockname()[1], second.getsockname()[1]

    @property
    def bootstrap(self) -> str:
        """The address for clients."""
        if self._ports is None:
            raise KafkaToolsError("Apache Kafka was not started")
        return f"127.0.0.1:{self._ports[0]}"

    @property
    def pid(self) -> int:
        """The id of the Java process."""
        if self._process is None:
            raise KafkaToolsError("Apache Kafka is not running")
        return self._process.pid

    @property
    def log_dir(self) -> Path:
        """Where the partitions are, each in its folder."""
        return self.folder / "data"

    @property
    def server_log(self) -> Path:
        """What Kafka itself logs."""
        return self.folder / "server.log"

    def start(self) -> None:
        """Start and wait until it serves; `startup_s` is the time from launch to the answer."""
        if self._process is not None:
            raise KafkaToolsError("Apache Kafka is already running")
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._ports is not None:
            self._launch(self._ports)
            return
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self._ports = self.choose_ports()
            try:
                self._launch(self._ports)
                return
            except KafkaToolsError:
                taken = "Address already in use" in self._log_text()
                if not taken or attempt == PORT_ATTEMPTS:
                    self._ports = None
                    raise

    def stop(self, timeout_s: float = 60.0) -> None:
        """Stop cleanly, as its own script does; by force only if it does not end in time."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
        self._process = None

    def kill(self) -> None:
        """End it as a crash would."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _launch(self, ports: tuple[int, int]) -> None:
        properties = self._write_properties(ports)
        if not (self.log_dir / "meta.properties").exists():
            self._format(properties)
        options = self._jvm_options + LOGGING_OPTIONS
        command = [*java_command(self._home, options, "kafka.Kafka"), str(properties)]
        launched = monotonic()
        with self.server_log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.folder
            )
        try:
            self._wait_until_ready(self._process, ports[0], launched + self._start_timeout_s)
        except BaseException:
            self.kill()
            raise
        self.startup_s = monotonic() - launched

    def _write_properties(self, ports: tuple[int, int]) -> Path:
        broker, controller = ports
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker}",
            "controller.listener.names": "CONTROLLER",
            "log.dirs": str(self.log_dir),
            **ONE_NODE,
            **self._config,
        }
        path = self.folder / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        return path

    def _format(self, properties: Path) -> None:
        cluster_id = urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")
        command = [
            *java_command(self._home, SMALL_JVM_OPTIONS, "kafka.tools.StorageTool"),
            *("format", "--cluster-id", cluster_id, "--config", str(properties)),
        ]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise KafkaToolsError(f"formatting Kafka's storage failed: {done.stdout}{done.stderr}")

    def _wait_until_ready(
        self, process: subprocess.Popen[bytes], port: int, deadline: float
    ) -> None:
        while not _lists_itself(port):
            try:
                # A pause that ends at once if the process does.
                status = process.wait(POLL_S)
            except subprocess.TimeoutExpired:
                if monotonic() < deadline:
                    continue
                status = None
            how = "did not get ready in time" if status is None else f"ended with status {status}"
            raise KafkaToolsError(f"Apache Kafka {how}; its log says: {self._log_errors()}")

    def _log_text(self) -> str:
        return self.server_log.read_text(errors="replace") if self.server_log.exists() else ""

    def _log_errors(self) -> str:
        """The lines that speak of errors; the last ones of all where none does."""
        lines = self._log_text().splitlines()
        errors = [line for line in lines if "ERROR" in line or "Exception" in line]
        return "\n".join((errors or lines)[-LOG_LINES:])

    def _remove_temporary(self) -> None:
        if self._temporary:
            shutil.rmtree(self.folder, ignore_errors=True)


def _lists_itself(port: int) -> bool:
    """Whether a Metadata request (v1, about no topic) is answered with a broker on this port."""
    body = struct.pack(">hhihi", 3, 1, 1, -1, 0)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(struct.pack(">i", len(body)) + body)
            with connection.makefile("rb") as answers:
                (size,) = struct.unpack(">i", answers.read(4))
                answer = answers.read(size)
        # correlation id, number of brokers; the first one: node id, host, port
        _, brokers, _, host_length = struct.unpack_from(">iiih", answer)
        return bool(brokers > 0 and struct.unpack_from(">i", answer, 14 + host_length)[0] == port)
    except (OSError, struct.error):
        return False
