"""What went wrong, in plain words: from Spark's long reports to one `Failure`.

An error of ours may have happened in a Python worker or inside a callback, and comes back as text
in an exception of Java's in an exception of Python's. `explain` looks for it there, then for what
Spark itself is known to say, then for the user's own code, and tells for each whether trying again
may help:

| what | again? |
|---|---|
| an error of Penstock's | as it says of itself |
| no space under the checkpoint | yes: somebody may make room |
| the state does not fit the flow any more, the checkpoint is damaged | no |
| the user's function, expression or a row that it cannot take | no: it would fail the same way |
| anything else: a lost executor, a broken connection | yes, a bounded number of times |
"""

from __future__ import annotations

import importlib
import re
from typing import Any, Final

from penstock.errors import PenstockError
from penstock.spark.flows.errors import DeclarationError, SparkTroubleError, UserCodeError
from penstock.spark.flows.folder import UNWRITABLE_ADVICE
from penstock.spark.flows.supervisor import Failure
from penstock.spark.places import is_library, place, raised_at, told
from penstock.spark.state.operator import ADVICE

MAX_MESSAGE: Final = 2_000
# The line of a traceback that names the error: `penstock.client.errors.OffsetGoneError: ...`.
_OURS: Final = re.compile(r"(?:^|(?<=[\s:\]]))(penstock(?:\.\w+)+Error): (.*)$", re.MULTILINE)
_FRAME: Final = re.compile(r'File "([^"]+)", line (\d+)')
_PYTHON_ERROR: Final = re.compile(r"^(?:\w+\.)*(\w+(?:Error|Exception|Warning|Exit)): ?(.*)$")
_TRACEBACK: Final = "Traceback (most recent call last)"
_STATE: Final = re.compile(r"SQLSTATE: (\w{5})")
_SQLSTATE: Final = re.compile(r"\s*SQLSTATE: \w+")
_CONDITION: Final = re.compile(r"\[([A-Z][A-Z0-9_.]{4,})\]")
# A stream that failed: says nothing of the cause.
_STREAM_FAILED: Final = "XXKST"
# Classes of SQLSTATE that are about the query or its data: data, constraints, syntax, unsupported.
_USER_STATES: Final = ("22", "23", "42", "0A", "21", "07")
_USER_KINDS: Final = frozenset(
    {
        "AnalysisException", "ArithmeticException", "ArrayIndexOutOfBoundsException",
        "DateTimeException", "IllegalArgumentException", "NumberFormatException",
        "ParseException", "PythonException", "UnsupportedOperationException",
    }
)  # fmt: skip
_JAVA_GONE: Final = frozenset({"Py4JNetworkError", "Py4JError", "ConnectionRefusedError"})
_NO_SPACE: Final = ("No space left on device", "There is not enough space on the disk")
# Of a folder, if it is that of the checkpoint: nobody will make it writable meanwhile.
_UNWRITABLE: Final = (
    "AccessDeniedException", "Mkdirs failed to create", "Not a directory", "Permission denied",
    "Read-only file system",
)  # fmt: skip
_SOURCES: Final = re.compile(r"There are \[(\d+)\] sources in the checkpoint")
_STATE_WORDS: Final = (
    "STATE_STORE_KEY_SCHEMA_NOT_COMPATIBLE",
    "STATE_STORE_VALUE_SCHEMA_NOT_COMPATIBLE",
    "STREAMING_STATEFUL_OPERATOR_NOT_MATCH_IN_STATE_METADATA",
    "STATE_STORE_PROVIDER_DOES_NOT_SUPPORT",
    "STATE_STORE_INVALID_VALUE_SCHEMA",
    "STATE_STORE_VALUE_ROW_FORMAT_VALIDATION_FAILURE",
    "STATE_STORE_KEY_ROW_FORMAT_VALIDATION_FAILURE",
    "Provided schema doesn't match to the schema for existing state",
    "The streaming query stopped because the state schema",
)
_DAMAGE_WORDS: Final = (
    "CANNOT_LOAD_STATE_STORE",
    "MALFORMED_STATE_IN_RATE",
    "Incomplete log file",
    "Malformed log file",
    "Error reading delta file",
    "CHECKPOINT_FILE_CHECKSUM_VERIFICATION_FAILED",
    "DATASOURCE_INTERNAL_LOG",
    "INVALID_LOG_VERSION",
    "Failed to read log file",
)
RESET_ADVICE: Final = (
    "`penstock flows reset {name}` builds its output anew from the log, beside the old one; or "
    "rename the flow, to keep both."
)


def explain(error: BaseException, *, flow: str, checkpoint: str) -> Failure:
    """Why a flow failed."""
    ours = _in_chain(error)
    if ours is not None:
        # Some put their advice into their text as well.
        message = Exception.__str__(ours)
        if isinstance(ours, DeclarationError):
            message = told(raised_at(ours), message)
        return _shortened(Failure(message, ours.advice, ours.retriable))
    text = str(error)
    return _shortened(
        _ours_in(text)
        or _of_disk(text, checkpoint)
        or _of_state(text, flow, checkpoint)
        or _of_user(error, text)
        or Failure(_headline(error, text), SparkTroubleError.advice, retriable=True)
    )


def is_java_gone(error: BaseException) -> bool:
    """Whether the Java process itself does not answer any more: nothing can go on without it."""
    return type(error).__name__ in _JAVA_GONE


def _shortened(failure: Failure) -> Failure:
    if len(failure.message) <= MAX_MESSAGE:
        return failure
    return Failure(failure.message[:MAX_MESSAGE] + " ...", failure.advice, failure.retriable)


# ---- ours --------------------------------------------------------------------------------


def _in_chain(error: BaseException) -> PenstockError | None:
    """The outermost of ours in a chain of Python's: it knows most of the circumstances."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        if isinstance(at, PenstockError):
            return at
        seen.add(id(at))
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)
    return None


def _ours_in(text: str) -> Failure | None:
    """The last of ours that a text tells of."""
    for found in reversed(list(_OURS.finditer(text))):
        kind = _class(found[1])
        if kind is not None:
            message = found[2].strip() + _continued(text[found.end() :])
            message, _, own = _SQLSTATE.sub("", message).partition(f" {ADVICE}")
            advice = kind.advice if kind.advice and kind.advice not in message else ""
            return Failure(message, own or advice, kind.retriable)
    return None


def _continued(rest: str) -> str:
    """Further lines of a message: up to an empty one, or what Java puts behind it."""
    lines = []
    for line in rest.split("\n")[1:]:
        if not line.strip() or line.lstrip().startswith(("at ", "SQLSTATE", "===", "Caused by")):
            break
        if _FRAME.search(line) or line.startswith((_TRACEBACK, "The above", "During handling")):
            break
        lines.append(line.strip())
    return "".join(f" {line}" for line in lines[:5])


def _class(path: str) -> type[PenstockError] | None:
    module, _, name = path.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None
    return found if isinstance(found, type) and issubclass(found, PenstockError) else None


# ---- Spark's -----------------------------------------------------------------------------


def _of_disk(text: str, checkpoint: str) -> Failure | None:
    folder = checkpoint.partition("://")[2] or checkpoint
    if folder.rstrip("/").rpartition("/")[0] in text and any(each in text for each in _UNWRITABLE):
        return Failure(f"the checkpoint {checkpoint} cannot be written: {_first_sentence(text)}",
                       UNWRITABLE_ADVICE)  # fmt: skip
    if not any(words in text for words in _NO_SPACE):
        return None
    return Failure(
        f"no space is left on the disk of the checkpoint, {checkpoint}",
        "Free disk space there; the flow goes on from its last micro-batch, nothing is lost.",
        retriable=True,
    )


def _of_state(text: str, flow: str, checkpoint: str) -> Failure | None:
    remedy = RESET_ADVICE.format(name=flow)
    sources = _SOURCES.search(text)
    if sources is not None:
        return Failure(
            f"the flow has another number of streams than its checkpoint, which has {sources[1]}",
            remedy,
        )
    if any(words in text for words in _STATE_WORDS):
        return Failure(
            "what the flow keeps as state does not fit what it had kept: " + _first_sentence(text),
            remedy,
        )
    if any(words in text for words in _DAMAGE_WORDS):
        return Failure(
            f"the checkpoint {checkpoint} is damaged or not complete: {_first_sentence(text)}",
            f"Restore it from a backup, or: {remedy}",
        )
    return None


def _of_user(error: BaseException, text: str) -> Failure | None:
    """The user's code, or a row that it does not take."""
    advice = UserCodeError.advice
    if _TRACEBACK in text:
        return Failure(_of_traceback(text), advice)
    kind = type(error).__name__
    of_spark = type(error).__module__.startswith(("pyspark", "py4j"))
    if not of_spark:
        # Raised by the function itself, while Spark asked it for its DataFrame.
        place = _user_place(error)
        return Failure(f"{place}{kind}: {error}" if text else f"{place}{kind}", advice)
    states = [state for state in _STATE.findall(text) if state != _STREAM_FAILED]
    if kind in _USER_KINDS or kind.startswith("PySpark") or (
        states and states[0].startswith(_USER_STATES)
    ):  # fmt: skip
        return Failure(_user_place(error) + _first_sentence(text), advice)
    return None


def _of_traceback(text: str) -> str:
    """The line of the user's code and the error, of a traceback that came as text."""
    told = text[text.rindex(_TRACEBACK) :].split("\n")
    places = [
        f"{place(found[1], int(found[2]))}: "
        for found in map(_FRAME.search, told)
        if found is not None and not is_library(found[1])
    ]
    errors = [line.strip() for line in told if _PYTHON_ERROR.match(line.strip())]
    return (places[-1] if places else "") + (errors[-1] if errors else _first_sentence(text))


def _user_place(error: BaseException) -> str:
    where = raised_at(error)
    return f"{where}: " if where else ""


def _first_sentence(text: str) -> str:
    """What Spark says, without the plan, the stack and the numbers of the query behind it."""
    found = re.search(r"terminated with exception: (.*)", text, re.DOTALL)
    told = found[1] if found else text
    told = re.split(r";\n|\n\nJVM stacktrace|\n\tat |\nJVM stacktrace|\n== ", told)[0]
    told = _SQLSTATE.sub("", told)
    return " ".join(told.split())


def _headline(error: BaseException, text: str) -> str:
    said = _first_sentence(text)
    return said or type(error).__name__
