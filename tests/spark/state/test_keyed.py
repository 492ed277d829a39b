"""Tables by key against a dict: any types, versions, collisions, damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from concurrent.futures import Executor, Future
from decimal import Decimal
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.spark.state import hashing, keyed, runs, store
from penstock.spark.state.files import Files, StateError
from penstock.spark.state.keyed import KeyedTable
from penstock.spark.state.store import Place, State, opened
from tests.harness.profiles import examples

INNER = pa.struct([("a", pa.int32()), ("b", pa.string())])
SCHEMA = pa.schema(
    [
        ("name", pa.string()),
        ("number", pa.int64()),
        ("price", pa.decimal128(10, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("more", INNER),
        ("tags", pa.list_(pa.string())),
    ]
)
KEY = ("name", "number")
NAMES = st.none() | st.sampled_from(["", "a", "b", "ä", "long" * 9])
NUMBERS = st.none() | st.integers(-2, 3)
KEYS = st.tuples(NAMES, NUMBERS)
VALUES = st.fixed_dictionaries(
    {
        "price": st.none() | st.sampled_from([Decimal("1.25"), Decimal("-7.00")]),
        "more": st.none() | st.fixed_dictionaries({"a": NUMBERS, "b": NAMES}),
        "tags": st.none() | st.lists(NAMES, max_size=2),
    }
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.dictionaries(KEYS, VALUES, max_size=9)),
        st.tuples(st.just("delete"), st.lists(KEYS, max_size=9)),
        st.tuples(
            st.just("change"),
            st.tuples(st.dictionaries(KEYS, VALUES, max_size=9), st.lists(KEYS, max_size=9)),
        ),
        st.tuples(st.just("version"), st.booleans()),
    ),
    max_size=25,
)


def table(rows: list[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(rows, SCHEMA)


def key_table(keys: list[tuple[Any, ...]]) -> pa.Table:
    kept = pa.schema([SCHEMA.field(name) for name in KEY])
    return pa.Table.from_pylist([dict(zip(KEY, key, strict=True)) for key in keys], kept)


def row(key: tuple[Any, ...], value: dict[str, Any]) -> dict[str, Any]:
    return {"name": key[0], "number": key[1], "at": None, **value}


def check(kept: KeyedTable, model: dict[tuple[Any, ...], dict[str, Any]]) -> None:
    asked = [*model, ("nobody", 9), (None, None), *reversed(list(model))]
    found = kept.get(key_table(asked)).to_pylist()
    assert len(found) == len(asked)
    for key, each in zip(asked, found, strict=True):
        assert each.pop("_found") == (key in model)
        assert (each["name"], each["number"]) == key
        if key in model:
            assert each == row(key, model[key])
        else:
            assert all(value is None for name, value in each.items() if name not in KEY)
    assert len(kept) == len(model)
    scanned = {(each["name"], each["number"]): each for each in kept.scan().to_pylist()}
    assert scanned == {key: row(key, value) for key, value in model.items()}


def follow(folder: Path, steps: list[tuple[str, Any]]) -> None:
    place, version = Place(str(folder)), 0
    model: dict[tuple[Any, ...], dict[str, Any]] = {}
    before = dict(model)
    todo = iter([*steps, ("version", False)])
    for step, what in todo:
        # What is done up to the next version; a try that fails leaves nothing.
        pending = [(step, what)]
        while pending[-1][0] != "version":
            pending.append(next(todo))
        for fails in [True, False] if pending[-1][1] else [False]:
            store._warm.clear() if fails else None
            model = dict(before)
            with (
                pytest.raises(KeyError) if fails else _nothing(),
                opened(place, 0, version) as state,
            ):
                kept = state.table("rows", SCHEMA, KEY)
                for doing, given_ in pending:
                    if doing == "put":
                        model |= given_
                        kept.put(table([row(*each) for each in given_.items()]))
                    elif doing == "delete":
                        for key in given_:
                            model.pop(key, None)
                        kept.delete(key_table(given_))
                    elif doing == "change":
                        rows, others = given_
                        gone = [key for key in others if key not in rows]
                        for key in gone:
                            model.pop(key, None)
                        model |= rows
                        made = table([row(*each) for each in rows.items()])
                        kept.change(made, key_table(gone))
                    check(kept, model)
                state.keep("count", pa.table({"n": [len(model)]}))
                if fails:
                    raise KeyError
        before = model
        version += 1
    store._warm.clear()
    with opened(place, 0, version) as state:
        check(state.table("rows", SCHEMA, KEY), model)
        count = state.value("count")
        assert count is not None
        assert count.to_pylist() == [{"n": len(model)}]


class _nothing:  # noqa: N801
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@given(steps=STEPS)
@settings(max_examples=examples(12))
def test_a_table_is_a_dict(tmp_path_factory: pytest.TempPathFactory, steps: Any) -> None:
    follow(tmp_path_factory.mktemp("state"), steps)


class Later(Executor):
    """Merges runs when it is told to, or waited for."""

    class Merge(Future[Any]):
        def __init__(self, work: Callable[[], Any]) -> None:
            super().__init__()
            self._work = work

        def result(self, timeout: float | None = None) -> Any:
            if not self.done():
                self.set_result(self._work())
            return super().result(timeout)

    def __init__(self) -> None:
        self.waiting: list[Later.Merge] = []
        self.merges = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self.merges += 1
        self.waiting.append(Later.Merge(partial(fn, *args, **kwargs)))
        return self.waiting[-1]

    def work(self, count: int) -> None:
        for each in self.waiting[:count]:
            if not each.cancelled():
                each.result()
        del self.waiting[:count]


@given(steps=STEPS, seed=st.integers(0, 1 << 32))
@settings(max_examples=examples(12))
def test_a_table_is_a_dict_whenever_its_runs_are_merged(
    tmp_path_factory: pytest.TempPathFactory, steps: Any, seed: int
) -> None:
    random, later = Random(seed), Later()

    def forget(*_: object) -> None:
        # After each version some are merged, and maybe the shard goes to another worker.
        later.work(random.randrange(3))
        if random.random() < 0.2:
            store._warm.clear()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(keyed, "_FEW", 0)
        patch.setattr(keyed, "_MOST_RUNS", random.randrange(1, 4))
        patch.setattr(store, "_merging", later)
        patch.setattr(store, "_forget_soon", forget)
        follow(tmp_path_factory.mktemp("state"), steps)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """Runs of any size are merged when the test wants it."""
    made = Later()
    monkeypatch.setattr(keyed, "_FEW", 0)
    monkeypatch.setattr(store, "_merging", made)
    return made


def put_ten(place: Place, version: int) -> list[int]:
    """A version with ten rows more; how many the runs have."""
    with opened(place, 0, version) as state:
        kept = state.table("rows", SCHEMA, KEY)
        kept.put(table([row((str(at), version), {}) for at in range(10)]))
        assert len(kept) == 10 * version + 10
        return [len(each) for each in kept.runs]


def test_what_one_worker_has_merged_serves_the_next(tmp_path: Path, later: Later) -> None:
    place = Place(str(tmp_path))
    for version in range(2):
        put_ten(place, version)
    # Both begin, and the second finds what the first has made.
    store._warm.clear()
    store.hold(place, 0, 2).tidy()
    later.work(2)
    [file] = (tmp_path / "0").glob("*.runs")
    with opened(place, 0, 2) as state:
        [run] = state.table("rows", SCHEMA, KEY).runs
        assert len(run) == 20
    store._warm.clear()
    file.unlink()
    with (
        pytest.raises(StateError, match=rf"{file.name}, which 2-\S+ needs, cannot be read"),
        opened(place, 0, 3),
    ):
        pass


def test_a_merge_that_fails_or_comes_too_late_is_only_not_done(
    tmp_path: Path, later: Later, caplog: pytest.LogCaptureFixture
) -> None:
    place = Place(str(tmp_path / "kept"))
    assert [put_ten(place, version) for version in range(2)] == [[10], [10, 10]]
    [merge] = later.waiting
    merge.set_exception(OSError("no space left"))
    assert put_ten(place, 2) == [10, 10, 10]
    assert "runs of a table stay as they are for now: no space left" in caplog.text
    # The folder is removed, as after a reset, while somebody still merges.
    shutil.rmtree(tmp_path / "kept")
    with pytest.raises(FileNotFoundError):
        later.waiting[-1].result()
    assert not (tmp_path / "kept").exists()


def test_what_is_merged_late_by_a_worker_that_lost_the_shard_still_serves(
    tmp_path: Path, later: Later
) -> None:
    place = Place(str(tmp_path))
    for version in range(8):
        if version > 1:
            store._warm.clear()
        sizes = put_ten(place, version)
    assert sizes == [10] * 8
    # Begun at version 1.
    later.work(1)
    store._warm.clear()
    assert put_ten(place, 8) == [20, *[10] * 7]


@pytest.mark.parametrize("stays", [True, False], ids=["one worker", "always another"])
def test_runs_do_not_become_many_if_nobody_merges_them(
    tmp_path: Path, later: Later, stays: bool
) -> None:
    most = 0
    for version in range(80):
        if not stays:
            store._warm.clear()
        most = max(most, len(put_ten(Place(str(tmp_path)), version)))
    assert later.merges
    assert most <= keyed._MOST_RUNS + 2


@given(steps=STEPS)
@settings(max_examples=examples(6))
def test_keys_with_the_same_hash_stay_apart(
    tmp_path_factory: pytest.TempPathFactory, steps: Any
) -> None:
    def few(columns: Any) -> Any:
        return hashing.hashes(columns) % np.uint64(3)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "hashes", few)
        patch.setattr("penstock.spark.state.keyed.hashes", few)
        follow(tmp_path_factory.mktemp("state"), steps)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.int8(), [0, None, -1]),
        (pa.uint64(), [0, None, 2**64 - 1]),
        (pa.float64(), [0.0, None, float("inf"), 1e-300]),
        (pa.float32(), [0.5, None]),
        (pa.bool_(), [True, False, None]),
        (pa.decimal128(38, 3), [Decimal(0), None, Decimal("-12345678901234567890.125")]),
        (pa.date32(), [0, None, 5]),
        (pa.time64("us"), [0, None, 5]),
        (pa.duration("us"), [0, None, 5]),
        (pa.large_string(), ["", None, "x"]),
        (pa.binary(3), [b"abc", None, b"abd"]),
        (pa.string_view(), ["", None, "more than twelve bytes"]),
        (pa.dictionary(pa.int32(), pa.string()), ["a", None, "b"]),
        (INNER, [None, {"a": None, "b": None}, {"a": 1, "b": ""}, {"a": 0, "b": None}]),
        (pa.list_(pa.int32()), [None, [], [None], [1, 2]]),
        (pa.null(), [None]),
    ],
)
def test_keys_of_all_types(kind: pa.DataType, values: list[Any]) -> None:
    column = pa.array(values, kind)
    # A slice of something larger is the same key.
    padded = pa.concat_arrays([column, column]).slice(len(column))
    assert (hashing.hashes([column]) == hashing.hashes([padded])).all()
    assert len(set(hashing.hashes([column]).tolist())) == len(values)
    for one in range(len(values)):
        for other in range(len(values)):
            alike = hashing.same([column.slice(one, 1)], [padded.slice(other, 1)])
            assert alike.tolist() == [one == other]


def test_floats_that_are_equal_are_one_key() -> None:
    column = pa.array([0.0, -0.0, float("nan"), -float("nan")])
    assert len(set(hashing.hashes([column]).tolist())) == 2


@pytest.mark.parametrize("merged_after", [None, 1, 2, 5], ids=lambda each: f"after {each}")
def test_files_do_not_pile_up_and_old_versions_can_be_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, merged_after: int | None
) -> None:
    """Whether runs are merged at once, or so many versions later, when others may be forgotten."""
    later = Later()
    if merged_after is not None:
        monkeypatch.setattr(keyed, "_FEW", 0)
        monkeypatch.setattr(store, "_merging", later)
    monkeypatch.setattr(store, "_forget_soon", store._forget)
    place = Place(str(tmp_path))
    schema = pa.schema([("n", pa.int64()), ("total", pa.int64())])
    for version in range(60):
        with opened(place, 0, version) as state:
            kept = state.table("rows", schema, ["n"])
            keys = pa.table({"n": np.arange(version, version + 50)})
            before = kept.get(keys)["total"].fill_null(0)
            kept.put(keys.append_column("total", pa.compute.add(before, 1)))
        if merged_after is not None and version % merged_after == 0:
            later.work(1)
        names = [file.name for file in (tmp_path / "0").iterdir()]
        # With those that wait to be merged.
        assert len(names) <= (12 if merged_after is None else 20)
    assert (later.merges > 0) == (merged_after is not None)
    # The same number once more, as after a failure: from the state before it.
    store._warm.clear()
    with opened(place, 0, 59) as state:
        kept = state.table("rows", schema, ["n"])
        assert len(kept) == 108
        assert kept.get(pa.table({"n": [58]}))["total"].to_pylist() == [50]


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    place = Place(str(tmp_path))
    schema = pa.schema([("n", pa.int64())])
    state = State()
    kept = state.table("rows", schema, ["n"])
    with pytest.raises(StateError, match=r"key \{'n': 1\} were put into one table at once"):
        kept.put(pa.table({"n": [1, 2, 1]}))
    with pytest.raises(StateError, match="was kept with the key n"):
        state.table("rows", pa.schema([("n", pa.string())]), ["n"])
    with opened(place, 3, 0) as fresh:
        fresh.table("rows", schema, ["n"]).put(pa.table({"n": [1]}))
    [file] = (tmp_path / "3").iterdir()
    file.write_bytes(file.read_bytes()[:-5])
    store._warm.clear()
    with pytest.raises(StateError, match="is damaged") as caught, opened(place, 3, 1):
        pass
    assert "flows reset" in caught.value.advice
    with pytest.raises(StateError, match="cannot be used for state"):
        Files("nowhere://x/y")


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / ".beside-1-old", tmp_path / ".beside-1-new"
    for each in (old, new):
        each.touch()
    os.utime(old, (1, 1))
    files = Files(str(tmp_path))
    assert files.names() == {}
    files.sweep()
    assert not old.exists()
    assert new.exists()


def test_state_in_a_store_that_is_a_url(tmp_path: Path) -> None:
    files = Files(f"file://{tmp_path}/there")
    assert files.is_local
    # As a store behind an interface: the same files through pyarrow.
    from pyarrow import fs

    other = Files(str(tmp_path / "far"))
    other._store = fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem())
    other._path = "far"
    other.write("a/b", b"data")
    assert bytes(other.read("a/b")) == b"data"
    assert other.names("a") == {"b": 4}
    assert (other.is_there("a/b"), other.is_there("a/c")) == (True, False)
    other.remove("a/b")
    other.remove("a/b")
    other.remove_folder("a")
    assert other.names("a") == {}


def test_of_several_tries_of_a_version_the_last_counts(tmp_path: Path) -> None:
    """A table that a flow looks up may have changed in between: the output is of the last try."""
    place = Place(str(tmp_path))
    for number in range(20):
        with opened(place, 0, 0) as state:
            state.keep("tries", pa.table({"number": [number]}))
        store._warm.clear()
        with opened(place, 0, 1) as state:
            kept = state.value("tries")
            assert kept is not None
            assert kept["number"].to_pylist() == [number]


@settings(max_examples=examples(50))
@given(
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9) | st.integers(2**64 - 9, 2**64 - 1)),
    st.lists(st.integers(0, 2**64 - 1) | st.integers(0, 9)),
    st.integers(1, 40),
)
def test_hashes_are_sorted_and_found_as_numpy_does(
    there: list[int], asked: list[int], times: int
) -> None:
    """Evenly spread or not, and with many that are the same."""
    unsorted = np.array(there * times, np.uint64)
    order = runs.order_of(unsorted)
    assert order.tolist() == np.argsort(unsorted, kind="stable").tolist()
    numbers = np.array(asked + there, np.uint64)
    if there:
        found = runs.first_at_least(unsorted[order], numbers)
        assert found.tolist() == np.searchsorted(unsorted[order], numbers).tolist()
