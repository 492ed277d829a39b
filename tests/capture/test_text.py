"""Strings as sources write them are byte for byte what orjson writes."""

from __future__ import annotations

import orjson
from hypothesis import example, given
from hypothesis import strategies as st

from penstock.capture.mysql.values import text as mysql_text
from penstock.capture.postgres.values import text as postgres_text
from penstock.capture.sqlite.values import fragment

EVERY_ASCII = "".join(map(chr, range(128)))


@given(st.text())
@example(EVERY_ASCII)
@example("\u2028\u2029\ufeff\U0001f600")
def test_text(value: str) -> None:
    expected = orjson.dumps(value)
    assert mysql_text(value.encode()) == expected
    assert postgres_text(value.encode()) == expected
    assert fragment(value) == expected
