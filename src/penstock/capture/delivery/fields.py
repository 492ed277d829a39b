"""Settings out of a mapping such as a TOML table; each error names the key and what it may be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

from penstock.errors import ConfigError

T = TypeVar("T")


class Fields:
    """A mapping that is read key by key; `done` complains of keys that nobody asked for."""

    def __init__(self, where: str, data: Mapping[str, Any]) -> None:
        if not isinstance(data, Mapping):
            raise ConfigError(f"{where} must be a table of settings, not {data!r}")
        self._where = where
        self._data = data
        self._asked: list[str] = []

    def path(self, key: str) -> str:
        return f"{self._where}.{key}"

    def wrong(self, key: str, expected: str) -> ConfigError:
        return ConfigError(f"{self.path(key)} must be {expected}, not {self._data.get(key)!r}")

    def _get(self, key: str) -> Any:
        self._asked.append(key)
        return self._data.get(key)

    def text(self, key: str, default: str | None = None) -> str:
        value = self._get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.path(key)} is missing", advice="It must be a text.")
            return default
        if not isinstance(value, str) or not value:
            raise self.wrong(key, "a text that is not empty")
        return value

    def optional_text(self, key: str) -> str:
        """A text, which may be empty or missing."""
        value = self._get(key)
        if value is not None and not isinstance(value, str):
            raise self.wrong(key, "a text")
        return value or ""

    def choice(self, key: str, default: str, allowed: Iterable[str]) -> str:
        value = self._get(key)
        if value is None:
            return default
        if value not in set(allowed):
            raise self.wrong(key, "one of " + ", ".join(allowed))
        return str(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(key, "true or false")
        return value

    def number(self, key: str, default: int, low: int, high: int) -> int:
        value = self._get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.wrong(key, f"a whole number from {low} to {high}")
        return value

    def texts(self, key: str, default: tuple[str, ...] = ()) -> tuple[str, ...]:
        value = self._get(key)
        if value is None:
            return default
        if not isinstance(value, list | tuple) or not all(
            isinstance(item, str) and item for item in value
        ):
            raise self.wrong(key, "a list of texts")
        return tuple(value)

    def table(self, key: str, each: Callable[[str, Any], T]) -> dict[str, T]:
        """A table of settings, each of whose values `each` makes something of, given its path."""
        value = self._get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.wrong(key, "a table")
        return {str(name): each(f"{self.path(key)}.{name}", item) for name, item in value.items()}

    def inner(self, key: str) -> Fields | None:
        value = self._get(key)
        return None if value is None else Fields(self.path(key), value)

    def inners(self, key: str) -> list[Fields]:
        value = self._get(key)
        if value is None:
            return []
        if not isinstance(value, list | tuple):
            raise self.wrong(key, "a list of tables")
        return [Fields(f"{self.path(key)}[{at}]", item) for at, item in enumerate(value)]

    def done(self) -> None:
        """ConfigError if there is a key that means nothing here."""
        for key in self._data:
            if key not in self._asked:
                near = get_close_matches(str(key), self._asked, 1)
                hint = f"Did you mean {near[0]}? " if near else ""
                raise ConfigError(
                    f"{self.path(key)} is no setting",
                    advice=f"{hint}There are {', '.join(self._asked)}.",
                )
