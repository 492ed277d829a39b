"""The source block: where a change came from, as Debezium's MySQL connector says it.

Most of it is the same for all changes of a table; the number of the row within its event is put in
by the row decoders, so a block comes in two halves, before and after that number.
"""

from __future__ import annotations

import orjson

import penstock
from penstock.capture.source import Table


class Blocks:
    """Source blocks of one table."""

    def __init__(self, table: Table, name: str, kind: str) -> None:
        begin = orjson.dumps({"version": penstock.__version__, "connector": kind, "name": name})
        self._begin = begin[:-1] + b',"ts_ms":'
        place = orjson.dumps({"db": table.database, "sequence": None, "table": table.name})
        self._place = place[1:-1]

    def halves(
        self,
        ts_us: int,
        server_id: int,
        gtid: bytes,
        file: bytes,
        at: int,
        thread: bytes,
        query: bytes,
    ) -> tuple[bytes, bytes]:
        """Of the changes of one event; gtid, file, thread and query are JSON."""
        return (
            b'%b%d,"ts_us":%d,"ts_ns":%d000,"snapshot":"false",%b,"server_id":%d,"gtid":%b,'
            b'"file":%b,"pos":%d,"row":'
            % (
                *(self._begin, ts_us // 1000, ts_us, ts_us, self._place),
                *(server_id, gtid, file, at),
            ),
            b',"thread":%b,"query":%b}' % (thread, query),
        )

    def snapshot(self, ts_us: int, server_id: int, gtid: bytes, file: bytes, at: int) -> bytes:
        """Of rows that were read, not changed."""
        return (
            b'%b%d,"ts_us":%d,"ts_ns":%d000,"snapshot":"true",%b,"server_id":%d,"gtid":%b,'
            b'"file":%b,"pos":%d,"row":0,"thread":null,"query":null}'
            % (
                *(self._begin, ts_us // 1000, ts_us, ts_us, self._place),
                *(server_id, gtid, file, at),
            )
        )
