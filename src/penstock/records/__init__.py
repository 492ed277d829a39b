"""The record batch: the unit that producers send, the log stores and consumers fetch.

`batch` reads, verifies and patches the 61-byte header without looking inside; `record` opens a
batch for those who must (compaction, the command line, tests); `control` makes and reads the
markers of transactions; `compression` holds the codecs.
This room imports no other.
"""
