"""Kafka's protocol messages as data, and the functions that read and write them.

A message is one plain class for all versions (`penstock.wire.messages.*`, generated from Kafka's
own definitions); `decoder` and `encoder` give the function for one version of it, compiled when
first asked for. `api` finds the classes by key; their module is loaded at that moment, so
importing this package costs little. Nothing here knows of sockets, logs or brokers.

    request, pos = decoder(api(3).request, 12)(frame, pos)
    body = encoder(MetadataResponse, 12)(MetadataResponse(brokers=[...]))
"""

from __future__ import annotations

from penstock.errors import WireError
from penstock.wire.codec import decoder, encoder, parts_encoder
from penstock.wire.header import (
    decode_request_header,
    decode_response_header,
    is_flexible,
    request_header,
    response_header,
)
from penstock.wire.index import INDEX
from penstock.wire.message import Message, Struct
from penstock.wire.primitive import Buffer

__all__ = [
    "APIS",
    "Api",
    "Buffer",
    "Message",
    "Struct",
    "WireError",
    "api",
    "decode_request_header",
    "decode_response_header",
    "decoder",
    "encoder",
    "is_flexible",
    "parts_encoder",
    "request_header",
    "response_header",
]


class Api:
    """One API: its versions, and its two message classes, which are loaded when first used."""

    __slots__ = (
        "_classes",
        "flexible_from",
        "key",
        "module",
        "name",
        "unstable_max",
        "versions",
    )

    def __init__(self, key: int, row: tuple[str, str, int, int, int, int]) -> None:
        self.key = key
        self.name, self.module, low, stable, self.unstable_max, self.flexible_from = row
        self.versions = (low, stable)
        self._classes: tuple[type[Message], type[Message]] | None = None

    @property
    def request(self) -> type[Message]:
        return self._load()[0]

    @property
    def response(self) -> type[Message]:
        return self._load()[1]

    def _load(self) -> tuple[type[Message], type[Message]]:
        if self._classes is None:
            from importlib import import_module

            module = import_module(f"penstock.wire.messages.{self.module}")
            self._classes = (
                getattr(module, f"{self.name}Request"),
                getattr(module, f"{self.name}Response"),
            )
        return self._classes

    def __repr__(self) -> str:
        return f"Api({self.name}, key={self.key}, versions={self.versions})"


APIS: dict[int, Api] = {key: Api(key, row) for key, row in INDEX.items()}
"""Every API there is, by key."""


def api(key: int) -> Api:
    """The API with this key; WireError if there is none."""
    found = APIS.get(key)
    if found is None:
        raise WireError(f"no API has key {key}")
    return found
