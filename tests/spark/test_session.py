"""The session: what is set, which Java is taken, and an archive that never stands in the way."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import zipfile
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from penstock import worker_daemon
from penstock.spark import archive as archives
from penstock.spark import register, session
from penstock.spark.archive import archive_path, cache_folder, java_options
from penstock.spark.java import Java, JavaError, find_java, major_of
from penstock.spark.python import worker_python
from penstock.spark.session import SessionError, settings_of
from tools.warm import SOURCE, compiled_modules

JAVA = Java(Path("/opt/java/bin/java"), "17.0.1", 17)


def test_what_is_set(spark: SparkSession) -> None:
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert "RocksDB" in str(spark.conf.get("spark.sql.streaming.stateStore.providerClass"))
    assert "FileSystemBased" in str(
        spark.conf.get("spark.sql.streaming.checkpointFileManagerClass")
    )
    assert spark.conf.get("spark.sql.execution.arrow.pyspark.enabled") == "true"
    # What the tests asked for goes before.
    assert spark.conf.get("spark.sql.shuffle.partitions") == "2"
    assert os.environ["PYSPARK_PYTHON"] == worker_python()


def test_a_second_session_is_the_first(spark: SparkSession) -> None:
    before = str(spark.conf.get("spark.sql.shuffle.partitions"))
    try:
        again = session(**{"spark.sql.shuffle.partitions": "3", "spark.driver.memory": "9g"})
        assert again is spark
        assert spark.conf.get("spark.sql.shuffle.partitions") == "3"
        assert spark.conf.get("spark.driver.memory") == "1g"
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", before)
    register(spark)
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(session).result() is spark


def test_a_setting_that_is_none_of_sparks() -> None:
    with pytest.raises(SessionError, match="'shuffle' is not a setting of Spark"):
        session(shuffle=1)


def test_settings_depend_on_where_spark_runs() -> None:
    here = settings_of("local[3]", {}, "")
    assert here["spark.sql.shuffle.partitions"] == "3"
    assert here["spark.driver.host"] == "127.0.0.1"
    assert here["spark.python.daemon.module"] == worker_daemon.__name__
    there = settings_of("spark://master:7077", {}, "")
    assert "spark.driver.host" not in there
    assert "spark.python.daemon.module" not in there
    assert "spark.sql.streaming.checkpointFileManagerClass" not in there
    mine = settings_of("local", {"spark.driver.extraJavaOptions": "-Dmine=1"}, "-Dfirst=1")
    assert mine["spark.driver.extraJavaOptions"].endswith("-Dfirst=1 -Dmine=1")


@pytest.mark.java
def test_versions_of_java() -> None:
    assert [major_of(text) for text in ("17.0.15+6-Debian", "1.8.0_402", "21", "")] == [
        17,
        8,
        21,
        0,
    ]
    assert find_java().major >= 17


def test_java_that_is_missing_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(JavaError, match=r"no bin/java in it.*Install a Java runtime"):
        find_java()
    program = tmp_path / "bin" / "java"
    program.parent.mkdir()
    program.write_text("#!/bin/sh\n")
    (tmp_path / "release").write_text('JAVA_VERSION="11.0.2"\n')
    with pytest.raises(JavaError, match=r"is version 11\.0\.2.*17 or newer"):
        find_java()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JavaError, match="there is no java on this machine"):
        find_java()


def test_an_archive_is_used_where_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(archives.MODE_VARIABLE, "use")
    assert cache_folder() == tmp_path / "penstock"
    assert java_options(JAVA) == ""
    assert not archives.is_made(JAVA)
    path = archive_path(JAVA)
    path.parent.mkdir()
    path.write_bytes(b"a stump")
    assert java_options(JAVA) == ""
    with path.open("wb") as file:
        file.truncate(20 << 20)
    assert f"-XX:SharedArchiveFile={path}" in java_options(JAVA)
    assert archives.is_made(JAVA)
    monkeypatch.setenv(archives.MODE_VARIABLE, "off")
    assert java_options(JAVA) == ""


def test_what_is_compiled_beforehand_is_all_that_has_kernels() -> None:
    named = compiled_modules()
    assert {"penstock.records.columns.kernels", "penstock.capture.kernels"} < set(named)
    for path in SOURCE.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts)
        assert ("kernel(" in text and "compiled import" in text) == (module in named), module


@pytest.mark.java
def test_java_starts_with_a_broken_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(archives.MODE_VARIABLE, "use")
    java = find_java()
    path = archive_path(java)
    path.parent.mkdir()
    path.write_bytes(os.urandom(11 << 20))
    options = java_options(java).split()
    assert options
    started = subprocess.run(
        [java.program, *options, "-version"], capture_output=True, text=True, check=True
    )
    assert "warning" not in started.stderr.lower()


def test_one_maker_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(archives.MODE_VARIABLE, "on")
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: started.append(1))
    assert java_options(JAVA) == ""
    assert len(started) == 1
    with archives.locked(archive_path(JAVA), wait=False) as mine:
        assert mine
        assert java_options(JAVA) == ""
    assert len(started) == 1


def test_a_cache_that_cannot_be_written_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv(archives.MODE_VARIABLE, "on")
    assert java_options(JAVA) == ""


@pytest.mark.processes
def test_workers_do_not_look_again_at_what_stays(tmp_path: Path) -> None:
    """In a process of its own, for it changes how Python imports and collects."""
    for name in ("pyspark.zip", "other.zip"):
        with zipfile.ZipFile(tmp_path / name, "w") as file:
            file.writestr(f"from_{name.partition('.')[0]}.py", "")
    code = (
        "import sys, importlib, from_pyspark, from_other\n"
        "from penstock.spark.source.workers import settle\n"
        "settle()\n"
        "importlib.invalidate_caches()\n"
        "kept = [type(f.__dict__.get('invalidate_caches')).__name__\n"
        "        for p, f in sys.path_importer_cache.items() if p.endswith('.zip')\n"
        "        and ('pyspark' in p or 'other' in p)]\n"
        "assert sorted(kept) == ['NoneType', 'function'], kept\n"
        "import gc\n"
        "assert gc.get_freeze_count()\n"
    )
    source = Path(archives.__file__).resolve().parents[2]
    paths = [str(tmp_path / "pyspark.zip"), str(tmp_path / "other.zip"), str(source)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_workers_let_nothing_wait(spark: SparkSession) -> None:
    def options(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = []
        for each in os.listdir("/proc/self/fd"):
            try:
                with socket.socket(fileno=os.dup(int(each))) as sock:
                    if sock.family == socket.AF_INET:
                        found.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            except OSError:
                continue
        assert sum(len(each) for each in batches) == 1
        yield pa.record_batch({"found": pa.array(found, pa.int32())})

    if sys.platform == "linux":
        found = spark.range(0, 1, 1, 1).mapInArrow(options, "found int").collect()
        assert found
        assert all(each["found"] for each in found)


@pytest.mark.skipif(sys.platform != "linux", reason="only there is anything imported before")
def test_workers_are_forked_with_their_modules_and_draw_numbers_of_their_own(
    spark: SparkSession,
) -> None:
    def look(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        there = "penstock.spark.runtime.sink_loop" in sys.modules
        drawn = float(sys.modules["numpy"].random.random())
        assert sum(len(each) for each in batches) == 1
        yield pa.record_batch({"there": pa.array([there]), "drawn": pa.array([drawn])})

    found = spark.range(0, 4, 1, 4).mapInArrow(look, "there boolean, drawn double").collect()
    assert all(each["there"] for each in found)
    assert len({each["drawn"] for each in found}) == len(found) == 4


def test_a_connection_is_hastened() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sock:
            worker_daemon.hasten(sock)
            assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    one, other = socket.socketpair()
    with one, other:
        worker_daemon.hasten(one)


@pytest.mark.processes
def test_workers_do_not_look_into_the_zip_files_of_spark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    program = worker_python()
    assert program != sys.executable
    zips = ["/spark/python/lib/pyspark.zip", "/spark/python/lib/py4j-0.10.9-src.zip"]
    tells = "import os, sys; print(os.environ['PYTHONPATH'], sys.executable, *sys.argv)"
    ran = subprocess.run(
        [program, "-c", tells, "a b", "c"],
        env={**os.environ, "PYTHONPATH": ":".join([*zips, "/one place", "/two"])},
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.stdout == f"/one place:/two {sys.executable} -c a b c\n"
    # Another Spark than that of the package brings its own Python side.
    monkeypatch.setenv("SPARK_HOME", "/spark")
    assert worker_python() == sys.executable


def test_workers_without_a_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPARK_HOME", raising=False)
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("penstock.spark.python.cache_folder", lambda: tmp_path / "file")
    assert worker_python() == sys.executable
