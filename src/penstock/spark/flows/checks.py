"""What is said in a declaration, checked while it is declared: the error names the user's line."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from penstock.errors import PenstockError
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.source.options import parse

_TOPIC: Final = re.compile(r"[A-Za-z0-9._-]{1,249}")


def source_options(
    topic: str, options: Mapping[str, str] | None, *, streaming: bool = True
) -> dict[str, str]:
    """The options of the source, as texts; DeclarationError if it does not know one, or its value.

    Found out here, and not when Spark runs: by then a wrong option would be an error of the query.
    """
    if not options:
        return {}
    if not isinstance(options, Mapping):
        raise DeclarationError(
            f"{topic!r}: options={options!r} are no options",
            advice='Give them by name, as in options={"maxOffsetsPerTrigger": "100000"}.',
        )
    found = {str(name): str(value) for name, value in options.items()}
    place = {"kafka.bootstrap.servers": "localhost:9092", "subscribe": topic}
    try:
        parse(place | found, streaming=streaming)
    except PenstockError as error:
        raise DeclarationError(f"{topic!r}, options: {error}", advice=error.advice) from error
    return found


def check_texts(what: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None and not isinstance(value, str):
            raise DeclarationError(
                f"{what}: {name}={value!r} is no text", advice=f'Write it in quotes: {name}="...".'
            )


def is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_topic(name: Any) -> None:
    if not isinstance(name, str) or not _TOPIC.fullmatch(name) or name in {".", ".."}:
        raise DeclarationError(
            f"{name!r} is no name of a topic",
            advice="A name has 1 to 249 letters, digits, dots, dashes and underscores.",
        )
