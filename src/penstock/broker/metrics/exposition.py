"""Prometheus' text format: families of samples into lines.

    # HELP name what it is
    # TYPE name counter
    name{label="value"} 1

Pure: values in, text out. Of each family all samples stand together, as the format wants it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final, Literal

from penstock.broker.metrics.metering import Histogram

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

Kind = Literal["counter", "gauge", "histogram"]


class Family:
    """One metric with all its samples."""

    __slots__ = ("_help", "_kind", "_lines", "name")

    def __init__(self, name: str, kind: Kind, help_: str) -> None:
        self.name = name
        self._kind = kind
        self._help = help_
        self._lines: list[str] = []

    def add(self, value: float, labels: Mapping[str, str] | None = None) -> None:
        self._lines.append(f"{self.name}{show_labels(labels)} {show_number(value)}")

    def add_text(self, labels: str, value: float) -> None:
        """The same with labels that are text already, where many families share them."""
        self._lines.append(f"{self.name}{labels} {show_number(value)}")

    def add_histogram(self, histogram: Histogram) -> None:
        """All lines of a histogram. Its counts are added up here, so that they always agree."""
        counts, seen = list(histogram.counts), 0
        for bound, count in zip((*histogram.bounds, math.inf), counts, strict=True):
            seen += count
            self._lines.append(f'{self.name}_bucket{{le="{show_number(bound)}"}} {seen}')
        self._lines.append(f"{self.name}_sum {show_number(histogram.total)}")
        self._lines.append(f"{self.name}_count {seen}")

    def lines(self) -> Iterator[str]:
        """What is to be told of it; nothing if there is no sample."""
        if self._lines:
            text = self._help.replace("\\", r"\\").replace("\n", r"\n")
            yield f"# HELP {self.name} {text}"
            yield f"# TYPE {self.name} {self._kind}"
            yield from self._lines


def show_labels(labels: Mapping[str, str] | None) -> str:
    if not labels:
        return ""
    pairs = ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())
    return f"{{{pairs}}}"


def show_number(value: float) -> str:
    if isinstance(value, int):
        return str(value)
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return "NaN" if math.isnan(value) else repr(value)


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
