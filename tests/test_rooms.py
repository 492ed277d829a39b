"""The house rules that a machine can check: who imports whom, docstrings, lengths, no sleeping.

The table below is the one of the design. What a room may import, at any depth of its modules and
inside functions too, is what stands there and nothing else; `errors`, why a connection did not come
about (`connecting`), the optional packages (`extras`) and the package itself (`__version__`) are
everyone's.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "penstock"
FILE_LINES_MAX = 700
FUNCTION_LINES_MAX = 90

ALL = "all"
MAY_IMPORT: dict[str, set[str] | str] = {
    "records": set(),
    "wire": set(),
    "log": {"records"},
    "broker": {"records", "log", "wire"},
    "client": {"records", "wire"},
    "capture": {"client", "records"},
    "direct": {"client"},
    "events": {"client"},
    "spark": {"client", "records", "sinks"},
    "sinks": set(),
    "serve": {"client"},
    "cli": ALL,
    "testing": ALL,
}
SHARED = {"errors", "connecting", "extras", "__version__"}
# Only these may be long: they are written by a program from Kafka's message definitions.
GENERATED = PACKAGE / "wire" / "messages"

SOURCES = sorted(PACKAGE.rglob("*.py"))
CHECKED = sorted(
    file
    for folder in ("src", "tests", "conformance", "benchmarks", "tools", "examples")
    for file in (ROOT / folder).rglob("*.py")
)
# The one place that draws a seed.
SEEDS = "tests/harness/seeds.py"
TESTS = sorted((ROOT / "tests").rglob("*.py")) + sorted((ROOT / "conformance").rglob("*.py"))


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


@dataclass(frozen=True)
class Module:
    """What the rules ask of a module; a syntax tree takes too much memory to be kept."""

    docstring: str
    imports: tuple[tuple[str, int], ...]
    functions: tuple[tuple[str, int], ...]
    sleeps: tuple[int, ...]
    chances: tuple[int, ...] = ()


@cache
def module_of(file: Path) -> Module:
    return module_from(file.read_text(encoding="utf-8"))


def module_from(code: str) -> Module:
    tree = ast.parse(code)
    nodes = list(ast.walk(tree))
    return Module(
        (ast.get_docstring(tree) or "").strip(),
        tuple(imported_rooms(nodes)),
        tuple(
            (node.name, (node.end_lineno or node.lineno) - node.lineno + 1)
            for node in nodes
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ),
        tuple(sleeps(nodes)) if "sleep" in code else (),
        tuple(unseeded_chances(nodes)) if "andom" in code or "default_rng" in code else (),
    )


def imported_rooms(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, int]]:
    """The parts of penstock that a module imports, each with its line."""
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "penstock":
            names = [f"penstock.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        else:
            continue
        for name in names:
            parts = name.split(".")
            if parts[0] == "penstock":
                yield (parts[1] if len(parts) > 1 else "__version__"), node.lineno


def forbidden_imports(room: str, module: Module) -> list[str]:
    """What a module of a room imports although the table does not allow it."""
    allowed = MAY_IMPORT.get(room, set())
    if isinstance(allowed, str):
        return []
    own = allowed | SHARED | {room}
    return [
        f"line {line}: {room} may not import {target}"
        for target, line in module.imports
        if target not in own
    ]


def sleeps(nodes: list[ast.AST]) -> Iterator[int]:
    """The lines that sleep: `time.sleep(...)`, or `sleep(...)` imported from time."""
    bare = any(
        isinstance(node, ast.ImportFrom)
        and node.module == "time"
        and any(alias.name == "sleep" for alias in node.names)
        for node in nodes
    )
    for node in nodes:
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called == "time.sleep" or (bare and called == "sleep"):
                yield node.lineno


def unseeded_chances(nodes: list[ast.AST]) -> Iterator[int]:
    """The lines that draw from chance that no seed repeats.

    That is any function of the module `random`, which has one generator for everybody, and a
    generator that is made without a seed.
    """
    is_module = any(
        isinstance(node, ast.Import) and any(alias.name == "random" for alias in node.names)
        for node in nodes
    )
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "random":
            if any(alias.name != "Random" for alias in node.names):
                yield node.lineno
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            makes_one = called.rpartition(".")[2] in {"Random", "default_rng"}
            draws = is_module and called.startswith("random.") and called.count(".") == 1
            if (draws and not makes_one) or (makes_one and not node.args and not node.keywords):
                yield node.lineno


def broken(rule: Callable[[Path], list[str]], files: list[Path]) -> list[str]:
    """Each breach of a rule, with the file it is in."""
    return [f"{name_of(file)}: {breach}" for file in files for breach in rule(file)]


def imports_of_other_rooms(file: Path) -> list[str]:
    parts = file.relative_to(PACKAGE).parts
    room = parts[0] if len(parts) > 1 else file.stem
    if len(parts) > 1 and room not in MAY_IMPORT:
        return [f"{room} is not a room of the design"]
    return forbidden_imports(room, module_of(file))


def missing_docstring(file: Path) -> list[str]:
    return [] if module_of(file).docstring else ["does not say what it is"]


def excessive_lengths(file: Path) -> list[str]:
    if GENERATED in file.parents:
        return []
    lines = len(file.read_text(encoding="utf-8").splitlines())
    breaches = [f"{lines} lines, the limit is {FILE_LINES_MAX}"] if lines > FILE_LINES_MAX else []
    for name, lines in module_of(file).functions:
        if lines > FUNCTION_LINES_MAX:
            breaches.append(f"{name} has {lines} lines, the limit is {FUNCTION_LINES_MAX}")
    return breaches


def test_a_room_imports_only_what_the_table_allows() -> None:
    assert broken(imports_of_other_rooms, SOURCES) == []


def test_a_module_says_what_it_is() -> None:
    assert broken(missing_docstring, CHECKED) == []


def test_files_and_functions_are_short() -> None:
    assert broken(excessive_lengths, CHECKED) == []


def test_tests_wait_on_conditions() -> None:
    sleeping = broken(lambda file: [f"line {at} sleeps" for at in module_of(file).sleeps], TESTS)
    assert sleeping == []


def test_tests_take_their_chances_from_a_seed() -> None:
    """From the fixture `seed`, so that what fails once can fail again."""
    drawing = broken(
        lambda file: [f"line {at} draws without a seed" for at in module_of(file).chances],
        [file for file in TESTS if name_of(file) != SEEDS],
    )
    assert drawing == []


def test_the_rules_see_what_they_forbid() -> None:
    code = module_from(
        "import penstock.broker\n"
        "from penstock import log, errors\n"
        "def late():\n"
        "    from penstock.broker.server import Server\n"
        "    from penstock.errors import PenstockError\n"
    )
    assert [found.split(":")[0] for found in forbidden_imports("records", code)] == [
        "line 1",
        "line 2",
        "line 4",
    ]
    assert len(forbidden_imports("log", code)) == 2
    assert forbidden_imports("cli", code) == []
    assert module_from("import time\ntime.sleep(1)").sleeps == (2,)
    assert module_from("from time import sleep\nsleep(1)").sleeps == (2,)
    assert module_from("import asyncio\nasyncio.sleep(0)").sleeps == ()
    drawing = "import random\nrandom.random()\nrandom.Random()\nrandom.Random(seed).random()\n"
    assert module_from(drawing).chances == (2, 3)
    assert module_from("from random import choice, Random\nRandom(1)").chances == (1,)
    assert module_from("import random\nrandom.SystemRandom()").chances == (2,)
    assert module_from("np.random.default_rng()\nnp.random.default_rng(1)").chances == (1,)
