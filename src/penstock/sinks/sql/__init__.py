"""Tables in SQL databases: SQLite, PostgreSQL, MariaDB and MySQL, DuckDB.

The table is made from the schema. Where it stands is a row of the table `penstock_positions` of the
same database, written in the same transaction: the next offsets, the schema, and the number of the
writer, which the next writer raises to fence this one. A table that is built beside another has
`__building` behind its name until it is switched.

- `base`: what they have in common, all of the contract but the words of each database.
- `text`: values as text and back, for databases and drivers that have no better way.
- `sqlite`, `postgresql`, `mysql`, `duckdb`: one database each.
"""
