"""The storage engine: a durable, partitioned, replayable log in Apache Kafka's on-disk format.

From the inside out: `disk` and `clock` are what the engine asks of the world, `index`,
`txn_index` and `segment` hold a stretch of one partition, `producers` and `transactions` know who
wrote and what is decided, `readable` and `partition` are the log of one partition, `recovery`
opens it after a stop or a crash, `store` holds all partitions of a data directory. `retention`,
`archive` and `compaction` keep it within bounds.

No sockets and no asyncio in here. A partition belongs to one thread; what may run elsewhere
(`SyncPlan.run`, `compaction.compact`) says so. This room imports `records` only.
"""
