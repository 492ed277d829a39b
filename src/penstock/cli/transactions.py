"""`penstock transactions`: list, describe, commit and abort transactions, whoever began them.

Client libraries have no calls for most of this, so the requests go out directly (`client`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
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
from penstock.cli.values import parse_duration_ms, show_duration, show_time
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.client.connection import Cluster
    from penstock.client.transactions import Described, Ids

app = typer.Typer(
    no_args_is_help=True,
    help="List, describe, commit and abort transactions.",
    epilog="A transaction is known by the transactional id of its producer. While it is open, "
    "consumers that read committed records wait before its first record. It ends when its producer "
    "commits or aborts it, or when it takes longer than its timeout; one that was begun for "
    "a two-phase commit has no timeout and waits until somebody decides: `commit` and `abort` do.",
)

STATES: Final = (
    "Empty", "Ongoing", "PrepareCommit", "PrepareAbort", "CompleteCommit", "CompleteAbort",
)  # fmt: skip
_NOT_FOUND: Final = "TRANSACTIONAL_ID_NOT_FOUND"
_OPEN: Final = "Ongoing"

TransactionalId = Annotated[
    str, typer.Argument(metavar="ID", help="The transactional id of the producer.")
]
Expected = Annotated[
    str | None,
    typer.Option(
        "--prepared",
        metavar="PRODUCER:EPOCH",
        help="Only if this is the transaction that was prepared: the producer id and epoch that "
        "its producer gave to whoever decides.",
    ),
]


@contextmanager
def _cluster(bootstrap: str, client: list[str]) -> Iterator[Cluster]:
    from penstock.cli.protocol import cluster, reachable
    from penstock.client.connection import RefusedError, UnreachableError

    settings = connect(bootstrap, client).settings
    if not reachable(settings):
        raise BrokerError(
            "transactions cannot be asked for with these settings of security",
            advice="Use kafka-transactions.sh of Apache Kafka.",
        )
    try:
        with cluster(bootstrap, settings) as brokers:
            yield brokers
    except UnreachableError as error:
        raise BrokerError(
            str(error),
            advice="Start one with `penstock up`, or name another with --bootstrap or "
            "PENSTOCK_BOOTSTRAP.",
        ) from error
    except RefusedError as error:
        advice = ""
        if error.name == _NOT_FOUND:
            advice = "`penstock transactions list` shows what there is."
        raise BrokerError(str(error), advice=advice) from error


# ---- list --------------------------------------------------------------------------------


@app.command("list")
def list_transactions(
    state: Annotated[
        list[str],
        typer.Option(
            "--state", "-s", metavar="STATE",
            help=f"Only those in this state: {', '.join(STATES)}. May be repeated.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    longer_than: Annotated[
        str | None,
        typer.Option(
            "--longer-than", metavar="DURATION", help="Only open ones that began longer ago than "
            "this, such as 5m.",
        ),
    ] = None,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """List the transactional ids, and what their transactions are doing.

    Ongoing is an open transaction. Of one that was begun for a two-phase commit the timeout is
    `none`: it waits for `commit` or `abort`.

    \b
    Examples:
      penstock transactions list
      penstock transactions list --state Ongoing --longer-than 5m
      penstock transactions list --json | jq -r '.[].transactional_id'
    """
    from penstock.client import transactions

    known = {name.lower(): name for name in STATES}
    unknown = [name for name in state if name.lower() not in known]
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is no state: {', '.join(STATES)}")
    state = [known[name.lower()] for name in state]
    longer_than_ms = -1
    if longer_than is not None:
        parsed = parse_duration_ms(longer_than)
        if parsed is None:
            raise typer.BadParameter(f"{longer_than!r} is not a duration such as 90s or 5m")
        longer_than_ms, state = parsed, state or [_OPEN]
    with _cluster(bootstrap, client) as cluster:
        found = transactions.listed(cluster, states=state, longer_than_ms=longer_than_ms)
        rows = []
        for item in found:
            try:
                rows.append(transactions.described(cluster, item.transactional_id))
            except PenstockError as error:
                if _NOT_FOUND not in str(error):
                    raise
                # It was forgotten since.
    if json:
        output.write_json([_as_json(item) for item in rows])
    elif rows:
        columns = (
            "transactional id", "state", ">producer:epoch", "timeout", "open since", ">partitions",
        )  # fmt: skip
        output.print_table(columns, (_row(item) for item in rows))
    else:
        output.say("there are no transactions" + (" of this kind" if state else ""))


def _row(item: Described) -> tuple[str, ...]:
    return (
        item.transactional_id,
        item.state,
        str(item.ids),
        _timeout(item),
        show_time(item.started_ms) if item.is_open else "-",
        str(sum(map(len, item.partitions.values()))),
    )


def _timeout(item: Described) -> str:
    return "none" if item.is_two_phase else show_duration(item.timeout_ms)


def _as_json(item: Described) -> dict[str, Any]:
    value = asdict(item)
    del value["ids"]
    return {
        **value,
        "producer_id": item.ids.producer_id,
        "producer_epoch": item.ids.epoch,
        "timeout_ms": None if item.is_two_phase else item.timeout_ms,
        "started_ms": item.started_ms if item.is_open else None,
        "two_phase": item.is_two_phase,
    }


# ---- describe ----------------------------------------------------------------------------


@app.command("describe")
def describe(
    name: TransactionalId,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Show one transactional id: its state, its producer, and where its transaction has written.

    \b
    Examples:
      penstock transactions describe orders-1
    """
    from penstock.client import transactions

    with _cluster(bootstrap, client) as cluster:
        item = transactions.described(cluster, name)
    if json:
        output.write_json(_as_json(item))
        return
    print(f"transactional id  {item.transactional_id}")
    print(f"state             {item.state}")
    print(f"producer:epoch    {item.ids}")
    print(f"timeout           {_timeout(item)}")
    if item.is_open:
        age_ms = max(0, int(time.time() * 1000) - item.started_ms)
        print(f"open since        {show_time(item.started_ms)}, {age_ms / 1000:,.0f} s ago")
    for topic, numbers in item.partitions.items():
        print(f"partitions        {topic}: {', '.join(map(str, numbers))}")
    if item.is_open and item.is_two_phase:
        output.say(f"it waits for `penstock transactions commit {name}` or `abort`")


# ---- commit and abort --------------------------------------------------------------------


@app.command("commit")
def commit(
    name: TransactionalId,
    prepared: Expected = None,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also a transaction that was not begun for a two-phase "
                     "commit, though its producer may not have written all of it."),
    ] = False,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """Commit a prepared transaction, from whatever process and machine.

    The producer that began it must have written everything: it is fenced from now on, and what
    it still sends is refused. That is how a database and the log are committed together: the
    producer prepares here (its records are written and acknowledged) and there, the database
    commits, then this is run; and if the database has not committed, `abort`.

    \b
    Examples:
      penstock transactions commit orders-1
      penstock transactions commit orders-1 --prepared 4000:7
    """
    _end(name, prepared, commit=True, force=force, json=json, bootstrap=bootstrap, client=client)


@app.command("abort")
def abort(
    name: TransactionalId,
    prepared: Expected = None,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Abort an open transaction, prepared or not, and fence its producer.

    Consumers that read committed records pass over what it has written; the offsets that it
    carried are not committed. On brokers that cannot resume transactions (Apache Kafka as of
    4.3) it works too, but without --prepared.

    \b
    Examples:
      penstock transactions abort orders-1
      penstock transactions abort orders-1 --prepared 4000:7
    """
    _end(name, prepared, commit=False, force=True, json=json, bootstrap=bootstrap, client=client)


def _end(
    name: str,
    prepared: str | None,
    *,
    commit: bool,
    force: bool,
    json: bool,
    bootstrap: str,
    client: list[str],
) -> None:
    from penstock.client import transactions
    from penstock.client.connection import UnsupportedError

    expected = _parse_ids(prepared) if prepared is not None else None
    with _cluster(bootstrap, client) as cluster:
        item = transactions.described(cluster, name)
        if not item.is_open:
            raise BrokerError(
                f"{name} has no open transaction: its state is {item.state}",
                advice="CompleteCommit and CompleteAbort say how the last one ended.",
            )
        _check_prepared(item.ids, expected)
        if not item.is_two_phase and not force:
            raise BrokerError(
                f"the transaction of {name} was not begun for a two-phase commit: its producer "
                "may not have written all of it",
                advice="Let its producer end it; or --force, if you know that it is complete.",
            )
        try:
            # An ordinary one stays ordinary, with the timeout it has.
            timeout_ms = None if item.is_two_phase else item.timeout_ms
            resumed = transactions.resume(cluster, name, timeout_ms=timeout_ms)
        except UnsupportedError as error:
            if commit or expected is not None:
                raise BrokerError(
                    f"{error}: this broker cannot resume transactions (KIP-939)"
                ) from error
            transactions.terminate(cluster, name)
        else:
            # It may have ended, and another begun, in the meantime.
            _check_prepared(resumed.prepared, expected or item.ids)
            transactions.end(cluster, resumed, commit=commit)
    if json:
        outcome = "committed" if commit else "aborted"
        output.write_json({"transactional_id": name, "outcome": outcome})
    else:
        output.say(f"{'committed' if commit else 'aborted'} the transaction of {name}")


def _parse_ids(text: str) -> Ids:
    from penstock.client.transactions import Ids

    producer_id, colon, epoch = text.partition(":")
    if not colon or not producer_id.isdecimal() or not epoch.isdecimal():
        raise typer.BadParameter(f"{text!r} is not PRODUCER:EPOCH, as in 4000:7")
    return Ids(int(producer_id), int(epoch))


def _check_prepared(found: Ids | None, expected: Ids | None) -> None:
    if expected is not None and found != expected:
        raise BrokerError(
            f"the open transaction is {found or 'none'}, not {expected}",
            advice="What was prepared has been ended already; nothing was done.",
        )
