"""Numbers of keys: one for each key as Spark tells them apart, and never too large to go on."""

from __future__ import annotations

import math
import struct
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.state.numbering import numbered

# Another NaN than Python's, which Spark holds for the same.
ODD_NAN = struct.unpack("<d", struct.pack("<Q", 0xFFF8000000000001))[0]
KEYS = st.tuples(
    st.sampled_from([0.0, -0.0, math.nan, ODD_NAN, 1.0, None]),
    st.sampled_from(["", "a", None]),
    st.sampled_from([0, 7, None]),
)


def plain(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple("NaN" if each != each else each for each in key)  # noqa: PLR0124


@given(st.lists(KEYS, max_size=30), st.integers(0, 3), st.booleans())
def test_equal_keys_have_one_number(
    keys: list[tuple[Any, ...]], used: int, null_is_value: bool
) -> None:
    keys = [each[:used] for each in keys]
    kinds = [pa.float64(), pa.string(), pa.int64()][:used]
    columns = [pa.array([each[at] for each in keys], kind) for at, kind in enumerate(kinds)]
    # In pieces, as rows of a state and of a micro-batch are.
    pieces = [pa.chunked_array([each.slice(0, 2), each.slice(2)]) for each in columns]
    numbers, count = numbered(pieces, len(keys), null_is_value=null_is_value)
    known: dict[tuple[Any, ...], int] = {}
    for key, number in zip(keys, numbers.tolist(), strict=True):
        if not null_is_value and None in key:
            assert number == -1
        else:
            assert known.setdefault(plain(key), number) == number
            assert 0 <= number < count <= len(keys)
    assert len(set(known.values())) == len(known)


def test_numbers_of_many_columns_stay_small() -> None:
    # More possibilities than 64 bits have numbers.
    columns = [pa.array(np.random.default_rng(at).permutation(5_000)) for at in range(6)]
    numbers, count = numbered(columns, 5_000)
    assert count == len(set(numbers.tolist())) == 5_000
    assert numbers.max() == 4_999
