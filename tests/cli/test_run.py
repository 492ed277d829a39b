"""`penstock run` and `penstock flows`: wrong uses, what is told at rest, and a real run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any
from uuid import uuid4

import orjson
import pytest
from pyspark.sql import SparkSession

from penstock.spark.flows.folder import Fingerprint, Folder, Record
from tests.cli.runner import Ran, run, share_session
from tests.waiting import eventually

WAIT_S = 200.0
HEAD = "from penstock.spark import flow, stream, table, topic\n"
GOOD = """
@flow(inputs=stream("a", json="n long"), output=topic("b"))
def good(a):
    return a
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "flows.py"
    path.write_text(HEAD + GOOD)
    return path


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(tmp_path / "data")


# ---- wrong uses --------------------------------------------------------------------------


def refused(*args: str) -> Ran:
    ran = run("run", *args)
    assert ran.status == 1
    assert "Traceback" not in ran.err
    return ran


def test_a_file_that_is_wrong_is_told_with_its_line(file: Path, at: str, data: str) -> None:
    assert "there is no file" in refused(str(file.parent / "no.py"), "--data", data).err
    file.write_text(HEAD + "\nx = undefined_name\n")
    error = refused(str(file), "--data", data).err
    assert f"error: {file}:3: NameError: name 'undefined_name' is not defined" in error
    file.write_text("x = 1\n")
    assert "declares no flows" in refused(str(file), "--data", data).err
    file.write_text(HEAD + GOOD + GOOD)
    assert f"two flows are named 'good': at {file}:3 and at {file}:7" in refused(str(file)).err
    assert not Path(data).exists()


def test_a_flow_that_is_not_in_the_file(file: Path, at: str) -> None:
    ran = refused(str(file), "--only", "other")
    assert "the file has no flow 'other'" in ran.err
    assert "It has: good." in ran.err


def test_no_broker(file: Path, data: str) -> None:
    ran = refused(str(file), "--bootstrap", "127.0.0.1:1", "--data", data)
    assert "no broker answers" in ran.err


def test_a_folder_that_is_in_use(file: Path, at: str, data: str) -> None:
    with Folder(Path(data)).locked():
        ran = refused(str(file), "--data", data)
    assert "another `penstock run` works with" in ran.err


def test_options_that_make_no_sense(file: Path, at: str) -> None:
    for option in (("--report", "often"), ("--stop-timeout", "x"), ("--metrics", "a:b:c")):
        assert run("run", str(file), *option).status == 2


# ---- when nothing runs -------------------------------------------------------------------


@pytest.fixture
def known(data: str) -> Folder:
    """A folder in which flows have run before."""
    folder = Folder(Path(data))
    record = Record(
        "counts",
        file="/x/flows.py",
        where="/x/flows.py:7",
        bootstrap="127.0.0.1:9",
        inputs=("stream clicks (json user string)",),
        outputs=("topic counts",),
        state="running",
        updated_ms=1_700_000_000_000,
    )
    made_from = Fingerprint(("clicks",), ("topic counts",), "append", ("Aggregate [user]",))
    folder.write(record.remembering(1, made_from))
    failed = replace(record, name="broken", state="failed", error="no such column",
                     advice="Mend it.")  # fmt: skip
    folder.write(failed)
    return folder


def test_what_ran_before_is_told(known: Folder, data: str) -> None:
    out = run("flows", "list", "--data", data).ok().out
    assert re.search(r"counts +killed", out)
    assert "running" not in out
    assert re.search(r"broken +failed .* no such column", out)
    listed = run("flows", "list", "--json", "--data", data).ok().json
    assert [each["name"] for each in listed] == ["broken", "counts"]
    described = run("flows", "describe", "counts", "--data", data).ok().out
    for part in ("/x/flows.py:7", "stream clicks", "topic counts", "Aggregate [user]", "killed"):
        assert part in described
    assert "Mend it." in run("flows", "describe", "broken", "--data", data).ok().out
    as_json = run("flows", "describe", "broken", "--json", "--data", data).ok().json
    assert (as_json["error"], as_json["running"]) == ("no such column", [])


def test_nothing_has_run(data: str) -> None:
    assert "no flows have run" in run("flows", "list", "--data", data).ok().err
    assert run("flows", "list", "--json", "--data", data).ok().json == []
    ran = run("flows", "describe", "any", "--data", data)
    assert (ran.status, "no flow 'any' has run" in ran.err) == (1, True)


def test_commands_need_somebody_who_runs(known: Folder, data: str) -> None:
    for command in ("stop", "restart"):
        ran = run("flows", command, "counts", "--data", data)
        assert ran.status == 1
        assert "no `penstock run` works with" in ran.err
        assert "no flow 'x' has run" in run("flows", command, "x", "--data", data).err


def test_a_reset_can_be_left_for_the_next_run(known: Folder, data: str) -> None:
    # A script that has not said --yes must not go on as if it were done.
    asked = run("flows", "reset", "counts", "--data", data)
    assert (asked.status, "nothing was changed" in asked.err, "--yes" in asked.err) == (
        1,
        True,
        True,
    )
    assert known.record("counts").rebuilding == 0
    ran = run("flows", "reset", "counts", "--yes", "--data", data).ok()
    assert "the next `penstock run` rebuilds counts, as generation 2" in ran.err
    assert known.record("counts").rebuilding == 2
    # What will count is named while it is built.
    described = run("flows", "describe", "counts", "--data", data).ok().out
    assert re.search(r"being rebuilt +as generation 2\s+topic counts\.v2\s", described)
    known.write(replace(known.record("counts"), generation=2, rebuilding=3,
                        outputs=("topic counts.v2", "files at /x")))  # fmt: skip
    as_json = run("flows", "describe", "counts", "--json", "--data", data).ok().json
    assert as_json["rebuilding_outputs"] == ["topic counts.v3"]


# ---- a real run --------------------------------------------------------------------------


@contextmanager
def process(*args: str) -> Iterator[subprocess.Popen[bytes]]:
    """`penstock run` as the process that it is; gone afterwards."""
    command = [sys.executable, "-m", "penstock.cli", "run", *args]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield started
    finally:
        if started.poll() is None:
            started.kill()
        started.communicate()


def read_until(started: subprocess.Popen[bytes], pattern: str) -> str:
    """What it says on stderr, up to what is waited for."""
    assert started.stderr is not None
    said = ""
    while not re.search(pattern, said):
        line = started.stderr.readline().decode()
        assert line, f"no {pattern!r} in {said!r}"
        said += line
    return said


@pytest.mark.java
@pytest.mark.timeout(900)
def test_flows_are_run_commanded_and_stopped(tmp_path: Path, at: str, data: str) -> None:
    source, target = f"in-{uuid4().hex[:8]}", f"out-{uuid4().hex[:8]}"
    file = tmp_path / "flows.py"
    text = f"""
    from beside import twice

    numbers = stream("{source}", json="n long")

    @flow(inputs=numbers, output=topic("{target}"))
    def doubled(numbers):
        return numbers.select(twice("n").alias("n"))

    @flow(inputs=numbers, output=topic("{target}-x"))
    def wrong(numbers):
        return numbers.select("colour")

    @flow(inputs=numbers, output=topic("{target}-y"))
    def failing(numbers):
        return numbers.select(nothing("n").alias("n"))
    """
    file.write_text(HEAD + dedent(text).replace("import twice", "import nothing, twice"))
    beside = """
    from pyspark.sql import functions as F

    @F.udf("long")
    def twice(n):
        return helper(n)

    def helper(n):
        return 2 * n

    @F.udf("long")
    def nothing(n):
        return n // 0
    """
    (tmp_path / "beside.py").write_text(dedent(beside))
    run("produce", source, stdin=b'{"n": 1}\n{"n": 2}\n').ok()

    with process(
        str(file), "--data", data, "--metrics", "127.0.0.1:0", "--conf", "spark.ui.enabled=false",
        "--conf", "spark.driver.memory=1g", "--report", "1s",
    ) as started:  # fmt: skip
        said = read_until(started, r"running flow doubled, flow wrong, flow failing")
        metrics = re.search(r"metrics at (\S+)", said)
        assert metrics is not None

        def values() -> list[Any]:
            ran = run("consume", target, "--json")
            return [orjson.loads(each["value"])["n"] for each in ran.json_lines] if ran.out else []

        def listed(name: str) -> dict[str, Any]:
            found = run("flows", "list", "--json", "--data", data).ok().json
            return next(each for each in found if each["name"] == name)

        eventually(lambda: values() == [2, 4], WAIT_S, 0.5)
        failed = eventually(lambda: (w := listed("wrong"))["state"] == "failed" and w, WAIT_S)
        assert f"{file}:13: " in failed["error"]
        assert "colour" in failed["error"]
        # In the middle of a micro-batch, in a function of the user's.
        failed = eventually(lambda: (w := listed("failing"))["state"] == "failed" and w, WAIT_S)
        assert "ZeroDivisionError" in failed["error"]
        out = run("flows", "list", "--data", data).ok().out
        assert re.search(r"doubled +running", out)
        page = urllib.request.urlopen(metrics[1], timeout=60).read().decode()
        assert 'penstock_flow_state{flow="doubled",state="running"} 1' in page
        assert 'penstock_flow_rows_out_total{flow="doubled"} 2' in page
        with pytest.raises(urllib.error.HTTPError) as unwell:
            urllib.request.urlopen(metrics[1].replace("metrics", "healthz"), timeout=60)
        unwell.value.close()

        run("flows", "stop", "doubled", "--data", data).ok()
        eventually(lambda: listed("doubled")["state"] == "stopped", WAIT_S)
        run("produce", source, stdin=b'{"n": 3}\n').ok()
        run("flows", "restart", "doubled", "--data", data).ok()
        eventually(lambda: values() == [2, 4, 6], WAIT_S, 0.5)
        assert "no flow 'x' has run" in run("flows", "stop", "x", "--data", data).err

        os.kill(started.pid, signal.SIGTERM)
        out_bytes, err = started.communicate(timeout=WAIT_S)
    assert started.returncode == 1
    assert b"error: flow wrong: " in err
    assert b"Traceback" not in err
    assert re.search(rb"doubled: running", out_bytes)
    assert re.search(rb"doubled: .*rows in 3", out_bytes)
    resting = run("flows", "list", "--json", "--data", data).ok().json
    assert [each["state"] for each in resting] == ["stopped", "failed", "failed"]


@pytest.mark.timeout(600)
@pytest.mark.filterwarnings("default::penstock.spark.UnboundedStateWarning")
def test_state_without_a_bound_is_told_in_one_line(
    tmp_path: Path, at: str, data: str, penstock_spark: SparkSession, monkeypatch: Any
) -> None:
    share_session(penstock_spark, monkeypatch)
    source, file = f"in-{uuid4().hex[:8]}", tmp_path / "flows.py"
    text = f"""
    from penstock.spark import pattern

    @flow(inputs=stream("{source}", json="k string, at timestamp", time="at"), output=topic("o"))
    def twice(events):
        return pattern.begin("a").next("b").match(events, by="k", events=False)
    """
    file.write_text(HEAD + dedent(text))
    run("produce", source, stdin=b'{"k": "a", "at": "2026-01-01T00:00:00Z"}\n').ok()
    said = run("run", str(file), "--once", "--data", data, "--plain").ok().err.splitlines()
    (told,) = [line for line in said if "within" in line]
    assert told.startswith(f"warning: {file}:7: pattern of a, b: an attempt may stay open for ever")
    assert not [line for line in said if "UnboundedState" in line or "return pattern" in line]
