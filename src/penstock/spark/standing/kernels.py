"""The loops of standing queries: words of documents by number, and queries asked of documents.

A document has seen a word if the word's stamp is the document's number: so nothing is cleared
between documents. Queries are programs in postfix form over what they look at.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from penstock.records.columns.compiled import helper, kernel

AND: Final = -1
OR: Final = -2
NOT: Final = -3
# How deep a program's stack may be: that of the deepest query.
STACK: Final = 512


@helper
def _hash(data: Any, start: int, end: int, field: int) -> Any:
    found = np.uint64(14695981039346656037) ^ np.uint64(field)
    for at in range(start, end):
        found = (found ^ np.uint64(data[at])) * np.uint64(1099511628211)
    found ^= found >> np.uint64(29)
    return found


@helper
def _is_word(byte: int) -> bool:
    return (97 <= byte <= 122) or (48 <= byte <= 57) or byte == 95 or byte >= 128


@helper
def _find(
    data: Any, start: int, end: int, field: int, slots: Any, own: Any, starts: Any, fields: Any
) -> Any:
    """The number of a word, or -1."""
    mask = len(slots) - 1
    slot = np.int64(_hash(data, start, end, field)) & mask
    while slots[slot] >= 0:
        word = slots[slot]
        if fields[word] == field and starts[word + 1] - starts[word] == end - start:
            at = starts[word]
            same = True
            for each in range(start, end):
                if data[each] != own[at]:
                    same = False
                    break
                at += 1
            if same:
                return word
        slot = (slot + 1) & mask
    return np.int64(-1)


@kernel("void(int64[:], uint8[:], int64[:], int64[:])")
def fill(slots: Any, own: Any, starts: Any, fields: Any) -> None:
    """Put all words into the table by their hashes; no two of them are the same."""
    mask = len(slots) - 1
    for word in range(len(fields)):
        slot = np.int64(_hash(own, starts[word], starts[word + 1], fields[word])) & mask
        while slots[slot] >= 0:
            slot = (slot + 1) & mask
        slots[slot] = word


@kernel(
    "int64(uint8[:], int64[:], boolean[:], int64, boolean, "
    "int64[:], uint8[:], int64[:], int64[:], int64[:], int64[:])"
)
def number(
    data: Any,
    offsets: Any,
    there: Any,
    field: int,
    whole: bool,
    slots: Any,
    own: Any,
    starts: Any,
    fields: Any,
    words: Any,
    ends: Any,
) -> Any:
    """The words of a column of texts, by number: those of each document one after the other.

    With `whole` the whole value is one word. `ends` is where the words of each document end.
    """
    count = np.int64(0)
    for document in range(len(there)):
        if there[document]:
            at, end = offsets[document], offsets[document + 1]
            if whole:
                words[count] = _find(data, at, end, field, slots, own, starts, fields)
                count += 1
                at = end
            while at < end:
                if not _is_word(data[at]):
                    at += 1
                    continue
                first = at
                while at < end and _is_word(data[at]):
                    at += 1
                words[count] = _find(data, first, at, field, slots, own, starts, fields)
                count += 1
        ends[document] = count
    return count


@helper
def _has_phrase(words: Any, start: int, end: int, wanted: Any, first: int, last: int) -> bool:
    for at in range(start, end - (last - first) + 1):
        same = True
        for each in range(first, last):
            if words[at + each - first] != wanted[each]:
                same = False
                break
        if same:
            return True
    return False


@helper
def _holds(
    leaf: int,
    document: int,
    counts: Any,
    seen: Any,
    words: Any,
    bounds: Any,
    phrases: Any,
    phrase_words: Any,
    ranges: Any,
    limits: Any,
    numbers: Any,
) -> Any:
    """Whether a document has what one leaf says: a word, a phrase or a range, in this order."""
    if leaf < counts[0]:
        return seen[leaf] == document
    leaf -= counts[0]
    if leaf < counts[1]:
        first, last, field = phrases[leaf, 0], phrases[leaf, 1], phrases[leaf, 2]
        for each in range(first, last):
            if seen[phrase_words[each]] != document:
                return False
        return _has_phrase(
            words, bounds[field, document], bounds[field, document + 1], phrase_words, first, last
        )
    leaf -= counts[1]
    value = numbers[ranges[leaf, 0], document]
    low, high = limits[leaf, 0], limits[leaf, 1]
    # What has no number is not between any.
    above = value >= low if ranges[leaf, 1] else value > low
    below = value <= high if ranges[leaf, 2] else value < high
    return above and below


@helper
def _gather(
    document: int,
    words: Any,
    bounds: Any,
    numbers: Any,
    seen: Any,
    tried: Any,
    filed: Any,
    filed_at: Any,
    edges: Any,
    edges_at: Any,
    buckets: Any,
    bucketed: Any,
    always: Any,
    candidates: Any,
) -> Any:
    """The queries that a document may match, and how many; its words are stamped on the way."""
    count = 0
    for field in range(bounds.shape[0]):
        for at in range(bounds[field, document], bounds[field, document + 1]):
            word = words[at]
            if word < 0 or seen[word] == document:
                continue
            seen[word] = document
            for each in range(filed_at[word], filed_at[word + 1]):
                query = filed[each]
                if tried[query] != document:
                    tried[query] = document
                    candidates[count] = query
                    count += 1
    for field in range(numbers.shape[0]):
        low, high = edges_at[field], edges_at[field + 1]
        value = numbers[field, document]
        if low == high or np.isnan(value):
            continue
        bucket = low + np.searchsorted(edges[low:high], value, side="right") + field
        for each in range(buckets[bucket], buckets[bucket + 1]):
            query = bucketed[each]
            if tried[query] != document:
                tried[query] = document
                candidates[count] = query
                count += 1
    for each in range(len(always)):
        if tried[always[each]] != document:
            tried[always[each]] = document
            candidates[count] = always[each]
            count += 1
    return count


@helper
def _runs(
    query: int,
    document: int,
    programs: Any,
    program_at: Any,
    stack: Any,
    counts: Any,
    seen: Any,
    words: Any,
    bounds: Any,
    phrases: Any,
    phrase_words: Any,
    ranges: Any,
    limits: Any,
    numbers: Any,
) -> Any:
    """Whether a document matches a query."""
    depth = 0
    for at in range(program_at[query], program_at[query + 1]):
        code = programs[at]
        if code >= 0:
            stack[depth] = _holds(
                code, document, counts, seen, words, bounds, phrases, phrase_words, ranges,
                limits, numbers,
            )  # fmt: skip
            depth += 1
        elif code == -3:
            stack[depth - 1] = not stack[depth - 1]
        elif code == -1:
            depth -= 1
            stack[depth - 1] = stack[depth - 1] and stack[depth]
        else:
            depth -= 1
            stack[depth - 1] = stack[depth - 1] or stack[depth]
    return stack[0]


_I, _II, _FF = "int64[:]", "int64[:,:]", "float64[:,:]"


@kernel(
    f"int64(int64, {_I}, {_I}, {_II}, {_FF}, {_I}, {_I}, {_I}, {_I}, float64[:], {_I}, {_I}, {_I}, "
    f"{_I}, {_I}, {_I}, {_II}, {_I}, {_II}, {_FF}, {_I}, {_I}, {_I}, {_I}, {_I}, {_I})"
)
def ask(
    first: int,
    counts: Any,
    words: Any,
    bounds: Any,
    numbers: Any,
    seen: Any,
    tried: Any,
    filed: Any,
    filed_at: Any,
    edges: Any,
    edges_at: Any,
    buckets: Any,
    bucketed: Any,
    always: Any,
    programs: Any,
    program_at: Any,
    phrases: Any,
    phrase_words: Any,
    ranges: Any,
    limits: Any,
    shown: Any,
    shown_at: Any,
    out_documents: Any,
    out_queries: Any,
    out_leaves: Any,
    out_ends: Any,
) -> Any:
    """Ask documents from `first` on, until all are asked or there is no room for what is found.

    Gives the next document; how much was found is in `counts`.
    """
    candidates = np.empty(len(tried), np.int64)
    stack = np.empty(STACK, np.bool_)
    found, leaves = np.int64(0), np.int64(0)
    documents = bounds.shape[1] - 1
    for document in range(first, documents):
        count = _gather(
            document, words, bounds, numbers, seen, tried, filed, filed_at, edges, edges_at,
            buckets, bucketed, always, candidates,
        )  # fmt: skip
        before, leaves_before = found, leaves
        for each in range(count):
            query = candidates[each]
            if not _runs(
                query, document, programs, program_at, stack, counts, seen, words, bounds, phrases,
                phrase_words, ranges, limits, numbers,
            ):  # fmt: skip
                continue
            room = shown_at[query + 1] - shown_at[query]
            if found == len(out_documents) or leaves + room > len(out_leaves):
                counts[2], counts[3] = before, leaves_before
                # Its stamps would say that it was asked.
                seen[:] = -1
                tried[:] = -1
                return document
            for at in range(shown_at[query], shown_at[query + 1]):
                leaf = shown[at]
                if _holds(
                    leaf, document, counts, seen, words, bounds, phrases, phrase_words, ranges,
                    limits, numbers,
                ):  # fmt: skip
                    out_leaves[leaves] = leaf
                    leaves += 1
            out_documents[found] = document
            out_queries[found] = query
            out_ends[found] = leaves
            found += 1
    counts[2], counts[3] = found, leaves
    return documents
