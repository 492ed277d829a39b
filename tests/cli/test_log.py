"""`penstock log dump` and `penstock log verify`: what they print and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.records.batch import HEADER_SIZE
from tests.cli.runner import run
from tests.log.data_dirs import crashed, open_store, stopped

FIRST = "00000000000000000000"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return stopped(tmp_path / "data")


def harm(path: Path, at: int) -> None:
    changed = bytearray(path.read_bytes())
    changed[at] ^= 1
    path.write_bytes(changed)


# ---- verify ------------------------------------------------------------------------------


def test_a_sound_directory(data: Path) -> None:
    ran = run("log", "verify", str(data), "--records").ok()
    assert "4 partitions" in ran.out
    assert "38 batches, 74 records" in ran.out
    assert ran.lines[-1] == "no damage"


def test_damage_is_named_and_the_status_is_1(data: Path) -> None:
    harm(data / "orders-0" / f"{FIRST}.log", HEADER_SIZE + 3)
    ran = run("log", "verify", str(data))
    assert ran.status == 1
    assert f"orders-0/{FIRST}.log (byte 0, offset 0)" in ran.out
    assert "offsets 0 to 1 are affected" in ran.out
    assert "Restore the file" in ran.out
    assert ran.lines[-1] == "1 damaged"


def test_findings_as_json(data: Path) -> None:
    harm(data / "orders-1" / f"{FIRST}.index", 2)
    ran = run("log", "verify", str(data), "--json")
    assert ran.status == 1
    finding, summary = ran.json_lines
    assert finding["finding"] == "damage"
    assert finding["kind"] == "index"
    assert finding["path"].endswith(f"orders-1/{FIRST}.index")
    assert (summary["summary"], summary["damage"], summary["clean_stop"]) == ("damaged", 1, True)


def test_a_torn_tail_is_noted_and_no_failure(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "data")
    log = max((folder / "orders-0").glob("*.log"))
    log.write_bytes(log.read_bytes() + b"torn")
    ran = run("log", "verify", str(folder)).ok()
    assert "note: torn tail" in ran.out
    assert "not stopped cleanly" in ran.out
    assert ran.lines[-1] == "no damage, 1 note"


def test_indexes_are_rebuilt_on_request(data: Path) -> None:
    harm(data / "orders-0" / f"{FIRST}.timeindex", 2)
    ran = run("log", "verify", str(data), "--rebuild-indexes")
    assert ran.status == 1
    assert "1 segment anew" in ran.err
    run("log", "verify", str(data)).ok()


def test_a_running_broker_is_respected(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    refused = run("log", "verify", str(tmp_path / "data"))
    forced = run("log", "verify", str(tmp_path / "data"), "--force")
    rebuilding = run("log", "verify", str(tmp_path / "data"), "--force", "--rebuild-indexes")
    store.close()
    assert refused.status == 1
    assert "a broker is running" in refused.err
    assert "--force" in refused.err
    assert forced.status == 0
    assert "may look torn" in forced.err
    assert rebuilding.status == 1


@pytest.mark.parametrize("command", ["verify", "dump"])
def test_a_path_that_is_no_log_is_explained(command: str, tmp_path: Path) -> None:
    for path in (tmp_path / "nothing", tmp_path):
        ran = run("log", command, str(path))
        assert ran.status == 1
        assert ran.err.startswith("error: ")


# ---- dump --------------------------------------------------------------------------------


def test_batches_and_records(data: Path) -> None:
    batches = run("log", "dump", str(data / "orders-1")).ok()
    assert "offsets 0 to 1, 2 records" in batches.out
    assert "producer 7/0 sequence 0 to 1" in batches.out
    assert "value 0" not in batches.out
    records = run("log", "dump", str(data / "orders-1"), "--records").ok()
    assert "key: value 0  [h=1]" in records.out
    assert "(null)" in records.out


def test_a_whole_directory_a_part_of_it_and_json(data: Path) -> None:
    whole = run("log", "dump", str(data), "--json", "--records").ok().json_lines
    assert sum(len(batch["records"]) for batch in whole) == 74
    part = run("log", "dump", str(data / "orders-0"), "--from", "15", "--max", "2", "--json").ok()
    assert [batch["base_offset"] for batch in part.json_lines] == [14, 16]
    one = run("log", "dump", str(data / "orders-0" / f"{FIRST}.log"), "--json").ok().json_lines
    assert {batch["kind"] for batch in one} == {"batch"}
    assert one[0]["codec"] == "none"


def test_indexes_and_snapshots(data: Path) -> None:
    folder = data / "orders-1"
    assert "ends the batch at byte" in run("log", "dump", str(folder / f"{FIRST}.index")).ok().out
    assert "latest up to" in run("log", "dump", str(folder / f"{FIRST}.timeindex")).ok().out
    snapshot = max(folder.glob("*.snapshot"))
    assert "producer 7" in run("log", "dump", str(snapshot)).ok().out
    (aborted,) = (data / "users-0").glob("*.txnindex")
    out = run("log", "dump", str(aborted)).ok().out
    assert "producer 8 aborted the transaction of offsets 0 to 1" in out
    ran = run("log", "dump", str(aborted), "--json").ok()
    assert '"kind": "aborted"' in ran.out or '"kind":"aborted"' in ran.out
    harm(snapshot, 8)
    assert run("log", "dump", str(snapshot)).status == 1


def test_damage_is_shown_and_read_past(data: Path) -> None:
    harm(data / "orders-0" / f"{FIRST}.log", 89 + HEADER_SIZE)
    out = run("log", "dump", str(data / "orders-0")).ok().out
    assert "are not a batch: the checksum of the batch is wrong" in out
    assert "offsets 4 to 5" in out
