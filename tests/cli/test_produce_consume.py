"""`penstock produce` and `penstock consume` on a real broker, and one against the other."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from penstock.cli import produce
from penstock.testing.broker import Broker
from tests.broker import requests
from tests.broker.overload.guarded import GROUP, fill, guarded_topic
from tests.broker.raw import RawClient
from tests.broker.requests import batch, one
from tests.cli.runner import Live, run, run_until
from tests.waiting import eventually

pytestmark = pytest.mark.usefixtures("at")

COMMAND = (sys.executable, "-m", "penstock.cli")


def values(topic: str, *args: str) -> list[str | None]:
    return [row["value"] for row in run("consume", topic, "--json", *args).ok().json_lines]


def test_lines_become_records(topic: str) -> None:
    sent = run("produce", topic, stdin=b"one\r\ntwo\n\nfour").ok()
    assert "sent 4 records" in sent.err
    assert values(topic) == ["one", "two", "", "four"]
    assert run("consume", topic, "--value-only", "-q").ok().out_bytes == b"one\ntwo\n\nfour\n"


def test_a_record_from_options(topic: str) -> None:
    sent = run(
        "produce", topic, "-k", "42", "-v", "hello", "-H", "source=shop", "-H", "source=web",
        "-t", "2026-03-01T12:00:00Z", "-p", "0", "-z", "lz4",
    ).ok()  # fmt: skip
    assert f"sent 1 record to {topic}, partition 0, offset 0" in sent.err
    (record,) = run("consume", topic, "--json").ok().json_lines
    assert record == {
        "topic": topic, "partition": 0, "offset": 0, "timestamp": 1_772_366_400_000,
        "key": "42", "value": "hello",
        "headers": [{"name": "source", "value": "shop"}, {"name": "source", "value": "web"}],
    }  # fmt: skip
    line = run("consume", topic).ok().out
    assert "0:0" in line
    assert "42:  hello" in line
    assert "source=shop source=web" in line


def test_keys_nulls_and_markers(topic: str) -> None:
    run("produce", topic, "-K", "\\t", "--null-marker", "-", stdin=b"a\t1\nb\t-\nc\t\n").ok()
    run("produce", topic, "-k", "d", "--null").ok()
    rows = run("consume", topic, "--json").ok().json_lines
    assert [(r["key"], r["value"]) for r in rows] == [
        ("a", "1"), ("b", None), ("c", ""), ("d", None),
    ]  # fmt: skip
    assert "(null)" in run("consume", topic).ok().out


def test_files_whole_and_by_line(topic: str, tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"a\nb\n")
    run("produce", topic, "--file", str(path)).ok()
    run("produce", topic, "--file", str(path), "--whole").ok()
    assert values(topic) == ["a", "b", "a\nb\n"]


@pytest.mark.parametrize(
    ("codec", "acks"),
    [("gzip", "all"), ("snappy", "all"), ("lz4", "all"), ("zstd", "1"), ("none", "0")],
)
def test_codecs_and_acks(topic: str, codec: str, acks: str) -> None:
    run("topics", "create", topic).ok()
    text = "x" * 500
    run("produce", topic, "-z", codec, "--acks", acks, stdin=f"{text}\n".encode() * 3).ok()
    # Without acknowledgements the records may still be on their way: follow until they are there.
    assert values(topic, "--follow", "--max", "3") == [text] * 3


def test_json_goes_round(topic: str) -> None:
    lines = [
        {"key": "k", "value": {"base64": "/wA="}, "headers": [{"name": "h", "value": None}]},
        {"value": {"total": 9.5}, "timestamp": 1_700_000_000_000, "headers": {"a": "b"}},
        {"key": None, "value": None},
    ]
    run("produce", topic, "--json-lines", stdin=b"\n".join(map(orjson.dumps, lines)) + b"\n\n").ok()
    first = run("consume", topic, "--json").ok()
    rows = first.json_lines
    assert [row["value"] for row in rows] == [{"base64": "/wA="}, '{"total":9.5}', None]
    assert rows[0]["headers"] == [{"name": "h", "value": None}]
    assert rows[1]["timestamp"] == 1_700_000_000_000
    copy = f"{topic}-copy"
    run("produce", copy, "--json-lines", stdin=first.out_bytes).ok()
    again = run("consume", copy, "--json").ok().json_lines
    assert [{**row, "topic": topic} for row in again] == rows


def test_lines_that_fail_are_named_and_the_rest_is_sent(topic: str) -> None:
    ran = run("produce", topic, "--json-lines", stdin=b'{"value":"a"}\nno\n[1]\n{"value":"b"}\n')
    assert ran.status == 1
    assert "line 2: not JSON" in ran.err
    assert "line 3: not a JSON object" in ran.err
    assert "2 records could not be sent" in ran.err
    assert values(topic) == ["a", "b"]
    ran = run("produce", topic, "-K", ":", stdin=b"x\n" * 30)
    assert ran.status == 1
    assert "line 10: there is no ':'" in ran.err
    assert "and 20 more" in ran.err


def test_what_the_broker_refuses_names_the_line(topic: str) -> None:
    run("topics", "create", topic, "-c", "max.message.bytes=2000").ok()
    ran = run(
        "produce", topic, "-X", "batch.num.messages=1", stdin=b"small\n" + b"x" * 5000 + b"\n"
    )
    assert ran.status == 1
    assert "line 2: " in ran.err
    assert "max.message.bytes" in ran.err
    assert values(topic) == ["small"]


def test_a_partition_that_is_not_there(topic: str) -> None:
    run("topics", "create", topic).ok()
    assert run("produce", topic, "-p", "7", "-v", "x").status == 1
    ran = run("consume", topic, "-p", "7")
    assert ran.status == 1
    assert "has no partition 7" in ran.err


# ---- where to start and to stop ----------------------------------------------------------


@pytest.fixture
def ten(topic: str) -> str:
    """Ten records a second apart, 0 to 9."""
    lines = [{"value": str(n), "timestamp": 1_700_000_000_000 + n * 1000} for n in range(10)]
    run("produce", topic, "--json-lines", stdin=b"\n".join(map(orjson.dumps, lines))).ok()
    return topic


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("beginning", "0123456789"),
        ("end", ""),
        ("7", "789"),
        ("10", ""),
        ("-2", "89"),
        ("-99", "0123456789"),
        ("1700000004500", "56789"),
        ("2023-11-14T22:13:28Z", "89"),
        ("1m ago", ""),
        ("1000w ago", "0123456789"),
    ],
)
def test_where_reading_starts(ten: str, where: str, expected: str) -> None:
    assert "".join(map(str, values(ten, "--from", where))) == expected


def test_an_offset_that_is_not_there_is_an_error(ten: str) -> None:
    ran = run("consume", ten, "--from", "11")
    assert ran.status == 1
    assert "partition 0 holds 0 to 9" in ran.err


def test_reading_stops_after_max(ten: str) -> None:
    assert values(ten, "--max", "3") == ["0", "1", "2"]


def test_several_partitions_are_read_to_their_ends(topic: str) -> None:
    run("topics", "create", topic, "-p", "3").ok()
    for partition in ("0", "2"):
        run("produce", topic, "-p", partition, stdin=b"a\nb\n").ok()
    rows = run("consume", topic, "--json").ok().json_lines
    assert sorted((r["partition"], r["offset"]) for r in rows) == [(0, 0), (0, 1), (2, 0), (2, 1)]
    assert values(topic, "-p", "1") == []
    assert values(topic, "-p", "2", "--from", "-1") == ["b"]


def test_an_unknown_topic_and_wrong_options(topic: str) -> None:
    ran = run("consume", topic)
    assert ran.status == 1
    assert "penstock topics create" in ran.err
    assert topic not in {row["name"] for row in run("topics", "list", "--json").ok().json}
    wrong: list[tuple[str, ...]] = [
        ("consume", "--from", "soonish"),
        ("consume", "--json", "--value-only"),
        ("consume", "--max", "0"),
        ("produce", "-v", "x", "--null"),
        ("produce", "-k", "a", "-K", ":"),
        ("produce", "-t", "soonish"),
        ("produce", "--json-lines", "--whole"),
        ("produce", "-H", "nothing"),
        ("produce", "-K", ""),
    ]
    for command, *args in wrong:
        assert run(command, topic, *args).status == 2, args


# ---- until Ctrl-C, and as processes ------------------------------------------------------


def test_following_ends_with_ctrl_c(ten: str, at: str) -> None:
    def look(live: Live) -> None:
        eventually(lambda: live.out.endswith("\n9\n"))
        with RawClient(at) as client:
            assert not one(client.call(requests.produce(ten, batch(b"later")), 12)).error_code
        eventually(lambda: live.out.endswith("\n9\nlater\n"))

    following = ("consume", ten, "--follow", "--value-only")
    ran = run_until(look, *following, stop=signal.SIGINT, is_handled=False)
    assert ran.status == 130
    assert ran.lines == [*(str(n) for n in range(10)), "later"]
    assert "Traceback" not in ran.err


@pytest.mark.processes
def test_a_reader_that_has_seen_enough_is_no_error(topic: str) -> None:
    run("produce", topic, stdin=b"x" * 100 + b"\n" + (b"y" * 1000 + b"\n") * 2000).ok()
    with subprocess.Popen(
        [*COMMAND, "consume", topic, "--value-only"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"x" * 100 + b"\n"
        process.stdout.close()
        assert process.stderr is not None
        err = process.stderr.read()
    assert process.returncode == 0
    assert err == b""


@pytest.mark.processes
def test_records_go_through_a_pipe(ten: str) -> None:
    with subprocess.Popen(
        [*COMMAND, "consume", ten, "--json", "-q"], stdout=subprocess.PIPE
    ) as reader:
        writer = subprocess.run(
            [*COMMAND, "produce", f"{ten}-copy", "--json-lines"],
            stdin=reader.stdout, capture_output=True, check=False, timeout=60, env=os.environ,
        )  # fmt: skip
    assert (reader.returncode, writer.returncode) == (0, 0)
    assert values(f"{ten}-copy") == [str(n) for n in range(10)]


# ---- a full topic ------------------------------------------------------------------------


@pytest.fixture
def full(broker: Broker) -> str:
    """A topic that takes nothing, until a group reads that never will."""
    with RawClient(broker.bootstrap) as client:
        name = guarded_topic(client, "reject")
        fill(client, name)
    return name


def test_a_full_topic_is_named_as_the_reason(full: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(produce, "STALLED_AFTER_S", 0.0)
    ran = run("produce", full, "-v", "x", "-X", "message.timeout.ms=1500")
    assert ran.status == 1
    assert f"{full} may be full. With overflow=reject" in ran.err
    assert f"the slowest of {GROUP} has read on" in ran.err
    assert "overflow=block or reject" in ran.err.splitlines()[-1]
    shown = run("topics", "describe", full).ok().out
    assert f"overflow=reject: producers are refused until the slowest of {GROUP}" in shown


def test_interrupted_it_says_what_was_acknowledged(
    full: str, at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"a\nb\nc\n")
    monkeypatch.setattr(produce, "STALLED_AFTER_S", 0.2)

    def look(live: Live) -> None:
        eventually(lambda: "may be full" in live.err)

    producing = ("produce", full, "-b", at, "--file", str(path))
    ran = run_until(look, *producing, stop=signal.SIGINT, is_handled=False)
    assert ran.status == 130
    assert "sent 0 records" in ran.err
    assert "gave up 3 records" in ran.err
