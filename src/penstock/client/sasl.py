"""Passwords: the mechanisms PLAIN and SCRAM (RFC 5802), as conversations without a network.

A mechanism is a generator: it yields what is to be sent, is sent what the broker answers, and
returns when both sides are content. With SCRAM the broker has to prove that it knows the password,
too.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
from collections.abc import Generator
from typing import Final

from penstock.client.errors import AuthenticationError
from penstock.client.security import Security

# What the broker may ask for: fewer rounds are no protection, more would keep us busy for long.
_ROUNDS: Final = (4096, 1_000_000)
_NONCE_BYTES: Final = 24

Conversation = Generator[bytes, bytes, None]


def conversation(security: Security) -> Conversation:
    """What is said to prove who we are."""
    if security.mechanism == "PLAIN":
        return _plain(security)
    hash_name = security.mechanism.removeprefix("SCRAM-").replace("SHA-", "sha")
    return scram(security.username, security.password, hash_name, _nonce())


def _plain(security: Security) -> Conversation:
    yield b"\0" + security.username.encode() + b"\0" + security.password.encode()


def _nonce() -> str:
    return base64.b64encode(secrets.token_bytes(_NONCE_BYTES)).decode()


def scram(username: str, password: str, hash_name: str, nonce: str) -> Conversation:
    """The client's side of SCRAM."""
    name = username.replace("=", "=3D").replace(",", "=2C")
    first = f"n={name},r={nonce}"
    server_first = (yield f"n,,{first}".encode()).decode("utf-8", "replace")
    told = _fields(server_first)
    joint, rounds = told.get("r", ""), told.get("i", "")
    if not joint.startswith(nonce) or len(joint) == len(nonce):
        raise AuthenticationError("the broker's nonce is not an answer to ours")
    if not rounds.isdecimal() or not _ROUNDS[0] <= int(rounds) <= _ROUNDS[1]:
        raise AuthenticationError(f"the broker asks for {rounds or 'no'} rounds of SCRAM")
    salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), _decoded(told, "s"), int(rounds))
    client_key = _hmac(hash_name, salted, b"Client Key")
    final = f"c=biws,r={joint}"
    message = f"{first},{server_first},{final}".encode()
    signature = _hmac(hash_name, hashlib.new(hash_name, client_key).digest(), message)
    proof = bytes(left ^ right for left, right in zip(client_key, signature, strict=True))
    server_final = yield f"{final},p={base64.b64encode(proof).decode()}".encode()
    last = _fields(server_final.decode("utf-8", "replace"))
    if "e" in last:
        raise AuthenticationError(f"the broker refuses: {last['e']}")
    expected = _hmac(hash_name, _hmac(hash_name, salted, b"Server Key"), message)
    if not hmac.compare_digest(_decoded(last, "v"), expected):
        raise AuthenticationError(
            "the broker does not know the password",
            advice="It may be somebody else's broker. Check the address.",
        )


def _fields(text: str) -> dict[str, str]:
    parts = (part.partition("=") for part in text.split(","))
    return {name: value for name, _, value in parts}


def _decoded(fields: dict[str, str], name: str) -> bytes:
    try:
        return base64.b64decode(fields[name], validate=True)
    except (KeyError, binascii.Error) as error:
        raise AuthenticationError("the broker's answer is not one of SCRAM") from error


def _hmac(hash_name: str, key: bytes, message: bytes) -> bytes:
    return hmac.new(key, message, hash_name).digest()
