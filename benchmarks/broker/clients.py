"""The load generators: C programs from `benchmarks/clients`, compiled when needed.

They are called as `program MODE key=value ...` and answer with one JSON object. The program on
librdkafka is linked with the library inside the confluent-kafka wheel, which is years newer than
Debian's, with the headers of Debian's (its interface only ever grows); with Debian's if there is
no such wheel.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[2]
SOURCES: Final = ROOT / "benchmarks" / "clients"
BUILD: Final = ROOT / "build" / "bench"
COMPILE: Final = ("-O2", "-Wall", "-Wextra", "-Werror")
RUN_TIMEOUT_S: Final = 180.0


class ClientError(Exception):
    """A load generator could not be compiled, or did not finish its run."""


@dataclass(frozen=True)
class Program:
    """A load generator: its source and what it is linked with."""

    name: str
    libraries: tuple[str, ...] = ()
    package: str = "build-essential"

    @property
    def source(self) -> Path:
        return SOURCES / f"{self.name}.c"


PROGRAMS: Final = {
    program.name: program
    for program in (
        Program("kafka_bench", ("rdkafka", "pthread"), "librdkafka-dev"),
        Program("raw_kafka"),
        Program("nats_bench", ("nats", "pthread"), "libnats-dev"),
        Program("rabbit_bench", ("rabbitmq", "pthread"), "librabbitmq-dev"),
        Program("rabbit_stream_bench", ("pthread",)),
        Program("redis_bench", ("hiredis", "pthread"), "libhiredis-dev"),
    )
}


def build(name: str) -> Path:
    """The compiled program; compiles it if its source is newer."""
    program = PROGRAMS[name]
    target = BUILD / name
    sources = (program.source, SOURCES / "bench.h")
    if target.exists() and target.stat().st_mtime > max(s.stat().st_mtime for s in sources):
        return target
    compiler = shutil.which("cc")
    if compiler is None:
        raise ClientError("there is no C compiler (cc); run scripts/bench-packages.sh")
    BUILD.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(".new")
    command = [compiler, *COMPILE, str(program.source), "-o", str(fresh), *_link(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr)
        raise ClientError(
            f"{name} does not compile, is {program.package} installed? ({said.strip()})"
        )
    fresh.replace(target)
    return target


def _link(program: Program) -> list[str]:
    flags: list[str] = []
    for library in program.libraries:
        bundled = _bundled_librdkafka() if library == "rdkafka" else None
        if bundled is None:
            flags.append(f"-l{library}")
        else:
            flags += [str(bundled), f"-Wl,-rpath,{bundled.parent}"]
    return flags


def _bundled_librdkafka() -> Path | None:
    """The shared library inside the confluent-kafka wheel."""
    spec = importlib.util.find_spec("confluent_kafka")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parents[1] / "confluent_kafka.libs"
    return next(iter(sorted(folder.glob("librdkafka*.so*"))), None)


def run(name: str, mode: str, *extra: str, **arguments: str | int | float) -> dict[str, Any]:
    """Run a program to its end and return its answer. `extra` are arguments as they are."""
    command = [str(build(name)), mode, *(f"{k}={v}" for k, v in arguments.items()), *extra]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=RUN_TIMEOUT_S
        )
    except subprocess.TimeoutExpired as late:
        raise ClientError(f"{name} {mode} did not end within {RUN_TIMEOUT_S:.0f} s") from late
    if done.returncode != 0:
        raise ClientError(f"{name} {mode}: {done.stderr.strip() or f'status {done.returncode}'}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def start(name: str, mode: str, **arguments: str | int | float) -> subprocess.Popen[bytes]:
    """Run a program in the background; whoever starts it ends it."""
    command = [str(build(name)), mode, *(f"{k}={v}" for k, v in arguments.items())]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
