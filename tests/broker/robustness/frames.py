"""Frames that a broker may be sent: valid ones of every API and version, and damaged ones.

A corpus of valid requests is drawn once, with the names, ids and batches of topics that exist, so
that they get far into the broker. Damaging one is cheap, so a hundred thousand are quickly made.
Everything comes from one seed. Touches nothing but bytes.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from penstock.broker.apis.table import ENDPOINTS
from penstock.records import record
from penstock.records.record import BatchOptions, Record
from penstock.wire import APIS, Api, Message, encoder, request_header
from penstock.wire.message import Field
from tests.wire.samples import Sampler

LENGTH: Final = struct.Struct(">i")
_NAME_FIELDS: Final = {"name", "topic", "topic_name", "resource_name", "key"}
_EXTREMES: Final = (
    b"\xff\xff\xff\xff", b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", b"\x00\x00\x00\x00",
    b"\xff\xff\xff\xff\x07", b"\xff\xff\xff\xff\x0f", b"\x7f\xff", b"\x80\x00", b"\x00", b"\xff",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """What exists on the broker under test: topics by name and id, and the time there."""

    topics: dict[str, UUID]
    now_ms: int


class Corpus(Sampler):
    """Draws valid requests that mention what exists."""

    def __init__(self, seed: int, target: Target) -> None:
        super().__init__("corpus", seed, items_max=2)
        self._target = target
        self._names = [*target.topics, "no-such-topic"]
        self._batches = [self._batch() for _ in range(60)]

    def one(self, field: Field, version: int) -> object:
        rng = self.rng
        if field.type == "string" and field.name in _NAME_FIELDS and rng.random() < 0.8:
            return rng.choice(self._names)
        if field.type == "uuid" and rng.random() < 0.8:
            return rng.choice(list(self._target.topics.values()))
        if field.type == "records":
            return rng.choice(self._batches)
        return super().one(field, version)

    def number(self, name: str, low: int, high: int) -> int:
        if name == "acks":
            return self.rng.choice((-1, 0, 1, 1, -1, 7))
        if name in {"max_wait_ms", "timeout_ms"}:
            return self.rng.choice((0, 0, 1, 2))
        if self.rng.random() < 0.6:
            # Some are without sign.
            return max(low, self.rng.choice((0, 0, 0, 1, 2, -1, -2)))
        return super().number(name, low, high)

    def _batch(self) -> bytes:
        """A valid batch; now and then one whose inside is not."""
        rng = self.rng
        records = [
            Record(at, self._target.now_ms, rng.choice((None, b"key-%d" % rng.randint(0, 9))),
                   rng.choice((None, b"", rng.randbytes(rng.randint(0, 200)))))
            for at in range(rng.randint(1, 5))
        ]  # fmt: skip
        producer_id = rng.choice((-1, -1, -1, 0, 1, rng.getrandbits(40)))
        options = BatchOptions(
            codec=rng.randint(0, 4),
            producer_id=producer_id,
            producer_epoch=-1 if producer_id < 0 else rng.choice((0, 1)),
            base_sequence=-1 if producer_id < 0 else rng.choice((0, 1, 0x7FFFFFFF)),
            transactional=rng.random() < 0.05,
            control=rng.random() < 0.05,
        )
        batch = record.encode(records, options)
        return sealed(rng.randbytes(len(batch) - 61), batch) if rng.random() < 0.1 else batch

    def frame(self, api: Api, version: int) -> bytes:
        """One request, without its length."""
        request = self.message(api.request, version)
        assert isinstance(request, Message)
        header = request_header(
            api.key, version, self.rng.getrandbits(31), self.rng.choice((None, "", "fuzz"))
        )
        return header + encoder(api.request, version)(request)


def sealed(body: bytes, batch: bytes) -> bytes:
    """A batch with another inside, under a checksum that says it is right."""
    from crc32c import crc32c

    raw = bytearray(batch[:61] + body)
    struct.pack_into(">i", raw, 8, len(raw) - 12)
    struct.pack_into(">I", raw, 17, crc32c(memoryview(raw)[21:]))
    return bytes(raw)


def valid_frames(seed: int, target: Target, each: int) -> list[bytes]:
    """Requests of every API in every version that there is, those offered more often."""
    corpus = Corpus(seed, target)
    frames: list[bytes] = []
    for api in APIS.values():
        offered = ENDPOINTS.get(api.key)
        for version in range(api.versions[0], api.unstable_max + 1):
            known = offered is not None and offered.min_version <= version <= offered.max_version
            frames += [corpus.frame(api, version) for _ in range(each if known else 1)]
    return frames


# ---- damage ----------------------------------------------------------------------------------

Damage = Callable[[random.Random, bytes], bytes]


def flip_bits(rng: random.Random, frame: bytes) -> bytes:
    raw = bytearray(frame)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def flip_in_body(rng: random.Random, frame: bytes) -> bytes:
    """Past the header, so that the request is taken for what it was."""
    raw = bytearray(frame)
    for _ in range(rng.choice((1, 1, 2))):
        raw[rng.randrange(min(8, len(raw) - 1), len(raw))] ^= 1 << rng.randrange(8)
    return bytes(raw)


def put_extreme(rng: random.Random, frame: bytes) -> bytes:
    """A count or a length as large, as small or as wrong as can be."""
    extreme = rng.choice(_EXTREMES)
    at = rng.randrange(min(8, len(frame) - 1), len(frame))
    return frame[:at] + extreme + frame[at + len(extreme) :]


def cut(rng: random.Random, frame: bytes) -> bytes:
    return frame[: rng.randint(1, len(frame))]


def extend(rng: random.Random, frame: bytes) -> bytes:
    return frame + rng.randbytes(rng.randint(1, 40))


def repeat_a_piece(rng: random.Random, frame: bytes) -> bytes:
    start = rng.randrange(len(frame))
    end = rng.randint(start, len(frame))
    at = rng.randint(0, len(frame))
    return frame[:at] + frame[start:end] + frame[at:]


def other_api(rng: random.Random, frame: bytes) -> bytes:
    """The same body under another key or version."""
    key = rng.choice((rng.randint(-3, 100), rng.choice(list(ENDPOINTS))))
    return struct.pack(">hh", key, rng.choice((rng.randint(-2, 20), 0x7FFF))) + frame[4:]


def noise(rng: random.Random, frame: bytes) -> bytes:
    """Nothing of the frame stays, but for its beginning now and then."""
    keep = rng.choice((0, 0, 2, 4, 8, 10))
    return frame[:keep] + rng.randbytes(rng.randint(1, 120))


DAMAGES: Final[tuple[Damage, ...]] = (
    flip_bits, flip_in_body, flip_in_body, flip_in_body, flip_in_body, put_extreme, put_extreme,
    cut, extend, repeat_a_piece, other_api, noise,
)  # fmt: skip


def damaged_frames(rng: random.Random, corpus: list[bytes]) -> Iterator[bytes]:
    """Without end."""
    while True:
        yield rng.choice(DAMAGES)(rng, rng.choice(corpus))


def broken_streams(rng: random.Random, corpus: list[bytes]) -> Iterator[bytes]:
    """Bytes that are not a sequence of frames: wrong lengths, halves, noise. Without end."""
    lengths = (-1, 0, -0x80000000, 0x7FFFFFFF, 100 << 20, (100 << 20) + 1)
    while True:
        frame = rng.choice(corpus)
        whole = LENGTH.pack(len(frame)) + frame
        match rng.randrange(5):
            case 0:
                yield LENGTH.pack(rng.choice(lengths)) + frame
            case 1:
                yield whole[: rng.randrange(1, len(whole))]
            case 2:
                yield LENGTH.pack(len(frame) + rng.choice((-3, -1, 1, 5, 1000))) + frame
            case 3:
                yield rng.randbytes(rng.randint(1, 300))
            case _:
                yield whole * rng.randint(1, 3) + whole[: rng.randrange(1, len(whole))]
