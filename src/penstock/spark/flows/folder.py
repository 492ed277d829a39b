"""What flows keep on disk: which there are, what they look like, how far each has come.

    DATA/run.lock              held while a process runs flows here
    DATA/run.json              who that is, and where it can be asked
    DATA/NAME/flow.json        the flow as it was last run: inputs, outputs, generation, last state
    DATA/NAME/g1/checkpoint    what Spark remembers; the number is the generation
    DATA/NAME/g1/counts.json   rows, late ones and dead letters so far

**Generations.** An output is derived, so it can be thrown away and built anew from the log. That
happens beside the old one: the next generation has a checkpoint and output topics of its own, and
only when it has caught up does `flow.json` point at it. The file is replaced in one step, so that
whoever reads it sees the one or the other.

**Changes.** With each generation stands what it was made from (`Fingerprint`). A flow that has
changed so that its checkpoint does not fit is not started.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.spark.flows import changed, shapes
from penstock.spark.flows.errors import (
    AlreadyRunningError,
    CheckpointError,
    CheckpointFullError,
    UnknownFlowError,
)
from penstock.spark.flows.shapes import Part
from penstock.spark.flows.versions import Behind, name_of, physical
from penstock.spark.state.files import Files, StateError

log = logging.getLogger(__name__)

DEFAULT_DATA: Final = Path(".penstock") / "flows"
FLOW_FILE: Final = "flow.json"
RUN_FILE: Final = "run.json"
# Made for a moment, to see whether it can be.
CHECK_FILE: Final = ".penstock-check"
COUNTS_FILE: Final = "counts.json"
LOCK_FILE: Final = "run.lock"
_NO_SPACE: Final = 28
UNWRITABLE_ADVICE: Final = (
    "Choose another folder, with --data or --checkpoints, or make it writable for you."
)


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a checkpoint depends on: change it, and the checkpoint fits no more."""

    streams: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    mode: str = "append"
    # Spark's operators that keep state, from the last to the first.
    operators: tuple[str, ...] = ()
    # The lengths of Spark's windows of time, that operators only have the names of; flows that were
    # last run by an older Penstock do not say them.
    windows: tuple[str, ...] = ()
    # Which topics the streams were: the cluster's ids of them, empty where it has none.
    ids: tuple[str, ...] = ()
    # What views are made of.
    parts: tuple[Part, ...] = ()
    # The cluster that they are in.
    cluster: str = field(default="", compare=False)
    # The flow's code when it last ran, to tell what was changed in it; it may change.
    source: str = field(default="", compare=False)

    @classmethod
    def of(cls, found: dict[str, Any]) -> Fingerprint:
        return cls(
            streams=tuple(found.get("streams", ())),
            outputs=tuple(found.get("outputs", ())),
            mode=str(found.get("mode", "append")),
            operators=tuple(found.get("operators", ())),
            windows=tuple(found.get("windows", ())),
            parts=tuple(Part(*map(str, each)) for each in found.get("parts", ())),
            ids=tuple(found.get("ids", ())),
            cluster=str(found.get("cluster", "")),
            source=str(found.get("source", "")),
        )

    def as_dict(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "streams": list(self.streams),
            "outputs": list(self.outputs),
            "mode": self.mode,
            "operators": list(self.operators),
            "windows": list(self.windows),
            "parts": [list(each) for each in self.parts],
            "ids": list(self.ids),
            "cluster": self.cluster,
            "source": self.source,
        }

    def differences(self, new: Fingerprint) -> list[str]:
        """What has changed so that the checkpoint does not fit, in words."""
        found = []
        if self.streams != new.streams:
            found.append(f"it read {_list(self.streams)} and now reads {_list(new.streams)}")
        else:
            replaced = self.replaced(new)
            if replaced and self.cluster and new.cluster and self.cluster != new.cluster:
                found.append(
                    f"this is another cluster than the one it has run with ({self.cluster}), and "
                    f"offsets of {_list(tuple(replaced))} mean other records here"
                )
            else:
                found += [
                    f"topic {topic} was deleted and made again, so its offsets mean other records"
                    for topic in replaced
                ]
        if self.outputs != new.outputs:
            found.append(f"it wrote {_list(self.outputs)} and now writes {_list(new.outputs)}")
        # Whoever was started by an older Penstock has not written down its parts.
        parts = shapes.differences(self.parts, new.parts) if self.parts else []
        found += parts
        if self.operators != new.operators and self.parts and new.parts and not parts:
            found.append("this Penstock keeps the state of its view in another way")
        elif self.operators != new.operators and not parts:
            found += changed.operators(self.operators, new.operators)
        if self.windows and new.windows and self.windows != new.windows:
            found.append(
                f"its windows of time were {_list(self.windows)} and now are {_list(new.windows)}"
            )
        if self.mode != new.mode and (self.operators or new.operators):
            found.append(f"its mode was {self.mode} and now is {new.mode}")
        return found

    def replaced(self, new: Fingerprint) -> dict[str, str]:
        """The topics that are others under the same name, with the ids that they had."""
        return {
            topic: old
            for topic, old, now in zip(self.streams, self.ids, new.ids, strict=False)
            if old and now and old != now
        }


def _topics(found: dict[str, Any]) -> list[str]:
    """The topics of a record that was written before they stood in it by themselves."""
    suffix = f".v{found['generation']}" if int(found.get("generation", 1)) > 1 else ""
    outputs = (str(each) for each in found.get("outputs", ()))
    return [
        each.removeprefix("topic ").removesuffix(suffix)
        for each in outputs
        if each.startswith("topic ")
    ]


def _list(items: tuple[str, ...]) -> str:
    return ", ".join(items) or "nothing"


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a flow when nothing runs."""

    name: str
    file: str = ""
    where: str = ""
    bootstrap: str = ""
    # Where its checkpoints are, if not in the data folder.
    checkpoints: str = ""
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    # The topics that its dead letters go to.
    dead_letters: tuple[str, ...] = ()
    # The topics of its outputs, and those for late records and dead letters, without a version.
    topics: tuple[str, ...] = ()
    asides: tuple[str, ...] = ()
    generation: int = 1
    # The generation that is being built beside, or is to be at the next start; 0 if none.
    rebuilding: int = 0
    # The columns of the rows in each topic, with Spark's names of their types.
    columns: dict[str, dict[str, str]] = field(default_factory=dict)
    # By generation, as text.
    fingerprints: dict[str, dict[str, Any]] = field(default_factory=dict)
    # Of generations whose offsets are being translated: what stood in Spark's files.
    moving: dict[str, dict[str, str]] = field(default_factory=dict)
    # Generations whose topics were deleted by `penstock flows cleanup`.
    cleaned: tuple[int, ...] = ()
    state: str = "new"
    error: str = ""
    advice: str = ""
    updated_ms: int = 0

    def fingerprint(self, generation: int) -> Fingerprint | None:
        found = self.fingerprints.get(str(generation))
        return None if found is None else Fingerprint.of(found)

    def next_generation(self) -> int:
        """A number that no topic and no checkpoint of the flow has had yet."""
        return 1 + max(self.generation, self.rebuilding, *map(int, self.fingerprints or {"1": {}}))

    def old_generations(self) -> list[int]:
        """Those that were replaced or given up, and not cleaned up yet."""
        in_use = {self.generation, self.rebuilding, *self.cleaned}
        return [number for number in range(1, self.next_generation()) if number not in in_use]

    def present(self, topic: str) -> str:
        """The version of a topic of this flow that counts."""
        return physical(topic, self.generation)

    def remembering(self, generation: int, made_from: Fingerprint) -> Record:
        known = {**self.fingerprints, str(generation): made_from.as_dict()}
        return replace(self, fingerprints=known)


class Folder:
    """A data folder of flows."""

    def __init__(self, path: Path, checkpoints: str | None = None) -> None:
        self.path = path
        self._checkpoints = checkpoints
        # Damaged files that were told of.
        self._told: set[str] = set()

    @property
    def checkpoints(self) -> str:
        """Where checkpoints are, if not here."""
        return self._checkpoints or ""

    def checkpoint(self, flow: str, generation: int) -> str:
        """Where Spark keeps the checkpoint of a generation: a path, or a URL on a cluster."""
        if self._checkpoints is not None:
            return f"{self._checkpoints.rstrip('/')}/{flow}/g{generation}"
        return str((self.path / flow / f"g{generation}" / "checkpoint").resolve())

    def forget_checkpoint(self, flow: str, generation: int) -> None:
        """Remove the files of a generation."""
        shutil.rmtree(self.path / flow / f"g{generation}", ignore_errors=True)
        if self._checkpoints is not None:
            try:
                Files(self._checkpoints.rstrip("/")).remove_folder(f"{flow}/g{generation}")
            except (OSError, StateError) as error:
                log.warning("the checkpoint %s is left: %s; `penstock flows cleanup` deletes it",
                            self.checkpoint(flow, generation), error)  # fmt: skip

    # ---- counts --------------------------------------------------------------------------

    def counts(self, name: str, generation: int = 1) -> dict[str, int]:
        """What was counted so far; nothing if that is not known."""
        try:
            found = orjson.loads(self._counts_file(name, generation).read_bytes())
            return {str(each): int(value) for each, value in found.items()}
        except (OSError, ValueError, AttributeError, TypeError):
            return {}

    def write_counts(self, name: str, counts: Mapping[str, int], generation: int = 1) -> None:
        """Remember what was counted. Only for people, so it is not synced to the disk."""
        self._write(self._counts_file(name, generation), dict(counts), durable=False)

    def _counts_file(self, name: str, generation: int) -> Path:
        return self.path / name / f"g{generation}" / COUNTS_FILE

    # ---- records -------------------------------------------------------------------------

    def records(self) -> list[Record]:
        """All flows that ever ran here, by name."""
        if not self.path.is_dir():
            return []
        names = (entry.name for entry in self.path.iterdir() if (entry / FLOW_FILE).is_file())
        return [self.record(name) for name in sorted(names)]

    def intact(self) -> list[Record]:
        """The same without those whose file is damaged, of which a warning tells once."""
        found = []
        for file in sorted(self.path.glob(f"*/{FLOW_FILE}")):
            try:
                found.append(self.record(file.parent.name))
            except CheckpointError as error:
                if file.parent.name not in self._told:
                    self._told.add(file.parent.name)
                    log.warning("flow %s is passed over: %s. %s", file.parent.name, error,
                                error.advice)  # fmt: skip
        return found

    def record(self, name: str) -> Record:
        """What is known of a flow; UnknownFlowError if it never ran here."""
        file = self.path / name / FLOW_FILE
        try:
            found = orjson.loads(file.read_bytes())
            known = {key: found[key] for key in Record.__slots__ if key in found}
            return replace(
                Record(**known),
                inputs=tuple(found.get("inputs", ())),
                outputs=tuple(found.get("outputs", ())),
                dead_letters=tuple(found.get("dead_letters", ())),
                topics=tuple(found.get("topics") or _topics(found)),
                asides=tuple(found.get("asides", ())),
                cleaned=tuple(found.get("cleaned", ())),
            )
        except FileNotFoundError:
            raise UnknownFlowError(
                f"no flow {name!r} has run with {self.path}",
                advice="`penstock flows list` shows which have; --data names another folder.",
            ) from None
        except (orjson.JSONDecodeError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{file} is damaged: {error}",
                advice=f"Remove the folder {file.parent} to run the flow from the beginning; its "
                "output topics should be deleted too, or they get everything a second time.",
            ) from error

    def find(self, name: str) -> Record | None:
        """The same, or None."""
        return self.record(name) if (self.path / name / FLOW_FILE).is_file() else None

    def writer(self, topic: str) -> Record | None:
        """The flow that writes a topic: the last that ran, if several have.

        Of a topic for what goes aside only if no other flow writes it.
        """
        records = self.intact()
        found = [each for each in records if topic in each.topics]
        if found:
            return max(found, key=lambda each: each.updated_ms)
        found = [each for each in records if topic in each.asides]
        return found[0] if len(found) == 1 else None

    def resolve(self, topic: str) -> str:
        """The version of a topic that counts."""
        writer = self.writer(topic)
        return topic if writer is None else writer.present(topic)

    def behind(self, record: Record) -> list[Behind]:
        """Which inputs a flow that rests has read in an older version."""
        known = record.fingerprint(record.generation)
        found = []
        for topic in known.streams if known is not None else ():
            name = topic if self.writer(topic) is not None else name_of(topic)
            writer = self.writer(name)
            if writer is not None and writer.present(name) != topic:
                found.append(Behind(name, topic, writer.present(name)))
        return found

    def write(self, record: Record) -> None:
        """Replace what is known of a flow, in one step."""
        self._write(self.path / record.name / FLOW_FILE, asdict(record))

    def _write(self, file: Path, value: object, *, durable: bool = True) -> None:
        beside = file.with_suffix(".new")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as out:
                out.write(orjson.dumps(value, option=orjson.OPT_INDENT_2))
                if durable:
                    out.flush()
                    os.fsync(out.fileno())
            beside.replace(file)
        except OSError as error:
            if error.errno == _NO_SPACE:
                raise CheckpointFullError(f"no space is left under {self.path}") from error
            raise CheckpointError(
                f"{file} cannot be written: {error.strerror}",
                advice=UNWRITABLE_ADVICE,
            ) from error

    # ---- who runs ------------------------------------------------------------------------

    @contextmanager
    def locked(self) -> Iterator[None]:
        """While flows run here; AlreadyRunningError if another process has them."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"the data folder {self.path} cannot be used: {error.strerror}",
                advice=UNWRITABLE_ADVICE,
            ) from error
        try:
            self._check_checkpoints()
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise self._taken() from None
            yield
        finally:
            os.close(handle)

    def _taken(self) -> AlreadyRunningError:
        return AlreadyRunningError(
            f"another `penstock run` works with {self.path}{self._who()}",
            advice="Stop it first, or choose another folder with --data.",
        )

    def _check_checkpoints(self) -> None:
        """CheckpointError unless a folder for checkpoints on this machine can be written.

        Spark would find it out as an error of each flow, which might pass.
        """
        if self._checkpoints is None:
            return
        scheme, _, rest = self._checkpoints.rpartition(":")
        if scheme not in {"", "file"}:
            return
        path = Path("/" + rest.lstrip("/") if scheme else rest)
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / CHECK_FILE).touch()
            (path / CHECK_FILE).unlink(missing_ok=True)
        except OSError as error:
            raise CheckpointError(
                f"the folder for checkpoints, {path}, cannot be written: {error.strerror}",
                advice=UNWRITABLE_ADVICE,
            ) from error

    def _who(self) -> str:
        found = self.run()
        return f" (process {found['pid']})" if found else ""

    def write_run(self, value: dict[str, Any]) -> None:
        self._write(self.path / RUN_FILE, value)

    def remove_run(self) -> None:
        (self.path / RUN_FILE).unlink(missing_ok=True)

    def run(self) -> dict[str, Any] | None:
        """What the process that runs here has said of itself; None if there is none."""
        try:
            found = orjson.loads((self.path / RUN_FILE).read_bytes())
        except (OSError, orjson.JSONDecodeError):
            return None
        return found if isinstance(found, dict) and "pid" in found else None
