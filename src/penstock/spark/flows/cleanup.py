"""What rebuilds have left behind: topics of old generations, and checkpoints.

A generation that was replaced, or given up, has output topics and topics for late records and dead
letters that nobody writes any more. They stay until somebody says so, since others may still read
them. What a flow here writes or reads at present is kept, and what the caller knows a reader of.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.spark.flows.errors import CheckpointError
from penstock.spark.flows.folder import Folder, Record
from penstock.spark.flows.versions import is_version, physical
from penstock.spark.state.files import Files, StateError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Leftover:
    """A topic, or a checkpoint, of an old generation of a flow."""

    flow: str
    generation: int
    # "output", "late records or dead letters", "checkpoint".
    kind: str
    # The topic, or the folder, or its URL.
    name: str
    # Why it stays; empty if it may go.
    kept: str = ""

    @property
    def is_topic(self) -> bool:
        return self.kind != "checkpoint"


def candidates(folder: Folder, only: str = "") -> list[Leftover]:
    """All that old generations may have left, whether it is there or not."""
    records = [folder.record(only)] if only else folder.records()
    found = []
    for record in records:
        for number in record.old_generations():
            found += [
                Leftover(record.name, number, kind, physical(name, number))
                for kind, names in (
                    ("output", record.topics),
                    ("late records or dead letters", record.asides),
                )
                for name in names
            ]
            places = [str(folder.path / record.name / f"g{number}")]
            if record.checkpoints:
                places.append(
                    Folder(folder.path, record.checkpoints).checkpoint(record.name, number)
                )
            found += [Leftover(record.name, number, "checkpoint", each) for each in places]
    return found


def leftovers(
    folder: Folder,
    there: Iterable[str],
    readers: Mapping[str, Sequence[str]],
    only: str = "",
) -> list[Leftover]:
    """What is there of them; `there` are the topics that exist, `readers` who needs which."""
    topics, used = set(there), _used(folder.records())
    found: dict[str, Leftover] = {}
    for each in candidates(folder, only):
        if each.is_topic and each.name in topics:
            reasons = [*used.get(each.name, ()), *readers.get(each.name, ())]
            found.setdefault(each.name, replace(each, kept=", ".join(reasons)))
        elif not each.is_topic and _is_there(each):
            found.setdefault(each.name, each)
    return list(found.values())


def _is_there(checkpoint: Leftover) -> bool:
    try:
        return Files(checkpoint.name).is_there("")
    except (OSError, StateError) as error:
        log.warning("it is not known whether %s is there: %s", checkpoint.name, error)
        return False


def remove(checkpoint: Leftover) -> None:
    """Delete a checkpoint, in whatever store it is; PenstockError if that cannot be reached."""
    try:
        Files(checkpoint.name).remove_folder("")
    except OSError as error:
        raise CheckpointError(
            f"the checkpoint {checkpoint.name} cannot be deleted: {error}",
            advice="Look whether its store is there, and ask again.",
        ) from error


def _used(records: Iterable[Record]) -> dict[str, list[str]]:
    """The topics that flows write or read now, with who does."""
    found: dict[str, list[str]] = {}
    for record in records:
        for generation in filter(None, (record.generation, record.rebuilding)):
            known = record.fingerprint(generation)
            for name in (*record.topics, *record.asides):
                found.setdefault(physical(name, generation), []).append(
                    f"flow {record.name} writes it"
                )
            for name in known.streams if known is not None else ():
                found.setdefault(name, []).append(f"flow {record.name} reads it")
    return found


def cleaned(record: Record, generations: Iterable[int]) -> Record:
    """The record of a flow whose old generations have left nothing any more."""
    return replace(record, cleaned=tuple(sorted({*record.cleaned, *generations})))


def readers_of(folder: Folder, flow: str) -> list[str]:
    """The flows that read what a flow writes, and those that read theirs: all are rebuilt with
    it."""
    records = {each.name: each for each in folder.records()}
    found: list[str] = []
    waiting = [flow]
    while waiting:
        written = records[waiting.pop()]
        names = (*written.topics, *written.asides)
        for other in records.values():
            known = other.fingerprint(other.generation)
            read = known.streams if known is not None else ()
            follows = any(is_version(topic, name) for topic in read for name in names)
            if follows and other.name not in (*found, flow):
                found.append(other.name)
                waiting.append(other.name)
    return found
