"""Keys go where other clients put them."""

from __future__ import annotations

import warnings

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.records.columns.layout import ColumnsError
from penstock.records.columns.partition import partitions_of

with warnings.catch_warnings():
    # It reads its schemas by a function that Python 3.11 calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka.partitioner.default import murmur2


@given(st.lists(st.none() | st.binary(max_size=40), max_size=30), st.integers(1, 2**31 - 1))
def test_as_kafka_python_does(keys: list[bytes | None], count: int) -> None:
    expected = [-1 if key is None else (murmur2(key) & 0x7FFFFFFF) % count for key in keys]
    assert partitions_of(pa.array(keys, pa.binary()), count).tolist() == expected
    sliced = pa.array([b"before", *keys, b"after"], pa.binary()).slice(1, len(keys))
    assert partitions_of(sliced, count).tolist() == expected


def test_text_and_nothing() -> None:
    assert partitions_of(pa.array(["21", "foobar"]), 1000).tolist() == [
        (murmur2(b"21") & 0x7FFFFFFF) % 1000,
        (murmur2(b"foobar") & 0x7FFFFFFF) % 1000,
    ]
    assert partitions_of(pa.array([], pa.binary()), 3).tolist() == []
    with pytest.raises(ColumnsError, match="0 partitions"):
        partitions_of(pa.array([b""]), 0)
