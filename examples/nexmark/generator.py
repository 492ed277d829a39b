"""The auction house of NEXMark: people, auctions and bids, the same ones for every run.

Of fifty events one is a new person, three are auctions, the rest are bids; most bids are on a few
hot auctions, and most auctions are by a few hot sellers. Every field of event *n* is computed from
*n* alone, so any range of events can be made anywhere, in any order, by columns.

    python examples/nexmark/generator.py --events 100000 --bootstrap 127.0.0.1:9092
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import orjson

from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.client.writer import LogWriter

PERSON, AUCTION, BID = "nexmark.person", "nexmark.auction", "nexmark.bid"

PEOPLE_PER_EPOCH: Final = 1
AUCTIONS_PER_EPOCH: Final = 3
EPOCH: Final = 50
FIRST_PERSON, FIRST_AUCTION, FIRST_CATEGORY = 1_000, 1_000, 10
CATEGORIES: Final = 5
# Bids are on the auctions of the last epochs, by the people of the last ones.
OPEN_EPOCHS: Final = 33
ACTIVE_PEOPLE: Final = 1_000
HOT_EVERY: Final = 100
STATES: Final = ("AZ", "CA", "ID", "OR", "WA", "WY")
CITIES: Final = ("Phoenix", "Los Angeles", "Boise", "Portland", "Seattle", "Cheyenne")
FIRST_NAMES: Final = (
    "Ada",
    "Alan",
    "Barbara",
    "Donald",
    "Edsger",
    "Grace",
    "Jim",
    "Leslie",
    "Tony",
)
LAST_NAMES: Final = ("Codd", "Gray", "Hoare", "Hopper", "Knuth", "Lamport", "Liskov", "Turing")
CHANNELS: Final = ("apple", "baidu", "facebook", "google")


@dataclass(frozen=True, slots=True)
class Auctions:
    """The house: when it opened, how far events are apart, how much their times are disordered."""

    opened: datetime = datetime(2026, 1, 1, tzinfo=UTC)
    gap_us: int = 1_000
    # An event may stand this much before its turn in the log.
    disorder_us: int = 0
    seed: int = 7

    def events(self, first: int, last: int) -> Iterator[tuple[str, bytes, dict[str, Any]]]:
        """Events from `first` to before `last`: topic, key, row; in the order of the log."""
        n = np.arange(first, last, dtype=np.int64)
        at = n % EPOCH
        made: dict[int, tuple[str, bytes, dict[str, Any]]] = {}
        kinds = (
            (PERSON, at < PEOPLE_PER_EPOCH, self._people),
            (AUCTION, (at >= PEOPLE_PER_EPOCH) & (at < 4), self._auctions),
            (BID, at >= PEOPLE_PER_EPOCH + AUCTIONS_PER_EPOCH, self._bids),
        )
        for topic, chosen, rows in kinds:
            numbers = n[chosen]
            for number, row in zip(numbers.tolist(), rows(numbers), strict=True):
                key = row.get("id", row.get("auction"))
                made[number] = (topic, str(key).encode(), row)
        for number in range(first, last):
            yield made[number]

    # ---- fields --------------------------------------------------------------------------

    def _random(self, n: np.ndarray, salt: int, below: int | np.ndarray) -> np.ndarray:
        """A number from 0 to before `below` for each event: a hash of its number (splitmix64)."""
        with np.errstate(over="ignore"):
            z = n.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
            z += np.uint64(self.seed * 1_000_003 + salt)
            z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            z ^= z >> np.uint64(31)
        return (z % np.asarray(below, dtype=np.uint64)).astype(np.int64)

    def _times(self, n: np.ndarray) -> list[str]:
        start = int(self.opened.timestamp() * 1_000_000)
        at = start + n * self.gap_us
        if self.disorder_us:
            at -= self._random(n, 99, self.disorder_us + 1)
        return [_text(each) for each in at.tolist()]

    def _last_person(self, n: np.ndarray) -> np.ndarray:
        """The newest person before each event."""
        return n // EPOCH * PEOPLE_PER_EPOCH

    def _last_auction(self, n: np.ndarray) -> np.ndarray:
        """The newest auction before each event; of the first events, the first auction."""
        within = np.clip(n % EPOCH - PEOPLE_PER_EPOCH, -1, AUCTIONS_PER_EPOCH - 1)
        last: np.ndarray = np.maximum(n // EPOCH * AUCTIONS_PER_EPOCH + within, 0)
        return last

    def _someone(self, n: np.ndarray, salt: int) -> np.ndarray:
        newest = self._last_person(n)
        hot = newest // HOT_EVERY * HOT_EVERY
        any_ = newest - self._random(n, salt, np.minimum(newest, ACTIVE_PEOPLE) + 1)
        chosen = np.where(self._random(n, salt + 1, 4) > 0, hot, any_)
        found: np.ndarray = FIRST_PERSON + chosen
        return found

    def _people(self, n: np.ndarray) -> Iterator[dict[str, Any]]:
        state = self._random(n, 1, len(STATES)).tolist()
        first = self._random(n, 2, len(FIRST_NAMES)).tolist()
        last = self._random(n, 3, len(LAST_NAMES)).tolist()
        card = self._random(n, 4, 10**16).tolist()
        ids = (FIRST_PERSON + self._last_person(n)).tolist()
        for at, time in enumerate(self._times(n)):
            name = f"{FIRST_NAMES[first[at]]} {LAST_NAMES[last[at]]}"
            yield {
                "id": ids[at],
                "name": name,
                "email": f"{name.replace(' ', '.').lower()}@example.com",
                "credit_card": f"{card[at]:016d}",
                "city": CITIES[state[at]],
                "state": STATES[state[at]],
                "date_time": time,
            }

    def _auctions(self, n: np.ndarray) -> Iterator[dict[str, Any]]:
        category = (FIRST_CATEGORY + self._random(n, 11, CATEGORIES)).tolist()
        initial = self._price(n, 12).tolist()
        reserve = self._price(n, 13).tolist()
        seller = self._someone(n, 14).tolist()
        ids = (FIRST_AUCTION + self._last_auction(n)).tolist()
        # Most end while their neighbours are still open.
        open_us = self._random(n, 16, OPEN_EPOCHS * EPOCH * self.gap_us) + 1
        start = int(self.opened.timestamp() * 1_000_000)
        expires = [_text(each) for each in (start + n * self.gap_us + open_us).tolist()]
        for at, time in enumerate(self._times(n)):
            yield {
                "id": ids[at],
                "item_name": f"item {ids[at]}",
                "initial_bid": initial[at],
                "reserve": initial[at] + reserve[at],
                "date_time": time,
                "expires": expires[at],
                "seller": seller[at],
                "category": category[at],
            }

    def _bids(self, n: np.ndarray) -> Iterator[dict[str, Any]]:
        newest = self._last_auction(n)
        hot = newest // HOT_EVERY * HOT_EVERY
        recent = np.minimum(newest, OPEN_EPOCHS * AUCTIONS_PER_EPOCH) + 1
        any_ = newest - self._random(n, 21, recent)
        auction = (
            FIRST_AUCTION + np.where(self._random(n, 22, 2) > 0, np.maximum(hot, 0), any_)
        ).tolist()
        bidder = self._someone(n, 23).tolist()
        price = self._price(n, 25).tolist()
        channel = self._random(n, 26, len(CHANNELS)).tolist()
        page = self._random(n, 27, 10**6).tolist()
        for at, time in enumerate(self._times(n)):
            name = CHANNELS[channel[at]]
            yield {
                "auction": auction[at],
                "bidder": bidder[at],
                "price": price[at],
                "channel": name,
                "url": f"https://www.example.com/{name}/item.htm?query=1&channel_id={page[at]}",
                "date_time": time,
            }

    def _price(self, n: np.ndarray, salt: int) -> np.ndarray:
        """Cents; each factor of ten is as likely as another."""
        return np.round(100 * 10 ** (self._random(n, salt, 10**6) / 10**6 * 6)).astype(np.int64)


def _text(at_us: int) -> str:
    return datetime.fromtimestamp(at_us / 1_000_000, UTC).isoformat(timespec="microseconds")


def write(bootstrap: str, house: Auctions, first: int, last: int, *, partitions: int = 2) -> None:
    """Write events to the three topics, each in the order of the house."""
    with Cluster(bootstrap) as cluster:
        for topic in (PERSON, AUCTION, BID):
            create(cluster, topic, partitions=partitions, exists_ok=True)
        with LogWriter(cluster) as writer:
            step = 20_000
            for begin in range(first, last, step):
                batch: dict[str, tuple[list[bytes], list[bytes]]] = {}
                for topic, key, row in house.events(begin, min(begin + step, last)):
                    keys, values = batch.setdefault(topic, ([], []))
                    keys.append(key)
                    values.append(orjson.dumps(row))
                for topic, (keys, values) in batch.items():
                    writer.write(topic, keys, values)
            writer.flush()


def main() -> None:
    """Fill the topics of a broker."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bootstrap", default="127.0.0.1:9092")
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--gap-us", type=int, default=1_000, help="time between two events")
    parser.add_argument("--disorder-us", type=int, default=0)
    parser.add_argument("--partitions", type=int, default=2)
    given = parser.parse_args()
    house = Auctions(gap_us=given.gap_us, disorder_us=given.disorder_us)
    write(given.bootstrap, house, given.first, given.first + given.events,
          partitions=given.partitions)  # fmt: skip
    print(f"wrote {given.events:,} events to {PERSON}, {AUCTION} and {BID}")


if __name__ == "__main__":
    main()
