"""Views of a project: each a file of SQL that says all there is to know, and runs as a flow.

    -- topic revenue
    -- table orders = shop.public.orders(id bigint, customer_id bigint, amount double) key id
    -- table customers = shop.public.customers(id bigint, country string) key id
    SELECT country, sum(amount) AS revenue FROM orders JOIN customers ON ...

A table is a topic of change events with its columns and its primary key. `changelog` at the end
says that the topic holds the rows themselves, and nulls for what is deleted, as other views do.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from pyspark.errors import AnalysisException

from penstock.spark.reasons import reason
from penstock.spark.views.plan import Node, columns, key_of, tables
from penstock.spark.views.refusing import COLUMNS_ADVICE, Text, ViewError
from penstock.spark.views.sql import Schema, plan, tables_in

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from penstock.spark.flows.declare import Flow

FOLDER: Final = "views"
SUFFIX: Final = ".sql"
Format = Literal["debezium", "changelog"]

_NAME: Final = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_SPEC: Final = re.compile(
    rf"\s*(?P<name>{_NAME})\s*=\s*(?P<topic>[A-Za-z0-9._-]+)\s*(?:\((?P<ddl>.*)\))?"
    r"\s*(?:\bkey\s+(?P<key>[\w, ]+?))?\s*(?:\b(?P<format>debezium|changelog))?\s*",
    re.DOTALL | re.IGNORECASE,
)
_STATEMENT: Final = re.compile(
    rf"\s*(?:(?:create\s+)?(?:materialized\s+)?view\s+)?(?P<name>{_NAME})\s+as\b",
    re.IGNORECASE,
)
_HEADER: Final = re.compile(r"\s*--\s*(?P<what>topic|table)\s+(?P<rest>.*)")


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table as the project knows it; what is not said is empty."""

    name: str
    topic: str
    ddl: str = ""
    key: tuple[str, ...] = ()
    format: Format | None = None

    @classmethod
    def parse(cls, text: str) -> TableSpec:
        """NAME=TOPIC(COLUMN TYPE, ...) key COLUMN[, COLUMN] [changelog]."""
        found = _SPEC.fullmatch(text)
        if found is None:
            raise ViewError(
                f"{text!r} is no table",
                advice="Write it so: orders=shop.public.orders(id bigint, amount double) key id",
            )
        key = tuple(each.strip() for each in (found["key"] or "").split(",") if each.strip())
        how: Any = (found["format"] or "").lower() or None
        spec = cls(found["name"], found["topic"], (found["ddl"] or "").strip(), key, how)
        if spec.ddl:
            for each in key:
                if each not in spec.columns():
                    raise ViewError(f"table {spec.name!r} has no column {each!r}, its key",
                                    advice=f"It has {', '.join(spec.columns())}.")  # fmt: skip
        return spec

    def columns(self) -> tuple[str, ...]:
        """The names of the columns; ViewError if they cannot be read."""
        return self._text.columns()

    def frame(self, spark: SparkSession) -> DataFrame:
        """The table without any row; ViewError if Spark does not know a type."""
        try:
            return spark.createDataFrame([], self.ddl)
        except AnalysisException as error:
            word = re.search(r'data type "([^"]+)"', str(error))
            at = re.search(rf"\b{re.escape(word[1])}\b", self.ddl, re.IGNORECASE) if word else None
            raise self._text.error(at.start() if at else 0, reason(error), COLUMNS_ADVICE) from None

    @property
    def _text(self) -> Text:
        return Text(self.ddl, f"table {self.name}")

    @property
    def is_whole(self) -> bool:
        return bool(self.ddl and self.key)

    def __str__(self) -> str:
        how = f" {self.format}" if self.format == "changelog" else ""
        return f"{self.name} = {self.topic}({self.ddl}) key {', '.join(self.key)}{how}"


@dataclass(frozen=True)
class Definition:
    """A view: its name, its SQL, the tables that it reads, and the topic that it becomes."""

    name: str
    text: Text
    tables: tuple[TableSpec, ...]
    topic: str
    where: str = ""

    @cached_property
    def plan(self) -> Node:
        """ViewError if it cannot be kept up to date."""
        return plan(self.text, {e.name: Schema(e.columns(), e.key) for e in self.tables})

    @property
    def columns(self) -> tuple[str, ...]:
        return columns(self.plan)

    @property
    def key(self) -> tuple[str, ...]:
        return key_of(self.plan)

    def flow(self) -> Flow:
        """The flow that keeps the view up to date."""
        from penstock.spark.flows.declare import flow, stream, topic
        from penstock.spark.views.frames import View

        names = list(dict.fromkeys(each.name for each in tables(self.plan)))
        specs = {each.name: each for each in self.tables}
        inputs = [
            replace(
                stream(specs[name].topic, **{specs[name].format or "debezium": specs[name].ddl}),  # type: ignore[arg-type]
                callsite=self.where,
            )
            for name in names
        ]
        node = self.plan

        def changes(*frames: DataFrame) -> DataFrame:
            given = dict(zip(names, frames, strict=True))
            return View(node, given, {"": columns(node)}).changes()

        output = topic(self.topic, key="_key", compacted=True)
        made = flow(inputs=inputs, output=output, name=self.name)(changes)
        return replace(made, where=self.where or made.where, source=self.written())

    def check_types(self, spark: SparkSession) -> None:
        """ViewError, with the place, if Spark does not take an expression of the view."""
        from penstock.spark.views.frames import View

        frames = {each.name: each.frame(spark) for each in self.tables}
        View(self.plan, frames, {"": self.columns}).changes()

    def written(self) -> str:
        """The file."""
        lines = [f"-- topic {self.topic}", *(f"-- table {each}" for each in self.tables)]
        return "\n".join([*lines, self.text.sql.strip().rstrip(";"), ""])


def statement(text: str) -> tuple[str, Text]:
    """The name and the SELECT of `NAME AS SELECT ...`; places are those in the whole text."""
    found = _STATEMENT.match(text)
    if found is None:
        raise Text(text).error(0, "a view is NAME AS SELECT ...", "Begin with its name.")
    blank = re.sub(r"\S", " ", found.group())
    return found["name"], Text(blank + text[found.end() :], "", text)


def used(text: Text, known: Mapping[str, TableSpec]) -> list[TableSpec]:
    """The tables that a SELECT reads, of those that are known; a topic's own name is one too."""
    lower = {name.lower(): spec for name, spec in known.items()}
    return [lower.get(name.lower()) or TableSpec(name, name) for name in tables_in(text)]


def read(file: Path) -> Definition:
    """A view from its file."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise ViewError(f"{file} cannot be read: {error.strerror or error}") from error
    specs, topic = [], file.stem
    for line in text.splitlines():
        found = _HEADER.match(line)
        if found is None:
            continue
        if found["what"] == "topic":
            topic = found["rest"].strip()
        else:
            specs.append(TableSpec.parse(found["rest"]))
    where = Text(text, f"{file.parent.name}/{file.name}")
    return Definition(file.stem, where, tuple(specs), topic, f"{file}:1")


def files(folder: Path) -> list[Path]:
    """The views of a project."""
    return sorted((folder / FOLDER).glob(f"*{SUFFIX}"))


def flows(folder: Path) -> Sequence[Flow]:
    """The flows of all views of a project."""
    return [read(each).flow() for each in files(folder)]
