"""Records by columns: JSON put together by Arrow, each partition in the order of event time."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.processing.harness import PARTITIONS, Bench

# When the first event happens.
FIRST_US: Final = 1_767_225_600_000_000
_BLOCK: Final = 50_000

Numbers = Any


def mixed(n: Numbers, salt: int, below: int) -> Numbers:
    """A number from 0 to before `below` for each: a hash (splitmix64), the same in every run."""
    with np.errstate(over="ignore"):
        z = n.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(salt * 1_000_003)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        z ^= z >> np.uint64(31)
    return (z % np.uint64(below)).astype(np.int64)


def times(at_us: Numbers) -> pa.Array:
    """As JSON has them."""
    stamps = pa.array(FIRST_US + at_us, pa.int64()).cast(pa.timestamp("us"))
    text = pc.replace_substring(stamps.cast(pa.string()), " ", "T")
    return pc.binary_join_element_wise(text, "Z", "")


def rows(**columns: Any) -> pa.Array:
    """JSON objects: numbers as they are, text in quotes."""
    parts: list[Any] = []
    for at, (name, values) in enumerate(columns.items()):
        column = values if isinstance(values, pa.Array) else pa.array(values)
        quote = '"' if pa.types.is_string(column.type) else ""
        parts += [f'{"," if at else "{"}"{name}":{quote}', column.cast(pa.string())]
        if quote:
            parts.append(quote)
    joined = pc.binary_join_element_wise(*parts, "}", "")
    return joined.cast(pa.binary())


def write(bench: Bench, topic: str, values: pa.Array) -> None:
    """Records without keys, by turns to all partitions."""
    for begin in range(0, len(values), _BLOCK):
        block = values.slice(begin, _BLOCK)
        for number in range(PARTITIONS):
            turn = pa.array(np.arange(number, len(block), PARTITIONS))
            bench.writer.write(topic, None, block.take(turn), partition=number)


def write_keyed(
    bench: Bench, topic: str, keys: Numbers, values: pa.Array, at_us: Numbers | None = None
) -> None:
    """Records whose keys decide the partition, with the time given."""
    names = pa.array(keys).cast(pa.string()).cast(pa.binary())
    for begin in range(0, len(values), _BLOCK):
        stamps = None
        if at_us is not None:
            stamps = ((FIRST_US + at_us[begin : begin + _BLOCK]) // 1000).tolist()
        bench.writer.write(
            topic,
            names.slice(begin, _BLOCK),
            values.slice(begin, _BLOCK),
            timestamps_ms=stamps,
        )
