"""Columns as SQL text. To Spark it is the same, and each `Column` costs several calls to Java.

For what is done in every micro-batch: there the calls took longer than the planning. A list of
texts, too, costs a call for each when PySpark sends it; here it goes as one text, which Java parts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from pyspark import SparkContext
from pyspark.sql.classic.dataframe import DataFrame as ClassicFrame

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_SEPARATOR: Final = "\x1f\x1e"
# Rows as JSON. Nulls are written, so that a reader can tell "no value" from "no such field"; times
# are whole: what Spark writes unasked has no microseconds, and two keys would be one.
JSON: Final = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}


def quoted(name: str) -> str:
    """A name as SQL takes any."""
    return f"`{name.replace('`', '``')}`"


def struct(names: Iterable[str]) -> str:
    """Columns as one."""
    return f"struct({', '.join(map(quoted, names))})"


def literal(text: str) -> str:
    """A text as SQL writes it."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def json(names: Iterable[str]) -> str:
    """Columns as the text of a JSON object."""
    options = ", ".join(map(literal, (part for pair in JSON.items() for part in pair)))
    return f"to_json({struct(names)}, map({options}))"


def select(rows: DataFrame, wanted: Mapping[str, str], *more: str) -> DataFrame:
    """Columns by their names, each with the expression that it is; and more, as they are."""
    texts = [*more, *(f"{text} AS {quoted(name)}" for name, text in wanted.items())]
    if not isinstance(rows, ClassicFrame) or any(_SEPARATOR in each for each in texts):
        return rows.selectExpr(*texts)
    array = _parting.of(SparkContext._gateway)(_SEPARATOR.join(texts), _SEPARATOR)
    return ClassicFrame(rows._jdf.selectExpr(array), rows.sparkSession)


class _Parting:
    """Java's function that parts a text, which is looked up once."""

    def __init__(self) -> None:
        self._gateway: Any = None
        self._function: Any = None

    def of(self, gateway: Any) -> Any:
        if self._gateway is not gateway:
            found = gateway.jvm.org.apache.commons.lang3.StringUtils.splitByWholeSeparator
            self._gateway, self._function = gateway, found
        return self._function


_parting: Final = _Parting()
