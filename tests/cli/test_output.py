"""Tables where there is little room: words stay whole as far as they can."""

from __future__ import annotations

import io
import itertools

import pytest
from rich.console import Console

from penstock.cli import output
from penstock.errors import PenstockError
from penstock.spark.java import JavaError

LAG = (
    ("topic", ">part", ">committed", ">end", ">records", ">bytes", ">age", ">loss in",
     ">missed", "client"),
    [("orders", str(n), "120000", "1240000", "1,120,000", "101.4 MiB", "1h 12m", "6d 22h", "-",
      "billing-worker-1") for n in range(3)],
)  # fmt: skip
TRANSACTIONS = (
    ("transactional id", "state", ">producer id", ">epoch", ">timeout", ">open for", "partitions"),
    [("payments-writer-0001", "CompleteCommit", "1042", "17", "1m", "-", "orders: 0, 1, 2"),
     ("x" * 60, "PrepareAbort", "1043", "0", "15m", "12m 3s", "orders: 0")],
)  # fmt: skip


def printed(table: object, width: int) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("content", [LAG, TRANSACTIONS])
@pytest.mark.parametrize("width", [80, 100, 120])
def test_words_of_the_head_stay_whole(
    content: tuple[tuple[str, ...], list[tuple[str, ...]]],
    width: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(output, "_width", lambda: width)
    lines = printed(output.table(*content), width)
    assert all(len(line.rstrip()) <= width for line in lines)
    head = " ".join(itertools.takewhile(lambda line: "\u2500" not in line, lines)).split()
    assert sorted(head) == sorted(" ".join(content[0]).replace(">", "").split())


def test_states_and_numbers_stay_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "_width", lambda: 80)
    text = "\n".join(printed(output.table(*TRANSACTIONS), 80))
    for word in ("CompleteCommit", "PrepareAbort", "1042", "12m 3s"):
        assert word in text


def test_what_fits_is_left_alone() -> None:
    assert output.column_widths(("a", "b"), [("xx", "y")], (False, True), 8) is None
    assert output.column_widths(("a", "b"), [("xx" * 9, "y")], (False, True), 8) == [4, 1]


def test_where_no_word_fits_nothing_is_promised() -> None:
    assert output.column_widths(("partition", "records"), [("1", "2")], (False, True), 8) is None


def test_a_remedy_is_told_once(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (JavaError("there is no Java"), PenstockError("no", advice="Do this.")):
        output.fail(error)
        assert capsys.readouterr().err.count(error.advice) == 1
