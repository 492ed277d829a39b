"""Record batches as Arrow columns, and back, without an object for any record.

`decode` turns the bytes of a Fetch answer into a `pyarrow.RecordBatch`; `encode` packs columns
into batches for Produce; `partition` says to which partition keys go. The loops over records are
in `kernels`, compiled by numba; `compiled` says how, and where the machine code is kept.

Needs the extra `penstock[columnar]`; nothing else of this package imports it.
"""
