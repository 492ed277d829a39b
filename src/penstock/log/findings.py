"""What an examination of a log can find, and what to do about each.

*Damage* is a byte that is not as it was stored. A *note* is something that the next start of the
broker puts right by itself, such as the torn tail that a crash leaves.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

Severity = Literal["damage", "note"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found, where it is and what to do."""

    severity: Severity
    kind: str
    path: str
    message: str
    remedy: str = ""
    # The byte within the file, and the record offset, where they are known.
    position: int | None = None
    offset: int | None = None


def damage(
    kind: str,
    path: str,
    message: str,
    remedy: str,
    position: int | None = None,
    offset: int | None = None,
) -> Finding:
    return Finding("damage", kind, path, message, remedy, position, offset)


def note(
    kind: str,
    path: str,
    message: str,
    remedy: str = "",
    position: int | None = None,
    offset: int | None = None,
) -> Finding:
    return Finding("note", kind, path, message, remedy, position, offset)


@dataclass(slots=True)
class Report:
    """What was looked at, and what was found."""

    path: str
    clean_stop: bool | None = None
    partitions: int = 0
    segments: int = 0
    batches: int = 0
    records: int = 0
    bytes: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def damage(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "damage"]

    @property
    def notes(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity == "note"]


RESTORE_RECORDS: Final = (
    "Restore the file from a copy, or send the records of this range again from their source. "
    "Records outside of the range are unharmed."
)
COPY_FIRST: Final = (
    "Copy the data directory before the broker starts on it: recovery cuts the log off here."
)
REBUILD: Final = (
    "No record is harmed. With the broker stopped, run `penstock log verify --rebuild-indexes`."
)
RECOVERS: Final = "Nothing to do: the next start puts it right."
DELETE_SNAPSHOT: Final = (
    "Delete the file while the broker is stopped: producers' state is then read from the log."
)
DELETE_CHECKPOINT: Final = (
    "Delete the file and `clean-shutdown` while the broker is stopped: the next start checks the "
    "log and writes both anew."
)
DELETE_LOG_STARTS: Final = (
    "Delete the file while the broker is stopped: it is written anew. Records that were deleted "
    "by request may show again until their segment goes."
)
RESTORE_EPOCHS: Final = (
    "Restore the file from a copy. Without it a client that asks where an old leader epoch ended "
    "is told that this is not known, and goes on."
)
RESTORE_IDENTITY: Final = (
    "Restore the file from a copy: the broker does not start on a directory that it cannot tell "
    "to be its own."
)
DELETE_METADATA: Final = "Delete the file while the broker is stopped: it is written anew."
DELETE_MARKER: Final = (
    "Delete the file while the broker is stopped: the next start checks the log as after a crash."
)
DELETE_STATES: Final = (
    "Delete the file while the broker is stopped: the next start looks at the logs themselves."
)
RESTORE_RESERVE: Final = (
    "Restore the file from a copy, or delete it if no consumer remembers a position in this topic."
)
DELETE_CLEANER: Final = (
    "Delete the file while the broker is stopped: compaction then starts from the beginning."
)
RESTORE_MANIFEST: Final = (
    "Replace the file with manifest.json from the partition's folder in the archive."
)
RESTORE_FOLDER: Final = "Restore the partition's folder from a copy."
