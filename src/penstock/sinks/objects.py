"""Where a warehouse's files lie: a folder, or a bucket of an S3-compatible store.

    delta:///data/orders
    delta+s3://bucket/orders?endpoint=https://minio:9000&region=eu-west-1

Keys come from the options `access_key_id` and `secret_access_key`, or as the AWS tools find them:
from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile, or the machine's role.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError
from penstock.sinks.disk import sync
from penstock.sinks.errors import StoreAwayError, StoreUnreachableError
from penstock.sinks.stores import Address

if TYPE_CHECKING:
    from obstore.store import ObjectStore

# Nobody is there, as the library says it.
_AWAY: Final = ("tcp connect error", "kind: Connect", "dns error", "Connection refused")
OPTIONS: Final = ("endpoint", "region", "access_key_id", "secret_access_key")
_SETTINGS: Final = {
    "endpoint": "AWS_ENDPOINT_URL",
    "region": "AWS_REGION",
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
}


_ANSI: Final = re.compile("\x1b\\[[0-9;]*m|\N{DOWNWARDS ARROW WITH TIP RIGHTWARDS}")
_EFFORT: Final = re.compile(r" in [0-9.]+(?:s|ms|µs|us)(?:, after .*?retry_timeout:? \S+)?")
_CAUSE: Final = re.compile(r'message: "([^"]+)"')


def explain(target: str, error: Exception) -> StoreUnreachableError:
    """What an object store's library says, in a line: it writes reports over many, with colours."""
    text, _, debug = _ANSI.sub("", str(error)).partition("Debug source:")
    text = _EFFORT.sub("", " ".join(text.split())).rstrip(" :")
    cause = _CAUSE.search(debug)
    if cause is not None and cause[1] not in text:
        text = f"{text}: {cause[1]}"
    away = any(word in f"{text} {debug}" for word in _AWAY)
    kind = StoreAwayError if away else StoreUnreachableError
    return kind(f"{target}: {text[:500]}")


@dataclass(frozen=True, slots=True)
class Folder:
    """A folder on disk or in a bucket."""

    uri: str
    storage: dict[str, str] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, address: Address) -> Folder:
        """The one that a URL names."""
        if address.scheme.endswith("s3"):
            if not address.host or not address.path.strip("/"):
                raise ConfigError(f"{address.shown} names no folder in a bucket")
            found = {setting: address.option(name) for name, setting in _SETTINGS.items()}
            storage = {setting: value for setting, value in found.items() if value}
            storage.setdefault("AWS_REGION", "us-east-1")
            if storage.get("AWS_ENDPOINT_URL", "").startswith("http://"):
                storage["AWS_ALLOW_HTTP"] = "true"
            return cls(f"s3://{address.host}/{address.path.strip('/')}", storage)
        if address.host or not address.path.strip("/"):
            raise ConfigError(
                f"{address.shown} names no folder",
                advice="Three slashes before a relative path, four before an absolute one.",
            )
        return cls(address.path.rstrip("/"))

    def sibling(self, suffix: str) -> Folder:
        """One beside it."""
        return Folder(self.uri + suffix, self.storage)

    @property
    def local(self) -> Path | None:
        return None if self.storage is not None else Path(self.uri)

    def store(self) -> ObjectStore:
        """To read and write single objects; a folder on disk is made."""
        from obstore.store import LocalStore, S3Store

        if self.storage is None:
            return LocalStore(self.uri, mkdir=True)
        bucket, _, prefix = self.uri.removeprefix("s3://").partition("/")
        settings = {
            name.lower(): value for name, value in self.storage.items() if "ALLOW" not in name
        }
        http = {"allow_http": True} if "AWS_ALLOW_HTTP" in self.storage else {}
        made: ObjectStore = S3Store(
            bucket,
            prefix=prefix,
            config=settings,  # type: ignore[arg-type]
            client_options=http,  # type: ignore[arg-type]
        )
        return made

    def keep(self, path: str) -> None:
        """Return when an object that was written would survive a power loss; in a bucket it does
        already."""
        if self.storage is None:
            sync(Path(self.uri) / path)
            sync((Path(self.uri) / path).parent)

    def remove(self) -> None:
        """Take away all that is in it."""
        if self.storage is None:
            shutil.rmtree(self.uri, ignore_errors=True)
            return
        import obstore

        store = self.store()
        for some in obstore.list(store, chunk_size=500):
            obstore.delete(store, [found["path"] for found in some])
