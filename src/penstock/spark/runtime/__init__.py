"""Flows and sinks as running units.

Sinks live in long-running Spark tasks (`resident` on the driver, `resident_task` in the task), each
in a `sink_loop`: fetch, decode, the store's transaction with the position, and again. The driver
starts, watches and stops them (`sink_query`); no record passes through it.

Flows run in `micro_batches`, by a loop on the driver for each, over the files of a `checkpoint`.
What of Spark is private, and needed all the same, is in `spark_internals`.
"""
