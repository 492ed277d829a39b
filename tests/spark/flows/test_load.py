"""Files of flows: what is found in them, and errors that point at the line."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

import penstock
from penstock.errors import PenstockError
from penstock.spark.flows.declare import Stream, Table, flow, stream, table, topic
from penstock.spark.flows.errors import DeclarationError, FlowFileError
from penstock.spark.flows.load import _is_users, load
from penstock.spark.flows.versions import physical

HEAD = "from penstock.spark.flows.declare import flow, stream, table, topic\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "flows.py"


def write(file: Path, text: str) -> None:
    file.write_text(HEAD + dedent(text))


def test_flows_are_found_in_their_order(file: Path) -> None:
    write(
        file,
        """
        clicks = stream("clicks", json="user string")
        people = table("people", json="name string", key="user")

        @flow(inputs=clicks, output=topic("b"))
        def second(clicks): return clicks

        @flow(inputs=[clicks, people], outputs={"x": topic("x"), "y": topic("y")}, name="first")
        def anything(clicks, people): return {"x": clicks, "y": people}
        """,
    )
    flows = load(file)
    assert [each.name for each in flows] == ["second", "first"]
    found = flows.named("first")
    assert found is not None
    assert found("c", "p") == {"x": "c", "y": "p"}
    assert [type(each) for each in found.inputs] == [Stream, Table]
    assert found.where == f"{file}:9"
    assert found.streams[0].dead_letters == "clicks.dead"


def test_modules_beside_the_file_can_be_imported(file: Path) -> None:
    (file.parent / "beside_flows_file.py").write_text("NAME = 'from-beside'\n")
    write(
        file,
        """
        import beside_flows_file
        @flow(inputs=stream("a"), output=topic("b"), name=beside_flows_file.NAME)
        def f(a): return a
        """,
    )
    assert [each.name for each in load(file)] == ["from-beside"]


ERRORS = {
    "raises": ("\nprint(1)\n1 / 0\n", ":4: ZeroDivisionError: division by zero"),
    "syntax": ("\ndef f(:\n", ":3: invalid syntax"),
    "missing module": ("import no_such_module_anywhere\n", ":2: ModuleNotFoundError"),
    "exits": ("raise SystemExit(3)\n", ":2: SystemExit: 3"),
    "nothing": ("x = 1\n", "declares no flows"),
    "bad topic": ('stream("a b")\n', ":2: 'a b' is no name of a topic"),
    "inside a function": (
        "def deep():\n    return stream('a', start='never')\ndeep()\n",
        ":3: stream 'a': start='never'",
    ),
    "same name": (
        """
@flow(inputs=stream("a"), output=topic("b"))
def f(a): return a
@flow(inputs=stream("a"), output=topic("c"))
def f(a): return a
""",
        "two flows are named 'f'",
    ),
    "same topic": (
        """
@flow(inputs=stream("a"), output=topic("b"))
def f(a): return a
@flow(inputs=stream("a"), output=topic("b"))
def g(a): return a
""",
        "flows 'f' and 'g' both write topic 'b'",
    ),
    "itself": (
        """
@flow(inputs=stream("a"), output=topic("a"))
def f(a): return a
""",
        "writes topic 'a', which it reads",
    ),
    "parameters": (
        """
@flow(inputs=stream("a"), output=topic("b"))
def f(a, b): return a
""",
        "has 1 inputs, but its function takes (a, b)",
    ),
    "only tables": (
        """
@flow(inputs=table("a", json="x int"), output=topic("b"))
def f(a): return a
""",
        "reads no stream",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_points_at_the_place(file: Path, case: str) -> None:
    text, expected = ERRORS[case]
    file.write_text(HEAD + text)
    with pytest.raises(PenstockError) as caught:
        load(file)
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)
    assert caught.value.advice


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FlowFileError, match="there is no file"):
        load(tmp_path / "nothing.py")
    with pytest.raises(FlowFileError, match="is a folder"):
        load(tmp_path)
    (tmp_path / "flows.txt").write_text("hello")
    with pytest.raises(FlowFileError, match="not a Python file"):
        load(tmp_path / "flows.txt")


def test_declarations_that_cannot_work() -> None:
    with pytest.raises(DeclarationError, match="either output= or outputs="):
        flow(inputs=stream("a"))
    with pytest.raises(DeclarationError, match="needs one"):
        topic("t", compacted=True)
    with pytest.raises(DeclarationError, match="not both"):
        stream("t", json="a int", avro="{}")
    with pytest.raises(DeclarationError, match="not several"):
        table("t", json="a int", debezium="a int")
    with pytest.raises(DeclarationError, match="at least 1"):
        table("t", json="a int", max_rows=0)
    for every in ("often", 10):
        with pytest.raises(DeclarationError, match=f"every={every!r} is no length of time"):
            flow(inputs=stream("a"), output=topic("b"), every=every, name="f")(lambda a: a)  # type: ignore[arg-type]


ORDERS = {"json": "id int, at timestamp", "time": "at"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"lateness": 10}, "lateness=10 is no length of time"),
        ({"idle": 30}, "idle=30 is no length of time"),
        ({"max_future": 3600}, "max_future=3600 is no length of time"),
        ({"time_unit": "m"}, "time_unit='m' is not known"),
        ({"where": " "}, "where=' ' is no condition"),
        ({"json": 5}, "json=5 is no text"),
        ({"late": 5}, "5 is no name of a topic"),
        ({"options": {"maxOffsetsPerTriger": "5"}}, "there is no option 'maxOffsetsPerTriger'"),
        ({"options": {"maxOffsetsPerTrigger": "many"}}, "maxOffsetsPerTrigger is 'many'"),
        ({"options": "latest"}, "options='latest' are no options"),
    ],
)
def test_a_stream_says_at_once_what_cannot_be(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(DeclarationError, match=re.escape(message)) as caught:
        stream("orders", **{**ORDERS, **wrong})
    assert caught.value.advice


def test_numbers_may_be_options_and_settings() -> None:
    declared = stream("orders", options={"maxOffsetsPerTrigger": 5})  # type: ignore[dict-item]
    assert declared.options == {"maxOffsetsPerTrigger": "5"}
    assert topic("o", settings={"retention.ms": 5}).settings == {"retention.ms": "5"}  # type: ignore[dict-item]


def test_generations_of_an_output_have_topics_of_their_own() -> None:
    assert [physical("t", n) for n in (1, 2, 3)] == ["t", "t.v2", "t.v3"]


def test_what_is_sent_to_workers_whole(tmp_path: Path) -> None:
    """What the user has beside the file; not Penstock, which lies below it in a checkout."""
    root = Path(penstock.__file__).resolve().parents[2]
    assert not _is_users(Path(load.__code__.co_filename).resolve(), root)
    assert not _is_users(tmp_path / ".venv/lib/python3/site-packages/numpy/core.py", tmp_path)
    assert not _is_users(tmp_path.parent / "other.py", tmp_path)
    assert _is_users(tmp_path / "rules" / "prices.py", tmp_path)
