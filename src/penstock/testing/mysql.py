"""A MySQL 8 server of a test's own, beside the one of MariaDB.

Debian has no MySQL, so the binary comes from Maven Central (`scripts/mysql-server.sh` fetches it to
`.mysql` in the checkout; Linux on x86-64 only). It is MySQL 8.0.12: old, but with all that a
capture rests on except for compressed transactions.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Final

from penstock.testing.mariadb import (
    CAPTURED,
    PASSWORD,
    SMALL,
    USER,
    DatabaseServerError,
    MariaDB,
)

HOME_VARIABLE: Final = "PENSTOCK_MYSQL_HOME"
_INSTALL: Final = f"Run scripts/mysql-server.sh, or set {HOME_VARIABLE} to where bin/mysqld is."


def mysql_home() -> Path | None:
    """The folder of MySQL, if it is there and runs on this machine."""
    named = os.environ.get(HOME_VARIABLE)
    here = Path(__file__).resolve()
    places = [Path(named)] if named else [folder / ".mysql" for folder in here.parents]
    return next((place for place in places if _runs(place / "bin" / "mysqld")), None)


@cache
def _runs(binary: Path) -> bool:
    if not binary.exists():
        return False
    # A newer system may lack the libraries of its time.
    said = subprocess.run([binary, "--version"], capture_output=True, timeout=60, check=False)
    return said.returncode == 0


class MySQL(MariaDB):
    """One server of MySQL, with GTIDs on."""

    kind = "mysql"
    options_base: Mapping[str, str] = {
        **SMALL,
        **CAPTURED,
        "gtid-mode": "ON",
        "enforce-gtid-consistency": "ON",
        "default-authentication-plugin": "mysql_native_password",
        "mysqlx": "OFF",
    }

    def _binary(self) -> str:
        return str(self._home() / "bin" / "mysqld")

    def _home(self) -> Path:
        home = mysql_home()
        if home is None:
            raise DatabaseServerError("MySQL is not there", advice=_INSTALL)
        return home

    def _place(self) -> list[str]:
        return [*super()._place(), f"--basedir={self._home()}"]

    def _initialise(self) -> None:
        first = self.folder / "tmp" / "first.sql"
        first.write_text(
            f"CREATE USER '{USER}'@'%' IDENTIFIED WITH mysql_native_password BY '{PASSWORD}';\n"
            f"GRANT ALL ON *.* TO '{USER}'@'%' WITH GRANT OPTION;\n"
        )
        command = [self._binary(), "--no-defaults", "--initialize-insecure", *self._place()]
        command += [f"--init-file={first}"]
        done = subprocess.run(command, capture_output=True, timeout=180, check=False)
        if done.returncode != 0:
            text = done.stderr.decode(errors="replace")[-4000:]
            raise DatabaseServerError(f"no system tables for MySQL could be made:\n{text}")
