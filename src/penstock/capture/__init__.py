"""Databases into the log: every committed change, in order, from a known snapshot.

`source` is the seam: what a database must offer to be captured, and how it says what changed.
`postgres/`, `mysql/` and `sqlite/` offer it; everything else here knows no database. `events/`
turns changes into Debezium's events, `delivery/` brings them into the log together with the
position that they lead to, so that a capture which is killed goes on where the log says.

This room writes to the log through `client` and reads databases; it imports nothing else of ours
but `records`.
"""
