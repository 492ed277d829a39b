"""Global transaction ids: MariaDB's positions and MySQL's sets.

MariaDB: `domain-server-sequence`, a position has the last one of each domain. MySQL: for each
server's UUID the ranges of transaction numbers that were executed.
"""

from __future__ import annotations

from struct import pack
from typing import Self
from uuid import UUID

from penstock.capture.source import CaptureError


class MariadbPosition:
    """The last id of each domain."""

    def __init__(self, text: str = "") -> None:
        self._domains: dict[int, str] = {}
        for part in filter(None, (p.strip() for p in text.split(","))):
            domain, _, rest = part.partition("-")
            if not (domain.isdigit() and rest.replace("-", "").isdigit() and "-" in rest):
                raise CaptureError(f"{part!r} is not a MariaDB GTID such as 0-1-42")
            self._domains[int(domain)] = part

    def add(self, domain: int, gtid: str) -> str | None:
        """The one that it was until now."""
        before = self._domains.get(domain)
        self._domains[domain] = gtid
        return before

    def put_back(self, domain: int, before: str | None) -> None:
        """What was added was never executed."""
        if before is None:
            self._domains.pop(domain, None)
        else:
            self._domains[domain] = before

    def __str__(self) -> str:
        if len(self._domains) == 1:
            return next(iter(self._domains.values()))
        return ",".join(gtid for _, gtid in sorted(self._domains.items()))


class MysqlSet:
    """Ranges of transaction numbers by server (and tag); both ends belong to a range."""

    def __init__(self, text: str = "") -> None:
        self._servers: dict[str, list[list[int]]] = {}
        for part in filter(None, (p.strip() for p in text.replace("\n", "").split(","))):
            server, *ranges = part.split(":")
            try:
                UUID(server)
                pairs = [[int(x) for x in r.split("-")] for r in ranges]
            except ValueError:
                raise CaptureError(
                    f"{part!r} is not a MySQL GTID set such as UUID:1-42 (tags are not supported)"
                ) from None
            mine = self._servers.setdefault(server.lower(), [])
            mine.extend([pair[0], pair[-1]] for pair in pairs)
        for name, found in self._servers.items():
            self._servers[name] = _merged(found)

    def add(self, server: str, number: int) -> None:
        """One more transaction; mostly it follows the last."""
        ranges = self._servers.setdefault(server, [])
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
            self._servers[server] = _merged(ranges)

    def contains(self, other: Self) -> bool:
        return all(
            any(mine[0] <= low and high <= mine[1] for mine in self._servers.get(server, ()))
            for server, ranges in other._servers.items()
            for low, high in ranges
        )

    def __str__(self) -> str:
        return ",".join(
            ":".join([server, *(f"{a}-{b}" if a != b else str(a) for a, b in ranges)])
            for server, ranges in sorted(self._servers.items())
        )

    def encoded(self) -> bytes:
        """As COM_BINLOG_DUMP_GTID wants it."""
        out = [pack("<Q", len(self._servers))]
        for server, ranges in sorted(self._servers.items()):
            out.append(UUID(server).bytes + pack("<Q", len(ranges)))
            out += [pack("<QQ", low, high + 1) for low, high in ranges]
        return b"".join(out)


def _merged(ranges: list[list[int]]) -> list[list[int]]:
    out: list[list[int]] = []
    for low, high in sorted(ranges):
        if out and low <= out[-1][1] + 1:
            out[-1][1] = max(out[-1][1], high)
        else:
            out.append([low, high])
    return out
