"""Reads topics for tests with the plain decoder; and a cluster behind a proxy."""

from __future__ import annotations

from penstock.client.connection import Address, Cluster, Connection, parse_bootstrap
from penstock.client.fetching import Fetcher
from penstock.client.metadata import LATEST, Isolation, Metadata, Place, offsets
from penstock.records.batch import headers
from penstock.records.control import read_marker
from penstock.records.record import Record, decode
from penstock.testing.tcp_proxy import TcpProxy


class Through(Cluster):
    """A cluster of one, reached through a proxy only, wherever the broker says that it is."""

    def __init__(self, proxy: TcpProxy) -> None:
        super().__init__(proxy.address)
        (self._proxy,) = parse_bootstrap(proxy.address)

    def connect(self, address: Address, *, timeout_s: float | None = None) -> Connection:
        return super().connect(self._proxy, timeout_s=timeout_s)


def read_topic(
    cluster: Cluster, topic: str, isolation: Isolation = "read_committed", *, settled: bool = True
) -> dict[int, list[Record]]:
    """All records of a topic by partition; aborted and control records left out if committed.

    Kafka answers a commit a moment before readers see it: `settled` waits until they do.
    """
    places = [(topic, number) for number in Metadata(cluster).partitions(topic)]
    to: Isolation = "read_uncommitted" if settled else isolation
    ends = offsets(cluster, dict.fromkeys(places, LATEST), isolation=to)
    positions: dict[Place, int] = {place: 0 for place, end in ends.items() if end}
    found: dict[int, list[Record]] = {number: [] for _, number in places}
    with Fetcher(cluster, isolation=isolation) as fetcher:
        while positions:
            for place, fetched in fetcher.fetch(positions, 1000).items():
                at, records = take(fetched.data, positions[place], fetched.aborted)
                found[place[1]] += records
                positions[place] = at
                if at >= ends[place]:
                    del positions[place]
    return found


def take(
    data: memoryview, position: int, aborted: tuple[tuple[int, int], ...]
) -> tuple[int, list[Record]]:
    """The next position, and the records from the old one on."""
    records: list[Record] = []
    starts = sorted(aborted, key=lambda item: item[1])
    skipping: set[int] = set()
    for at, header in headers(data):
        while starts and starts[0][1] <= header.last_offset:
            skipping.add(starts.pop(0)[0])
        batch = data[at : at + header.size]
        if header.is_control:
            marker = read_marker(batch)
            if marker is not None and not marker.commit:
                skipping.discard(header.producer_id)
        elif not (header.is_transactional and header.producer_id in skipping):
            records += [record for record in decode(batch) if record.offset >= position]
        position = max(position, header.next_offset)
    return position, records


def values(cluster: Cluster, topic: str, isolation: Isolation = "read_committed") -> list[bytes]:
    """The values of all partitions, one partition after the other."""
    found = read_topic(cluster, topic, isolation)
    return [record.value or b"" for number in sorted(found) for record in found[number]]
