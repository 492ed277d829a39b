"""Queues: topics read record by record, with acknowledgement, redelivery and dead letters.

Who is a member of a share group and which partitions it reads is in `groups`. Here is what
happens to the records: `partition` is the state machine of one group's records of one partition,
`coordinator` holds them all and keeps their state in the journal.
"""
