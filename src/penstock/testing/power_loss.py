"""What a power loss leaves of files and folders: the state under a `SimulatedDisk`.

A file has the content that processes see, the content that is safe, and the changes between the
two; a folder has the same of its names. Everything here is a function of that state and a source
of randomness. What may be left is said in `faults`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

# Small, so that the little files of tests span several.
PAGE_BYTES: Final = 512


@dataclass(frozen=True, slots=True)
class Write:
    position: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Truncate:
    size: int


class Node:
    """A file's content, by whatever name: as seen now, as safe, and what lies between."""

    __slots__ = ("content", "durable", "linked", "pending")

    def __init__(self, content: bytes = b"") -> None:
        self.content = bytearray(content)
        self.durable = bytearray(content)
        self.pending: list[Write | Truncate] = []
        self.linked = False


class Folder:
    """Names in a folder. A pending change sets names to what they mean after it, None for gone."""

    __slots__ = ("durable", "names", "pending")

    def __init__(self) -> None:
        self.names: dict[str, Node | Folder] = {}
        self.durable: dict[str, Node | Folder] = {}
        self.pending: list[dict[str, Node | Folder | None]] = []

    def change(self, change: dict[str, Node | Folder | None]) -> None:
        _apply_names(self.names, change)
        self.pending.append(change)


@dataclass(slots=True)
class State:
    """What outlives a process: the tree, and how much of the device is used."""

    root: Folder = field(default_factory=Folder)
    used_bytes: int = 0


# ---- contents ----------------------------------------------------------------------------


def set_size(content: bytearray, size: int, fill: bytes = b"\x00") -> None:
    if size < len(content):
        del content[size:]
    elif size > len(content):
        missing = size - len(content)
        content += (fill * (missing // len(fill) + 1))[:missing]


def write_into(content: bytearray, data: bytes, position: int, fill: bytes = b"\x00") -> int:
    """Returns by how much the file grew."""
    before = len(content)
    if position > before:
        set_size(content, position, fill)
    content[position : position + len(data)] = data
    return len(content) - before


def apply(content: bytearray, change: Write | Truncate, fill: bytes = b"\x00") -> None:
    if isinstance(change, Write):
        write_into(content, change.data, change.position, fill)
    else:
        set_size(content, change.size)


def surviving_content(node: Node, rng: random.Random) -> bytearray:
    """What a power loss leaves of a file."""
    content = bytearray(node.durable)
    if not node.pending:
        return content
    fill = b"\x00" if rng.random() < 0.5 else rng.randbytes(251)
    style = rng.choice(("nothing", "everything", "prefix", "pages", "pages", "size-first"))
    if style == "everything":
        for change in node.pending:
            apply(content, change)
    elif style == "prefix":
        *whole, torn = node.pending[: rng.randint(1, len(node.pending))]
        for change in whole:
            apply(content, change)
        if isinstance(torn, Write):
            write_into(content, torn.data[: rng.randint(0, len(torn.data))], torn.position)
    elif style != "nothing":
        truncations = [at for at, c in enumerate(node.pending) if isinstance(c, Truncate)]
        # Metadata goes to disk in order: choose where it stopped.
        stops = [*truncations, len(node.pending)]
        reached = node.pending[: rng.choice(stops)]
        share = rng.choice((0.2, 0.5, 0.9))
        for change in reached:
            if isinstance(change, Truncate):
                set_size(content, change.size)
            else:
                for piece in _torn_pages(change, share, rng):
                    write_into(content, piece.data, piece.position, fill)
        if style == "size-first":
            ends = [c.position + len(c.data) for c in reached if isinstance(c, Write)]
            set_size(content, max([len(content), *ends[-1:]]), fill)
    return content


def content_after_failed_sync(node: Node, rng: random.Random) -> bytearray:
    """Data may be lost, but not metadata: that is in the journal."""
    content = bytearray(node.durable)
    share = rng.choice((0.0, 0.5, 0.9))
    for change in node.pending:
        if isinstance(change, Truncate):
            set_size(content, change.size)
        else:
            for piece in _torn_pages(change, share, rng):
                write_into(content, piece.data, piece.position)
    if rng.random() < 0.5:
        set_size(content, len(node.content))
    return content


def _torn_pages(write: Write, share: float, rng: random.Random) -> Iterator[Write]:
    """The pages of a write that reach the disk, and now and then a piece of one."""
    at, end = write.position, write.position + len(write.data)
    while at < end:
        stop = min(end, at - at % PAGE_BYTES + PAGE_BYTES)
        start = at
        at = stop
        if rng.random() >= share:
            continue
        if rng.random() < 0.2:
            start, stop = sorted((rng.randint(start, stop), rng.randint(start, stop)))
        yield Write(start, write.data[start - write.position : stop - write.position])


# ---- names -------------------------------------------------------------------------------


def _apply_names(names: dict[str, Node | Folder], change: dict[str, Node | Folder | None]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
            continue
        # A file has one name: where it came from is gone even if that step was lost.
        for old in [n for n, other in names.items() if other is node]:
            del names[old]
        names[name] = node


def _surviving_names(folder: Folder, rng: random.Random) -> dict[str, Node | Folder]:
    """What a power loss leaves of a folder's names."""
    kept = folder.pending
    if kept:
        if rng.random() < 0.5:
            kept = kept[: rng.randint(0, len(kept))]
        else:
            share = rng.choice((0.2, 0.5, 0.9))
            kept = [change for change in kept if rng.random() < share]
    names = dict(folder.durable)
    for change in kept:
        _apply_names(names, change)
    return names


def surviving_state(state: State, rng: random.Random) -> State:
    after = State()
    after.root = _surviving_folder(state.root, rng, after)
    return after


def _surviving_folder(folder: Folder, rng: random.Random, state: State) -> Folder:
    survivor = Folder()
    for name, node in sorted(_surviving_names(folder, rng).items()):
        if isinstance(node, Folder):
            survivor.names[name] = _surviving_folder(node, rng, state)
        else:
            copy = Node(bytes(surviving_content(node, rng)))
            copy.linked = True
            state.used_bytes += len(copy.content)
            survivor.names[name] = copy
    survivor.durable = dict(survivor.names)
    return survivor
