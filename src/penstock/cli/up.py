"""`penstock up`: run a broker in this process until it is told to stop."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import output
from penstock.cli.values import PROMISES, parse_address, parse_duration_ms, parse_pairs
from penstock.errors import DataDirectoryError, PenstockError

if TYPE_CHECKING:
    from penstock.broker.main import Broker, BrokerConfig
    from penstock.cli.beside import Beside
    from penstock.cli.project import Project

DEFAULT_DATA: Final = Path("penstock-data")
LOOPBACK: Final = "127.0.0.1"
DEFAULT_LISTEN: Final = f"{LOOPBACK}:9092"
# Names of this machine that nobody else can use.
LOCAL: Final = frozenset({LOOPBACK, "localhost", "::1"})


class DurabilityChoice(StrEnum):
    """When a record counts as acknowledged."""

    DISK = "disk"
    OS = "os"
    MEMORY = "memory"


class LogLevel(StrEnum):
    """How much the broker tells of what it does."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def chosen_listen(context: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """The address for an option that nobody has given: where commands of the project will look."""
    from penstock.cli import kafka, project

    if kafka.is_given(context, param) or context.resilient_parsing:
        return value
    for server in filter(None, project.load_broker().bootstrap.split(",")):
        host, port = parse_address(server.strip(), default_port=kafka.DEFAULT_PORT)
        if host in LOCAL:
            return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    return value


DataOption = Annotated[
    Path,
    typer.Option(
        "--data",
        "-d",
        envvar="PENSTOCK_DATA",
        metavar="DIR",
        file_okay=False,
        help="Where the log is kept; made if it is not there.",
    ),
]
ListenOption = Annotated[
    str,
    typer.Option(
        "--listen",
        "-l",
        envvar="PENSTOCK_LISTEN",
        show_default=DEFAULT_LISTEN,
        metavar="[HOST:]PORT",
        callback=chosen_listen,
        help="Address to listen on; port 0 takes any free one. Without HOST only this machine can "
        "connect. Else bootstrap in [broker] of penstock.toml, if that is on this machine.",
    ),
]
AdvertiseOption = Annotated[
    str | None,
    typer.Option(
        "--advertise",
        metavar="HOST:PORT",
        help="Address that clients are told to "
        "use, where it differs: behind a proxy, or when listening on 0.0.0.0.",
    ),
]
DurabilityOption = Annotated[
    DurabilityChoice,
    typer.Option(
        "--durability",
        help="Of topics that do not say otherwise: disk (after "
        "fsync), os (survives a crash of the process), memory (nothing survives).",
    ),
]
ArchiveOption = Annotated[
    str | None,
    typer.Option(
        "--archive",
        metavar="URL",
        help="Where closed segments of topics with "
        "remote.storage.enable=true go: a directory, or s3://BUCKET/PREFIX.",
    ),
]
ConfigOption = Annotated[
    list[str],
    typer.Option(
        "--config",
        "-c",
        metavar="NAME=VALUE",
        help="A setting of topics that do "
        "not say otherwise, such as retention.ms=86400000. May be repeated.",
    ),
]
PartitionsOption = Annotated[
    int,
    typer.Option(
        "--partitions", min=1, metavar="N", help="Partitions of topics that do not say otherwise."
    ),
]
AutoCreateOption = Annotated[
    bool,
    typer.Option(
        "--auto-create/--no-auto-create", help="Make a topic when a client first writes to it."
    ),
]
TwoPhaseOption = Annotated[
    bool,
    typer.Option(
        "--two-phase/--no-two-phase",
        help="Let producers leave the decision about their transactions to somebody else, for as "
        "long as it takes.",
    ),
]
MetricsOption = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        envvar="PENSTOCK_METRICS",
        metavar="[HOST:]PORT",
        help="Serve metrics for Prometheus over HTTP there, at /metrics, and /healthz. Without "
        "HOST only this machine can ask.",
    ),
]
AlertBeforeOption = Annotated[
    str,
    typer.Option(
        "--alert-before",
        metavar="DURATION",
        help="Warn when a group will lose unread records to retention within this long, such as "
        "90m or 6h; 0 for no such warnings.",
    ),
]
AlertWebhookOption = Annotated[
    str | None,
    typer.Option(
        "--alert-webhook",
        envvar="PENSTOCK_ALERT_WEBHOOK",
        metavar="URL",
        help="Also send alerts there, as JSON by POST.",
    ),
]
CapturesOption = Annotated[
    bool,
    typer.Option(
        "--captures/--no-captures",
        help="Run the captures of penstock.toml, found here or above, beside the broker.",
    ),
]
QuietOption = Annotated[
    bool, typer.Option("--quiet", "-q", help="Print only the address, when ready.")
]
LogLevelOption = Annotated[
    LogLevel, typer.Option("--log-level", help="How much to tell of what happens.")
]
LogJsonOption = Annotated[bool, typer.Option("--log-json", help="Log lines as JSON, for programs.")]


def up(
    data: DataOption = DEFAULT_DATA,
    listen: ListenOption = DEFAULT_LISTEN,
    advertise: AdvertiseOption = None,
    durability: DurabilityOption = DurabilityChoice.DISK,
    archive: ArchiveOption = None,
    config: ConfigOption = [],  # noqa: B006
    partitions: PartitionsOption = 1,
    auto_create: AutoCreateOption = True,
    two_phase: TwoPhaseOption = True,
    metrics: MetricsOption = None,
    alert_before: AlertBeforeOption = "1h",
    alert_webhook: AlertWebhookOption = None,
    captures: CapturesOption = True,
    quiet: QuietOption = False,
    log_level: LogLevelOption = LogLevel.WARNING,
    log_json: LogJsonOption = False,
) -> None:
    """Start a broker, and run it until Ctrl-C or SIGTERM.

    Any Kafka client can then use the address it prints. Everything it knows is in the data
    directory: start it there again and all is as it was, also after a crash. One broker at a
    time can use a directory.

    If there is a penstock.toml here or above, or named by PENSTOCK_PROJECT, the broker listens
    where its [broker] says, and its captures run beside the broker, each in a process of its own:
    see `penstock capture`.

    \b
    Examples:
      penstock up
      penstock up --data /var/lib/penstock --listen 127.0.0.1:9092
      penstock up --durability os -c retention.ms=86400000 --partitions 4
      penstock up --listen 0.0.0.0:9092 --advertise broker.example:9092
      penstock up --metrics 9644 --alert-before 6h --alert-webhook http://127.0.0.1:8000/alerts
    """
    started = time.monotonic()
    _set_up_logging(log_level, as_json=log_json)
    host, port = parse_address(listen, default_host=LOOPBACK)
    advertised = parse_address(advertise) if advertise is not None else (None, None)
    settings = parse_pairs(config)
    if "durability" in settings:
        raise typer.BadParameter("use --durability")
    watching = {"alert_before_loss_ms": _alert_before_ms(alert_before), **_metrics_at(metrics)}
    # What is made while starting stays; the broker turns the collector on again.
    gc.disable()
    from penstock.broker.main import BrokerConfig, serve

    broker_config = BrokerConfig(
        data=str(data),
        host=host,
        port=port,
        advertised_host=advertised[0],
        advertised_port=advertised[1],
        durability=durability.value,
        archive=archive,
        auto_create_topics=auto_create,
        two_phase_commit=two_phase,
        default_partitions=partitions,
        topic_defaults=settings,
        alert_webhook=alert_webhook,
        **watching,
    )
    _warn_of_strangers(broker_config)
    beside = _beside() if captures else None
    with _directory(data) as made:

        def ready(broker: Broker) -> None:
            made.clear()
            _greet(broker, data, durability, time.monotonic() - started, quiet=quiet)
            if not quiet:
                _warn_of_another(broker)
            if beside is not None:
                if not quiet:
                    output.say(f"captures, see penstock capture status: {', '.join(beside.names)}")
                beside.start(_reached_at(broker))

        clean = serve(broker_config, ready, on_stopping=beside.stop if beside else None)
    if not clean:
        output.warn("stopped, but not cleanly; the next start checks what is on disk")
    elif not quiet:
        output.say("stopped cleanly; everything is on disk")


def _warn_of_strangers(config: BrokerConfig) -> None:
    """Say what others can do who can reach this machine."""
    if not config.is_loopback:
        output.warn(
            f"listening on {config.host}, where others can reach it: there is no authentication, "
            "so whoever can connect can read, write and delete everything"
        )
    if config.metrics_port is not None and not config.serves_metrics_here:
        output.warn(f"metrics are served on {config.metrics_host}, where others can read them")


def _metrics_at(text: str | None) -> dict[str, Any]:
    """The settings for `--metrics`; a port alone is one of the loopback."""
    if text is None:
        return {}
    host, port = parse_address(text, default_host=LOOPBACK)
    return {"metrics_host": host, "metrics_port": port}


def _alert_before_ms(text: str) -> int:
    before_ms = 0 if text.strip() == "0" else parse_duration_ms(text)
    if before_ms is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 90m or 6h")
    return before_ms


@contextmanager
def _directory(data: Path) -> Iterator[list[Path]]:
    """Make the data directory; after an error, what was made for it is removed again.

    Yields the folders that were made. From when a client may have written, the list must be empty.
    """
    made = [folder for folder in (data, *data.parents) if not folder.exists()]
    _check_data(data)
    try:
        yield made
    except PenstockError:
        if data in made:
            _remove_fresh(data)
            for folder in made[1:]:
                with suppress(OSError):
                    folder.rmdir()
        raise


def _check_data(data: Path) -> None:
    """Say plainly why a directory cannot be used."""
    try:
        data.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataDirectoryError(
            f"the data directory {data} cannot be made: {error.strerror}",
            advice="Choose another with --data, or make it writable for you.",
        ) from None
    if not os.access(data, os.W_OK | os.X_OK):
        raise DataDirectoryError(
            f"the data directory {data} is not writable",
            advice="Choose another with --data, or make it writable for you.",
        )


def _remove_fresh(data: Path) -> None:
    """Remove a directory in which there is only what every broker begins with."""
    from penstock.log.disk import OsDisk
    from penstock.log.store import FILES, LOCK_FILE

    # Another broker may have been quicker.
    release = OsDisk().lock(str(data / LOCK_FILE))
    if release is None:
        return
    try:
        if all(name in FILES or name.startswith("__penstock_") for name in os.listdir(data)):
            shutil.rmtree(data, ignore_errors=True)
    finally:
        release()


def _beside() -> Beside | None:
    """What the project file wants to have run beside the broker; ConfigError if it is wrong."""
    from penstock.cli import project

    if project.find() is None:
        return None
    from penstock.cli.beside import Beside

    found = project.load()
    found.need("capture")
    if found.named("capture"):
        _need_captures(found)
    beside = Beside(found)
    return beside if beside.names else None


def _need_captures(found: Project) -> None:
    """MissingExtraError, with the way to do without, if the captures lack something."""
    from penstock.cli.needs import need_captures
    from penstock.extras import MissingExtraError

    try:
        need_captures(found)
    except MissingExtraError as error:
        advice = f"{error.advice}; or start without them: penstock up --no-captures"
        raise MissingExtraError(str(error), advice=advice) from None


def _warn_of_another(broker: Broker) -> None:
    """Say so if commands of this folder would look for the broker elsewhere."""
    from penstock.cli import kafka, project

    try:
        found = project.load_broker()
        named = [
            parse_address(each.strip(), default_port=kafka.DEFAULT_PORT)
            for each in kafka.bootstrap_of(None, found).split(",")
        ]
    except (PenstockError, typer.BadParameter):
        # Without its captures the file is none of our business.
        return
    if found.path is None or not found.bootstrap:
        return
    config = broker.config
    here = {*LOCAL, config.host, config.advertised_host}
    ports = {broker.port, config.advertised_port}
    if not any(host in here and port in ports for host, port in named):
        output.warn(
            f"commands in this folder use the broker at {kafka.bootstrap_of(None, found)}, as "
            f"{kafka.BOOTSTRAP_VARIABLE} or {found.path.name} says, and not this one"
        )


def _reached_at(broker: Broker) -> str:
    """Where a process on this machine reaches the broker."""
    host = broker.config.host
    host = LOOPBACK if host in {"0.0.0.0", "::", ""} else host
    return f"[{host}]:{broker.port}" if ":" in host else f"{host}:{broker.port}"


def _greet(
    broker: Broker, data: Path, durability: DurabilityChoice, took_s: float, *, quiet: bool
) -> None:
    host, port = broker.config.host, broker.port
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if quiet:
        print(address, flush=True)
        return
    option = "" if address == DEFAULT_LISTEN else f" --bootstrap {address}"
    lines = [
        f"Penstock is ready at {address} ({took_s:.2f} s)",
        f"  data        {data.resolve()}",
        f"  cluster     {broker.store.cluster_id}",
        f"  durability  {durability.value}: {PROMISES[durability.value]}",
        f"  try         echo hello | penstock produce greetings{option}",
        f"              penstock consume greetings{option}",
        "  stop        Ctrl-C",
    ]
    if broker.metrics_server is not None:
        lines.insert(-1, f"  metrics     {broker.metrics_server.address}")
    if not sys.stdout.isatty():
        lines.pop()
    print("\n".join(lines), flush=True)


class _JsonFormatter(logging.Formatter):
    """A log line as a JSON object."""

    def format(self, record: logging.LogRecord) -> str:
        import orjson

        fields: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(fields).decode()


def _set_up_logging(level: LogLevel, *, as_json: bool) -> None:
    handler = logging.StreamHandler(sys.stderr)
    plain = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
    handler.setFormatter(_JsonFormatter() if as_json else logging.Formatter(plain))
    logging.basicConfig(level=level.value.upper(), handlers=[handler], force=True)
