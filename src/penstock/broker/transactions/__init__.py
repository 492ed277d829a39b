"""Transactions: records and offsets of many partitions that become visible together or never.

`coordinator` is the state machine: who may write in which transaction, and what was decided.
`markers` carries a decision out in the partitions.
"""
