"""Why a connection to a database did not come about, from the texts of the drivers.

For captures and sinks alike, which know nothing of each other. It imports no driver.

PostgreSQL: nobody there, busy, or not let in. psycopg has no code for it, only libpq's text; and a
host such as `localhost` may have several addresses, each with a failure of its own. What a server
that answered has said counts more than that nobody answers at another address. MariaDB and MySQL
have codes; of the text only the reason is of use.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["refused", "busy", "away"]

_TLS: Final = "Check sslmode, sslrootcert, sslcert and sslkey in the URL."
_REFUSED: Final = (
    ("password authentication failed", "Check the user and the password in the URL."),
    ("no password supplied", "Put the password into the URL: postgresql://USER:PASSWORD@HOST/DB"),
    ("no pg_hba.conf entry", "Let this host and user in: a line in the server's pg_hba.conf."),
    # A connection that TLS lost in the middle is worth another try; these are not.
    ("does not support SSL", _TLS),
    ("certificate", _TLS),
    ("sslmode", _TLS),
)
_MISSING: Final = re.compile(r"\b(database|role)\b.* does not exist")
_MISSING_ADVICE: Final = {
    "database": "Check the database in the URL.",
    "role": "Check the user in the URL.",
}
_BUSY: Final = (
    "starting up",
    "shutting down",
    "in recovery mode",
    "accepting connections",
    "too many",
    "remaining connection",
)
# libpq says of each address that it tried where that was, why it failed, and what it guesses.
_SEVERAL: Final = "Multiple connection attempts failed"
_FAILED: Final = re.compile(
    r"(?:failed|FATAL): (?!connection |FATAL)(.+?)"
    r"(?= Is the server running| - host:| connection to server | This probably means|$)"
)
_NUMBER: Final = re.compile(r"\[Errno -?\d+\] ")
_ORDER: Final[tuple[Kind, ...]] = ("refused", "busy", "away")


# PyMySQL repeats the address, and numbers what the system said.
_MYSQL: Final = re.compile(r"Can't connect to MySQL server on '.*' \((?:\[Errno -?\d+\] )?(.*)\)")


@dataclass(frozen=True, slots=True)
class Trouble:
    """What kind it is, why, and what a person can do."""

    kind: Kind
    reason: str
    advice: str = ""


def why(error: Exception) -> Trouble:
    """What an error of the driver, raised while it connected, comes to."""
    text = " ".join(str(error).split()).removeprefix("connection failed: ")
    told = text.partition(_SEVERAL)[2] or text
    reasons = list(dict.fromkeys(_NUMBER.sub("", each) for each in _FAILED.findall(told)))
    found = [_classed(each) for each in reasons or [_NUMBER.sub("", text)]]
    kind = min((each.kind for each in found), key=_ORDER.index)
    alike = [each for each in found if each.kind == kind]
    return Trouble(kind, "; ".join(each.reason for each in alike), alike[0].advice)


def mysql_away(text: str) -> str | None:
    """Why nobody answers at the address of a MariaDB or MySQL; None if that is not what it says."""
    found = _MYSQL.fullmatch(text)
    return None if found is None else found[1]


def _classed(reason: str) -> Trouble:
    for part, advice in _REFUSED:
        if part in reason:
            return Trouble("refused", reason, advice)
    if missing := _MISSING.search(reason):
        return Trouble("refused", reason, _MISSING_ADVICE[missing[1]])
    if any(part in reason for part in _BUSY):
        return Trouble("busy", reason)
    return Trouble("away", reason, "Is the server running, and are host and port in the URL right?")
