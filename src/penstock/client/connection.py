"""Connections to brokers: requests in, responses out, in versions that both sides know.

A `Connection` is one socket to one broker. It asks for the broker's versions when it is made, and
sends each request in the newest version that both know. A `Cluster` is what a list of bootstrap
servers leads to: any broker that answers, the coordinator of a group or a transactional id, the
leader of a partition. Connections are kept and used again.

No retries, no threads: whoever calls decides what to do about an error. `call` is one request and
its answer. `submit` and `receive` are its halves, for whoever keeps several requests on their way:
answers come in the order of the requests. Such a connection should be one's own (`connect`), not
one that is shared (`at`).

Every error is a `ClientError`. Where the broker refuses, it is a `RefusedError` with Kafka's code.
"""

from __future__ import annotations

import itertools
import math
import socket
import ssl
import struct
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Final, NamedTuple, Self

from penstock import __version__
from penstock.client.errors import (
    AuthenticationError,
    ClientError,
    RefusedError,
    UnreachableError,
    UnsupportedError,
    check,
    name_of,
)
from penstock.client.sasl import conversation
from penstock.client.security import PLAINTEXT, Security
from penstock.errors import WireError
from penstock.wire import (
    Message,
    api,
    decode_response_header,
    decoder,
    parts_encoder,
    request_header,
)
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from penstock.wire.messages.metadata import MetadataRequest, MetadataRequestTopic
from penstock.wire.messages.sasl_authenticate import SaslAuthenticateRequest
from penstock.wire.messages.sasl_handshake import SaslHandshakeRequest

__all__ = [
    "GROUP",
    "TRANSACTION",
    "Address",
    "ClientError",
    "Cluster",
    "Connection",
    "Pending",
    "RefusedError",
    "UnreachableError",
    "UnsupportedError",
    "check",
    "parse_bootstrap",
    "show_address",
]

TIMEOUT_S: Final = 15.0
DEFAULT_PORT: Final = 9092
# An answer is held in memory whole.
MAX_ANSWER_BYTES: Final = 256 << 20
_SMALLEST_BUFFER_BYTES: Final = 1 << 20
GROUP, TRANSACTION = 0, 1

_LENGTH: Final = struct.Struct(">i")
# How much of the time that a password is good for is used.
_USED_LIFETIME: Final = 0.8
_BATCHED_COORDINATORS_FROM: Final = 4
# ApiVersions tells of features, and asks who we are.
_FEATURES_FROM: Final = 3

Address = tuple[str, int]


class Connection:
    """One connection to one broker; a context manager."""

    def __init__(
        self,
        address: Address,
        *,
        client_id: str = "penstock",
        timeout_s: float = TIMEOUT_S,
        security: Security | None = None,
    ) -> None:
        self.address = address
        self._client_id = client_id
        self._ids = itertools.count(1)
        self._is_closed = False
        # Asked for when somebody needs them.
        self._features: dict[str, int] | None = None
        # When the broker wants to hear the password again: a new connection is simpler.
        self._expires_at = math.inf
        wanted = security or PLAINTEXT
        tls = wanted.context()
        try:
            plain = socket.create_connection(address, timeout_s)
        except OSError as error:
            raise UnreachableError(f"{show_address(address)}: {error.strerror or error}") from error
        self._socket: socket.socket = plain
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if tls is not None:
                self._socket = tls.wrap_socket(plain, server_hostname=address[0])
            self.versions = self._ask_versions()
            if wanted.uses_sasl:
                self._authenticate(wanted)
        except OSError as error:
            self.close()
            raise _network_error(show_address(address), error) from error
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

    @property
    def is_open(self) -> bool:
        """Whether it is worth asking something."""
        return not self._is_closed and time.monotonic() < self._expires_at

    def close(self) -> None:
        self._is_closed = True
        with suppress(OSError):
            self._socket.close()

    # ---- versions ------------------------------------------------------------------------

    def _ask_versions(self) -> dict[int, tuple[int, int]]:
        # Every broker answers version 0, whatever else it knows.
        told: ApiVersionsResponse = self._exchange(ApiVersionsRequest(), 0)
        check(told.error_code, f"asking {show_address(self.address)} for its versions")
        return {item.api_key: (item.min_version, item.max_version) for item in told.api_keys}

    def feature(self, name: str) -> int:
        """The level of a feature that all brokers of the cluster have agreed on; 0: none.

        Nothing may be on its way here.
        """
        if self._features is None:
            if self.versions.get(ApiVersionsRequest.API_KEY, (0, 0))[1] < _FEATURES_FROM:
                self._features = {}
            else:
                request = ApiVersionsRequest(
                    client_software_name="penstock", client_software_version=__version__
                )
                told: ApiVersionsResponse = self.call(request, at_least=_FEATURES_FROM)
                check(told.error_code, f"asking {show_address(self.address)} for its features")
                self._features = {
                    item.name: item.max_version_level for item in told.finalized_features
                }
        return self._features.get(name, 0)

    def _authenticate(self, security: Security) -> None:
        """Say who we are, and hear who the broker is."""
        doing = f"{show_address(self.address)}: {security.username!r} by {security.mechanism}"
        request = SaslHandshakeRequest(mechanism=security.mechanism)
        told = self.call(request, at_least=1)
        if told.error_code:
            offered = ", ".join(told.mechanisms) or "none"
            raise AuthenticationError(
                f"{doing}: {name_of(told.error_code)}",
                advice=f"Choose a sasl.mechanism that the broker has: {offered}.",
            )
        speech = conversation(security)
        try:
            message = next(speech)
            while True:
                answer = self.call(SaslAuthenticateRequest(auth_bytes=message))
                if answer.error_code:
                    reason = answer.error_message or name_of(answer.error_code)
                    raise AuthenticationError(f"{doing}: {reason}")
                if answer.session_lifetime_ms > 0:
                    lifetime_s = answer.session_lifetime_ms / 1000
                    self._expires_at = time.monotonic() + _USED_LIFETIME * lifetime_s
                message = speech.send(answer.auth_bytes)
        except StopIteration:
            return
        except AuthenticationError as error:
            if str(error).startswith(doing):
                raise
            raise AuthenticationError(f"{doing}: {error}", advice=error.advice) from error

    def version_of(
        self, request: type[Message], at_least: int = 0, at_most: int | None = None
    ) -> int:
        """The newest version that both know; UnsupportedError if it is older than needed.

        Versions that Kafka still calls unstable are used only where `at_least` asks for them.
        """
        name = api(request.API_KEY).name
        low, high = self.versions.get(request.API_KEY, (0, -1))
        newest = max(request.VERSIONS[1], min(at_least, request.UNSTABLE_MAX))
        version = min(high, newest if at_most is None else min(newest, at_most))
        if version < max(low, request.VERSIONS[0], at_least):
            wanted = f" version {at_least}" if at_least and high >= 0 else ""
            raise UnsupportedError(
                f"the broker at {show_address(self.address)} has no {name}{wanted}"
            )
        return version

    # ---- requests ------------------------------------------------------------------------

    def call(self, request: Message, *, at_least: int = 0, at_most: int | None = None) -> Any:
        """Ask, and wait for the answer, which is the response of the same version."""
        return self._exchange(request, self.version_of(type(request), at_least, at_most))

    def _exchange(self, request: Message, version: int) -> Any:
        return self.receive(self._submit(request, version))

    def submit(self, request: Message, *, at_least: int = 0, at_most: int | None = None) -> Pending:
        """Ask; the answer is to be received later, after those of earlier requests."""
        return self._submit(request, self.version_of(type(request), at_least, at_most))

    def _submit(self, request: Message, version: int) -> Pending:
        pending = Pending(request.API_KEY, version, next(self._ids))
        header = request_header(pending.api_key, version, pending.id, self._client_id)
        parts = [header, *parts_encoder(type(request), version)(request)]
        length = _LENGTH.pack(sum(map(len, parts)))
        try:
            self._socket.sendall(b"".join((length, *parts)))
        except OSError as error:
            raise self._lost(pending, error) from error
        return pending

    def receive(self, pending: Pending, buffer: Reusable | None = None) -> Any:
        """The answer to the oldest request that is on its way, which must be this one.

        Records in it are views of what was received: into `buffer`, if there is one.
        """
        try:
            head = bytearray(_LENGTH.size)
            self._receive_into(memoryview(head))
            (length,) = _LENGTH.unpack(head)
            if not 0 < length <= MAX_ANSWER_BYTES:
                raise ClientError(
                    f"{show_address(self.address)} {_spoken(bytes(head))}",
                    advice="Is it a Kafka broker, and security.protocol that of its listener?",
                )
            answer = memoryview(bytearray(length)) if buffer is None else buffer.take(length)
            self._receive_into(answer)
            got_id, at = decode_response_header(pending.api_key, pending.version, answer)
            if got_id != pending.id:
                raise ClientError(f"{show_address(self.address)} answered another request")
            response, _ = decoder(api(pending.api_key).response, pending.version)(answer, at)
        except (ClientError, OSError, WireError) as error:
            raise self._lost(pending, error) from error
        except BaseException:
            # Interrupted within an answer: nobody knows where the next one begins.
            self.close()
            raise
        return response

    def _lost(self, pending: Pending, error: Exception) -> ClientError:
        # What is on the way cannot be told from the next answer.
        self.close()
        if isinstance(error, ClientError):
            return error
        doing = f"asking {show_address(self.address)} for {api(pending.api_key).name}"
        if isinstance(error, WireError):
            return ClientError(f"{doing}: {error}")
        return _network_error(doing, error)

    def _receive_into(self, view: memoryview) -> None:
        while view:
            got = self._socket.recv_into(view)
            if not got:
                raise UnreachableError(f"{show_address(self.address)} closed the connection")
            view = view[got:]

    def fileno(self) -> int:
        """For `select`: readable when an answer arrives, or the end; but see `is_buffered`."""
        return self._socket.fileno()

    def is_buffered(self) -> bool:
        """Whether something of an answer is here already, where `select` does not see it.

        TLS comes in records, and one may hold several answers: reading the first unwraps them all.
        """
        return isinstance(self._socket, ssl.SSLSocket) and self._socket.pending() > 0

    def set_timeout(self, timeout_s: float) -> None:
        """How long one wait for the network may be."""
        with suppress(OSError):
            self._socket.settimeout(timeout_s)


def _spoken(head: bytes) -> str:
    """What is known of an answer that begins as none of Kafka's does."""
    if head == b"HTTP":
        return "speaks HTTP"
    # A record of TLS: its type, and the version 3.
    if head[:2] in {b"\x15\x03", b"\x16\x03"}:
        return "speaks TLS"
    return f"sent {head!r}, with which no answer of Kafka begins"


def _network_error(doing: str, error: Exception) -> ClientError:
    if isinstance(error, ssl.SSLCertVerificationError):
        return AuthenticationError(
            f"{doing}: the broker's certificate is not trusted: {error.verify_message}",
            advice="Name the right ssl.ca.location; the certificate must name the broker's host.",
        )
    ends = (ssl.SSLEOFError, ssl.SSLZeroReturnError, TimeoutError)
    if isinstance(error, ssl.SSLError) and not isinstance(error, ends):
        return AuthenticationError(
            f"{doing}: TLS failed: {error.reason or error}",
            advice="Does the listener speak TLS, and does it want a certificate of ours?",
        )
    reason = "no answer in time" if isinstance(error, TimeoutError) else error
    return UnreachableError(f"{doing}: {reason}")


class Pending(NamedTuple):
    """A request that is on its way."""

    api_key: int
    version: int
    id: int


class Reusable:
    """Memory for one answer after the other; it is used again once nobody looks at it any more."""

    def __init__(self) -> None:
        self._memory = bytearray()

    def take(self, count: int) -> memoryview:
        """A view of so many bytes, with whatever is in them."""
        if len(self._memory) < count or not self._is_free():
            # Some more than asked for, so that a slightly larger answer fits, too.
            self._memory = bytearray(max(_SMALLEST_BUFFER_BYTES, count + count // 8))
        return memoryview(self._memory)[:count]

    def _is_free(self) -> bool:
        try:
            # A bytearray refuses to change its length while there are views of it.
            self._memory.pop()
            self._memory.append(0)
        except BufferError:
            return False
        return True


class Cluster:
    """The brokers that a list of bootstrap servers leads to; a context manager."""

    def __init__(
        self,
        bootstrap: str,
        *,
        client_id: str = "penstock",
        timeout_s: float = TIMEOUT_S,
        security: Security | None = None,
    ) -> None:
        self.bootstrap = bootstrap
        self._bootstrap = parse_bootstrap(bootstrap)
        self._client_id = client_id
        self._timeout_s = timeout_s
        self.security = security or PLAINTEXT
        self._connections: dict[Address, Connection] = {}
        # Brokers that were heard of: they may answer where the bootstrap servers are gone.
        self._heard_of: tuple[Address, ...] = ()

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

    def another(self) -> Cluster:
        """The same cluster with connections of its own, for another thread."""
        return Cluster(
            self.bootstrap,
            client_id=self._client_id,
            timeout_s=self._timeout_s,
            security=self.security,
        )

    def at(self, address: Address) -> Connection:
        """A connection to the broker at this address."""
        known = self._connections.get(address)
        if known is None or not known.is_open:
            if known is not None:
                known.close()
            known = self._connections[address] = self.connect(address)
        return known

    def connect(self, address: Address, *, timeout_s: float | None = None) -> Connection:
        """A connection to the broker at this address that nobody else uses, nor closes."""
        return Connection(
            address,
            client_id=self._client_id,
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            security=self.security,
        )

    def heard_of(self, addresses: Iterable[Address]) -> None:
        """Remember who belongs to the cluster, for when no bootstrap server answers."""
        self._heard_of = tuple(addresses) or self._heard_of

    def any(self) -> Connection:
        """A connection to a broker that answers: one that is open, else the first that can be made.

        Bootstrap servers go before brokers that were only heard of.
        """
        addresses = dict.fromkeys((*self._bootstrap, *self._heard_of))
        for address in addresses:
            known = self._connections.get(address)
            if known is not None and known.is_open:
                return known
        reasons = []
        for address in addresses:
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


def show_address(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
