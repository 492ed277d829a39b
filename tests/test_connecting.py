"""Why PostgreSQL cannot be connected to: from the texts that libpq and psycopg make of it."""

from __future__ import annotations

import pytest

from penstock.connecting import Kind, mysql_away, why

AT = 'connection to server at "{}", port 5432 failed: '
HINT = "\n\tIs the server running on that host and accepting TCP/IP connections?"
PASSWORD = 'FATAL:  password authentication failed for user "me"'


def one(reason: str) -> str:
    return "connection failed: " + AT.format("127.0.0.1") + reason


def both(first: str, second: str) -> str:
    """A name with two addresses."""
    lines = [
        one(second),
        "Multiple connection attempts failed. All failures were:",
        f"- host: 'localhost', port: 5432, hostaddr: '::1': {one(first)}",
        f"- host: 'localhost', port: 5432, hostaddr: '127.0.0.1': {one(second)}",
    ]
    return "\n".join(lines)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        (one(f"Connection refused{HINT}"), "away", "Connection refused"),
        ("[Errno -2] Name or service not known", "away", "Name or service not known"),
        ("connection timeout expired", "away", "connection timeout expired"),
        (one(PASSWORD), "refused", PASSWORD.removeprefix("FATAL:  ")),
        (one("fe_sendauth: no password supplied"), "refused", "fe_sendauth: no password supplied"),
        (one('FATAL:  no pg_hba.conf entry for host "::1"'), "refused", None),
        (one('FATAL:  database "x" does not exist'), "refused", 'database "x" does not exist'),
        (one('FATAL:  role "x" does not exist'), "refused", 'role "x" does not exist'),
        (one("FATAL:  the database system is starting up"), "busy", None),
        (one("FATAL:  the database system is not yet accepting connections"), "busy", None),
        (one("FATAL:  sorry, too many clients already"), "busy", None),
        (both(f"Connection refused{HINT}", PASSWORD), "refused", PASSWORD.removeprefix("FATAL:  ")),
        (both(PASSWORD, f"Connection refused{HINT}"), "refused", PASSWORD.removeprefix("FATAL:  ")),
        (both(f"Connection refused{HINT}", f"Connection refused{HINT}"), "away",
         "Connection refused"),
        (both("Connection refused", "FATAL:  the database system is starting up"), "busy",
         "the database system is starting up"),
    ],
)  # fmt: skip
def test_what_a_text_comes_to(text: str, kind: Kind, reason: str | None) -> None:
    found = why(RuntimeError(text))
    assert found.kind == kind
    assert reason in {None, found.reason}
    assert found.kind == "busy" or found.advice


def test_why_nobody_answers_for_mysql() -> None:
    text = "Can't connect to MySQL server on '127.0.0.1' ([Errno 111] Connection refused)"
    assert mysql_away(text) == "Connection refused"
    assert mysql_away("Can't connect to MySQL server on 'db' (timed out)") == "timed out"
    assert mysql_away("Lost connection to MySQL server during query") is None
