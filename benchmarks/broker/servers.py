"""How each system is started: alone, on free ports of 127.0.0.1, its data in one folder.

Settings are the system's own defaults but for addresses, the data folder and what the durability
asks for; each deviation has its reason beside it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from benchmarks.broker import probes
from benchmarks.broker.processes import Managed, ServerError
from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.java import KafkaToolsError, kafka_home

# Debian's /usr/sbin/rabbitmq-server changes the user; the script below it runs as whoever calls.
RABBIT_SCRIPT: Final = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")


class Server(ABC):
    """One server on one data folder; started and stopped any number of times."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    @abstractmethod
    def address(self) -> str:
        """Where clients connect."""

    @property
    @abstractmethod
    def pid(self) -> int:
        """The process whose tree is the server."""

    @abstractmethod
    def start(self) -> float:
        """Start, and return the seconds until it gave its first right answer."""

    @abstractmethod
    def stop(self, *, clean: bool = True) -> None:
        """Stop; not `clean` is a crash (SIGKILL)."""


_KEPT_BYTES: Final = 64 << 30
START_TIMEOUT_S: Final = 300.0


class Penstock(Server):
    """Ours: the command a user would type."""

    def __init__(self, folder: Path, durability: str) -> None:
        super().__init__(folder)
        self._durability = durability
        self._port = probes.free_ports(1)[0]
        self._managed = Managed("Penstock", folder)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._managed.pid

    def start(self) -> float:
        command = [
            str(penstock_command()),
            *("up", "--data", str(self.folder / "data"), "--listen", self.address),
            *("--durability", self._durability),
            # Everything that is published is read back, also from a topic in memory, which is
            # otherwise bounded more tightly.
            *("-c", f"retention.bytes={_KEPT_BYTES}"),
        ]
        return self._managed.start(command, lambda: probes.kafka(self._port))

    def stop(self, *, clean: bool = True) -> None:
        self._managed.stop(clean=clean)


def penstock_command() -> Path:
    return Path(sys.executable).with_name("penstock")


class Kafka(Server):
    """Apache Kafka as its own scripts start it."""

    def __init__(self, folder: Path, config: Mapping[str, str]) -> None:
        super().__init__(folder)
        # With thousands of partitions a start takes its time.
        self._kafka = ApacheKafka(config, data_dir=folder, start_timeout_s=START_TIMEOUT_S)

    @property
    def address(self) -> str:
        return self._kafka.bootstrap

    @property
    def pid(self) -> int:
        return self._kafka.pid

    def start(self) -> float:
        try:
            self._kafka.start()
        except KafkaToolsError as error:
            raise ServerError(str(error)) from error
        return self._kafka.startup_s

    def stop(self, *, clean: bool = True) -> None:
        if clean:
            self._kafka.stop()
        else:
            self._kafka.kill()


class Nats(Server):
    """NATS with JetStream in file storage."""

    def __init__(self, folder: Path, *, sync_always: bool) -> None:
        super().__init__(folder)
        self._sync_always = sync_always
        self._port = probes.free_ports(1)[0]
        self._managed = Managed("NATS", folder)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._managed.pid

    def start(self) -> float:
        self.folder.mkdir(parents=True, exist_ok=True)
        config = self.folder / "nats.conf"
        config.write_text(nats_config(self.address, self.folder / "data", self._sync_always))
        command = [find("nats-server"), "-c", str(config)]
        return self._managed.start(command, lambda: probes.nats(self._port))

    def stop(self, *, clean: bool = True) -> None:
        self._managed.stop(clean=clean)


def nats_config(address: str, store: Path, sync_always: bool) -> str:
    sync = ", sync_interval: always" if sync_always else ""
    return f'listen: "{address}"\njetstream {{ store_dir: "{store}", max_file: 100G{sync} }}\n'


class Rabbit(Server):
    """RabbitMQ with the stream plugin; `stream` says which of its two protocols is spoken to."""

    def __init__(self, folder: Path, *, stream: bool) -> None:
        super().__init__(folder)
        self._stream = stream
        self._amqp, self._streams, self._epmd, self._distribution = probes.free_ports(4)
        self._managed = Managed("RabbitMQ", folder)
        self._names = Managed("epmd", folder / "epmd")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._streams if self._stream else self._amqp}"

    @property
    def pid(self) -> int:
        return self._managed.pid

    def start(self) -> float:
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "plugins").write_text("[rabbitmq_stream].\n")
        (self.folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self._amqp}\n"
            f"stream.listeners.tcp.1 = 127.0.0.1:{self._streams}\n"
        )
        # Erlang would leave its name server behind as a daemon: this one is ours to stop.
        epmd = [find("epmd"), "-port", str(self._epmd), "-address", "127.0.0.1"]
        self._names.start(epmd, lambda: True)
        try:
            return self._managed.start(
                [rabbit_command()], self._ready, environment=self._environment()
            )
        except BaseException:
            self._names.stop()
            raise

    def _ready(self) -> bool:
        return probes.rabbit_stream(self._streams) if self._stream else probes.amqp(self._amqp)

    def _environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "HOME": str(self.folder),
            "ERL_EPMD_PORT": str(self._epmd),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": f"bench{self._amqp}@localhost",
            "RABBITMQ_DIST_PORT": str(self._distribution),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "data"),
            "RABBITMQ_LOG_BASE": str(self.folder / "log"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }

    def stop(self, *, clean: bool = True) -> None:
        self._managed.stop(clean=clean)
        self._names.stop()


def rabbit_command() -> str:
    return str(RABBIT_SCRIPT) if RABBIT_SCRIPT.exists() else find("rabbitmq-server")


class Redis(Server):
    """Redis with the append-only file."""

    def __init__(self, folder: Path, appendfsync: str) -> None:
        super().__init__(folder)
        self._appendfsync = appendfsync
        self._port = probes.free_ports(1)[0]
        self._managed = Managed("Redis", folder)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        return self._managed.pid

    def start(self) -> float:
        (self.folder / "data").mkdir(parents=True, exist_ok=True)
        command = [
            find("redis-server"),
            *("--port", str(self._port), "--bind", "127.0.0.1"),
            *("--dir", str(self.folder / "data")),
            *("--appendonly", "yes", "--appendfsync", self._appendfsync),
            # Snapshots and rewrites would fork in the middle of a run, to Redis' disadvantage.
            *("--save", "", "--auto-aof-rewrite-percentage", "0"),
        ]
        return self._managed.start(command, lambda: probes.redis(self._port))

    def stop(self, *, clean: bool = True) -> None:
        self._managed.stop(clean=clean)


# ---- is it here, and which one ----


def find(command: str) -> str:
    """The path of a command, or a clear word that it is not there."""
    path = shutil.which(command)
    if path is None:
        raise ServerError(f"{command} is not installed; run scripts/bench-packages.sh")
    return path


def says(*command: str) -> str:
    """The first number-like version in what a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = re.search(r"\d+\.\d+(\.\d+)?", done.stdout + done.stderr)
    return found.group() if found else "?"


def penstock_version() -> str:
    if not penstock_command().exists():
        raise ServerError("the penstock command is not installed; run make setup")
    return says(str(penstock_command()), "--version")


def kafka_version() -> str:
    try:
        jar = next((kafka_home() / "jars").glob("kafka-clients-*.jar"))
    except KafkaToolsError as error:
        raise ServerError(f"{error} {error.advice}") from error
    find("java")
    return jar.stem.removeprefix("kafka-clients-")


def nats_version() -> str:
    return says(find("nats-server"), "--version")


def nats_sync_version(scratch: Path) -> str:
    """The version, if it can fsync every message: 2.9, which Debian 12 has, cannot."""
    version = nats_version()
    scratch.mkdir(parents=True, exist_ok=True)
    config = scratch / "check.conf"
    config.write_text(nats_config("127.0.0.1:4222", scratch / "store", True))
    command = [find("nats-server"), "-t", "-c", str(config)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        raise ServerError(f"nats-server {version} has no sync_interval setting (2.10 has)")
    return version


def rabbit_version() -> str:
    script = Path(rabbit_command())
    find("epmd")
    homes = sorted(script.parents[1].glob("lib/rabbitmq_server-*"))
    return homes[-1].name.removeprefix("rabbitmq_server-") if homes else "?"


def redis_version() -> str:
    return says(find("redis-server"), "--version")
