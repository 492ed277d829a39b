"""The class archive that makes Spark start in a third of the time (AppCDS).

Java loads some twenty thousand classes before Spark answers. An archive holds them as they lie in
memory; it is made once per machine, Java and pyspark version, in the user's cache folder, by a
process of its own that starts Spark, runs one small query of each kind, and writes the archive
when its Java ends. That process is started in the background, at the lowest priority, by the first
session that finds no archive; `python -m penstock.spark.archive` makes it at once (for an image).

Nothing here may keep a session from starting: the archive appears under its name by a rename, one
maker at a time holds a lock, Java ignores an archive that does not fit it, and whatever goes wrong
leaves the session without an archive. PENSTOCK_SPARK_ARCHIVE=off does without one altogether,
`use` takes one that is there and makes none.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from penstock.spark.java import Java, find_java

MODE_VARIABLE: Final = "PENSTOCK_SPARK_ARCHIVE"
# Set in the process that makes an archive: where its Java shall write it.
MAKING_VARIABLE: Final = "PENSTOCK_SPARK_ARCHIVE_MAKING"
# An archive of Spark has a hundred megabytes; less is a stump.
_LEAST_BYTES: Final = 10 << 20
_MAKE_TIMEOUT_S: Final = 600
_QUIET: Final = "-Xshare:auto -Xlog:disable -Xlog:all=error:stderr"


def cache_folder() -> Path:
    """Where archives lie: `penstock` in the user's cache folder."""
    named = os.environ.get("XDG_CACHE_HOME")
    if named:
        return Path(named) / "penstock"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "penstock"
    return Path.home() / ".cache" / "penstock"


def archive_path(java: Java) -> Path:
    """The archive for this Java and this pyspark, whether it is there or not."""
    import pyspark

    # The folder counts too: an archive fits only the jars that it was made of.
    made_of = f"{java.program.resolve()}|{java.version}|{pyspark.__file__}"
    digest = hashlib.sha256(made_of.encode()).hexdigest()[:12]
    return cache_folder() / f"spark-{pyspark.__version__}-java-{java.major}-{digest}.jsa"


def java_options(java: Java) -> str:
    """What to add to Java's command line; starts the making of an archive where there is none."""
    making = os.environ.get(MAKING_VARIABLE)
    if making:
        return f"-XX:ArchiveClassesAtExit={making} {_QUIET}"
    mode = os.environ.get(MODE_VARIABLE, "on").lower()
    if mode == "off":
        return ""
    try:
        path = archive_path(java)
        if _is_whole(path):
            return f"-XX:SharedArchiveFile={path} {_QUIET}"
        if mode != "use":
            _make_in_background(path)
    except (OSError, RuntimeError):
        # No home, no space, no right to write: start without.
        pass
    return ""


def make(java: Java | None = None) -> Path:
    """Make the archive now and wait for it; the one that is there if there is one."""
    java = java or find_java()
    path = archive_path(java)
    path.parent.mkdir(parents=True, exist_ok=True)
    with locked(path, wait=True):
        if not _is_whole(path):
            _make(path)
    return path


def is_made(java: Java | None = None) -> bool:
    """Whether Spark starts with an archive here, or is told to do without."""
    if os.environ.get(MODE_VARIABLE, "on").lower() == "off":
        return True
    return _is_whole(archive_path(java or find_java()))


def _is_whole(path: Path) -> bool:
    with suppress(OSError):
        return " " not in str(path) and path.stat().st_size >= _LEAST_BYTES
    return False


def _make_in_background(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(path.parent, os.W_OK) or " " in str(path):
        return
    with locked(path, wait=False) as mine:
        if not mine:
            return
    subprocess.Popen(
        [sys.executable, "-m", "penstock.spark.archive"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=path.parent,
        env=_child_environment(),
        start_new_session=True,
    )


def _make(path: Path) -> None:
    """Train in a child, and put the archive in its place if it came out whole."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="making-") as folder:
        made = Path(folder) / "archive.jsa"
        environment = _child_environment() | {MAKING_VARIABLE: str(made)}
        subprocess.run(
            [sys.executable, "-c", "from penstock.spark.archive import train; train()"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=environment,
            timeout=_MAKE_TIMEOUT_S,
            check=True,
        )
        if _is_whole(made):
            made.replace(path)


def _child_environment() -> dict[str, str]:
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


@contextmanager
def locked(path: Path, *, wait: bool) -> Iterator[bool]:
    """Whether this process may make the archive; the lock ends with the process at the latest."""
    descriptor = os.open(path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(descriptor)


def train() -> None:
    """Start Spark and run one small query of each kind; Java writes the archive when it ends."""
    from pyspark.sql import functions as f

    from penstock.spark.session import session

    spark = session(name="penstock class archive", master="local[1]")
    with tempfile.TemporaryDirectory() as folder:
        rows = spark.range(100).withColumn("text", f.to_json(f.struct("id")))
        rows.groupBy((f.col("id") % 3).alias("k")).agg(f.sum("id")).collect()
        rows.select(f.from_json("text", "id long")).toPandas()
        stream = spark.readStream.format("rate").option("rowsPerSecond", 1).load()
        counted = (
            stream.withWatermark("timestamp", "1 second")
            .groupBy(f.window("timestamp", "1 second"))
            .count()
        )
        for number, frame in enumerate((stream, counted)):
            query = (
                frame.writeStream.format("noop")
                .option("checkpointLocation", f"{folder}/{number}")
                .trigger(availableNow=True)
                .start()
            )
            query.awaitTermination(60)
            query.stop()
    # Java writes the archive on its way out: end it, and wait for it.
    gateway = spark.sparkContext._gateway
    spark.stop()
    if gateway is not None and gateway.proc is not None:
        gateway.shutdown()
        gateway.proc.stdin.close()
        gateway.proc.wait(_MAKE_TIMEOUT_S)


if __name__ == "__main__":
    with suppress(OSError):
        os.nice(19)
    print(make())
