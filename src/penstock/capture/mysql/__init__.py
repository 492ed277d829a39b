"""MariaDB 10.6+ and MySQL 8: the row binlog into changes, from a snapshot at an exact position.

Bytes in, values out, no sockets: `binlog` (events), `tablemap` (what a table was at its place in
the log), `rows` and `textrows` (decoders generated for each table, of the binlog and of result
sets), `values`, `charsets`, `jsonb`, `gtid`, `ddl`, `types`. The sockets: `connection`,
`replication` (the dump), `snapshot`, `checks`. `groups` puts events together into transactions;
`source` is the seam.

Each row event is decoded by the table map just before it, which with binlog_row_metadata=FULL names
the columns, their signedness, character sets and the key. So an ALTER TABLE in the middle of the
stream is read right on both sides, whatever the table looks like now.
"""
