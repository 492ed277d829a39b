"""Changes of databases as Debezium's events: envelopes, keys, topics, schemas.

`settings` says what a user may choose, `composer` turns the changes of one table into records,
with an encoder for JSON (`json`) or Avro (`avro`); `changes` is the door through which `delivery`
comes. `table_schemas` and `registry` make the schemas that events name by id. Nothing here knows a
database or talks to the log: what must be read from the log (schemas, last values) is handed in.
"""
