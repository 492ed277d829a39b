"""TLS and SASL: options of both families understood, and Apache Kafka as the other side."""

from __future__ import annotations

import base64
import hashlib
import hmac
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.errors import AuthenticationError, ClientError
from penstock.client.reading import read_all
from penstock.client.sasl import scram
from penstock.client.security import Pem, Security, SecurityError
from penstock.client.transacting import Transaction
from penstock.client.writer import LogWriter
from penstock.testing.apache_kafka import FOR_TESTS, SMALL_JVM_OPTIONS, ApacheKafka
from tests.client.certificates import Pair, authority, issued
from tests.client.conftest import unique
from tests.waiting import eventually

USER, PASSWORD = "alice", "it's = secret, \\ really"
KEY_PASSWORD = "key password"
REAUTH_MS = 2_000


@dataclass(frozen=True)
class Secured:
    """A Kafka with a listener of each kind, and certificates to go with it."""

    kafka: ApacheKafka
    ca: Pair
    client: Pair
    folder: Path

    def at(self, listener: str) -> str:
        return self.kafka.bootstrap_of(listener)

    @property
    def ca_file(self) -> str:
        return str(self.folder / "ca.crt")


def settings(server_file: Path, ca_file: Path) -> dict[str, str]:
    plain = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    scram_module = "org.apache.kafka.common.security.scram.ScramLoginModule required;"
    # In a properties file a backslash is written twice, and in a JAAS file once more.
    escaped = PASSWORD.replace("\\", "\\\\\\\\")
    made = {
        "ssl.keystore.type": "PEM",
        "ssl.keystore.location": str(server_file),
        "ssl.truststore.type": "PEM",
        "ssl.truststore.location": str(ca_file),
        "listener.name.ssl.ssl.client.auth": "required",
        "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512",
        "listener.name.sasl_plaintext.plain.connections.max.reauth.ms": str(REAUTH_MS),
    }
    for listener in ("sasl_ssl", "sasl_plaintext"):
        prefix = f"listener.name.{listener}"
        made[f"{prefix}.plain.sasl.jaas.config"] = f'{plain} user_{USER}="{escaped}";'
        for mechanism in ("scram-sha-256", "scram-sha-512"):
            made[f"{prefix}.{mechanism}.sasl.jaas.config"] = scram_module
    return made


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    folder = tmp_path_factory.mktemp("certificates")
    ca = authority("tests")
    (folder / "ca.crt").write_text(ca.certificate_pem)
    server = issued("broker", ca).write(folder, "server")
    client = issued("client", ca)
    client.write(folder, "client")
    kafka = ApacheKafka(
        {**FOR_TESTS, **settings(server, folder / "ca.crt")},
        jvm_options=SMALL_JVM_OPTIONS,
        listeners=("SSL", "SASL_PLAINTEXT", "SASL_SSL"),
        scram_users={USER: "scram-secret"},
    )
    with kafka:
        yield Secured(kafka, ca, client, folder)


def works(bootstrap: str, options: Mapping[str, str]) -> None:
    """Records go there and come back, also where the options went to another process."""
    security = pickle.loads(pickle.dumps(Security.from_options(options)))
    with Cluster(bootstrap, security=security) as cluster:
        topic = unique("secured")
        topics.create(cluster, topic, partitions=2)
        with LogWriter(cluster, transactional_id=unique("txn")) as writer:
            writer.begin()
            writer.write(topic, [b"a", b"b", b"c"], [b"1" * 100_000, b"2", b"3"])
            writer.commit()
        values = {row.value for row in read_all(cluster, topic, settled=True)}
        assert values == {b"1" * 100_000, b"2", b"3"}


@pytest.mark.java
@pytest.mark.parametrize("listener", ["SASL_PLAINTEXT", "SASL_SSL"])
@pytest.mark.parametrize("mechanism", ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"])
def test_passwords(secured: Secured, listener: str, mechanism: str) -> None:
    password = PASSWORD if mechanism == "PLAIN" else "scram-secret"
    options = {
        "security.protocol": listener,
        "ssl.ca.location": secured.ca_file,
        "sasl.mechanism": mechanism,
        "sasl.username": USER,
        "sasl.password": password,
    }
    works(secured.at(listener), options)
    for wrong in ({"sasl.password": "guess"}, {"sasl.username": "mallory"}):
        security = Security.from_options({**options, **wrong})
        with Cluster(secured.at(listener), security=security) as cluster:
            with pytest.raises(AuthenticationError, match=f"by {mechanism}.*failed") as caught:
                topics.partition_counts(cluster, ["any"])
        assert "guess" not in str(caught.value)


@pytest.mark.java
def test_certificates_of_ours(secured: Secured) -> None:
    at, folder = secured.at("SSL"), secured.folder
    base = {"security.protocol": "SSL", "ssl.ca.location": secured.ca_file}
    certificate, key = folder / "own.crt", folder / "own.key"
    certificate.write_text(secured.client.certificate_pem)
    key.write_text(secured.client.key_pem(KEY_PASSWORD))
    separate = {
        "ssl.certificate.location": str(certificate),
        "ssl.key.location": str(key),
        "ssl.key.password": KEY_PASSWORD,
    }
    works(at, {**base, **separate})
    java = {
        "security.protocol": "SSL",
        "ssl.truststore.type": "PEM",
        "ssl.truststore.certificates": secured.ca.certificate_pem.replace("\n", "\\n"),
        "ssl.keystore.type": "PEM",
        "ssl.keystore.certificate.chain": secured.client.certificate_pem,
        "ssl.keystore.key": secured.client.key_pem(),
    }
    works(at, java)
    works(
        at,
        {
            "security.protocol": "ssl",
            "ssl.truststore.location": secured.ca_file,
            "ssl.keystore.location": str(folder / "client.pem"),
        },
    )
    for wrong in (base, {**base, **separate, "ssl.key.password": "wrong"}):
        with pytest.raises(ClientError) as caught:
            works(at, wrong)
        assert not caught.value.retriable, caught.value
    foreign = issued("client", authority("foreign")).write(folder, "foreign")
    with pytest.raises(AuthenticationError):
        works(at, {**base, "ssl.keystore.location": str(foreign)})


@pytest.mark.java
def test_whom_we_trust(secured: Secured, tmp_path: Path) -> None:
    other = tmp_path / "other.crt"
    other.write_text(authority("other").certificate_pem)
    options = {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": str(other),
        "sasl.mechanism": "PLAIN",
        "sasl.username": USER,
        "sasl.password": PASSWORD,
    }
    at = secured.at("SASL_SSL")
    with pytest.raises(AuthenticationError, match="certificate is not trusted"):
        works(at, options)
    works(at, {**options, "enable.ssl.certificate.verification": "false"})
    # The certificate is for the address, not for the name.
    by_name = at.replace("127.0.0.1", "localhost")
    trusting = {**options, "ssl.ca.location": secured.ca_file}
    with Cluster(by_name, security=Security.from_options(trusting)) as cluster:
        with pytest.raises(AuthenticationError, match="localhost"):
            cluster.any()
    trusting["ssl.endpoint.identification.algorithm"] = ""
    with Cluster(by_name, security=Security.from_options(trusting)) as cluster:
        assert cluster.any().is_open


@pytest.mark.java
def test_the_wrong_door(secured: Secured) -> None:
    tls = Security(protocol="SSL", ca=Pem(file=secured.ca_file))
    for at, security in ((secured.kafka.bootstrap, tls), (secured.at("SSL"), None)):
        with pytest.raises(ClientError) as caught:
            Cluster(at, security=security, timeout_s=5).any()
        assert "security.protocol" in caught.value.advice
    oauth = Security("SASL_PLAINTEXT", "OAUTHBEARER", USER, PASSWORD)
    with pytest.raises(AuthenticationError, match="UNSUPPORTED_SASL_MECHANISM") as refused:
        Cluster(secured.at("SASL_PLAINTEXT"), security=oauth).any()
    assert "SCRAM-SHA-256" in refused.value.advice


@pytest.mark.java
def test_a_password_is_good_for_a_while(secured: Secured) -> None:
    """Then there is a new connection, and nobody notices."""
    security = Security("SASL_PLAINTEXT", "PLAIN", USER, PASSWORD)
    with Cluster(secured.at("SASL_PLAINTEXT"), security=security) as cluster:
        first = cluster.any()
        topic = unique("expiring")
        topics.create(cluster, topic)
        written = 0
        with LogWriter(cluster) as writer:

            def write_until_anew() -> bool:
                nonlocal written
                writer.write(topic, None, [b"%d" % written])
                writer.flush()
                written += 1
                return not first.is_open and cluster.any() is not first

            eventually(write_until_anew)
            write_until_anew()
        assert [row.value for row in read_all(cluster, topic)] == [
            b"%d" % number for number in range(written)
        ]


@pytest.mark.java
def test_commands_that_ask_brokers_directly(secured: Secured) -> None:
    options = {
        "security.protocol": "SASL_SSL",
        "ssl.ca.location": secured.ca_file,
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": USER,
        "sasl.password": "scram-secret",
    }
    given = [word for name, value in options.items() for word in ("-X", f"{name}={value}")]
    with Cluster(secured.kafka.bootstrap) as cluster:
        name = unique("txn")
        Transaction(cluster, name).init()
    command = [sys.executable, "-m", "penstock.cli", "transactions", "list", "--json", *given]
    done = subprocess.run(
        [*command, "--bootstrap", secured.at("SASL_SSL")],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert name in done.stdout


# ---- without a broker ------------------------------------------------------------------------

CHAIN_WITHOUT_KEY = {"ssl.keystore.type": "PEM", "ssl.keystore.certificate.chain": "x"}
SASL = {"security.protocol": "SASL_SSL", "sasl.mechanism": "SCRAM-SHA-256"}


def test_options_of_both_families() -> None:
    assert Security.from_options({}) == Security()
    assert Security.from_options({"group.id": "x", "security.protocol": "plaintext"}) == Security()
    named = Security.from_options({**SASL, "sasl.username": "a", "sasl.password": "b"})
    jaas = (
        "org.apache.kafka.common.security.scram.ScramLoginModule required\n"
        '  username="a" password="b";'
    )
    assert Security.from_options({**SASL, "sasl.jaas.config": jaas}) == named
    tricky = r"""M required username='o\'neill' password="a \"b\" = \\c; d";"""
    found = Security.from_options({**SASL, "sasl.jaas.config": tricky})
    assert (found.username, found.password) == ("o'neill", r'a "b" = \c; d')
    assert "b" not in repr(named).replace("b'", "").split("username")[1]
    assert pickle.loads(pickle.dumps(named)) == named


@pytest.mark.parametrize(
    ("options", "message", "advice"),
    [
        ({"security.protocol": "TLS"}, "security.protocol=TLS", "SASL_SSL"),
        ({"security.protocol": "SASL_SSL"}, "not set", "SCRAM"),
        ({**SASL, "sasl.mechanism": "GSSAPI"}, "GSSAPI", "PLAIN"),
        (SASL, "user name and a password", "sasl.jaas.config"),
        ({**SASL, "sasl.jaas.config": "M required;"}, "user name", "sasl.username"),
        (
            {"security.protocol": "SSL", "ssl.truststore.location": "/trust.jks"},
            "type=JKS",
            "keytool.*trust.jks.*ssl.truststore.type=PEM",
        ),
        (
            {"security.protocol": "SSL", "ssl.keystore.type": "PKCS12"},
            "type=PKCS12",
            "ssl.keystore.type=PEM",
        ),
        (
            {"security.protocol": "SSL", **CHAIN_WITHOUT_KEY},
            "ssl.keystore.key",
            "",
        ),
    ],
)  # fmt: skip
def test_options_that_make_no_sense(options: dict[str, str], message: str, advice: str) -> None:
    with pytest.raises(SecurityError, match=message) as caught:
        Security.from_options(options)
    assert re.search(advice, caught.value.advice)


def test_certificates_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("nothing")
    for options in (
        {"ssl.ca.location": str(tmp_path / "empty.pem")},
        {"ssl.ca.location": str(tmp_path / "not there.pem")},
        {"ssl.ca.pem": "nothing"},
        {"ssl.certificate.location": str(tmp_path / "empty.pem")},
        {"ssl.certificate.pem": "nothing", "ssl.key.pem": "nothing"},
    ):
        security = Security.from_options({"security.protocol": "SSL", **options})
        with pytest.raises(SecurityError, match="certificates cannot be used"):
            security.context()


def server_signature(password: str, salt: bytes, rounds: int, message: str) -> str:
    salted = hashlib.pbkdf2_hmac("sha256", password.encode(), salt, rounds)
    key = hmac.digest(salted, b"Server Key", "sha256")
    return base64.b64encode(hmac.digest(key, message.encode(), "sha256")).decode()


def test_scram_as_in_its_rfc() -> None:
    """The example of RFC 7677."""
    talk = scram("user", "pencil", "sha256", "rOprNGfwEbeRWgbNEkqO")
    assert next(talk) == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    final = talk.send(
        b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    )
    assert final == (
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,"
        b"p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    with pytest.raises(StopIteration):
        talk.send(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")


@pytest.mark.parametrize(
    ("first", "final", "message"),
    [
        ("r=other,s=c2FsdA==,i=4096", "", "nonce"),
        ("r=mine,s=c2FsdA==,i=4096", "", "nonce"),
        ("r=mine+theirs,s=c2FsdA==,i=1", "", "1 rounds"),
        ("r=mine+theirs,s=c2FsdA==,i=999999999", "", "rounds"),
        ("r=mine+theirs,i=4096", "", "not one of SCRAM"),
        ("r=mine+theirs,s=c2FsdA==,i=4096", "e=other-error", "other-error"),
        ("r=mine+theirs,s=c2FsdA==,i=4096", "v=AAAA", "does not know the password"),
        ("r=mine+theirs,s=c2FsdA==,i=4096", "nonsense", "not one of SCRAM"),
    ],
)
def test_a_broker_that_only_claims_to_know_the_password(
    first: str, final: str, message: str
) -> None:
    talk = scram("a=b,c", "secret", "sha256", "mine")
    assert next(talk) == b"n,,n=a=3Db=2Cc,r=mine"
    with pytest.raises(AuthenticationError, match=message):
        exchange(talk, first, final)


def exchange(talk: Iterator[bytes], first: str, final: str) -> None:
    assert hasattr(talk, "send")
    talk.send(first.encode())
    talk.send(final.encode())


def test_a_broker_that_knows_the_password() -> None:
    talk = scram("alice", "secret", "sha256", "mine")
    next(talk)
    first = "r=mine+theirs,s=c2FsdA==,i=4096"
    talk.send(first.encode())
    message = f"n=alice,r=mine,{first},c=biws,r=mine+theirs"
    proof = server_signature("secret", b"salt", 4096, message)
    with pytest.raises(StopIteration):
        talk.send(f"v={proof}".encode())
