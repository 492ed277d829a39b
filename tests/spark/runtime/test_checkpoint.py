"""The files of a checkpoint: what is begun and what is done."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.spark.runtime.checkpoint import (
    COMMITS,
    KEPT,
    OFFSETS,
    Checkpoint,
    CheckpointError,
    ConcurrentRunError,
)
from penstock.spark.runtime.checkpoint import Planned as Batch

# As Spark 4.3 has written them.
_OFFSETS = """v1
{"batchWatermarkMs":0,"batchTimestampMs":1795131830810,"conf":{"spark.sql.shuffle.partitions":"2"}}
{"orders": {"0": 3}}
-"""


def test_a_micro_batch_is_begun_and_then_done(tmp_path: Path) -> None:
    files = Checkpoint(f"{tmp_path}/")
    assert files.last(2) == (None, False)
    first = Batch(0, [None, None], [{"a": {"0": 5}}, {"b": {"0": 1, "1": 0}}])
    files.begin(first)
    assert files.last(2) == (first, False)
    files.done(0)
    assert files.last(2) == (first, True)
    second = Batch(1, first.ends, [{"a": {"0": 7}}, {"b": {"0": 1, "1": 2}}])
    files.begin(second)
    assert Checkpoint(str(tmp_path)).last(2) == (second, False)


def test_two_do_not_begin_the_same(tmp_path: Path) -> None:
    """What the second would write under the number would not be what the first has read."""
    first = Batch(0, [None], [{"a": {"0": 5}}])
    Checkpoint(str(tmp_path)).begin(first)
    with pytest.raises(ConcurrentRunError, match="micro-batch 0 was begun by another"):
        Checkpoint(str(tmp_path)).begin(Batch(0, [None], [{"a": {"0": 6}}]))
    assert Checkpoint(str(tmp_path)).last(1) == (first, False)
    assert [each.name for each in (tmp_path / OFFSETS).iterdir()] == ["0"]


def test_nor_where_files_have_no_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on exFAT, SMB and file systems in user space."""

    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    test_two_do_not_begin_the_same(tmp_path)


def test_what_killed_writers_left_is_swept(tmp_path: Path) -> None:
    files = Checkpoint(str(tmp_path))
    files.begin(Batch(0, [None], [{"a": {"0": 5}}]))
    left = [tmp_path / OFFSETS / name for name in (".beside-1-0", ".0.a1.tmp", "..0.a1.tmp.crc")]
    for each in left:
        each.touch()
        os.utime(each, (0, 0))
    files.done(0)
    assert [each.name for each in (tmp_path / OFFSETS).iterdir()] == ["0"]


def test_the_id_is_made_once(tmp_path: Path) -> None:
    found = Checkpoint(str(tmp_path)).query_id()
    assert Checkpoint(str(tmp_path)).query_id() == found
    (tmp_path / "metadata").write_text('{"id":"58ed2c2d-b9e9-4aaf-a254-1c5e028415e4"}')
    assert Checkpoint(str(tmp_path)).query_id() == "58ed2c2d-b9e9-4aaf-a254-1c5e028415e4"


def test_what_spark_has_written_is_read(tmp_path: Path) -> None:
    (tmp_path / OFFSETS).mkdir()
    (tmp_path / OFFSETS / "0").write_text(_OFFSETS)
    planned, is_done = Checkpoint(str(tmp_path)).last(2)
    assert (planned, is_done) == (Batch(0, [None, None], [{"orders": {"0": 3}}, {}]), False)


def test_a_hundred_are_kept(tmp_path: Path) -> None:
    files = Checkpoint(str(tmp_path))
    for number in range(KEPT + 21):
        files.begin(Batch(number, [{}], [{"a": {"0": number}}]))
        files.done(number)
    for folder in (OFFSETS, COMMITS):
        kept = sorted(int(each.name) for each in (tmp_path / folder).iterdir())
        assert kept == list(range(21, KEPT + 21))


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("v2\n{}\n{}", "its format is v2"),
        ("v1\n{}\n{", "is damaged"),
        ("", "is damaged"),
        ("v1\n{}\n{}\n{}", "is of 2 streams, and the flow has 1"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, text: str, what: str) -> None:
    (tmp_path / OFFSETS).mkdir()
    (tmp_path / OFFSETS / "0").write_text(text)
    with pytest.raises(CheckpointError, match=what):
        Checkpoint(str(tmp_path)).last(1)


def test_where_the_last_one_begins_must_be_known(tmp_path: Path) -> None:
    Checkpoint(str(tmp_path)).begin(Batch(7, [{}], [{"a": {"0": 1}}]))
    with pytest.raises(CheckpointError, match="has micro-batch 7 and not the one before"):
        Checkpoint(str(tmp_path)).last(1)
