"""What the demo shows: rates, lag, the latest results, alerts. Live on a terminal, else lines."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import orjson

from penstock.cli import output
from penstock.cli.run_view import duration, line, rate
from penstock.cli.sinks_view import behind
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message
    from rich.console import RenderableType

    from penstock.sinks.spec import SinkSpec

RESULTS: Final = (
    "shop.clicks.enriched", "shop.top", "shop.carts.abandoned", "shop.payments.suspicious",
    "shop.searches.found",
)  # fmt: skip
LOOK_S: Final = 1.0
LINES_S: Final = 5.0
RATE_S: Final = 5.0
ALERTS: Final = 6


@dataclass(slots=True)
class Seen:
    """All that is known of the demo at a moment."""

    flows: list[dict[str, Any]] = field(default_factory=list)
    sinks: list[dict[str, Any]] = field(default_factory=list)
    # What the shop has done, over all of its lives, and how much of it in a second.
    done: Counter[str] = field(default_factory=Counter)
    rates: dict[str, float] = field(default_factory=dict)
    results: Counter[str] = field(default_factory=Counter)
    revenue: list[tuple[str, int, int]] = field(default_factory=list)
    top: list[tuple[int, int]] = field(default_factory=list)
    alerts: deque[str] = field(default_factory=lambda: deque(maxlen=ALERTS))
    restarts: int = 0
    memory: int = 0
    first_s: float | None = None
    # The shop is closed: nothing is done there any more.
    closed: bool = False


class Shopkeeper:
    """Adds up what the shop tells of itself; a shop that was started again begins at nothing."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen
        self._before: Counter[str] = Counter()
        self._now: Counter[str] = Counter()
        self._moments: deque[tuple[float, Counter[str]]] = deque(maxlen=60)
        self.heard = threading.Event()

    def started(self) -> None:
        self._before += self._now
        self._now = Counter()
        self._forget_rates()

    def closed(self) -> None:
        """What it did in a second is nothing of now."""
        self._seen.closed = True
        self._forget_rates()

    def _forget_rates(self) -> None:
        self._moments.clear()
        self._seen.rates = {}

    def hear(self, text: str) -> None:
        try:
            told = orjson.loads(text)
        except orjson.JSONDecodeError:
            return
        if not isinstance(told, dict):
            return
        self._now = Counter(told)
        total = self._before + self._now
        now = time.monotonic()
        while self._moments and now - self._moments[0][0] > RATE_S:
            self._moments.popleft()
        if self._moments:
            since, then = self._moments[0]
            took = max(now - since, 0.001)
            self._seen.rates = {kind: (total[kind] - then[kind]) / took for kind in total}
        self._moments.append((now, total))
        self._seen.done = total
        self.heard.set()


class Watcher:
    """Looks at everything once a second, on a thread of its own; a context manager."""

    def __init__(
        self, seen: Seen, folder: Path, bootstrap: str, specs: Sequence[SinkSpec],
        memory: Callable[[], int], began: float,
    ) -> None:  # fmt: skip
        self._seen = seen
        self._folder = folder
        self._bootstrap = bootstrap
        self._specs = {each.name: each for each in specs}
        self._memory = memory
        self._stop = threading.Event()
        self._began = began
        self._thread = threading.Thread(target=self._watch, name="demo-watch", daemon=True)
        self.is_running = False
        # Up to where the results are counted, wherever that was the end.
        self._counted: dict[tuple[str, int], int] = {}

    def has_counted(self, ends: Mapping[tuple[str, int], int]) -> bool:
        """Whether all results up to these ends are among those that are seen."""
        counted = dict(self._counted)
        return all(counted.get(place, -1) >= end for place, end in ends.items())

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _watch(self) -> None:
        from penstock.cli.kafka import Connection

        consumer = Connection(self._bootstrap, {}).consumer()
        assigned = False
        looks = 0
        while not self._stop.wait(LOOK_S):
            self._look_at_flows()
            with contextlib.suppress(Exception):
                if not assigned:
                    assigned = _assign(consumer)
                else:
                    self._look_at_results(consumer)
            self._look_at_revenue()
            if looks % 5 == 0:
                self._seen.memory = max(self._seen.memory, self._memory())
            looks += 1
        consumer.close()

    def _look_at_flows(self) -> None:
        from penstock.spark.flows.control import ask
        from penstock.spark.flows.folder import Folder
        from penstock.spark.sinking.folder import SinkFolder

        data = self._folder / ".penstock"
        try:
            self._seen.flows = ask(Folder(data / "flows"), {"do": "list"})
            self._seen.sinks = ask(SinkFolder(data / "sinks"), {"do": "list"})
        except (PenstockError, OSError):
            self.is_running = False
            return
        states = [each["state"] for each in self._seen.flows]
        self.is_running = bool(states) and "starting" not in states

    def _look_at_results(self, consumer: Consumer) -> None:
        from confluent_kafka import KafkaError

        for message in consumer.consume(5000, timeout=0.2):
            error = message.error()
            if error is None and message.value() is not None:
                self._take(message)
            elif error is not None and error.code() == KafkaError._PARTITION_EOF:
                place = str(message.topic()), int(message.partition() or 0)
                self._counted[place] = int(message.offset() or 0)

    def _take(self, message: Message) -> None:
        topic = str(message.topic())
        value = orjson.loads(message.value() or b"null")
        self._seen.results[topic] += 1
        self._first()
        at = time.strftime("%H:%M:%S", time.localtime(message.timestamp()[1] / 1000))
        if topic == "shop.top":
            self._seen.top = [tuple(each.values())[:2] for each in value["top"]]
        elif topic == "shop.carts.abandoned":
            self._seen.alerts.append(
                f"{at} cart of customer {value['customer_id']} with product {value['product_id']} "
                "is abandoned"
            )
        elif topic == "shop.payments.suspicious":
            self._seen.alerts.append(
                f"{at} {value['card']} is suspicious: small amounts, then {money(value['cents'])}"
            )
        elif topic == "shop.searches.found":
            self._seen.alerts.append(
                f"{at} {value['query']}: {value['title']} for {money(value['price_cents'])}"
            )

    def _look_at_revenue(self) -> None:
        spec = self._specs.get("revenue_by_country")
        if spec is None:
            return
        rows: list[tuple[str, int, int]] = []
        with contextlib.suppress(PenstockError), spec.sink() as sink:
            if sink.stored_schema() is not None:
                for batch in sink.scan():
                    rows += [(r["country"], r["orders"], r["cents"]) for r in batch.to_pylist()]
        if rows:
            self._seen.revenue = sorted(rows, key=lambda row: -row[2])
            self._first()

    def _first(self) -> None:
        if self._seen.first_s is None:
            self._seen.first_s = time.monotonic() - self._began


def _assign(consumer: Consumer) -> bool:
    from confluent_kafka import OFFSET_BEGINNING, TopicPartition

    known = consumer.list_topics(timeout=5).topics
    if not all(name in known for name in RESULTS):
        return False
    consumer.assign([TopicPartition(name, number, OFFSET_BEGINNING)
                     for name in RESULTS for number in known[name].partitions])  # fmt: skip
    return True


def money(cents: int) -> str:
    return f"{cents / 100:,.2f}"


class Dashboard:
    """Shows what is seen; a context manager. `show` is called again and again."""

    def __init__(self, seen: Seen, *, plain: bool) -> None:
        self._seen = seen
        self._plain = plain or not sys.stdout.isatty()
        self._live: Any = None
        self._next = 0.0
        self._stage = "starting"

    def __enter__(self) -> Dashboard:
        if not self._plain:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(highlight=False), auto_refresh=False, transient=True)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def stage(self, text: str) -> None:
        """What is being done now."""
        self._stage = text
        if self._live is None:
            line(text)
        else:
            self.show()

    def show(self) -> None:
        if self._live is not None:
            self._live.update(rendered(self._seen, self._stage), refresh=True)
            return
        now = time.monotonic()
        if now >= self._next and self._seen.done:
            self._next = now + LINES_S
            line(told(self._seen))


def told(seen: Seen) -> str:
    """One line of it."""
    parts = [
        "the shop is closed"
        if seen.closed
        else f"{rate(_changes(seen.rates))} changes/s, {rate(seen.rates.get('click', 0))} clicks/s",
        _lag(seen.sinks),
        f"enriched {seen.results['shop.clicks.enriched']:,}",
        f"alerts {_alerts(seen):,}",
    ]
    if seen.revenue:
        country, _, cents = seen.revenue[0]
        parts.append(f"most revenue {country} {money(cents)}")
    return "; ".join(parts)


def _lag(sinks: Sequence[Mapping[str, Any]]) -> str:
    """How far the sinks are behind: of the one that is furthest. What is not known is not said."""
    known = [each for each in sinks if each["lag"] is not None]
    if not known:
        return "sinks have not read anything yet"
    most = max(each["lag"] for each in known)
    if not most:
        return "sinks up to date"
    text = f"sinks {most:,} records"
    late = [each["lag_s"] for each in known if each["lag_s"] is not None]
    return f"{text}, {behind(max(late))} behind" if late else f"{text} behind"


def _changes(counts: Mapping[str, float]) -> float:
    return sum(counts.get(kind, 0) for kind in ("insert", "update", "delete"))


def _alerts(seen: Seen) -> int:
    return sum(seen.results[name] for name in RESULTS[2:])


def rendered(seen: Seen, stage: str) -> RenderableType:
    """All of it, for a terminal."""
    from rich.columns import Columns
    from rich.console import Group
    from rich.text import Text

    busy = (
        f"{rate(_changes(seen.rates))} changes/s   {rate(seen.rates.get('click', 0))} clicks/s   "
        f"{rate(seen.rates.get('payment', 0))} payments/s   "
    )
    head = Text.assemble(
        ("The shop", "bold"), f"  {stage}   {'' if seen.closed else busy}"
        f"{seen.memory / 1e9:.1f} GB" + (f"   {seen.restarts} restarts" if seen.restarts else ""),
    )  # fmt: skip
    flows = output.table(("flow", "state", ">in/s", ">rows out", ">batch", ">late"),
                         map(_flow, seen.flows))  # fmt: skip
    sinks = output.table(("sink", "state", ">put", ">deleted", ">lag", ">behind"),
                         map(_sink, seen.sinks))  # fmt: skip
    most = ((country, f"{orders:,}", money(cents)) for country, orders, cents in seen.revenue[:5])
    revenue = output.table(("country", ">orders", ">revenue"), most)
    top = output.table((">product", ">looked at"), ((str(a), str(b)) for a, b in seen.top))
    alerts = Group(Text("alerts", style="bold"), *(Text(each) for each in seen.alerts))
    return Group(head, Text(), flows, Text(), sinks, Text(),
                 Columns([revenue, top, alerts], padding=(0, 4)))  # fmt: skip


def _flow(status: Mapping[str, Any]) -> tuple[str, ...]:
    numbers = status["progress"]
    return (
        str(status["name"]), str(status["state"]), rate(numbers["in_per_s"]),
        f"{numbers['rows_out']:,}", duration(numbers["batch_ms"]), f"{numbers['late_rows']:,}",
    )  # fmt: skip


def _sink(status: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(status["name"]), str(status["state"]), f"{status['put']:,}", f"{status['deleted']:,}",
        "-" if status["lag"] is None else f"{status['lag']:,}", behind(status["lag_s"]),
    )  # fmt: skip
