"""What a micro-batch has, by the offsets that Spark has noted down."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.spark.flows.offsets import FOLDER, records_of


def note(checkpoint: Path, batch_id: int, *sources: Any) -> None:
    folder = checkpoint / FOLDER
    folder.mkdir(exist_ok=True)
    lines = ["v1", "{}", *(json.dumps(each) for each in sources)]
    (folder / str(batch_id)).write_text("\n".join(lines))


def test_how_many(tmp_path: Path) -> None:
    checkpoint = str(tmp_path)
    note(tmp_path, 0, {"orders": {"0": 5, "1": 7}}, {"names": {"0": 3}})
    note(tmp_path, 1, {"orders": {"0": 9, "1": 7, "2": 4}}, {"names": {"0": 3}})
    assert records_of(checkpoint, 1) == 8
    # What is before the first is not known.
    assert records_of(checkpoint, 0) is None


def test_a_topic_that_was_made_anew(tmp_path: Path) -> None:
    """What it has less does not hide what another has more."""
    note(tmp_path, 0, {"orders": {"0": 900_000}}, {"names": {"0": 3}})
    note(tmp_path, 1, {"orders": {"0": 4}}, {"names": {"0": 800_000}})
    assert records_of(str(tmp_path), 1) is None


def test_sources_that_have_no_offset_yet(tmp_path: Path) -> None:
    note(tmp_path, 0, {"orders": {"0": 1}})
    note(tmp_path, 1, {"orders": {"0": 2}}, {"names": {"0": 3}})
    (tmp_path / FOLDER / "1").write_text("v1\n{}\n-\n")
    assert records_of(str(tmp_path), 1) is None


def test_a_topic_that_a_plan_reads_twice(tmp_path: Path) -> None:
    checkpoint = str(tmp_path)
    note(tmp_path, 0, {"orders": {"0": 5}}, {"orders": {"0": 5}}, {"names": {"0": 3}})
    # The second source was asked a moment later.
    note(tmp_path, 1, {"orders": {"0": 9}}, {"orders": {"0": 10, "1": 1}}, {"names": {"0": 4}})
    assert records_of(checkpoint, 1) == 4 + 6 + 1
    assert records_of(checkpoint, 1, each_topic_once=True) == 6 + 1
    assert records_of(checkpoint, 0, each_topic_once=True) is None
