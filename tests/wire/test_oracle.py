"""The codec against kio, an independent implementation of the same messages.

What we write, kio reads with the same values; what kio writes from them, we read back equal.
"""

from __future__ import annotations

import io
from datetime import datetime, timedelta
from importlib import import_module
from typing import Any
from uuid import UUID

import pytest
from kio.serial import entity_reader, entity_writer

from penstock.wire import Api, Message, Struct, decoder, encoder
from tests.harness.profiles import ORACLE_ROUNDS
from tests.wire.samples import SEED, Sampler, every_message, name_of, some_versions, versions_of


def kio_class(api: Api, cls: type[Message], version: int) -> Any:
    """kio's class for this version, or None where it has none."""
    role = "request" if cls.IS_REQUEST else "response"
    try:
        module = import_module(f"kio.schema.{api.module}.v{version}.{role}")
    except ModuleNotFoundError:
        return None
    return getattr(module, cls.NAME)


def kio_value(entity: Any, name: str) -> Any:
    """kio names durations without their unit."""
    for candidate in (name, name.removesuffix("_ms"), name.replace("_2pc", "2_pc")):
        if hasattr(entity, candidate):
            return getattr(entity, candidate)
    raise AssertionError(f"{type(entity).__name__} of kio has no {name}")


def plain(value: Any) -> Any:
    """A value of kio as the number that is on the wire."""
    if isinstance(value, timedelta):
        return round(value.total_seconds() * 1000)
    if isinstance(value, datetime):
        return round(value.timestamp() * 1000)
    return value


def assert_same(ours: Any, theirs: Any, version: int, path: str) -> None:
    if isinstance(ours, Struct):
        for field in ours.SPEC:
            if field.exists_in(version):
                inner = kio_value(theirs, field.name)
                assert_same(getattr(ours, field.name), inner, version, f"{path}.{field.name}")
    elif isinstance(ours, list):
        assert len(ours) == len(theirs), path
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert_same(a, b, version, f"{path}[{index}]")
    elif isinstance(ours, UUID):
        assert (theirs or UUID(int=0)) == ours, path
    else:
        assert ours == plain(theirs), path


@pytest.mark.parametrize(("api", "cls"), every_message(), ids=name_of)
def test_kio_and_we_read_each_other(api: Api, cls: type[Message]) -> None:
    compared = 0
    for version in some_versions(versions_of(cls)):
        theirs = kio_class(api, cls, version)
        if theirs is None:
            continue
        read, write = entity_reader(theirs), entity_writer(theirs)
        for turn in range(ORACLE_ROUNDS):
            where = f"{cls.NAME} v{version}, turn {turn}, PENSTOCK_SEED={SEED}"
            message = Sampler(cls.NAME, version, turn, tame=True).message(cls, version)
            encoded = encoder(cls, version)(message)
            entity, size = read(encoded, 0)
            assert size == len(encoded), where
            assert_same(message, entity, version, where)
            out = io.BytesIO()
            write(out, entity)
            decoded, end = decoder(cls, version)(out.getvalue(), 0)
            assert (decoded, end) == (message, len(out.getvalue())), where
            compared += 1
    assert compared > 0, f"kio has no version of {cls.NAME}"
