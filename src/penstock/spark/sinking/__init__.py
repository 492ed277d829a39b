"""Sinks fed from the log: a topic of changes, read by Spark, kept as a table in a derived store.

Each sink is a streaming query of its own. It begins where the store says that it is, for the store
alone keeps the position; Spark's checkpoint is thrown away at each start. In a micro-batch each
task reduces the records of its partitions to the last of each key, and parses those; the driver
hands them to the store, which takes rows and position in one transaction. So a kill at any moment
loses nothing and repeats nothing that could be seen.

- `spec`: what a user says of a sink; `fields`: the columns, given or found out.
- `parsing`, `values`: records to rows, columnar where it counts; `task`: that in Spark's tasks.
- `feeding`: the query and its micro-batches; `letters`: what could not be read or taken.
- `manager`: starts, watches, restarts, pauses and rebuilds; `folder`: what outlives the process.
- `output`: a sink as the output of a flow.
"""
