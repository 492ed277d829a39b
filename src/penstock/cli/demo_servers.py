"""Servers in the place of the demo's embedded parts: asked before anything is changed."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from penstock.cli.kafka import connect
from penstock.cli.values import parse_address
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.cli.demo import Plan


def check_servers(plan: Plan) -> None:
    """PenstockError for what is not there, or does not let us in."""
    from penstock.cli.run_cluster import check_master

    check_master(plan.master)
    if plan.kafka is not None:
        check_kafka(plan.kafka, keep=plan.keep)
    else:
        check_port(plan.listen)
    if plan.postgres is not None:
        check_postgres(plan.postgres)
    if plan.redis is not None:
        check_redis(plan.redis)


def check_port(listen: str) -> None:
    """ConfigError if somebody else listens there."""
    host, port = parse_address(listen, default_host="127.0.0.1")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        raise ConfigError(
            f"the broker cannot listen at {host}:{port}: {error.strerror or error}",
            advice="Stop what listens there, or choose another place: --listen 127.0.0.1:0 takes "
            "any port that is free.",
        ) from None


def check_redis(url: str) -> None:
    """SinkError if it is not there, or does not let us in."""
    from penstock.sinks import open_sink

    with open_sink(url, name="cache") as sink:
        sink.position()


def check_kafka(bootstrap: str, *, keep: bool) -> None:
    """PenstockError if it does not answer; ConfigError if it has topics that would be mixed up."""
    try:
        topics = connect(bootstrap, []).admin().list_topics(timeout=15).topics
    except PenstockError as error:
        advice = "Is it running, and is the address of --kafka right?"
        raise PenstockError(str(error), advice=advice) from None
    there = sorted(name for name in topics if name.startswith("shop."))
    if there and not keep:
        raise ConfigError(
            f"{bootstrap} has topics of an earlier shop: {', '.join(there)}",
            advice="Go on with them, with --keep, or delete them: penstock topics delete "
            f"--bootstrap {bootstrap} {there[0]} ...",
        )


def check_postgres(url: str) -> None:
    """CaptureError if it is not there, or does not let us in."""
    from penstock.capture.postgres.connect import PostgresUrl

    PostgresUrl(url).connect(application="penstock demo").close()
