"""Groups of Kafka Streams applications (KIP-1071): the broker assigns tasks, not partitions.

`topology` is what an application says of itself, `internal_topics` what topics it needs beside its
own, `tasks` and `assignor` who is to do what, `members` and `group` the state machine. As in all of
`groups`, nothing here knows of sockets, disk or clock.
"""
