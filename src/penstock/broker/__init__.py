"""The server: real Kafka clients talk to it, the storage engine is under it.

`server` ties it together; `connection` turns bytes into frames and answers into bytes, in order;
`apis/` has one file per family of requests; `catalog` is what the broker knows of its topics,
event-sourced in an internal topic (`metadata_log`); `committer` is the group commit;
`housekeeping` keeps the log within bounds. This room imports `records`, `log` and `wire`.
"""
