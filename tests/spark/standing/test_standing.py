"""Standing queries: the language, the index against a naive reading and tantivy, and a flow."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import tantivy
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.flows.declare import flow, stream, topic
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.standing import QueryError, asking, bad_queries, match, matching
from penstock.spark.standing.index import Index
from penstock.spark.standing.operators import Latest, Shape
from penstock.spark.standing.query import All, Either, Kind, Node, Not, Phrase, Range, Word, parse
from penstock.spark.state import Shard, State
from penstock.testing import Broker
from penstock.testing.flows import FlowTester
from tests.harness.profiles import examples

pytestmark = pytest.mark.timeout(600)

FIELDS: dict[str, Kind] = {
    "title": "text", "body": "text", "price": "number", "at": "time", "brand": "keyword",
}  # fmt: skip
SCHEMA = pa.schema(
    [
        ("title", pa.string()),
        ("body", pa.string()),
        ("price", pa.float64()),
        ("at", pa.timestamp("us", "UTC")),
        ("brand", pa.string()),
    ]
)
Document = Mapping[str, Any]


def found(queries: Sequence[str], documents: Sequence[Document]) -> set[tuple[int, int]]:
    index = Index(FIELDS, [parse(each, FIELDS) for each in queries])
    result = index.match(pa.Table.from_pylist(list(documents), SCHEMA))
    return set(zip(result.documents.tolist(), result.queries.tolist(), strict=True))


# ---- against a naive reading -------------------------------------------------------------


def tokens(text: str | None) -> list[str]:
    return re.findall(r"\w+", (text or "").lower())


def holds(node: Node, document: Document) -> bool:
    match node:
        case Not(inner):
            return not holds(inner, document)
        case All(parts):
            return all(holds(each, document) for each in parts)
        case Either(parts):
            return any(holds(each, document) for each in parts)
        case Word(field, word):
            if FIELDS[field] == "keyword":
                return bool(document.get(field) == word)
            return word in tokens(document.get(field))
        case Phrase(field, words):
            there = tokens(document.get(field))
            size = len(words)
            return any(tuple(there[at : at + size]) == words for at in range(len(there)))
        case Range(field, low, high, with_low, with_high):
            value = document.get(field)
            if value is None:
                return False
            if isinstance(value, datetime):
                value = value.timestamp() * 1e6
            above = value >= low if with_low else value > low
            return bool(above and (value <= high if with_high else value < high))


WORDS = st.sampled_from(["red", "blue", "shoes", "Straße", "été", "x_1", "42"])
BRANDS = st.sampled_from(["acme", "Acme Ltd", "été"])
DAYS = st.sampled_from(["2026-01-01", "2026-01-02", "2026-01-03T12:00:00"])
NUMBERS = st.integers(-3, 3)
LEAVES = st.one_of(
    WORDS,
    st.builds("{}:{}".format, st.sampled_from(["title", "body"]), WORDS),
    st.lists(WORDS, min_size=1, max_size=3).map(lambda each: f'title:"{"-".join(each)}"'),
    BRANDS.map('brand:"{}"'.format),
    st.builds("price:{}{} TO {}{}".format, st.sampled_from("[{"), NUMBERS, NUMBERS,
              st.sampled_from("]}")),
    st.builds("price:{}{}".format, st.sampled_from(["<", "<=", ">", ">=", ""]), NUMBERS),
    st.builds("at:[{} TO {}{}".format, DAYS, DAYS | st.just("*"), st.sampled_from("]}")),
    DAYS.map("at:{}".format),
)  # fmt: skip
QUERIES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.builds("{} AND {}".format, inner, inner),
        st.builds("({} OR {})".format, inner, inner),
        inner.map("NOT ({})".format),
        st.builds("{} -({})".format, inner, inner),
    ),
    max_leaves=6,
)
TEXTS = st.none() | st.lists(WORDS, max_size=5).map(" (".join)
DOCUMENTS = st.fixed_dictionaries(
    {
        "title": TEXTS,
        "body": TEXTS,
        "price": st.none() | NUMBERS.map(float),
        "at": st.none() | DAYS.map(lambda day: datetime.fromisoformat(day).replace(tzinfo=UTC)),
        "brand": st.none() | BRANDS,
    }
)


@settings(max_examples=examples(40))
@given(st.lists(QUERIES, min_size=1, max_size=12), st.lists(DOCUMENTS, min_size=1, max_size=12))
def test_the_index_finds_what_each_query_says(
    queries: list[str], documents: list[Document]
) -> None:
    nodes = [parse(each, FIELDS) for each in queries]
    expected = {
        (at, number)
        for at, document in enumerate(documents)
        for number, node in enumerate(nodes)
        if holds(node, document)
    }
    assert found(queries, documents) == expected


def test_the_index_finds_what_tantivy_finds() -> None:
    queries = [
        "title:red", 'title:"red shoes"', "title:red AND body:blue", "title:(red OR blue)",
        "title:red AND NOT body:blue", "title:red AND price:[1 TO 3]",
        "(title:blue OR body:shoes) AND price:[0 TO 2}", 'body:"blue blue shoes"',
    ]  # fmt: skip
    words = ["red", "blue", "shoes"]
    documents = [
        {
            "title": f"{words[a]} {words[b]}",
            "body": f"{words[b]} {words[c]} {words[(a + c) % 3]}",
            "price": float(a + b),
        }
        for a in range(3)
        for b in range(3)
        for c in range(3)
    ]
    builder = tantivy.SchemaBuilder()
    builder.add_integer_field("number", stored=True, indexed=True)
    builder.add_text_field("title")
    builder.add_text_field("body")
    builder.add_float_field("price", indexed=True)
    engine = tantivy.Index(builder.build())
    writer = engine.writer(15_000_000, 1)
    for number, each in enumerate(documents):
        writer.add_document(tantivy.Document(number=number, **each))
    writer.commit()
    engine.reload()
    searcher = engine.searcher()
    expected = set()
    for at, text in enumerate(queries):
        # Its own parser reads AND NOT in another way.
        theirs = text if "NOT" not in text else "+title:red -body:blue"
        for _, place in searcher.search(engine.parse_query(theirs), 100).hits:
            expected.add((searcher.doc(place)["number"][0], at))
    assert len(expected) > 20
    assert found(queries, documents) == expected


@settings(max_examples=examples(12))
@given(
    st.lists(
        st.tuples(
            st.dictionaries(st.sampled_from("abcdef"), st.none() | QUERIES | st.just("x OR")),
            st.lists(DOCUMENTS, min_size=1, max_size=5),
        ),
        max_size=5,
    ),
    st.sampled_from([0, 2, 64]),
)
def test_queries_that_change_are_asked_as_they_are(
    steps: list[tuple[dict[str, str | None], list[Document]]], few: int
) -> None:
    out = pa.schema([("query", pa.string()), ("matched", pa.list_(pa.string())), *SCHEMA])
    operator = Latest(Shape(tuple(FIELDS.items()), tuple(SCHEMA.names), out))
    state, standing = State(), dict[str, str]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(asking, "_FEW", few)
        for version, (changes, documents) in enumerate(steps):
            table = pa.Table.from_pylist(documents, SCHEMA)
            inputs = {"documents": table.rename_columns([f"_d_{each}" for each in SCHEMA.names])}
            if changes:
                columns = [list(changes), list(changes.values())]
                inputs["queries"] = pa.table(
                    [pa.array(each, pa.string()) for each in columns], names=["_id", "_text"]
                )
            rows = operator.process(Shard(0, 1, version, None, state), inputs).to_pylist()
            standing |= {name: text for name, text in changes.items() if text is not None}
            for name, text in changes.items():
                if text is None:
                    standing.pop(name, None)
            expected = [
                (name, document)
                for name, text in standing.items()
                for document in table.to_pylist()
                if text != "x OR" and holds(parse(text, FIELDS), document)
            ]
            found = [(each.pop("query"), each) for each in rows if each.pop("matched") is not None]
            assert sorted(map(repr, found)) == sorted(map(repr, expected))


def test_queries_come_and_go() -> None:
    """Also twice in a micro-batch; what cannot be understood replaces what had its name."""
    steps: list[tuple[list[tuple[str, str | None]], list[tuple[str, float]], dict[Any, Any]]] = [
        (
            [("a", "red"), ("b", '{"query": "price:>5"}'), ("c", "red OR"), ("a", "blue")],
            [("red shoes", 9.0), ("blue shoes", 1.0), ("Blue", 6.0)],
            {
                ("a", "blue shoes"): {"title:blue"},
                ("b", "red shoes"): {"price:>5"},
                ("a", "Blue"): {"title:blue"},
                ("b", "Blue"): {"price:>5"},
            },
        ),
        (
            [("b", None), ("c", "title:(red OR (shoes AND none))"), ("a", "title:blue OR")],
            [("red shoes", 9.0), ("blue", 2.0)],
            {("c", "red shoes"): {"title:red", "title:shoes"}},
        ),
        ([], [("red", 3.0)], {("c", "red"): {"title:red"}}),
        ([("d", "title:red OR (title:shoes AND price:[1 TO 2])")],
         [("red hat", 1.0), ("shoes", 1.5), ("none", 1.0)],
         {("c", "red hat"): {"title:red"}, ("d", "red hat"): {"title:red", "price:[1 TO 2]"},
          ("d", "shoes"): {"title:shoes", "price:[1 TO 2]"}}),
    ]  # fmt: skip
    out = pa.schema([("query", pa.string()), ("matched", pa.list_(pa.string())), *SCHEMA])
    operator = Latest(Shape(tuple(FIELDS.items()), tuple(SCHEMA.names), out))
    state = State()
    for version, (queries, documents, expected) in enumerate(steps):
        rows = [{"title": title, "price": price} for title, price in documents]
        table = pa.Table.from_pylist(rows, SCHEMA)
        inputs = {"documents": table.rename_columns([f"_d_{each}" for each in SCHEMA.names])}
        if queries:
            names, texts = zip(*queries, strict=True)
            inputs["queries"] = pa.table(
                {"_id": pa.array(names, pa.string()), "_text": pa.array(texts, pa.string())}
            )
        matches = operator.process(Shard(0, 1, version, None, state), inputs).to_pylist()
        assert {(row["query"], row["title"]): set(row["matched"]) for row in matches} == expected


def test_more_than_fits_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.spark.standing.index._ROOM", 1)
    documents = [{"title": "red shoes", "price": float(at)} for at in range(50)]
    queries = ["red", "shoes", "price:>=25", "NOT blue"]
    expected = {(at, number) for at in range(50) for number in range(4)}
    expected -= {(at, 2) for at in range(25)}
    assert found(queries, documents) == expected


# ---- the language ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason", "position"),
    [
        ("", "the query is empty", 0),
        ("red AND", "ends too early", 7),
        ("AND red", "nothing for AND", 0),
        ("(red", "( without its )", 0),
        ("red)", ") without its (", 3),
        ("colour:red", "no field 'colour'", 0),
        ("title: AND red", "without a value", 7),
        ('red title:"blue', "without its second", 10),
        ("price:[1 TO", "without its end", 6),
        ("price:[1 5]", "a range is [LOW TO HIGH]", 6),
        ("price:[1 TO x]", "'x' is no number", 12),
        ("red at:yesterday", "'yesterday' is no time", 7),
        ("title:[a TO b]", "has no ranges", 6),
        ("[1 TO 2]", "a range needs its field", 0),
        ("sho*", "not known in words", 0),
        ("title:...", "no word", 6),
        ("(" * 50 + "a", "levels deep", 40),
        ("a " * 129, "conditions", 256),
        ("a" * 10_001, "characters", 10_000),
        ("title:(body:a)", "inside of", 7),
    ],
)
def test_a_wrong_query_is_told_with_the_place(text: str, reason: str, position: int) -> None:
    with pytest.raises(QueryError) as raised:
        parse(text, FIELDS)
    assert reason in raised.value.reason
    assert raised.value.position == position
    assert f"character {position + 1}" in str(raised.value)


@settings(max_examples=examples(80))
@given(st.text(st.sampled_from('ab:"()[]{}<>=-* ANDORT1.2026'), max_size=30))
def test_whatever_is_written_is_a_query_or_an_error(text: str) -> None:
    found = asking.parsed(text, tuple(FIELDS.items()))
    assert not isinstance(found, QueryError) or 0 <= found.position <= len(text)


# ---- through Spark -----------------------------------------------------------------------

QUERY_ROWS = "key string, value string, _topic string, _partition int, _offset bigint"
SPARK_FIELDS: dict[str, Kind] = {"title": "text", "price": "number"}


def documents_of(spark: SparkSession, start: int, *rows: tuple[str, float]) -> DataFrame:
    placed = [(*row, "offers", 0, start + at) for at, row in enumerate(rows)]
    return spark.createDataFrame(
        placed, "title string, price double, _topic string, _partition int, _offset bigint"
    )


def test_through_spark(penstock_spark: SparkSession) -> None:
    """In one job: queries as text and as JSON, the last of each name, and those that are wrong."""
    told = [("a", "red"), ("b", '{"query": "price:>5"}'), ("c", "red OR"), ("a", "blue")]
    rows = penstock_spark.createDataFrame(
        [(*each, "queries", 0, offset) for offset, each in enumerate(told)], QUERY_ROWS
    )
    documents = documents_of(penstock_spark, 0, ("red shoes", 9.0), ("blue shoes", 1.0),
                             ("Blue", 6.0))  # fmt: skip
    matches = match(documents, rows, fields=SPARK_FIELDS).select("query", "title", "matched")
    bad = bad_queries(rows, fields=SPARK_FIELDS).select(
        "query", F.col("position").cast("string"), F.array("error")
    )
    # Each lane goes to a shard of its own, by Spark's hash.
    lanes = penstock_spark.createDataFrame([(each,) for each in matching._lanes(5)], "id bigint")
    shards = lanes.select(
        F.pmod(F.xxhash64("id"), F.lit(5)).cast("string"), F.col("id").cast("string"), F.array()
    )
    found = {(each.query, each.title): each for each in matches.union(bad).union(shards).collect()}
    error = found.pop(("c", "6")).matched
    assert "ends too early" in error[0]
    lane_of = {query: title for query, title in found if query.isdigit()}
    assert lane_of == {str(shard): str(lane) for shard, lane in enumerate(matching._lanes(5))}
    matched = {each: set(row.matched) for each, row in found.items() if each[0] not in lane_of}
    assert matched == {
        ("a", "blue shoes"): {"title:blue"},
        ("a", "Blue"): {"title:blue"},
        ("b", "red shoes"): {"price:>5"},
        ("b", "Blue"): {"price:>5"},
    }


def test_in_a_flow(spark: SparkSession, tmp_path: Path) -> None:
    @flow(
        inputs=[stream("offers", json="title string, price double"), stream("queries", text=True)],
        outputs={"alerts": topic("alerts", key="query"), "bad": topic("bad", key="query")},
    )
    def alerts(offers: DataFrame, queries: DataFrame) -> dict[str, DataFrame]:
        return {
            "alerts": match(offers, queries, fields=SPARK_FIELDS),
            "bad": bad_queries(queries, fields=SPARK_FIELDS),
        }

    with Broker() as broker:
        tester = FlowTester(spark, broker, tmp_path / "data")
        tester.use(alerts)
        tester.feed("queries", ["shoes price:<10", "shoes AND ("], key=["cheap", "wrong"])
        tester.feed("offers", [{"title": "Shoes", "price": 5}, {"title": "Shoes", "price": 50}])
        tester.run()
        [alert] = tester.rows("alerts")
        assert alert["query"] == "cheap"
        assert sorted(alert["matched"]) == ["price:<10", "title:shoes"]
        assert (alert["title"], alert["price"]) == ("Shoes", 5.0)
        [bad] = tester.rows("bad")
        assert (bad["query"], bad["position"]) == ("wrong", 11)
        tester.feed("queries", [None], key=["cheap"])
        tester.feed("offers", [{"title": "Shoes", "price": 6}])
        tester.run()
        assert len(tester.rows("alerts")) == 1


def test_a_wrong_declaration_points_at_the_place(penstock_spark: SparkSession) -> None:
    rows = penstock_spark.createDataFrame([("q", "red", "t", 0, 0)], QUERY_ROWS)
    documents = documents_of(penstock_spark, 0, ("red hat", 1.0))
    with pytest.raises(DeclarationError, match=r"test_standing.py:\d+: match: .*'colour'"):
        match(documents, rows, fields={"colour": "text"})
    with pytest.raises(DeclarationError, match="cannot be searched as time"):
        match(documents, rows, fields={"price": "time"})
    with pytest.raises(DeclarationError, match="no column 'value'"):
        match(documents, rows.drop("value"), fields=SPARK_FIELDS)
