"""`make bench-spark`: our source and sink beside Spark's own Kafka connector, in one session.

Both read the same topic of the same broker, in the same Spark session, by turns. Needs the
connector's jars (`make spark-jars`); users never do.
"""
