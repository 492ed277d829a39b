"""Talking to a broker, whichever it is, through confluent-kafka.

Which broker is meant is decided here, in one way for all commands: the option, PENSTOCK_BOOTSTRAP,
the project file, 127.0.0.1:9092. `connect` first sees whether a broker answers: librdkafka by
itself would try again and again in silence. Its errors come out of here as `BrokerError`, with
advice where there is any.
"""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from penstock.cli import output, project
from penstock.cli.values import parse_address, parse_pairs
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from concurrent.futures import Future

    from confluent_kafka import Consumer, KafkaError, Producer
    from confluent_kafka.admin import AdminClient

T = TypeVar("T")

DEFAULT_BOOTSTRAP: Final = "127.0.0.1:9092"
DEFAULT_PORT: Final = 9092
BOOTSTRAP_VARIABLE: Final = "PENSTOCK_BOOTSTRAP"
CONNECT_TIMEOUT_S: Final = 5.0
# What listens is silent for so long: a broker that is busy would have answered.
ANSWER_TIMEOUT_S: Final = 10.0
REQUEST_TIMEOUT_S: Final = 15.0
COMPLETION_TIMEOUT_S: Final = 1.0
# For assigned partitions no group is ever joined; the client library wants a name all the same.
READER_GROUP: Final = "penstock-consume"


def bootstrap_of(given: str | None, found: project.Project) -> str:
    """Where the broker is: as the command says, the environment, the project file, the default."""
    return given or os.environ.get(BOOTSTRAP_VARIABLE) or found.bootstrap or DEFAULT_BOOTSTRAP


def is_given(context: typer.Context, param: typer.CallbackParam) -> bool:
    """Whether an option was given, in the command or by its variable of the environment."""
    assert param.name is not None
    source = context.get_parameter_source(param.name)
    # By its name: typer may bring a click of its own.
    return source is not None and source.name not in {"DEFAULT", "DEFAULT_MAP"}


def chosen_bootstrap(context: typer.Context, param: typer.CallbackParam, value: str) -> str:
    """The address for an option that nobody has given: of the project, if it has one."""
    if is_given(context, param) or context.resilient_parsing:
        return value
    return bootstrap_of(None, project.load_broker(project_of(context)))


def project_of(context: typer.Context) -> Path | None:
    """The project file that the command names by an option, if it does."""
    options = (each for each in context.command.params if each.envvar == project.VARIABLE)
    return next((context.params.get(each.name or "") for each in options), None)


Bootstrap = Annotated[
    str,
    typer.Option(
        "--bootstrap",
        "-b",
        envvar=BOOTSTRAP_VARIABLE,
        metavar="HOST:PORT,...",
        callback=chosen_bootstrap,
        help="Broker to connect to: Penstock's, or any of an Apache Kafka cluster; else bootstrap "
        "in [broker] of penstock.toml.",
    ),
]
ClientSettings = Annotated[
    list[str],
    typer.Option(
        "--client",
        "-X",
        metavar="NAME=VALUE",
        help="Setting of the client library (librdkafka), such as security.protocol=SSL. "
        "May be repeated.",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

_ADVICE: Final = {
    "UNKNOWN_TOPIC_OR_PART": "`penstock topics list` shows what there is; "
    "`penstock topics create` makes one.",
    "_UNKNOWN_TOPIC": "`penstock topics list` shows what there is; "
    "`penstock topics create` makes one.",
    "_UNKNOWN_PARTITION": "`penstock topics describe` shows which partitions there are.",
    "TOPIC_ALREADY_EXISTS": "Change it with `penstock topics alter`, or pass --if-not-exists.",
    "TOPIC_EXCEPTION": "A name has 1 to 249 letters, digits, dots, dashes and underscores.",
    "INVALID_PARTITIONS": "The number of partitions can grow, never shrink.",
    "MSG_SIZE_TOO_LARGE": "Raise max.message.bytes of the topic, and for the client pass "
    "-X message.max.bytes=BYTES.",
    "INVALID_RECORD": "A compacted topic takes only records with a key.",
    "GROUP_ID_NOT_FOUND": "`penstock groups list` shows what there is.",
    "NON_EMPTY_GROUP": "Stop its consumers first; a dead one is forgotten after its session "
    "timeout.",
    "UNKNOWN_MEMBER_ID": "The group has members: stop its consumers first.",
    "_TIMED_OUT": "The broker did not answer in time. Is it overloaded, or its disk full?",
    "_MSG_TIMED_OUT": "The broker did not take it in time. A topic with overflow=block or reject "
    "that is full waits for its groups: `penstock topics describe` names them. Otherwise: is the "
    "broker overloaded, or its disk full?",
    "_TRANSPORT": "Is the broker running? `penstock up` starts one.",
    "_ALL_BROKERS_DOWN": "Is the broker running? `penstock up` starts one.",
    "_RESOLVE": "Check the name of the host.",
}


class BrokerError(PenstockError):
    """The broker, or the way to it, refused what a command asked for."""

    # Kafka's name of the error, where it is one of Kafka's.
    kafka_name = ""


def broker_error(error: KafkaError, doing: str = "") -> BrokerError:
    """Our error for one of librdkafka's."""
    text = error.str().removeprefix("Broker: ").removeprefix("Local: ")
    ours = BrokerError(f"{doing}: {text}" if doing else text, advice=_ADVICE.get(error.name(), ""))
    ours.kafka_name = error.name()
    return ours


@contextmanager
def translated(doing: str = "") -> Iterator[None]:
    """Turn librdkafka's exceptions into ours."""
    from confluent_kafka import KafkaException

    try:
        yield
    except KafkaException as error:
        raise broker_error(error.args[0], doing) from None


class Connection:
    """Where the broker is, and clients of it as they are needed."""

    def __init__(self, bootstrap: str, settings: Mapping[str, str]) -> None:
        self.bootstrap = bootstrap
        self.settings = dict(settings)
        self._admin: AdminClient | None = None

    def _config(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "bootstrap.servers": self.bootstrap,
            "client.id": "penstock-cli",
            # What goes wrong is reported by the command, once.
            "log_level": 0,
            **extra,
            **self.settings,
        }

    def admin(self) -> AdminClient:
        """The same one every time."""
        from confluent_kafka.admin import AdminClient

        if self._admin is None:
            with _checked_settings():
                self._admin = AdminClient(self._config({}))
        return self._admin

    def consumer(self, extra: Mapping[str, Any] | None = None) -> Consumer:
        """A consumer for assigned partitions, which commits nothing."""
        from confluent_kafka import Consumer

        fixed = {
            "group.id": READER_GROUP,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "check.crcs": True,
        }
        with _checked_settings():
            return Consumer(self._config({**fixed, **(extra or {})}))

    def producer(self, extra: Mapping[str, Any]) -> Producer:
        from confluent_kafka import Producer

        with _checked_settings():
            return Producer(self._config(extra))


@contextmanager
def _checked_settings() -> Iterator[None]:
    """A wrong client setting is a wrong use of the command."""
    from confluent_kafka import KafkaException

    try:
        yield
    except KafkaException as error:
        raise typer.BadParameter(error.args[0].str()) from None


def connect(bootstrap: str, client: list[str], *, option: str = "--bootstrap") -> Connection:
    """A connection to a broker that is there; BrokerError if none answers, or none that is one.

    `option` is the one that names it, for the message.
    """
    others = ""
    if option == "--bootstrap":
        others = f", {BOOTSTRAP_VARIABLE} or bootstrap in [broker] of {project.FILE_NAME}"
    settings = parse_pairs(client, what="client setting")
    reasons: list[str] = []
    strangers: list[BrokerError] = []
    for server in filter(None, (part.strip() for part in bootstrap.split(","))):
        address = parse_address(server.rpartition("://")[2], default_port=DEFAULT_PORT)
        try:
            socket.create_connection(address, CONNECT_TIMEOUT_S).close()
            _speak(address, settings, option + others)
        except OSError as error:
            reasons.append(f"{server}: {error.strerror or error}".lower())
        except BrokerError as error:
            strangers.append(error)
        else:
            return Connection(bootstrap, settings)
    if strangers:
        raise strangers[0]
    if not reasons:
        raise typer.BadParameter(f"{option} names no broker")
    raise BrokerError(
        f"no broker answers at {'; '.join(reasons)}",
        advice=f"Start one with `penstock up`, or name another with {option}{others}.",
    )


def _speak(address: tuple[str, int], settings: Mapping[str, str], named_by: str) -> None:
    """BrokerError if what listens there is no broker, or does not let us in.

    librdkafka would try again until its time is over, and then say that it was over.
    """
    from penstock.client import connection as one
    from penstock.client.errors import AuthenticationError
    from penstock.client.security import Security

    try:
        security = Security.from_options(settings)
        security.context()
    except one.ClientError:
        # A mechanism or a store of keys that librdkafka alone knows: it may do better.
        return
    try:
        one.Connection(
            address, client_id="penstock-cli", timeout_s=ANSWER_TIMEOUT_S, security=security
        ).close()
    except AuthenticationError as error:
        # Whom librdkafka trusts may differ.
        if not isinstance(error.__cause__, ssl.SSLCertVerificationError):
            raise BrokerError(str(error), advice=error.advice) from None
    except one.ClientError as error:
        shown = one.show_address(address)
        cause = error.__cause__
        reason = str(error).replace(f"{shown} ", "it ", 1)
        if isinstance(cause, TimeoutError):
            reason = f"no answer within {ANSWER_TIMEOUT_S:.0f} s"
        elif isinstance(cause, OSError):
            reason = (cause.strerror or str(cause)).lower()
        raise BrokerError(
            f"what listens at {shown} does not answer as a Kafka broker: {reason}",
            advice="Is it a broker's port, and security.protocol (-X) that of the listener? Name "
            f"another with {named_by}.",
        ) from None


def result_of(future: Future[T], doing: str) -> T:
    """What an admin call came to."""
    with translated(doing):
        return future.result(REQUEST_TIMEOUT_S + 5)


def tell_deleted(names: list[str], futures: Mapping[str, Future[Any]]) -> None:
    """Say of each what came of it; if some could not be deleted, the last of them is raised."""
    failures = []
    for name in names:
        try:
            result_of(futures[name], f"deleting {name}")
        except BrokerError as error:
            failures.append(error)
        else:
            output.say(f"deleted {name}")
    for failure in failures[:-1]:
        output.fail(failure)
    if failures:
        raise failures[-1]


def complete_topics(incomplete: str) -> list[str]:
    """Names of topics for the shell's completion; none if the broker does not answer at once."""
    try:
        connection = connect(bootstrap_of(None, project.load_broker()), [])
        topics = connection.admin().list_topics(timeout=COMPLETION_TIMEOUT_S).topics
    except Exception:  # the shell has no use for a reason
        return []
    return sorted(name for name in topics if name.startswith(incomplete))


def complete_groups(incomplete: str) -> list[str]:
    """Names of groups for the shell's completion; none if the broker does not answer at once."""
    try:
        connection = connect(bootstrap_of(None, project.load_broker()), [])
        future = connection.admin().list_consumer_groups(request_timeout=COMPLETION_TIMEOUT_S)
        groups = future.result(COMPLETION_TIMEOUT_S + 1).valid
    except Exception:  # the shell has no use for a reason
        return []
    return sorted(each.group_id for each in groups if each.group_id.startswith(incomplete))


def complete_settings(incomplete: str) -> list[str]:
    """Names of topic settings for the shell's completion."""
    from penstock.log.config import SETTINGS

    return [f"{name}=" for name in SETTINGS if name.startswith(incomplete)]
