"""`penstock quotas`: list, set, remove."""

from __future__ import annotations

from time import monotonic

import pytest

from penstock.testing.apache_kafka import ApacheKafka
from tests.cli.runner import run

TIMEOUT_S = 60.0
Quotas = dict[tuple[str | None, str | None, str], float]


def values(*arguments: str) -> Quotas:
    """What `list` says: by user, client id and quota."""
    lines = run("quotas", "list", "--json", *arguments).ok().json_lines
    return {(line["user"], line["client_id"], line["quota"]): line["value"] for line in lines}


def test_set_list_and_remove(at: str) -> None:
    assert "no quotas" in run("quotas", "list").ok().err
    run("quotas", "set", "--client-id", "app", "producer_byte_rate=1000", "request_rate=2.5").ok()
    run("quotas", "set", "--user", "ann", "--default-client-id", "consumer_byte_rate=7").ok()
    app: Quotas = {(None, "app", "producer_byte_rate"): 1000, (None, "app", "request_rate"): 2.5}
    ann: Quotas = {("ann", "(default)", "consumer_byte_rate"): 7}
    assert values() == {**app, **ann}
    assert values("--client-id", "app") == app
    assert values("--user", "ann") == ann
    table = run("quotas", "list").ok().out
    assert "producer_byte_rate" in table
    assert "1,000" in table
    assert " 2.5" in table
    run("quotas", "set", "--client-id", "app", "producer_byte_rate=1048576").ok()
    assert "1,048,576" in run("quotas", "list").ok().out
    run("quotas", "remove", "--client-id", "app", "request_rate").ok()
    assert values("--client-id", "app") == {(None, "app", "producer_byte_rate"): 1_048_576}
    run("quotas", "remove", "--client-id", "app").ok()
    run("quotas", "remove", "--user", "ann", "--default-client-id").ok()
    assert values() == {}


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (("set", "producer_byte_rate=1"), 2, "name a --user or a --client-id"),
        (("set", "--user", "a", "producer_byte_rate"), 2, "producer_byte_rate"),
        (("set", "--user", "a", "producer_byte_rate=x"), 2, "a number is expected"),
        (("set", "--user", "a", "--default-user", "request_rate=1"), 2, "exclude"),
        (("set", "--user", "a", "speed=1"), 1, "there is no quota 'speed'"),
        (("set", "--user", "a", "request_rate=0"), 1, "more than 0"),
        (("remove", "--user", "nobody"), 1, "has no quota"),
        (("remove", "--user", "nobody", "request_rate"), 1, "has no request_rate"),
    ],
)
def test_wrong_use(at: str, arguments: tuple[str, ...], status: int, says: str) -> None:
    ran = run("quotas", *arguments)
    assert (ran.status, says in ran.err) == (status, True), ran.err


def test_it_works_on_apache_kafka(apache_kafka: ApacheKafka) -> None:
    where = ("--bootstrap", apache_kafka.bootstrap)
    run("quotas", "set", "--client-id", "app", "producer_byte_rate=1000000000", *where).ok()
    # Its broker hears of it a moment later.
    deadline = monotonic() + TIMEOUT_S
    while not (found := values("--client-id", "app", *where)):
        assert monotonic() < deadline
    assert found == {(None, "app", "producer_byte_rate"): 1_000_000_000}
    run("quotas", "remove", "--client-id", "app", *where).ok()
