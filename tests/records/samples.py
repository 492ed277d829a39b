"""Record batches for the tests: strategies of hypothesis, and all kinds of bytes inside."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.records import compression
from penstock.records.record import BatchOptions, Record

CODECS = sorted(compression.NAMES)

payloads = st.one_of(
    st.none(),
    st.binary(max_size=40),
    # Long enough for several blocks, and worth compressing.
    st.builds(lambda seed, times: seed * times, st.binary(min_size=1, max_size=9), st.just(5000)),
)
names = st.text(max_size=8)
headers = st.lists(st.tuples(names, st.none() | st.binary(max_size=8)), max_size=3).map(tuple)


@st.composite
def record_lists(draw: st.DrawFn, max_size: int = 8) -> list[Record]:
    """Records with rising offsets, some of them missing, and times in any order."""
    steps = draw(st.lists(st.integers(1, 3), min_size=1, max_size=max_size))
    base = draw(st.integers(0, 2**40))
    times = st.integers(-(2**40), 2**41)
    records = []
    offset = base - steps[0]
    for step in steps:
        offset += step
        records.append(Record(offset, draw(times), draw(payloads), draw(payloads), draw(headers)))
    return records


options = st.builds(
    BatchOptions,
    codec=st.sampled_from(CODECS),
    producer_id=st.integers(-1, 2**62),
    producer_epoch=st.integers(-1, 2**15 - 1),
    base_sequence=st.integers(-1, 2**31 - 1),
    transactional=st.booleans(),
    leader_epoch=st.integers(0, 2**31 - 1),
)


def for_other_writers(records: list[Record]) -> list[Record]:
    """The same, without the one time that other clients' writers take for "none"."""
    return [item._replace(timestamp_ms=-2) if item.timestamp_ms == -1 else item for item in records]
