"""A real Apache Kafka beside us: KRaft, from the jars, on free ports of 127.0.0.1.

For scenarios that must give the same result on both brokers, and for benchmarks. It is formatted
with Kafka's own storage tool, runs as Kafka's own main class with the options of Kafka's start
script, and counts as ready when it answers a Metadata request with itself in the list: from then
on it serves whatever a client asks.

Stopped and started again, it keeps its ports and its data. `ApacheKafka` is one node;
`ApacheKafkaCluster` is three of them, each broker and controller, to lose one and go on.
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
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Self
from uuid import uuid4

from penstock.testing.java import QUICK_COMPILER, KafkaToolsError, kafka_command, kafka_home

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
    QUICK_COMPILER,
    "-Djava.awt.headless=true",
)
# Three of them fit into a small machine.
NODE_JVM_OPTIONS: Final = ("-Xmx256m", *SMALL_JVM_OPTIONS[1:])
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
# Small internal topics are made sooner, and what tests wait for may be as short as they like.
FOR_TESTS: Final = {
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
    "share.coordinator.state.topic.num.partitions": "4",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "200",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.share.min.heartbeat.interval.ms": "100",
    "group.share.heartbeat.interval.ms": "200",
    "group.share.min.session.timeout.ms": "1000",
    "group.share.min.record.lock.duration.ms": "1000",
    "group.streams.min.heartbeat.interval.ms": "100",
    "group.streams.heartbeat.interval.ms": "200",
    "group.streams.min.session.timeout.ms": "1000",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}
# Every topic on three nodes, writes that survive one of them, and a short wait until a dead one
# is known to be dead.
THREE_NODES: Final = {
    "default.replication.factor": "3",
    "min.insync.replicas": "2",
    "offsets.topic.replication.factor": "3",
    "transaction.state.log.replication.factor": "3",
    "transaction.state.log.min.isr": "2",
    "share.coordinator.state.topic.replication.factor": "3",
    "share.coordinator.state.topic.min.isr": "2",
    "broker.session.timeout.ms": "3000",
    "broker.heartbeat.interval.ms": "500",
}
LISTENER_PROTOCOLS: Final = {
    "CONTROLLER": "PLAINTEXT",
    **{name: name for name in ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")},
}
SCRAM_MECHANISMS: Final = ("SCRAM-SHA-256", "SCRAM-SHA-512")
# Someone else may take a free port between our choice and Kafka's start.
PORT_ATTEMPTS: Final = 3
POLL_S: Final = 0.02
LOG_LINES: Final = 20


class ApacheKafka:
    """A one-node Apache Kafka. A context manager; or `start()` and `stop()`.

    `config` overrides or adds server properties. `data_dir` holds the configuration, the log of
    the process and, in `data/`, the segments; without it a temporary folder does, removed at the
    end of the context. A node of a cluster is told its `ports` and its `cluster_id`.

    `listeners` are further ones, named as their protocols (SSL, SASL_PLAINTEXT, SASL_SSL), whose
    settings are in `config`; `bootstrap_of` says where they are. `scram_users` are names and
    passwords.
    """

    def __init__(
        self,
        config: Mapping[str, str] | None = None,
        *,
        jvm_options: Sequence[str] = SCRIPT_JVM_OPTIONS,
        data_dir: Path | None = None,
        home: Path | None = None,
        start_timeout_s: float = 60.0,
        ports: tuple[int, int] | None = None,
        cluster_id: str | None = None,
        listeners: Sequence[str] = (),
        scram_users: Mapping[str, str] | None = None,
    ) -> None:
        self._home = kafka_home() if home is None else home
        self._config = dict(config or {})
        self._jvm_options = tuple(jvm_options)
        self._start_timeout_s = start_timeout_s
        self._temporary = data_dir is None
        self.folder = Path(tempfile.mkdtemp(prefix="kafka-")) if data_dir is None else data_dir
        self._process: subprocess.Popen[bytes] | None = None
        self._ports = ports
        self._cluster_id = cluster_id
        self._listeners = tuple(listeners)
        self._listener_ports: dict[str, int] = {}
        self._scram_users = dict(scram_users or {})
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
        first, second = choose_ports(2)
        return first, second

    @property
    def bootstrap(self) -> str:
        """The address for clients."""
        if self._ports is None:
            raise KafkaToolsError("Apache Kafka was not started")
        return f"127.0.0.1:{self._ports[0]}"

    def bootstrap_of(self, listener: str) -> str:
        """The address of one of the further listeners."""
        if listener not in self._listener_ports:
            raise KafkaToolsError(f"Apache Kafka has no listener {listener}, or was not started")
        return f"127.0.0.1:{self._listener_ports[listener]}"

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
            self._choose_listener_ports()
            self._launch(self._ports)
            return
        for attempt in range(1, PORT_ATTEMPTS + 1):
            self._ports = self.choose_ports()
            self._listener_ports.clear()
            self._choose_listener_ports()
            try:
                self._launch(self._ports)
                return
            except KafkaToolsError:
                taken = "Address already in use" in self._log_text()
                if not taken or attempt == PORT_ATTEMPTS:
                    self._ports = None
                    raise

    def _choose_listener_ports(self) -> None:
        """Once, so that they are the same after a restart."""
        if not self._listener_ports:
            numbers = choose_ports(len(self._listeners))
            self._listener_ports = dict(zip(self._listeners, numbers, strict=True))

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

    def prepare(self, ports: tuple[int, int]) -> Path:
        """Write the configuration and format the storage where that is still to be done."""
        self.folder.mkdir(parents=True, exist_ok=True)
        properties = self._write_properties(ports)
        if not (self.log_dir / "meta.properties").exists():
            self._format(properties)
        return properties

    def _launch(self, ports: tuple[int, int]) -> None:
        properties = self.prepare(ports)
        options = self._jvm_options + LOGGING_OPTIONS
        command = [*kafka_command(self._home, options, "kafka.Kafka"), str(properties)]
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
        further = "".join(
            f",{name}://127.0.0.1:{port}" for name, port in self._listener_ports.items()
        )
        properties = {
            "process.roles": "broker,controller",
            "node.id": "1",
            "controller.quorum.voters": f"1@127.0.0.1:{controller}",
            "listeners": f"PLAINTEXT://127.0.0.1:{broker},CONTROLLER://127.0.0.1:{controller}"
            + further,
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{broker}{further}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": ",".join(
                f"{name}:{protocol}" for name, protocol in LISTENER_PROTOCOLS.items()
            ),
            "log.dirs": str(self.log_dir),
            **ONE_NODE,
            **self._config,
        }
        path = self.folder / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        return path

    def _format(self, properties: Path) -> None:
        cluster_id = self._cluster_id or new_cluster_id()
        command = [
            *kafka_command(self._home, SMALL_JVM_OPTIONS, "kafka.tools.StorageTool"),
            *("format", f"--cluster-id={cluster_id}", "--config", str(properties)),
            *(
                f"--add-scram={mechanism}=[name={name},password={password}]"
                for mechanism in SCRAM_MECHANISMS
                for name, password in self._scram_users.items()
            ),
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


class ApacheKafkaCluster:
    """Three nodes of Apache Kafka, each broker and controller; a context manager.

    `nodes` are numbered from 1; any of them can be killed and started again by itself. Settings
    in `config` go to all of them.
    """

    def __init__(
        self,
        config: Mapping[str, str] | None = None,
        *,
        jvm_options: Sequence[str] = NODE_JVM_OPTIONS,
        size: int = 3,
        home: Path | None = None,
    ) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="kafka-cluster-"))
        ports = choose_ports(2 * size)
        pairs = list(zip(ports[:size], ports[size:], strict=True))
        voters = ",".join(f"{n}@127.0.0.1:{controller}" for n, (_, controller) in _numbered(pairs))
        cluster_id = new_cluster_id()
        self.nodes = {
            number: ApacheKafka(
                {
                    **THREE_NODES,
                    **(config or {}),
                    "node.id": str(number),
                    "controller.quorum.voters": voters,
                },
                jvm_options=jvm_options,
                data_dir=self.folder / str(number),
                home=home,
                ports=pair,
                cluster_id=cluster_id,
            )
            for number, pair in _numbered(pairs)
        }

    @property
    def bootstrap(self) -> str:
        """The addresses of all nodes, for clients."""
        return ",".join(node.bootstrap for node in self.nodes.values())

    def __enter__(self) -> Self:
        try:
            # All at once: none of them serves before a majority is there.
            with ThreadPoolExecutor(len(self.nodes)) as threads:
                for started in [threads.submit(node.start) for node in self.nodes.values()]:
                    started.result()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove()

    def _remove(self) -> None:
        # Nothing of it is needed any more, so nobody waits for an orderly end.
        for node in self.nodes.values():
            node.kill()
        shutil.rmtree(self.folder, ignore_errors=True)


def _numbered(pairs: list[tuple[int, int]]) -> list[tuple[int, tuple[int, int]]]:
    return list(enumerate(pairs, start=1))


def new_cluster_id() -> str:
    """An id as Kafka writes it: a UUID in 22 letters."""
    return urlsafe_b64encode(uuid4().bytes).decode().rstrip("=")


def choose_ports(count: int) -> list[int]:
    """Ports that are free now."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def _lists_itself(port: int) -> bool:
    """Whether a Metadata request (v1, about no topic) is answered with a broker on this port."""
    body = struct.pack(">hhihi", 3, 1, 1, -1, 0)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
            connection.sendall(struct.pack(">i", len(body)) + body)
            with connection.makefile("rb") as answers:
                (size,) = struct.unpack(">i", answers.read(4))
                answer = answers.read(size)
        return port in _ports_listed(answer)
    except (OSError, struct.error):
        return False


def _ports_listed(answer: bytes) -> list[int]:
    """The ports of the brokers in a Metadata response, version 1."""
    _, count = struct.unpack_from(">ii", answer)
    ports, at = [], 8
    for _ in range(count):
        _, host_length = struct.unpack_from(">ih", answer, at)
        port, rack_length = struct.unpack_from(">ih", answer, at + 6 + host_length)
        ports.append(port)
        at += 6 + host_length + 6 + max(0, rack_length)
    return ports
