"""Queues: topics read record by record, with acknowledgement, redelivery and dead letters.

Who is a member of a share group and which partitions it reads is in `groups`. Here is what
happens to the records. Pure: `partition` is the state machine of one group's records of one
partition, `keys` the order by key in it, `coordinator` holds them all and makes their journal
entries, `sessions` says whose request is next. With the log: `delivery` reads and locks,
`dead_letters` writes what was given up. `rounds` brings acknowledgements into the journal, many at
once; `service` ties all of it to a broker.
"""
