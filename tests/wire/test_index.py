"""The table of APIs, what importing costs, and the error codes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from kio.schema.errors import ErrorCode as KioErrorCode

from penstock.wire import APIS, Api, WireError, api
from penstock.wire.errors import ErrorCode
from tests.wire.samples import name_of

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("entry", APIS.values(), ids=name_of)
def test_index_agrees_with_the_classes(entry: Api) -> None:
    for cls, role in ((entry.request, "Request"), (entry.response, "Response")):
        assert cls.NAME == cls.__name__ == f"{entry.name}{role}"
        assert entry.key == cls.API_KEY
        assert entry.versions == cls.VERSIONS
        assert entry.unstable_max == cls.UNSTABLE_MAX
        assert entry.flexible_from == cls.FLEXIBLE_FROM
        assert (role == "Request") == cls.IS_REQUEST
        assert sorted(cls.__slots__) == sorted(f.name for f in cls.SPEC)


def test_lookup() -> None:
    assert api(3).name == "Metadata"
    assert "Metadata" in repr(api(3))
    with pytest.raises(WireError, match="no API has key 12345"):
        api(12345)


@pytest.mark.processes
def test_importing_loads_no_message() -> None:
    script = (
        "import sys, penstock.wire\n"
        "heavy = ('penstock.wire.messages', 'penstock.wire.decoding', 'uuid', 'kio')\n"
        "print([m for m in heavy if m in sys.modules])\n"
        "penstock.wire.api(18).request\n"
        "print(sorted(m for m in sys.modules if m.startswith('penstock.wire.messages.')))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == ["[]", "['penstock.wire.messages.api_versions']"]


def test_error_codes_are_those_of_kio() -> None:
    theirs = {int(code): (code.name.upper(), code.retriable) for code in KioErrorCode}
    ours = {int(code): (code.name, code.retriable) for code in ErrorCode}
    assert {code: ours[code] for code in theirs} == theirs


def test_an_unknown_error_code_is_an_unknown_server_error() -> None:
    assert ErrorCode.of(3) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert ErrorCode.of(31_000) is ErrorCode.UNKNOWN_SERVER_ERROR


def generator() -> ModuleType:
    """The tool that writes the message modules; it is not part of the package."""
    path = ROOT / "tools" / "generate_wire.py"
    spec = importlib.util.spec_from_file_location("generate_wire", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["generate_wire"] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules["generate_wire"]
    return module


def test_generator_reads_names_ranges_and_defaults() -> None:
    tool = generator()
    assert tool.snake("TopicId") == "topic_id"
    assert tool.snake("LastKnownElr") == "last_known_elr"
    assert tool.snake("Enable2Pc") == "enable_2pc"
    assert tool.parse_range("3+") == (3, 32767)
    assert tool.parse_range("0-12") == (0, 12)
    assert tool.parse_range("4") == (4, 4)
    assert tool.parse_range("none") is None
    assert tool.default_of("0x7fffffff", "int32", False) == "2147483647"
    assert tool.default_of("null", "string", False) == "None"
    assert tool.default_of(None, "string", False) == '""'
    assert {tool.snake(name) for name in tool.APIS} == {a.module for a in APIS.values()}
