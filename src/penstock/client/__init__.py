"""A synchronous client of the Kafka protocol: what capture, Spark and the commands talk with.

It works on Penstock's broker and on Apache Kafka. By floor:

`connection`    one broker, and the right one of a cluster; `security` TLS and SASL
`metadata`      topics, leaders, offsets; `topics` makes and deletes them
`fetching`      raw record batches from many leaders at once; `reading` small topics whole
`producing`     raw record batches to many leaders; `writer` records, in batches and transactions
`table_schemas` schemas of captured tables, which events name by id
`asking`        questions and answers over topics
`transacting`   one transaction for several processes; `transactions` those of other producers

Errors are in `errors`. Nothing here starts threads: each object belongs to one.
"""
