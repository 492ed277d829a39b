"""Apache Kafka's own Java code at hand: its segment dump and its client.

`KafkaTools` finds the jars that `make kafka-jars` fetches and starts one Java process when it is
first needed. The dump tool is the judge of what we write to disk: it prints what it reads, and
goes on after a line or two when something is wrong; here every such line is an error.

This may touch the Java process and the files it is asked to dump, which it only reads.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from penstock.testing.java import (
    DEFAULT_TIMEOUT_S,
    JavaClientError,
    JavaProcess,
    KafkaToolsError,
    kafka_home,
)
from penstock.testing.java_client import JavaClient

__all__ = [
    "DumpError",
    "DumpedLine",
    "JavaClient",
    "JavaClientError",
    "KafkaTools",
    "KafkaToolsError",
    "parse_dump",
]


class DumpError(KafkaToolsError):
    """Kafka's dump tool found a log, an index or a snapshot that is not in order."""

    def __init__(self, findings: tuple[str, ...]) -> None:
        super().__init__("Kafka's dump tool reports: " + " | ".join(findings))
        self.findings = findings


@dataclass(frozen=True, slots=True)
class DumpedLine:
    """One line of the dump: of which file, what it describes, and its `name: value` pairs.

    `kind` is `batch`, `record`, `offset-index`, `time-index`, `txn-index` or `producer`.
    Numbers and booleans are converted; with `payloads`, a record has `key` and `payload` too.
    """

    file: Path
    kind: str
    fields: dict[str, int | bool | str] = field(repr=False)
    text: str

    def number(self, name: str) -> int:
        """A field that is a number."""
        value = self.fields[name]
        if isinstance(value, str):
            raise KafkaToolsError(f"{name} is not a number in: {self.text}")
        return int(value)


_KINDS: Final = {
    ".log": "batch",
    ".index": "offset-index",
    ".timeindex": "time-index",
    ".txnindex": "txn-index",
    ".snapshot": "producer",
}
# What the tool prints beside the contents of files that are in order.
_REMARK: Final = re.compile(r"Log starting offset: \d+$|.* is empty\.$|.* passed sanity check\.$")
# Said of every log that does not begin at offset 0, Kafka's own included.
_FIRST_OFFSET: Final = re.compile(r"Non-consecutive offsets in .* -1 is followed by \d+")
_CONTENTS: Final = re.compile(r"(\| )?\w+: ")
_PAIR: Final = re.compile(r"(\w+): (.*?)(?= \w+: |$)")
_PAYLOAD: Final = re.compile(r" key: (?P<key>.*?) payload: (?P<payload>.*)$")


def parse_dump(text: str) -> tuple[list[DumpedLine], tuple[str, ...]]:
    """What the dump tool printed, as lines, and as findings where something is not in order.

    A line that is neither contents nor a known remark is a finding, so that a complaint in words
    we do not know is one too.
    """
    lines: list[DumpedLine] = []
    findings: list[str] = []
    file = Path()
    for line in text.split("\n"):
        if line.startswith("Dumping "):
            file = Path(line.removeprefix("Dumping "))
        elif not line or _REMARK.match(line):
            continue
        elif file.suffix in _KINDS and _CONTENTS.match(line):
            parsed = _parse_line(file, line)
            lines.append(parsed)
            if parsed.fields.get("isvalid") is False:
                findings.append(f"{file}: {line}")
        elif line.startswith("  ") and findings:
            # The particulars of the finding above.
            findings[-1] = f"{findings[-1]} {line.strip()}"
        else:
            findings.append(line)
    return lines, tuple(finding for finding in findings if not _FIRST_OFFSET.fullmatch(finding))


def _parse_line(file: Path, line: str) -> DumpedLine:
    kind, pairs, payload = _KINDS[file.suffix], line, None
    if line.startswith("| "):
        kind = "record"
        payload = _PAYLOAD.search(line)
        pairs = line[2 : payload.start()] if payload else line[2:]
    fields = {name: _value(value) for name, value in _PAIR.findall(pairs)}
    return DumpedLine(file, kind, fields | (payload.groupdict() if payload else {}), line)


def _value(text: str) -> int | bool | str:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text


class KafkaTools:
    """Apache Kafka's jars, put to work. A context manager; nothing starts before it is needed."""

    def __init__(self, home: Path | None = None) -> None:
        self.home = kafka_home() if home is None else home
        self._process: JavaProcess | None = None
        # Threads that come first at the same time must not start a process each.
        self._starting = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the Java process, if it was started."""
        if self._process is not None:
            self._process.close()
            self._process = None

    def call(
        self, request: Mapping[str, Any], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> dict[str, Any]:
        """One request to the Java process, which is started if it is not running."""
        with self._starting:
            if self._process is None:
                self._process = JavaProcess(self.home)
            process = self._process
        try:
            return process.call(request, timeout_s)
        except JavaClientError:
            raise
        except KafkaToolsError:
            # The process is gone; the next request gets a new one.
            self.close()
            raise

    def dump_log(
        self, path: Path, *more: Path, payloads: bool = False, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> list[DumpedLine]:
        """Dump log, index and snapshot files, or all of them in a folder, record by record.

        Raises `DumpError` on everything the tool objects to: bytes that are no batch, a batch
        whose checksum is wrong, offsets that jump back, an index that does not match its log.
        Ask for `payloads` only where they are text of one line each.
        """
        files = [file for place in (path, *more) for file in _log_files(place)]
        if not files:
            raise KafkaToolsError(f"nothing to dump in {path}")
        arguments = ["--deep-iteration", "--files", ",".join(str(file) for file in files)]
        if payloads:
            arguments.append("--print-data-log")
        answer = self.call({"op": "dump", "arguments": arguments}, timeout_s)
        lines, findings = parse_dump(answer["text"])
        if "failure" in answer:
            # Some damage the tool does not report, it gives up on it.
            findings = (*findings, answer["failure"])
        if findings:
            raise DumpError(findings)
        return lines

    def dump_snapshot(self, path: Path) -> list[DumpedLine]:
        """The producers in a `.snapshot` file of producer state, one line each."""
        return [line for line in self.dump_log(path) if line.kind == "producer"]

    def java_client(self, bootstrap: str, config: Mapping[str, str] | None = None) -> JavaClient:
        """Kafka's Java client, pointed at a broker; `config` is for all it does there."""
        return JavaClient(self.call, bootstrap, config or {})


def _log_files(place: Path) -> Iterator[Path]:
    if place.is_dir():
        # The log before its indexes: what is wrong with it explains what is wrong with them.
        for suffix in _KINDS:
            yield from sorted(place.glob(f"*{suffix}"))
    else:
        yield place
