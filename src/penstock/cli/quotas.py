"""`penstock quotas`: how much of the broker a client may use.

librdkafka does not know these requests, so they are asked here one by one (`protocol`); any broker
answers them, Apache Kafka's as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import output
from penstock.cli.kafka import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    BrokerError,
    ClientSettings,
    connect,
)
from penstock.cli.protocol import cluster, reachable
from penstock.cli.values import parse_pairs
from penstock.client.connection import Connection
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    OpData,
    RequestEntityData,
    RequestEntryData,
)
from penstock.wire.messages.describe_client_quotas import (
    ComponentData,
    DescribeClientQuotasRequest,
)

if TYPE_CHECKING:
    from penstock.wire.messages.describe_client_quotas import EntryData

app = typer.Typer(
    no_args_is_help=True,
    help="List, set and remove quotas of clients.",
    epilog="A quota is for a user, a client id, or both; of all that fit a client the most "
    "particular holds. A client over its quota is slowed down, and nobody else.",
)

EXACT, DEFAULT = 0, 1
USER, CLIENT_ID = "user", "client-id"
_DEFAULT: Final = "(default)"
Who = list[tuple[str, str | None]]

User = Annotated[str, typer.Option("--user", metavar="NAME", help="The quota of this user.")]
DefaultUser = Annotated[
    bool, typer.Option("--default-user", help="The quota of users without one of their own.")
]
ClientId = Annotated[
    str, typer.Option("--client-id", metavar="NAME", help="The quota of this client id.")
]
DefaultClientId = Annotated[
    bool,
    typer.Option("--default-client-id", help="The quota of client ids without one of their own."),
]


@app.command("list")
def list_command(
    user: User = "",
    default_user: DefaultUser = False,
    client_id: ClientId = "",
    default_client_id: DefaultClientId = False,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006 - typer copies it
) -> None:
    """List the quotas, all of them or those of a user or client id.

    \b
    Examples:
      penstock quotas list
      penstock quotas list --client-id importer --json
    """
    who = _entity(user, default_user, client_id, default_client_id)
    with _peer(bootstrap, client) as peer:
        entries = _described(peer, who, strict=False)
    rows = sorted(
        (_name(entry, USER), _name(entry, CLIENT_ID), value.key, value.value)
        for entry in entries
        for value in entry.values
    )
    if json:
        for of_user, of_client, quota, number in rows:
            output.write_json(
                {
                    "user": _plain(of_user),
                    "client_id": _plain(of_client),
                    "quota": quota,
                    "value": number,
                }
            )
        return
    if not rows:
        output.say("there are no quotas" if not who else "there are no such quotas")
        return
    output.print_table(
        ("user", "client id", "quota", ">per second"),
        [(a or "(any)", b or "(any)", quota, _digits(number)) for a, b, quota, number in rows],
    )


@app.command("set")
def set_command(
    quotas: Annotated[
        list[str],
        typer.Argument(
            metavar="QUOTA=NUMBER...",
            help="producer_byte_rate or consumer_byte_rate, in bytes a second, or request_rate, in "
            "requests a second.",
        ),
    ],
    user: User = "",
    default_user: DefaultUser = False,
    client_id: ClientId = "",
    default_client_id: DefaultClientId = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006 - typer copies it
) -> None:
    """Set quotas of a user, a client id, or both together.

    \b
    Examples:
      penstock quotas set --client-id importer producer_byte_rate=1048576
      penstock quotas set --default-client-id request_rate=200
    """
    who = _required(_entity(user, default_user, client_id, default_client_id))
    ops = [
        OpData(key=key, value=_number(key, text))
        for key, text in parse_pairs(quotas, what="quota").items()
    ]
    with _peer(bootstrap, client) as peer:
        _alter(peer, who, ops)
    output.say(f"set {output.count(len(ops), 'quota')} of {_shown(who)}")


@app.command("remove")
def remove_command(
    quotas: Annotated[
        list[str], typer.Argument(metavar="[QUOTA...]", help="Which ones; all without a name.")
    ] = [],  # noqa: B006 - typer copies it
    user: User = "",
    default_user: DefaultUser = False,
    client_id: ClientId = "",
    default_client_id: DefaultClientId = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006 - typer copies it
) -> None:
    """Remove quotas of a user, a client id, or both together.

    \b
    Examples:
      penstock quotas remove --client-id importer
    """
    who = _required(_entity(user, default_user, client_id, default_client_id))
    with _peer(bootstrap, client) as peer:
        there = [v.key for entry in _described(peer, who, strict=True) for v in entry.values]
        missing = [name for name in quotas if name not in there]
        if missing or not there:
            what = missing[0] if missing else "quota"
            raise BrokerError(
                f"{_shown(who)} has no {what}", advice="`penstock quotas list` shows what there is."
            )
        ops = [OpData(key=key, remove=True) for key in quotas or there]
        _alter(peer, who, ops)
    output.say(f"removed {output.count(len(ops), 'quota')} of {_shown(who)}")


# ---- who -------------------------------------------------------------------------------------


def _entity(user: str, default_user: bool, client_id: str, default_client_id: bool) -> Who:
    who: Who = []
    for kind, name, default in (
        (USER, user, default_user),
        (CLIENT_ID, client_id, default_client_id),
    ):
        if name and default:
            raise typer.BadParameter(f"--{kind} and --default-{kind} exclude each other")
        if name or default:
            who.append((kind, name or None))
    return who


def _required(who: Who) -> Who:
    if not who:
        raise typer.BadParameter("name a --user or a --client-id, or the default of one")
    return who


def _shown(who: Who) -> str:
    return " and ".join(f"{kind} {name or _DEFAULT}" for kind, name in who)


def _name(entry: EntryData, kind: str) -> str:
    """The entity's name of a kind; empty if it has none."""
    for part in entry.entity:
        if part.entity_type == kind:
            return part.entity_name or _DEFAULT
    return ""


def _plain(name: str) -> str | None:
    return name or None


def _digits(number: float) -> str:
    """A number as people write it, however large."""
    return f"{number:,.0f}" if number.is_integer() else f"{number:,}"


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise typer.BadParameter(f"{key}={text}: a number is expected") from None


# ---- asking ----------------------------------------------------------------------------------


def _peer(bootstrap: str, client: list[str]) -> Connection:
    """A connection to the first broker that can be reached."""
    settings = connect(bootstrap, client).settings
    if not reachable(settings):
        raise BrokerError(
            "quotas cannot be asked for with these settings of security",
            advice="Use kafka-configs.sh of Apache Kafka.",
        )
    return cluster(bootstrap, settings).any()


def _described(peer: Connection, who: Who, *, strict: bool) -> list[Any]:
    components = [
        ComponentData(entity_type=kind, match_type=DEFAULT if name is None else EXACT, match=name)
        for kind, name in who
    ]
    answer = peer.call(DescribeClientQuotasRequest(components=components, strict=strict))
    _check(answer.error_code, answer.error_message)
    return list(answer.entries or ())


def _alter(peer: Connection, who: Who, ops: Sequence[OpData]) -> None:
    entry = RequestEntryData(
        entity=[RequestEntityData(entity_type=kind, entity_name=name) for kind, name in who],
        ops=list(ops),
    )
    for result in peer.call(AlterClientQuotasRequest(entries=[entry])).entries:
        _check(result.error_code, result.error_message)


def _check(code: int, message: str | None) -> None:
    if code:
        raise BrokerError(message or ErrorCode(code).name)
