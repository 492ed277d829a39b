"""Where closed segments go to stay: a second directory, or an S3-compatible object store.

An archive holds named objects, `/` between folder and name. The contract, on which the order of
steps in `tiering` relies:

- `put` is atomic and durable on return: the whole object under its name, or what was there
  before. Putting the same name again replaces it.
- `get` returns exactly the bytes asked for, fewer only at the object's end.
- Removing what is not there is no error.

All calls block and may come from any thread; failures are StorageError, retriable. This module
knows nothing of partitions. `obstore`, an optional dependency, speaks to the object stores.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from penstock.errors import ConfigError, StorageError
from penstock.extras import install
from penstock.log.disk import Disk, OsDisk

if TYPE_CHECKING:
    from obstore.store import ObjectStore

_OBJECT_SCHEMES: Final = ("s3", "s3a", "gs", "az", "memory")
# An object up to this size is sent in one request, a larger one in parts of this size.
_PART_BYTES: Final = 8 << 20
_PARTS_AT_ONCE: Final = 2
_OPTIONS: Final = {
    "endpoint": "endpoint",
    "region": "region",
    "access_key_id": "access_key_id",
    "secret_access_key": "secret_access_key",
    "session_token": "session_token",
    "virtual_hosted_style": "virtual_hosted_style_request",
}


class Archive(Protocol):
    """A place for closed segments."""

    def put(self, name: str, chunks: Iterable[bytes], size: int) -> None: ...

    def get(self, name: str, start: int, length: int) -> bytes: ...

    def size(self, name: str) -> int | None:
        """Bytes of the object; None if there is none."""
        ...

    def names(self, folder: str) -> list[str]:
        """The objects in the folder, with it."""
        ...

    def remove(self, name: str) -> None: ...


def read_object(archive: Archive, name: str) -> bytes | None:
    """All of a small object; None if it is not there."""
    size = archive.size(name)
    return None if size is None else archive.get(name, 0, size)


class DirectoryArchive:
    """Objects as files below a directory, such as a mount of slower or remote storage."""

    def __init__(self, root: str, disk: Disk | None = None) -> None:
        self.root = os.path.abspath(root)
        self._disk: Disk = disk or OsDisk()
        self._lock = threading.Lock()
        self._made: set[str] = set()

    def _path(self, name: str) -> str:
        return os.path.join(self.root, *name.split("/"))

    def put(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        path = self._path(name)
        folder = os.path.dirname(path)
        self._make_folder(folder)
        temporary = path + ".tmp"
        file = self._disk.open(temporary, create=True)
        try:
            file.truncate(0)
            position = 0
            for chunk in chunks:
                file.pwritev([chunk], position)
                position += len(chunk)
            file.sync()
        finally:
            file.close()
        if position != size:
            raise StorageError(f"{name}: {position} bytes came instead of {size}")
        self._disk.rename(temporary, path)
        self._disk.sync_dir(folder)

    def _make_folder(self, folder: str) -> None:
        """Make it, and every new name on the way to it durable, once."""
        with self._lock:
            if folder in self._made:
                return
            missing: list[str] = []
            parent = folder
            while not self._disk.exists(parent):
                missing.append(parent)
                parent = os.path.dirname(parent)
            self._disk.make_dirs(folder)
            for made in reversed(missing):
                self._disk.sync_dir(os.path.dirname(made))
            self._made.add(folder)

    def get(self, name: str, start: int, length: int) -> bytes:
        file = self._disk.open(self._path(name))
        try:
            data = file.pread(length, start)
            while len(data) < length:
                more = file.pread(length - len(data), start + len(data))
                if not more:
                    break
                data += more
            return data
        finally:
            file.close()

    def size(self, name: str) -> int | None:
        path = self._path(name)
        if not self._disk.exists(path):
            return None
        file = self._disk.open(path)
        try:
            return file.size()
        finally:
            file.close()

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        if not self._disk.exists(path):
            return []
        return [f"{folder}/{name}" for name in self._disk.names(path)]

    def remove(self, name: str) -> None:
        self._disk.remove(self._path(name))


class ObjectStoreArchive:
    """Objects in S3 or what speaks its protocol, below the URL's prefix."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        self._store = store
        self._url = url

    def __repr__(self) -> str:
        return f"ObjectStoreArchive({self._url})"

    def put(self, name: str, chunks: Iterable[bytes], size: int) -> None:
        obstore = _import_obstore()
        try:
            if size <= _PART_BYTES:
                obstore.put(self._store, name, b"".join(chunks), use_multipart=False)
            else:
                obstore.put(
                    self._store,
                    name,
                    _parts(chunks),
                    chunk_size=_PART_BYTES,
                    max_concurrency=_PARTS_AT_ONCE,
                )
        except obstore.exceptions.BaseError as error:
            raise _failed(f"writing {name} to {self._url}", error) from error

    def get(self, name: str, start: int, length: int) -> bytes:
        if length <= 0:
            return b""
        obstore = _import_obstore()
        try:
            return bytes(obstore.get_range(self._store, name, start=start, length=length))
        except (obstore.exceptions.BaseError, FileNotFoundError) as error:
            raise _failed(f"reading {name} from {self._url}", error) from error

    def size(self, name: str) -> int | None:
        obstore = _import_obstore()
        try:
            return int(obstore.head(self._store, name)["size"])
        except FileNotFoundError:
            return None
        except obstore.exceptions.BaseError as error:
            raise _failed(f"looking for {name} in {self._url}", error) from error

    def names(self, folder: str) -> list[str]:
        obstore = _import_obstore()
        try:
            pages = obstore.list(self._store, prefix=folder + "/")
            return sorted(str(item["path"]) for page in pages for item in page)
        except obstore.exceptions.BaseError as error:
            raise _failed(f"listing {folder} in {self._url}", error) from error

    def remove(self, name: str) -> None:
        obstore = _import_obstore()
        try:
            obstore.delete(self._store, name)
        except FileNotFoundError:
            return
        except obstore.exceptions.BaseError as error:
            raise _failed(f"removing {name} from {self._url}", error) from error


def _parts(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """An iterator of its own: the library wants one that it can drive from another thread."""
    yield from chunks


def _failed(doing: str, error: Exception) -> StorageError:
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return StorageError(
        f"{doing}: {reason}", advice="Check the archive's address, credentials and network."
    )


def _import_obstore() -> Any:
    try:
        import obstore
        import obstore.exceptions
    except ImportError:
        raise ConfigError(
            "an archive in an object store needs the package obstore",
            advice=f"Install it: {install(['archive'])}",
        ) from None
    return obstore


def open_archive(url: str, disk: Disk | None = None) -> Archive:
    """The archive at a path, a `file:` URL, or `s3://bucket/prefix?endpoint=…&region=…`.

    Credentials, region and endpoint come from the environment (`AWS_ACCESS_KEY_ID`, …) unless
    they are options of the URL.
    """
    parts = urlsplit(url)
    if parts.scheme in _OBJECT_SCHEMES and parts.netloc:
        return _open_object_store(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost") and parts.path:
        return DirectoryArchive(unquote(parts.path), disk)
    if "://" not in url and url:
        return DirectoryArchive(url, disk)
    raise ConfigError(
        f"{url!r} is not an archive",
        advice="Give a directory, or a URL such as s3://bucket/prefix?region=eu-central-1.",
    )


def _open_object_store(url: str) -> ObjectStoreArchive:
    _import_obstore()
    from obstore.exceptions import BaseError
    from obstore.store import from_url

    parts = urlsplit(url)
    options = dict(parse_qsl(parts.query, keep_blank_values=True))
    unknown = sorted(set(options) - set(_OPTIONS))
    if unknown:
        raise ConfigError(
            f"the archive's URL has unknown options: {', '.join(unknown)}",
            advice=f"Known are {', '.join(sorted(_OPTIONS))}.",
        )
    config: Any = {_OPTIONS[name]: value for name, value in options.items()}
    endpoint = options.get("endpoint") or os.environ.get("AWS_ENDPOINT_URL", "")
    client_options: Any = {
        "allow_http": endpoint.startswith("http://"),
        "connect_timeout": timedelta(seconds=5),
        "timeout": timedelta(seconds=60),
    }
    retries: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=60)}
    # Options may hold secrets: errors and logs show the address without them.
    bare = urlunsplit((parts.scheme, parts.netloc, parts.path, "", ""))
    try:
        store = from_url(bare, config=config, client_options=client_options, retry_config=retries)
    except (BaseError, ValueError) as error:
        raise ConfigError(f"{bare} cannot be used as an archive: {error}") from error
    return ObjectStoreArchive(store, bare)
