"""Connections to brokers: requests in, responses out, in versions that both sides know.

A `Connection` is one socket to one broker. It asks for the broker's versions when it is made, and
sends each request in the newest version that both know. A `Cluster` is what a list of bootstrap
servers leads to: any broker that answers, the coordinator of a group or a transactional id, the
leader of a partition. Connections are kept and used again.

One request at a time, no retries, no threads: whoever calls decides what to do about an error.
Every error is a `ClientError`. Where the broker refuses, it is a `RefusedError` with Kafka's code.
"""

from __future__ import annotations

import itertools
import socket
import ssl
import struct
from collections.abc import Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from penstock.errors import PenstockError, WireError
from penstock.wire import Message, api, decode_response_header, decoder, encoder, request_header
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from penstock.wire.messages.metadata import MetadataRequest, MetadataRequestTopic

TIMEOUT_S: Final = 15.0
DEFAULT_PORT: Final = 9092
# An answer is held in memory whole.
MAX_ANSWER_BYTES: Final = 256 << 20
GROUP, TRANSACTION = 0, 1

_LENGTH: Final = struct.Struct(">i")
_API_VERSIONS: Final = 18
_BATCHED_COORDINATORS_FROM: Final = 4

Address = tuple[str, int]


class ClientError(PenstockError):
    """A broker could not be asked, or did not answer as it should."""


class UnreachableError(ClientError):
    """Nobody answers, or not any more."""

    retriable: ClassVar[bool] = True
    advice = "Is the broker running, and the address right?"


class UnsupportedError(ClientError):
    """The broker does not know what was to be asked, or not in a version that has it."""


class RefusedError(ClientError):
    """The broker answered with an error code."""

    def __init__(self, doing: str, code: int, message: str | None = None) -> None:
        name = ErrorCode(code).name if code in set(ErrorCode) else f"error {code}"
        super().__init__(f"{doing}: {name}" + (f" ({message})" if message else ""))
        self.code = code
        self.name = name


def check(code: int, doing: str, message: str | None = None) -> None:
    """RefusedError unless the code says that all is well."""
    if code:
        raise RefusedError(doing, code, message)


class Connection:
    """One connection to one broker; a context manager."""

    def __init__(
        self,
        address: Address,
        *,
        client_id: str = "penstock",
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.address = address
        self._client_id = client_id
        self._ids = itertools.count(1)
        self.is_open = True
        try:
            plain = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise UnreachableError(f"{_show(address)}: {error.strerror or error}") from error
        self._socket: socket.socket = plain
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(plain, server_hostname=address[0])
            self.versions = self._ask_versions()
        except OSError as error:
            self.close()
            raise UnreachableError(f"{_show(address)}: {error}") from error
        except BaseException:
            self.close()
            raise

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
        self.is_open = False
        with suppress(OSError):
            self._socket.close()

    # ---- versions ------------------------------------------------------------------------

    def _ask_versions(self) -> dict[int, tuple[int, int]]:
        # Every broker answers version 0, whatever else it knows.
        told: ApiVersionsResponse = self._exchange(ApiVersionsRequest(), 0)
        check(told.error_code, f"asking {_show(self.address)} for its versions")
        return {item.api_key: (item.min_version, item.max_version) for item in told.api_keys}

    def version_of(self, request: type[Message], at_least: int = 0) -> int:
        """The newest version that both know; UnsupportedError if it is older than needed.

        Versions that Kafka still calls unstable are used only where `at_least` asks for them.
        """
        name = api(request.API_KEY).name
        low, high = self.versions.get(request.API_KEY, (0, -1))
        newest = max(request.VERSIONS[1], min(at_least, request.UNSTABLE_MAX))
        version = min(high, newest)
        if version < max(low, request.VERSIONS[0], at_least):
            wanted = f" version {at_least}" if at_least and high >= 0 else ""
            raise UnsupportedError(f"the broker at {_show(self.address)} has no {name}{wanted}")
        return version

    # ---- requests ------------------------------------------------------------------------

    def call(self, request: Message, *, at_least: int = 0) -> Any:
        """Ask, and wait for the answer, which is the response of the same version."""
        return self._exchange(request, self.version_of(type(request), at_least))

    def _exchange(self, request: Message, version: int) -> Any:
        key, id_ = request.API_KEY, next(self._ids)
        frame = request_header(key, version, id_, self._client_id) + encoder(
            type(request), version
        )(request)
        try:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)
            (length,) = _LENGTH.unpack(self._receive(_LENGTH.size))
            if not 0 < length <= MAX_ANSWER_BYTES:
                raise ClientError(f"{_show(self.address)} sent an answer of {length} bytes")
            answer = self._receive(length)
            got_id, at = decode_response_header(key, version, answer)
            if got_id != id_:
                raise ClientError(f"{_show(self.address)} answered another request")
            response, _ = decoder(api(key).response, version)(answer, at)
        except (ClientError, OSError, WireError) as error:
            # What is on the way cannot be told from the next answer.
            self.close()
            if isinstance(error, ClientError):
                raise
            doing = f"asking {_show(self.address)} for {api(key).name}"
            if isinstance(error, WireError):
                raise ClientError(f"{doing}: {error}") from error
            reason = "no answer in time" if isinstance(error, TimeoutError) else error
            raise UnreachableError(f"{doing}: {reason}") from error
        return response

    def _receive(self, count: int) -> bytes:
        data = bytearray(count)
        view = memoryview(data)
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise UnreachableError(f"{_show(self.address)} closed the connection")
            view = view[got:]
        return bytes(data)


class Cluster:
    """The brokers that a list of bootstrap servers leads to; a context manager."""

    def __init__(
        self,
        bootstrap: str,
        *,
        client_id: str = "penstock",
        timeout_s: float = TIMEOUT_S,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._bootstrap = parse_bootstrap(bootstrap)
        self._client_id = client_id
        self._timeout_s = timeout_s
        self._tls = tls
        self._connections: dict[Address, Connection] = {}

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
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    def at(self, address: Address) -> Connection:
        """A connection to the broker at this address."""
        known = self._connections.get(address)
        if known is None or not known.is_open:
            known = self._connections[address] = Connection(
                address, client_id=self._client_id, timeout_s=self._timeout_s, tls=self._tls
            )
        return known

    def any(self) -> Connection:
        """A connection to the first bootstrap server that answers."""
        reasons = []
        for address in self._bootstrap:
            try:
                return self.at(address)
            except UnreachableError as error:
                reasons.append(str(error))
        raise UnreachableError(f"no broker answers: {'; '.join(reasons)}")

    def brokers(self) -> Iterator[Connection]:
        """A connection to each broker of the cluster."""
        told = self.any().call(MetadataRequest(topics=[]), at_least=1)
        for broker in told.brokers:
            yield self.at((broker.host, broker.port))

    def coordinator(self, kind: int, key: str) -> Connection:
        """A connection to who coordinates a `GROUP` or a `TRANSACTION`al id."""
        connection = self.any()
        doing = f"looking for the coordinator of {key!r}"
        if connection.version_of(FindCoordinatorRequest) < _BATCHED_COORDINATORS_FROM:
            told = connection.call(FindCoordinatorRequest(key=key, key_type=kind), at_least=1)
            check(told.error_code, doing, told.error_message)
            return self.at((told.host, told.port))
        request = FindCoordinatorRequest(coordinator_keys=[key], key_type=kind)
        found = connection.call(request).coordinators[0]
        check(found.error_code, doing, found.error_message)
        return self.at((found.host, found.port))

    def leader(self, topic: str, number: int) -> Connection:
        """A connection to the leader of a partition."""
        request = MetadataRequest(topics=[MetadataRequestTopic(name=topic)])
        request.allow_auto_topic_creation = False
        told = self.any().call(request, at_least=4)
        doing = f"looking for the leader of {topic}-{number}"
        check(told.topics[0].error_code, doing)
        for part in told.topics[0].partitions:
            if part.partition_index == number:
                check(part.error_code, doing)
                for broker in told.brokers:
                    if broker.node_id == part.leader_id:
                        return self.at((broker.host, broker.port))
                raise RefusedError(doing, ErrorCode.LEADER_NOT_AVAILABLE)
        raise RefusedError(doing, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION)


def parse_bootstrap(text: str) -> list[Address]:
    """`HOST:PORT,...`; an IPv6 address stands in brackets, and the port may be left out."""
    addresses = []
    for part in filter(None, (part.strip() for part in text.split(","))):
        server = part.rpartition("://")[2]
        host, colon, port = server.rpartition(":")
        if not colon or server.endswith("]"):
            host, port = server, str(DEFAULT_PORT)
        if not port.isdecimal() or int(port) > 65_535 or not host.strip("[]"):
            raise ClientError(f"{server!r} is not HOST:PORT, as in 127.0.0.1:9092")
        addresses.append((host.removeprefix("[").removesuffix("]"), int(port)))
    if not addresses:
        raise ClientError("no bootstrap server is named", advice="Name one, as HOST:PORT.")
    return addresses


def _show(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
