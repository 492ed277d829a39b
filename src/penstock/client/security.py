"""Who we are and whom we trust: TLS and SASL, from the options that Kafka's clients use.

    security = Security.from_options({
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": "ca.pem",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": "alice",
        "sasl.password": "...",
    })
    Cluster("broker:9093", security=security)

Both families of names are understood: librdkafka's (`ssl.ca.location`, `sasl.username`) and Java's
(`ssl.truststore.*` and `ssl.keystore.*` of type PEM, `sasl.jaas.config`). Options that have nothing
to do with security are left alone. A `Security` can be pickled and sent to other processes; files
are opened where it is used. It never shows its passwords.
"""

from __future__ import annotations

import os
import re
import ssl
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from penstock.client.errors import ClientError

PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")

_PEM_ENDINGS: Final = (".pem", ".crt", ".cer", ".key")
_NO_CHECK: Final = ("", "none")
# name = "value", name='value' or name=value, with escapes inside of quotes.
_JAAS_OPTION: Final = re.compile(
    r"""([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s;"']+))"""
)
_STORE_ADVICE: Final = (
    "Export it as PEM: `keytool -importkeystore -srckeystore {file} -destkeystore store.p12 "
    "-deststoretype PKCS12`, then `openssl pkcs12 -in store.p12 -out store.pem -nodes`; and name "
    "it with ssl.{store}.type=PEM and ssl.{store}.location=store.pem."
)


class SecurityError(ClientError):
    """Options of security that cannot be used."""


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificates or a key: the file that has them, or their text."""

    file: str | None = None
    text: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Security:
    """How to connect: encrypted or not, with a password or not."""

    protocol: str = "PLAINTEXT"
    mechanism: str = ""
    username: str = ""
    password: str = field(default="", repr=False)
    # Whom to trust; None: whom this machine trusts.
    ca: Pem | None = None
    # Our own certificate, where brokers want one, and its key, if it is not in the same place.
    certificate: Pem | None = None
    key: Pem | None = None
    key_password: str | None = field(default=None, repr=False)
    checks_host: bool = True
    checks_certificate: bool = True

    @property
    def uses_tls(self) -> bool:
        return self.protocol.endswith("SSL")

    @property
    def uses_sasl(self) -> bool:
        return self.protocol.startswith("SASL")

    @classmethod
    def from_options(cls, options: Mapping[str, str]) -> Security:
        """From client options; SecurityError if they make no sense."""
        protocol = options.get("security.protocol", "PLAINTEXT").upper()
        if protocol not in PROTOCOLS:
            raise SecurityError(
                f"security.protocol={protocol} is unknown",
                advice=f"Choose one of {', '.join(PROTOCOLS)}.",
            )
        mechanism = username = password = ""
        if protocol.startswith("SASL"):
            mechanism, username, password = _sasl(options)
        if not protocol.endswith("SSL"):
            return cls(protocol, mechanism, username, password)
        certificate, key = _own(options)
        verification = options.get("enable.ssl.certificate.verification", "true")
        identification = options.get("ssl.endpoint.identification.algorithm", "https")
        return cls(
            protocol,
            mechanism,
            username,
            password,
            ca=_trusted(options),
            certificate=certificate,
            key=key,
            key_password=options.get("ssl.key.password"),
            checks_host=identification.lower() not in _NO_CHECK,
            checks_certificate=verification.lower() != "false",
        )

    def context(self) -> ssl.SSLContext | None:
        """What TLS is made with; None without TLS. ClientError if a certificate is not usable."""
        return _context(self) if self.uses_tls else None


PLAINTEXT: Final = Security()


# ---- options -------------------------------------------------------------------------------


def _sasl(options: Mapping[str, str]) -> tuple[str, str, str]:
    mechanism = options.get("sasl.mechanism") or options.get("sasl.mechanisms") or ""
    if mechanism not in MECHANISMS:
        raise SecurityError(
            f"sasl.mechanism={mechanism or '(not set)'} is not supported",
            advice=f"Choose one of {', '.join(MECHANISMS)}.",
        )
    username, password = options.get("sasl.username"), options.get("sasl.password")
    jaas = options.get("sasl.jaas.config")
    if username is None and password is None and jaas is not None:
        found = _jaas(jaas)
        username, password = found.get("username"), found.get("password")
    if not username or password is None:
        raise SecurityError(
            f"{mechanism} needs a user name and a password",
            advice="Give sasl.username and sasl.password, or both in sasl.jaas.config.",
        )
    return mechanism, username, password


def _jaas(text: str) -> dict[str, str]:
    """The options of a login module: `...Module required username="..." password="...";`."""
    found = {}
    for name, double, single, bare in _JAAS_OPTION.findall(text):
        found[name] = re.sub(r"\\(.)", r"\1", double or single) or bare
    return found


def _trusted(options: Mapping[str, str]) -> Pem | None:
    if "ssl.ca.location" in options:
        return Pem(file=options["ssl.ca.location"])
    if "ssl.ca.pem" in options:
        return _text(options["ssl.ca.pem"])
    _check_store(options, "truststore")
    if "ssl.truststore.certificates" in options:
        return _text(options["ssl.truststore.certificates"])
    location = options.get("ssl.truststore.location")
    return None if location is None else Pem(file=location)


def _own(options: Mapping[str, str]) -> tuple[Pem | None, Pem | None]:
    """Our certificate and its key; the key may be in the file of the certificate."""
    key: Pem | None = None
    if "ssl.key.location" in options:
        key = Pem(file=options["ssl.key.location"])
    elif "ssl.key.pem" in options:
        key = _text(options["ssl.key.pem"])
    if "ssl.certificate.location" in options:
        return Pem(file=options["ssl.certificate.location"]), key
    if "ssl.certificate.pem" in options:
        return _text(options["ssl.certificate.pem"]), key
    _check_store(options, "keystore")
    if "ssl.keystore.certificate.chain" in options:
        if "ssl.keystore.key" not in options:
            raise SecurityError("ssl.keystore.certificate.chain needs ssl.keystore.key")
        chain = _text(options["ssl.keystore.certificate.chain"])
        return chain, _text(options["ssl.keystore.key"])
    location = options.get("ssl.keystore.location")
    return (None if location is None else Pem(file=location)), key


def _check_store(options: Mapping[str, str], store: str) -> None:
    """Java's own formats cannot be read here."""
    location = options.get(f"ssl.{store}.location")
    kind = options.get(f"ssl.{store}.type")
    if kind is None and location is not None and location.endswith(_PEM_ENDINGS):
        return
    if (kind or "JKS").upper() != "PEM" and (location is not None or kind is not None):
        raise SecurityError(
            f"ssl.{store}.type={kind or 'JKS'} cannot be read, only PEM can",
            advice=_STORE_ADVICE.format(file=location or "the store", store=store),
        )


def _text(pem: str) -> Pem:
    # In a properties file an end of line is written so.
    return Pem(text=pem.replace("\\n", "\n"))


# ---- TLS -----------------------------------------------------------------------------------


@lru_cache(maxsize=16)
def _context(security: Security) -> ssl.SSLContext:
    try:
        ca = security.ca or Pem()
        context = ssl.create_default_context(cafile=ca.file, cadata=ca.text)
        if not (security.checks_host and security.checks_certificate):
            context.check_hostname = False
        if not security.checks_certificate:
            context.verify_mode = ssl.CERT_NONE
        if security.certificate is not None:
            _load_own(context, security, security.certificate)
    except (OSError, ValueError) as error:
        raise SecurityError(f"the certificates cannot be used: {error}") from error
    return context


def _load_own(context: ssl.SSLContext, security: Security, certificate: Pem) -> None:
    # Without a password OpenSSL would ask for it at the terminal.
    password = security.key_password or ""
    texts = [pem.text for pem in (certificate, security.key) if pem is not None and pem.text]
    if not texts:
        key_file = None if security.key is None else security.key.file
        context.load_cert_chain(certificate.file or "", key_file, password)
        return
    # Python reads these from files only.
    descriptor, path = tempfile.mkstemp(suffix=".pem")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write("\n".join(texts))
        own = path if certificate.text else certificate.file
        key = path if security.key is None or security.key.text else security.key.file
        context.load_cert_chain(own or "", key, password)
    finally:
        os.unlink(path)
