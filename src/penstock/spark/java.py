"""The Java runtime that Spark will start: where it is, whether it is new enough.

Spark takes `JAVA_HOME/bin/java`, else the `java` of the path; so does this. The version is read
from the `release` file beside it, because asking Java itself costs a start of Java.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from penstock.errors import PenstockError

OLDEST: Final = 17
_ASK_TIMEOUT_S: Final = 30


class JavaError(PenstockError):
    """There is no Java that Spark can run on."""

    advice = (
        f"Install a Java runtime, version {OLDEST} or newer (Debian, Ubuntu: `apt install "
        "openjdk-17-jre-headless`; macOS: `brew install openjdk@17`), or let JAVA_HOME point to "
        "one."
    )

    def __str__(self) -> str:
        return f"{super().__str__()}. {self.advice}"


@dataclass(frozen=True, slots=True)
class Java:
    """A Java runtime: its program, its version in full, and the number that counts."""

    program: Path
    version: str
    major: int


def find_java() -> Java:
    """The Java that Spark will take; JavaError says what to do if it is missing or too old."""
    home = os.environ.get("JAVA_HOME")
    if home:
        program = Path(home) / "bin" / "java"
        if not program.is_file():
            raise JavaError(f"JAVA_HOME is {home}, and there is no bin/java in it")
    else:
        found = shutil.which("java")
        if found is None:
            raise JavaError("Spark runs on Java, and there is no java on this machine")
        program = Path(found)
    version = _released(program) or _asked(program)
    major = major_of(version)
    if major < OLDEST:
        raise JavaError(f"Spark needs Java {OLDEST} or newer, and {program} is version {version}")
    return Java(program, version, major)


def major_of(version: str) -> int:
    """17 of `17.0.15+6`, 8 of `1.8.0_402`, 0 of what is no version."""
    numbers = [int(number) for number in re.findall(r"\d+", version)[:2]]
    if not numbers:
        return 0
    return numbers[1] if numbers[0] == 1 and len(numbers) > 1 else numbers[0]


def _released(program: Path) -> str | None:
    try:
        text = (program.resolve().parent.parent / "release").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    for name in ("JAVA_RUNTIME_VERSION", "JAVA_VERSION"):
        told = re.search(rf'^{name}="([^"]+)"', text, re.MULTILINE)
        if told:
            return told.group(1)
    return None


def _asked(program: Path) -> str:
    try:
        told = subprocess.run(
            [program, "-version"],
            capture_output=True,
            text=True,
            timeout=_ASK_TIMEOUT_S,
            check=True,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise JavaError(f"{program} does not run: {error}") from error
    quoted = re.search(r'version "([^"]+)"', told.stderr + told.stdout)
    return quoted.group(1) if quoted else ""
