"""The broker beside its peers: `make bench-broker`, or `python -m benchmarks.broker --help`.

Every system runs alone, one after the other, on this machine, with its data in the same folder of
the same disk, driven by a C client. What is measured is in `workloads` (all systems), `raw` (the
Kafka protocol without a client library) and `retained` (a log that holds 10 GB); `systems` is the
table of contestants; `report`, `plot` and `docs` say what came out.
"""
