"""`make bench-processing`: windows, joins, views, patterns and standing queries, in events/s.

Beside plain Spark with its own Kafka connector where it has an equivalent: the same topics of the
same broker, in the same session, by turns, micro-batches of the same size, both to nowhere.
"""
