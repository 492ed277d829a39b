"""Spark's private parts that flows need, all in one place: sessions, jobs, plans, Hadoop's files.

Tested per version of Spark by `tests/spark/runtime/test_spark_internals.py`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from py4j.clientserver import ClientServer  # type: ignore[import-untyped]
from py4j.java_gateway import is_instance_of  # type: ignore[import-untyped]
from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
from pyspark.sql import SparkSession

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# What gives the same however often it is run, and keeps nothing from one run to the next: no
# shuffle (whose files would be used again), no broadcast, nothing that was cached.
_REPEATABLE: Final = frozenset({
    "ArrowEvalPythonExec", "BatchEvalPythonExec", "CoalesceExec", "ColumnarToRowExec", "ExpandExec",
    "FilterExec", "GenerateExec", "HashAggregateExec", "InputAdapter", "LocalTableScanExec",
    "MapInArrowExec", "MapInPandasExec", "ObjectHashAggregateExec", "ProjectExec", "RangeExec",
    "SortAggregateExec", "SortExec", "UnionExec", "WholeStageCodegenExec",
})  # fmt: skip
# Stores that show an object only when it is whole, and cannot move one.
_OBJECTS: Final = frozenset({"s3", "s3a", "s3n", "gs", "abfs", "abfss", "wasb", "wasbs"})
# Types of Spark that have such times, and how the texts begin that stand for them.
_TIMES: Final = frozenset({"date", "timestamp", "timestamp_ntz"})
_MOVING: Final = ("now", "today", "tomorrow", "yesterday")
# Files that were begun beside others: an hour later nobody writes them any more.
_BESIDE: Final = re.compile(r"\.+\d+\..*\.tmp(\.crc)?")
_STALE_MS: Final = 3_600_000
_EXISTS: Final = "FileAlreadyExistsException"
_REPLACEABLE: Final = "org.apache.spark.sql.catalyst.expressions.RuntimeReplaceable"
_PATTERNS: Final = "org.apache.spark.sql.catalyst.trees.TreePattern"


def cloned(spark: SparkSession) -> SparkSession:
    """A session with the settings, views and functions of another, and settings of its own."""
    return SparkSession(spark.sparkContext, spark._jsparkSession.cloneSession())


def are_threads_pinned(spark: SparkSession) -> bool:
    """Whether what a thread says to its jobs, by local properties, reaches those jobs and no other.

    Not with PYSPARK_PIN_THREAD=false.
    """
    gateway: Any = spark.sparkContext._gateway
    return isinstance(gateway, ClientServer)


def restore_active_session() -> None:
    """Make the first session of the process the active one again.

    `createDataFrame` makes its session the active one of all threads, be it one that was `cloned`
    for a flow; whoever asks for the active session would be given that.
    """
    first = SparkSession._instantiatedSession
    if first is not None and first._sc._jsc is not None:
        SparkSession._activeSession = first


def cancel_group(spark: SparkSession, group: str) -> None:
    """Cancel the jobs of a group that run, and refuse those that are submitted after this."""
    context: Any = spark.sparkContext
    context._jsc.sc().cancelJobGroupAndFutureJobs(group)


def numbers(spark: SparkSession, count: int) -> DataFrame:
    """The numbers below `count`, one for each task, as rows of which Spark knows no size.

    What is made of rows has a size by theirs: that of a range is next to nothing, and a join would
    send all that is read for its few numbers to every worker (broadcast it). What Spark has no size
    for is taken for too large, as a micro-batch of its own queries is.
    """
    from pyspark.sql.classic.dataframe import DataFrame

    plain = spark.range(0, count, 1, count)
    execution: Any = plain._jdf.queryExecution()
    session: Any = spark._jsparkSession
    schema = plain._jdf.schema()
    return DataFrame(session.internalCreateDataFrame(execution.toRdd(), schema, False), spark)


def unrepeatable(rows: DataFrame) -> str | None:
    """Why the plan of a frame cannot be run again and again over what it is told to read.

    None if it can. Otherwise what Spark would compute once and for all: the time of a query, the
    seeds of random numbers, rows that were shuffled, broadcast or cached.
    """
    execution: Any = rows._jdf.queryExecution()
    analyzed = execution.analyzed()
    context: Any = rows.sparkSession.sparkContext
    patterns = _patterns(context)
    if analyzed.containsPattern(patterns.CURRENT_LIKE()):
        return "it asks for the current time"
    if any(map(_is_moving_date, _casts(context, analyzed))):
        return "it asks for the date of today"
    if not analyzed.deterministic():
        return "it has random values"
    for node in _nodes(execution.executedPlan()):
        name = str(node.getClass().getSimpleName())
        if name not in _REPEATABLE:
            return f"it has {name}"
        if not node.subqueries().isEmpty():
            return "it has a query in a condition"
    return None


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    children = plan.children()
    for at in range(children.size()):
        yield from _nodes(children.apply(at))


def local_path(spark: SparkSession, folder: str) -> str | None:
    """The path of a folder that is on this machine; None of any other.

    Spark has Hadoop say that: what has no scheme is in `fs.defaultFS`, and `file:/x` is here.
    """
    context: Any = spark.sparkContext
    path = context._jvm.org.apache.hadoop.fs.Path(folder)
    system = path.getFileSystem(context._jsc.hadoopConfiguration())
    if str(system.getUri().getScheme()) != "file":
        return None
    return str(system.makeQualified(path).toUri().getPath())


def _patterns(context: Any) -> Any:
    found = context._jvm
    for part in _PATTERNS.split("."):
        found = getattr(found, part)
    return found


def _casts(context: Any, plan: Any) -> Iterator[Any]:
    """The casts in a plan, and in what Spark puts in the place of functions such as `to_date`."""
    patterns = _patterns(context)
    wanted = patterns.CAST(), patterns.RUNTIME_REPLACEABLE()

    def within(expression: Any) -> Iterator[Any]:
        if not any(map(expression.containsPattern, wanted)):
            return
        if str(expression.getClass().getSimpleName()) == "Cast":
            yield expression
        if is_instance_of(context._gateway, expression, _REPLACEABLE):
            yield from within(expression.replacement())
        children = expression.children()
        for at in range(children.size()):
            yield from within(children.apply(at))

    for node in _nodes(plan):
        expressions = node.expressions()
        for at in range(expressions.size()):
            yield from within(expressions.apply(at))


def _is_moving_date(cast: Any) -> bool:
    """Whether a cast of a text that is always the same gives a date, or time, that is not.

    Spark replaces 'today' and the like when it plans. Of a text that has to be computed first it is
    not known whether it is such a one.
    """
    child = cast.child()
    if str(cast.dataType().simpleString()) not in _TIMES or not child.foldable():
        return False
    if not str(child.dataType().simpleString()).startswith(("string", "char", "varchar")):
        return False
    if str(child.getClass().getSimpleName()) != "Literal":
        return True
    text = str(child.value()).strip().lower()
    return text.startswith(_MOVING)


class HadoopFiles:
    """A folder in whatever store Spark knows, by the driver's Java: for a few small files."""

    def __init__(self, spark: SparkSession, folder: str) -> None:
        context: Any = spark.sparkContext
        self._jvm = context._jvm
        self._folder = folder
        path = self._path("")
        self._system = path.getFileSystem(context._jsc.hadoopConfiguration())
        self._is_direct = str(path.toUri().getScheme()) in _OBJECTS

    def _path(self, name: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(f"{self._folder}/{name}".rstrip("/"))

    def write(self, name: str, data: bytes, *, durable: bool = True, replaces: bool = True) -> None:
        """Write a whole file; FileExistsError if it is there and is not to be replaced."""
        if not replaces and self._system.exists(self._path(name)):
            raise FileExistsError(f"{self._folder}/{name}")
        try:
            self._write(name, data, durable=durable, replaces=replaces)
        except Py4JJavaError as error:
            # Of two who write an object at a time the store may refuse one at the end.
            found = str(error.java_exception.getClass().getName())
            if replaces or not found.endswith(_EXISTS):
                raise
            raise FileExistsError(f"{self._folder}/{name}") from error

    def _write(self, name: str, data: bytes, *, durable: bool, replaces: bool) -> None:
        beside = self._path(name if self._is_direct else f".{name}.{uuid4().hex}.tmp")
        out = self._system.create(beside, replaces or not self._is_direct)
        try:
            out.write(data)
            # Where objects are stored, the end of writing is what makes them durable.
            if durable and not self._is_direct:
                out.hsync()
        finally:
            out.close()
        if self._is_direct or self._system.rename(beside, self._path(name)):
            return
        if not replaces:
            self._system.delete(beside, False)
            raise FileExistsError(f"{self._folder}/{name}")
        # It is there already.
        self._system.delete(self._path(name), False)
        if not self._system.rename(beside, self._path(name)):
            raise OSError(f"{self._folder}/{name} cannot be written")

    def read(self, name: str) -> bytes:
        """A file's bytes; FileNotFoundError if it is not there."""
        if not self._system.exists(self._path(name)):
            raise FileNotFoundError(f"{self._folder}/{name}")
        stream = self._system.open(self._path(name))
        try:
            return bytes(stream.readAllBytes())
        finally:
            stream.close()

    def names(self) -> list[str]:
        """What is in the folder; nothing if there is none."""
        if not self._system.exists(self._path("")):
            return []
        return [str(each.getPath().getName()) for each in self._system.listStatus(self._path(""))]

    def sweep(self) -> None:
        """Remove what writers that were killed have left half done, long ago."""
        if not self._system.exists(self._path("")):
            return
        limit = time.time() * 1000 - _STALE_MS
        for each in self._system.listStatus(self._path("")):
            is_old = each.getModificationTime() < limit
            if is_old and _BESIDE.fullmatch(str(each.getPath().getName())):
                self._system.delete(each.getPath(), False)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        self._system.delete(self._path(name), False)
