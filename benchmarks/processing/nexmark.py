"""The queries of `examples/nexmark`, beside what Spark's own operators say of the same events."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, Final

from pyspark import cloudpickle
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.broker.clients import ROOT
from benchmarks.broker.workloads import progress
from benchmarks.frame import Asked, Cells
from benchmarks.processing.harness import Bench, Nowhere, Ran, bench, note
from penstock.spark import flow, stream, topic
from penstock.spark.flows.declare import Flow, Stream

PER_BATCH: Final = 100_000
EVENTS: Final = 560_000
LATENESS: Final = "2 seconds"
# A person for fifty events, and three auctions: topics are read in step.
_SHARE: Final = {"nexmark.bid": 46, "nexmark.auction": 3, "nexmark.person": 1}

Plain = Callable[["_Read"], DataFrame]


def _modules() -> tuple[ModuleType, ModuleType]:
    """The example's own modules, which are found from its folder."""
    folder = str(ROOT / "examples" / "nexmark")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    import generator  # type: ignore[import-not-found]
    import queries  # type: ignore[import-not-found]
    import selling  # type: ignore[import-not-found]

    # Spark's workers do not know the folder.
    cloudpickle.register_pickle_by_value(selling)  # type: ignore[no-untyped-call]
    return generator, queries


class _Read:
    """The topics by Spark's own connector."""

    def __init__(self, bench: Bench, per_batch: int) -> None:
        self._bench = bench
        self._per_batch = per_batch
        _, self._q = _modules()

    def _timed(self, name: str, schema: str) -> DataFrame:
        rows = self._bench.read(name, schema, limit(name, self._per_batch))
        return rows.withWatermark("date_time", LATENESS)

    @property
    def raw(self) -> DataFrame:
        name = "nexmark.bid"
        return self._bench.read(name, self._q.BID, limit(name, self._per_batch))

    @property
    def bids(self) -> DataFrame:
        return self._timed("nexmark.bid", self._q.BID)

    @property
    def auctions(self) -> DataFrame:
        return self._timed("nexmark.auction", self._q.AUCTION)

    @property
    def people(self) -> DataFrame:
        return self._timed("nexmark.person", self._q.PERSON)


def limit(name: str, per_batch: int) -> int:
    """How many records of a topic a micro-batch has."""
    return max(1, per_batch * _SHARE[name] // 46)


# ---- plain Spark -------------------------------------------------------------------------


def _same(name: str) -> Plain:
    """The same function of single rows."""

    def rows(read: _Read) -> DataFrame:
        _, queries = _modules()
        found: DataFrame = getattr(queries, name)(read.raw)
        return found

    return rows


def _q5(read: _Read) -> DataFrame:
    window = F.window("date_time", "10 seconds", "2 seconds")
    counts = read.bids.groupBy(window.alias("w"), "auction").count()
    return counts.groupBy(F.window("w", "2 seconds")).agg(F.max_by("auction", "count"))


def _q7(read: _Read) -> DataFrame:
    window = F.window("date_time", "10 seconds")
    return read.bids.groupBy(window).agg(F.max("price"), F.count("*"))


def _q8(read: _Read) -> DataFrame:
    people = read.people.select("id", "name", F.window("date_time", "10 seconds").alias("w"))
    sellers = read.auctions.select("seller", F.window("date_time", "10 seconds").alias("v"))
    return people.join(sellers, F.expr("id = seller AND w = v"))


def _q11(read: _Read) -> DataFrame:
    return read.bids.groupBy(F.session_window("date_time", "10 seconds"), "bidder").count()


def _q12(read: _Read) -> DataFrame:
    rows = read.raw.withWatermark("timestamp", "0 seconds")
    return rows.groupBy(F.window("timestamp", "10 seconds"), "bidder").count()


def _q17(read: _Read) -> DataFrame:
    low, high = _modules()[1].CENTS_OF_RANKS
    price = F.col("price")
    return read.bids.groupBy(F.window("date_time", "1 day"), "auction").agg(
        F.count("*"),
        F.count_if(price < low),
        F.count_if((price >= low) & (price < high)),
        F.count_if(price >= high),
        F.min(price),
        F.max(price),
        F.avg(price),
        F.sum(price),
    )


PLAIN: Final[Mapping[str, Plain]] = {
    **{name: _same(name) for name in ("q0", "q1", "q2", "q14", "q21", "q22")},
    "q5": _q5,
    "q7": _q7,
    "q8": _q8,
    "q11": _q11,
    "q12": _q12,
    "q17": _q17,
}


# ---- ours --------------------------------------------------------------------------------


def _flows(per_batch: int, round_: int) -> dict[str, Flow]:
    _, q = _modules()

    def of(name: str, **more: Any) -> Stream:
        return stream(name, options={"maxOffsetsPerTrigger": str(limit(name, per_batch))}, **more)

    at = {"time": "date_time", "lateness": LATENESS}
    bids = of("nexmark.bid", json=q.BID)
    timed_bids = of("nexmark.bid", json=q.BID, **at)
    clocked_bids = of("nexmark.bid", json=q.BID, time="_timestamp")
    timed_auctions = of("nexmark.auction", json=q.AUCTION, **at)
    timed_people = of("nexmark.person", json=q.PERSON, **at)
    auctions = of("nexmark.auction", changelog=q.AUCTION)
    people = of("nexmark.person", changelog=q.PERSON)
    won = f"winning-{round_}"
    winning = stream(won, changelog="id bigint, category bigint, final bigint", dead_letters=None)
    inputs: dict[str, list[Stream]] = {
        "q0": [bids], "q1": [bids], "q2": [bids], "q3": [auctions, people],
        "q4": [winning], "q5": [timed_bids], "q6": [timed_auctions, timed_bids], "q7": [timed_bids],
        "q8": [timed_people, timed_auctions], "q11": [timed_bids], "q12": [clocked_bids],
        "q13": [bids, auctions], "q14": [bids], "q15": [timed_bids], "q16": [timed_bids],
        "q17": [timed_bids], "q20": [bids, auctions], "q21": [bids], "q22": [bids],
    }  # fmt: skip
    # The first half of q4 is a flow of its own, whose topic the second half reads.
    first = flow(
        inputs=[auctions, bids], output=topic(won, key="_key", compacted=True), name=f"w{round_}"
    )(q.winning)
    found = {"q4_winning": first}
    for name, streams in inputs.items():
        made = flow(inputs=streams, output=Nowhere(), name=f"{name}-{round_}")(getattr(q, name))
        found[name] = made
    order = ["q0", "q1", "q2", "q3", "q4_winning", *list(inputs)[4:]]
    return {name: found[name] for name in order}


def measure(asked: Asked) -> Cells:
    """Each query over the same events, from the start, by turns with Spark's."""
    per_batch = PER_BATCH // 10 if asked.quick else PER_BATCH
    events = EVENTS // 10 if asked.quick else EVENTS
    rounds = min(asked.rounds, 2)
    generator, _ = _modules()
    cells: Cells = {}
    with bench("nexmark") as one:
        house = generator.Auctions(gap_us=100, disorder_us=1_000_000)
        generator.write(one.bootstrap, house, 0, events)
        for turn in range(rounds):
            read = _Read(one, per_batch)
            for name, made in _flows(per_batch, turn).items():
                _run(cells, name, "penstock", partial(one.ours, made))
                if name in PLAIN:
                    _run(cells, name, "plain", partial(_plain, one, name, read))
                shutil.rmtree(one.folder / f"plain-{name}", ignore_errors=True)
                shutil.rmtree(one.folder / f"ours-{made.name}", ignore_errors=True)
    return cells


def _plain(one: Bench, name: str, read: _Read) -> Ran:
    return one.plain(PLAIN[name](read), name)


def _run(cells: Cells, name: str, system: str, job: Callable[[], Ran]) -> None:
    try:
        ran = job()
    except Exception as error:
        # One query less is no reason to lose the others.
        told = (str(error).splitlines() or [""])[0]
        progress(f"  {name} {system} failed: {type(error).__name__}: {told}")
        return
    note(name, system, ran)
    cells.setdefault(name, {}).setdefault(system, []).append(ran.rate)
    cells.setdefault(f"{name}_cpu", {}).setdefault(system, []).append(ran.cpu_us)
