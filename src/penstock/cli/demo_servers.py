"""Servers in the place of the demo's embedded parts: asked before anything is started."""

from __future__ import annotations

from penstock.cli.kafka import connect
from penstock.errors import ConfigError, PenstockError


def check_kafka(bootstrap: str, *, keep: bool) -> None:
    """BrokerError if it does not answer; ConfigError if it has topics that would be mixed up."""
    topics = connect(bootstrap, []).admin().list_topics(timeout=15).topics
    there = sorted(name for name in topics if name.startswith("shop."))
    if there and not keep:
        raise ConfigError(
            f"{bootstrap} has topics of an earlier shop: {', '.join(there)}",
            advice="Go on with them, with --keep, or delete them: penstock topics delete "
            f"--bootstrap {bootstrap} {there[0]} ...",
        )


def check_postgres(url: str) -> None:
    """PenstockError if it does not let us in."""
    from importlib.util import find_spec

    if find_spec("psycopg") is None:
        raise ConfigError("PostgreSQL needs psycopg, which is not installed",
                          advice="Install it with `pip install 'penstock[postgres]'`.")  # fmt: skip
    import psycopg

    try:
        psycopg.connect(url, connect_timeout=10).close()
    except psycopg.Error as error:
        raise PenstockError(
            f"the database does not let us in: {str(error).strip()}",
            advice="Look at the host, the user and the password of --postgres.",
        ) from None
