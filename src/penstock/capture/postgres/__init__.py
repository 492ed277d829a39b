"""PostgreSQL 14 and newer, captured by logical decoding (`pgoutput`) over the replication protocol.

- `pgoutput`, `values`, `types`, `decoders`, `assembly`, `spool`: pure, bytes to changes.
- `connect`, `catalog`, `setup`, `checks`: the server's own SQL: connections, what tables are, slots
  and publications, what must hold before.
- `snapshot`, `replication`, `chunks`: rows at a position, the stream, rows in the stream.
- `source`: all of it as a `Source`.
"""
