"""Many queries as one index: which of them a document may match, and which it does.

A query is filed under words of which any document that matches has at least one: for A AND B the
rarer of both will do, for A OR B both are needed. Only documents that have one of these words are
asked the query itself. Where a query has no such words it is filed under a range of numbers, by
buckets; what has neither (NOT acme) is asked of every document. Rare is what few of the documents
seen so far have: it decides how fast it is, and never what is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.standing import kernels
from penstock.spark.standing.query import (
    All,
    Either,
    Kind,
    Leaf,
    Node,
    Not,
    Phrase,
    Range,
    Word,
    leaves,
)
from penstock.spark.standing.words import plain

# How many bounds of ranges make buckets, at most.
MAX_EDGES: Final = 256
# After so many documents it is looked again which words are rare; then after twice as many.
FIRST_LOOK: Final = 1
# What a kernel may find before it gives it out.
_ROOM: Final = 1 << 18
_MAX_SAMPLE: Final = 4_096


class Found(NamedTuple):
    """Pairs of a document and a query, and for each what of the query holds."""

    documents: Any
    queries: Any
    matched: pa.Array


class Cover(NamedTuple):
    """Leaves of which a matching document has at least one, and how many documents do."""

    weight: float
    leaves: tuple[Leaf, ...]


@dataclass(slots=True)
class Index:
    """Queries by number, ready to be asked."""

    fields: Mapping[str, Kind]
    queries: Sequence[Node]
    words: dict[tuple[str, str], int] = field(default_factory=dict)
    phrases: dict[Phrase, int] = field(default_factory=dict)
    ranges: dict[Range, int] = field(default_factory=dict)
    # How many documents were looked at for what is rare, and how many had each word.
    looked: int = 0
    _next_look: int = FIRST_LOOK
    _arrays: dict[str, Any] = field(default_factory=dict)
    _texts: list[str] = field(default_factory=list)
    _numbers: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._texts = [each for each, kind in self.fields.items() if kind in {"text", "keyword"}]
        self._numbers = [each for each, kind in self.fields.items() if kind in {"number", "time"}]
        for query in self.queries:
            for leaf in leaves(query):
                self._intern(leaf)
        self._compile_leaves()
        self._compile_programs()

    # ---- once ----------------------------------------------------------------------------

    def _intern(self, leaf: Leaf) -> None:
        if isinstance(leaf, Word):
            self.words.setdefault((leaf.field, leaf.word), len(self.words))
        elif isinstance(leaf, Range):
            self.ranges.setdefault(leaf, len(self.ranges))
        elif leaf not in self.phrases:
            self.phrases[leaf] = len(self.phrases)
            for word in leaf.words:
                self.words.setdefault((leaf.field, word), len(self.words))

    def _number(self, leaf: Leaf) -> int:
        if isinstance(leaf, Word):
            return self.words[leaf.field, leaf.word]
        if isinstance(leaf, Phrase):
            return len(self.words) + self.phrases[leaf]
        return len(self.words) + len(self.phrases) + self.ranges[leaf]

    def _compile_leaves(self) -> None:
        own = [word.encode() for _, word in self.words]
        size = 1 << max(4, (2 * len(own)).bit_length())
        self._arrays |= {
            "slots": np.full(size, -1, np.int64),
            "own": np.frombuffer(bytearray(b"".join(own) or b" "), np.uint8),
            "starts": _ends([len(each) for each in own]),
            "fields": _ints(self._texts.index(name) for name, _ in self.words),
        }
        arrays = self._arrays
        kernels.fill(arrays["slots"], arrays["own"], arrays["starts"], arrays["fields"])
        at = 0
        spans, members = [], list[int]()
        for phrase in self.phrases:
            members += [self.words[phrase.field, word] for word in phrase.words]
            spans.append((at, len(members), self._texts.index(phrase.field)))
            at = len(members)
        arrays["phrases"] = np.array(spans, np.int64).reshape(-1, 3)
        arrays["phrase_words"] = _ints(members)
        arrays["ranges"] = np.array(
            [(self._numbers.index(r.field), r.with_low, r.with_high) for r in self.ranges], np.int64
        ).reshape(-1, 3)
        arrays["limits"] = np.array([(r.low, r.high) for r in self.ranges], np.float64).reshape(
            -1, 2
        )
        told = [Word(*each) for each in self.words] + [*self.phrases, *self.ranges]
        arrays["texts"] = pa.array([str(each) for each in told], pa.string())
        arrays["frequency"] = np.zeros(len(self.words), np.int64)

    def _compile_programs(self) -> None:
        programs = list[list[int]]()
        shown = list[list[int]]()
        for query in self.queries:
            made, positive = list[int](), dict[int, None]()
            self._write(query, made, positive, wanted=True)
            programs.append(made)
            shown.append(list(positive))
        self._arrays["programs"] = _ints(code for each in programs for code in each)
        self._arrays["program_at"] = _ends([len(each) for each in programs])
        self._arrays["shown"] = _ints(leaf for each in shown for leaf in each)
        self._arrays["shown_at"] = _ends([len(each) for each in shown])

    def _write(
        self, node: Node, program: list[int], positive: dict[int, None], *, wanted: bool
    ) -> None:
        if isinstance(node, Not):
            self._write(node.inner, program, positive, wanted=not wanted)
            program.append(kernels.NOT)
        elif isinstance(node, All | Either):
            for at, each in enumerate(node.parts):
                self._write(each, program, positive, wanted=wanted)
                if at:
                    program.append(kernels.AND if isinstance(node, All) else kernels.OR)
        else:
            number = self._number(node)
            program.append(number)
            if wanted:
                positive[number] = None

    # ---- filing --------------------------------------------------------------------------

    def _cover(self, node: Node, weights: Any) -> Cover | None:
        """The cheapest leaves that a matching document must have one of; None if there are none."""
        if isinstance(node, Not):
            return None
        if isinstance(node, All):
            covers = [self._cover(each, weights) for each in node.parts]
            there = [each for each in covers if each is not None]
            return min(there, key=lambda each: each.weight) if there else None
        if isinstance(node, Either):
            covers = [self._cover(each, weights) for each in node.parts]
            there = [each for each in covers if each is not None]
            if len(there) < len(covers):
                return None
            every = tuple(leaf for each in there for leaf in each.leaves)
            return Cover(sum(each.weight for each in there), every)
        if isinstance(node, Phrase):
            known = [Word(node.field, each) for each in node.words]
            rarest = min(known, key=lambda each: float(weights[self._number(each)]))
            return Cover(float(weights[self._number(rarest)]), (rarest,))
        return Cover(float(weights[self._number(node)]), (node,))

    def _file(self, numbers: Any) -> None:
        """Put each query where documents find it, by what is rare now."""
        weights = self._weights(numbers)
        by_word: list[list[int]] = [[] for _ in self.words]
        by_range = list[tuple[int, Range]]()
        always = list[int]()
        for at, query in enumerate(self.queries):
            cover = self._cover(query, weights)
            if cover is None:
                always.append(at)
                continue
            for leaf in cover.leaves:
                if isinstance(leaf, Range):
                    by_range.append((at, leaf))
                else:
                    by_word[self._number(leaf)].append(at)
        self._arrays["filed"] = _ints(query for each in by_word for query in each)
        self._arrays["filed_at"] = _ends([len(each) for each in by_word])
        self._arrays["always"] = _ints(always)
        self._file_ranges(by_range)

    def _weights(self, numbers: Any) -> Any:
        """Of each leaf, how many of the documents seen so far have it, about."""
        weights = np.zeros(len(self.words) + len(self.phrases) + len(self.ranges), np.float64)
        weights[: len(self.words)] = self._arrays["frequency"]
        start = len(self.words) + len(self.phrases)
        sample = [
            np.sort(each[~np.isnan(each)][:_MAX_SAMPLE]) if numbers.shape[1] else each
            for each in numbers
        ]
        for wanted, at in self.ranges.items():
            known = sample[self._numbers.index(wanted.field)]
            inside = np.searchsorted(known, wanted.high, "right") - np.searchsorted(
                known, wanted.low
            )
            # Rather by a word: a bucket has more than the range.
            weights[start + at] = (inside + 1) / max(1, len(known)) * max(1, self.looked) * 1.5
        return weights

    def _file_ranges(self, filed: Sequence[tuple[int, Range]]) -> None:
        edges_of, edges_at, buckets = [], [0], [0]
        bucketed = list[int]()
        for name in self._numbers:
            mine = [(query, wanted) for query, wanted in filed if wanted.field == name]
            bounds = np.array([(each.low, each.high) for _, each in mine], np.float64).ravel()
            edges = np.unique(bounds[np.isfinite(bounds)])
            if len(edges) > MAX_EDGES:
                edges = edges[np.linspace(0, len(edges) - 1, MAX_EDGES).astype(np.int64)]
            elif not len(edges) and mine:
                edges = np.zeros(1)
            lists: list[list[int]] = [[] for _ in range(len(edges) + 1)]
            for query, wanted in mine:
                low, high = np.searchsorted(edges, [wanted.low, wanted.high], "right")
                for bucket in range(low, high + 1):
                    lists[bucket].append(query)
            edges_of.append(edges)
            edges_at.append(edges_at[-1] + len(edges))
            for each in lists:
                bucketed += each
                buckets.append(len(bucketed))
        self._arrays["edges"] = np.concatenate([*edges_of, np.zeros(0)])
        self._arrays["edges_at"] = _ints(edges_at)
        self._arrays["buckets"] = _ints(buckets)
        self._arrays["bucketed"] = _ints(bucketed)

    # ---- asking --------------------------------------------------------------------------

    def match(self, documents: pa.Table) -> Found:
        """Which documents match which queries."""
        count = len(documents)
        if not count or not self.queries:
            return Found(_ints(()), _ints(()), pa.array([], pa.list_(pa.string())))
        words, bounds = self._words_of(documents)
        numbers = np.full((len(self._numbers), count), np.nan)
        for at, name in enumerate(self._numbers):
            numbers[at] = _values(documents[name])
        if self.looked + count >= self._next_look:
            self._look(words, count)
            self._file(numbers)
        return self._asked(count, words, bounds, numbers)

    def _look(self, words: Any, count: int) -> None:
        known = np.bincount(words[words >= 0], minlength=len(self.words))
        self._arrays["frequency"] = self._arrays["frequency"] + known
        self.looked += count
        self._next_look = self.looked * 4

    def _words_of(self, documents: pa.Table) -> tuple[Any, Any]:
        """All words of all text fields by number, and where those of each document are."""
        arrays = self._arrays
        bounds = np.zeros((len(self._texts), len(documents) + 1), np.int64)
        parts, base = [], 0
        for at, name in enumerate(self._texts):
            whole = self.fields[name] == "keyword"
            column = documents[name].combine_chunks().cast(pa.large_string())
            texts = column if whole else plain(column)
            data, offsets, there = _bytes_of(texts)
            room = len(texts) if whole else int(offsets[-1] - offsets[0]) // 2 + len(texts) + 1
            words, ends = np.empty(room, np.int64), np.empty(len(texts), np.int64)
            count = kernels.number(
                data, offsets, there, at, whole, arrays["slots"], arrays["own"], arrays["starts"],
                arrays["fields"], words, ends,
            )  # fmt: skip
            bounds[at, 0] = base
            bounds[at, 1:] = ends + base
            parts.append(words[:count])
            base += count
        return np.concatenate([*parts, np.zeros(0, np.int64)]), bounds

    def _asked(self, documents: int, words: Any, bounds: Any, numbers: Any) -> Found:
        a = self._arrays
        seen = np.full(max(1, len(self.words)), -1, np.int64)
        tried = np.full(len(self.queries), -1, np.int64)
        room = max(_ROOM, len(self.queries))
        leaf_room = max(2 * _ROOM, len(a["shown"]))
        counts = np.array([len(self.words), len(self.phrases), 0, 0], np.int64)
        if not len(bounds):
            bounds = np.zeros((1, documents + 1), np.int64)
        pairs, others, matched = [], [], []
        at = 0
        while at < documents:
            out = [np.empty(each, np.int64) for each in (room, room, leaf_room, room)]
            at = kernels.ask(
                at, counts, words, bounds, numbers, seen, tried, a["filed"], a["filed_at"],
                a["edges"], a["edges_at"], a["buckets"], a["bucketed"], a["always"], a["programs"],
                a["program_at"], a["phrases"], a["phrase_words"], a["ranges"], a["limits"],
                a["shown"], a["shown_at"], *out,
            )  # fmt: skip
            found, leaf_count = int(counts[2]), int(counts[3])
            pairs.append(out[0][:found])
            others.append(out[1][:found])
            ends = np.concatenate([np.zeros(1, np.int64), out[3][:found]]).astype(np.int32)
            texts = a["texts"].take(pa.array(out[2][:leaf_count]))
            matched.append(pa.ListArray.from_arrays(pa.array(ends), texts))
        return Found(np.concatenate(pairs), np.concatenate(others), pa.concat_arrays(matched))


def _ints(values: Iterable[int]) -> Any:
    return np.fromiter(values, np.int64)


def _ends(lengths: Sequence[int]) -> Any:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(lengths, np.int64))])


def _bytes_of(texts: pa.Array) -> tuple[Any, Any, Any]:
    """The bytes of texts, where each of them starts and ends, and whether there is one."""
    _, ends, data = texts.buffers()
    offsets = np.frombuffer(ends, np.int64)[texts.offset : texts.offset + len(texts) + 1].copy()
    there = pc.is_valid(texts).to_numpy(zero_copy_only=False)
    content = np.frombuffer(data, np.uint8) if data is not None and data.size else np.zeros(1)
    return np.require(content.astype(np.uint8), requirements=["W"]), offsets, there


def _values(column: pa.ChunkedArray) -> Any:
    """Numbers, and times in microseconds; nan where there is none."""
    whole = column.combine_chunks()
    if pa.types.is_timestamp(whole.type):
        whole = whole.cast(pa.timestamp("us", whole.type.tz)).cast(pa.int64())
    elif pa.types.is_date(whole.type):
        whole = whole.cast(pa.timestamp("us")).cast(pa.int64())
    return whole.cast(pa.float64(), safe=False).fill_null(float("nan")).to_numpy(
        zero_copy_only=False
    )  # fmt: skip
