"""Write docs/cli.md from the commands themselves: `python -m tools.generate_cli_docs`.

What a command says of itself with --help is the one source; tests/cli/test_main.py fails when
the file says something else.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

import typer

from penstock.cli.main import make_app

TARGET: Final = Path(__file__).resolve().parent.parent / "docs" / "cli.md"
HEAD: Final = """\
# The `penstock` command

Written from the commands themselves by `python -m tools.generate_cli_docs`; do not edit.
"""
STATUS: Final = """\
## What all commands share

Results go to the standard output, everything else to the standard error. The exit status is

| status | meaning |
|---|---|
| 0 | done |
| 1 | it failed; the reason and what to do are on the standard error |
| 2 | the command was used wrongly |
| 130 | interrupted with Ctrl-C |

`topics`, `produce`, `consume` and `groups` speak the Kafka protocol. They work the same on
Penstock's broker and on Apache Kafka; `--bootstrap` says where it is
([else](configuration.md#the-project-file) the variable `PENSTOCK_BOOTSTRAP`, or the project file),
and `-X` passes any setting to the client, for instance for a cluster with passwords:

    penstock topics list --bootstrap kafka.example:9093 \\
      -X security.protocol=SASL_SSL -X sasl.mechanism=PLAIN \\
      -X sasl.username=me -X sasl.password=secret

`penstock --install-completion` teaches the shell to complete commands, options, topics,
groups and settings; it takes effect in the next shell.
"""


def commands(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """A command and everything below it, in the order of --help."""
    yield path, command
    for name, child in getattr(command, "commands", {}).items():
        yield from commands(child, (*path, name))


def blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """The paragraphs of a help text: (`prose` or `code`, lines)."""
    for part in text.strip().split("\n\n"):
        lines = part.splitlines()
        if lines[0].strip() == "\b":
            yield "code", lines[1:]
        else:
            yield "prose", [line.strip() for line in lines]


def describe(text: str) -> str:
    parts = []
    for kind, lines in blocks(text):
        if kind == "prose":
            parts.append("\n".join(lines))
        else:
            title, *code = lines
            body = "\n".join(line.removeprefix("  ") for line in code)
            parts.append(f"{title.strip()}\n\n```sh\n{body}\n```")
    return "\n\n".join(parts)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def names_of(parameter: Any) -> str:
    options = [*parameter.opts, *parameter.secondary_opts]
    options.sort(key=lambda option: option.startswith("--"))
    names = ", ".join(f"`{option}`" for option in options)
    default = parameter.default
    if isinstance(default, Enum):
        return f"{names} `{'|'.join(str(item.value) for item in type(default))}`"
    return f"{names} `{parameter.metavar}`" if parameter.metavar else names


def default_of(parameter: Any) -> str:
    default = parameter.default
    if parameter.required:
        return "required"
    if isinstance(default, Enum):
        default = default.value
    if default in (None, "", [], ()) or isinstance(default, bool):
        on = default is True and parameter.secondary_opts
        return f"`{parameter.opts[0]}`" if on else ""
    text = f"`{default}`"
    return f"{text}, or `${parameter.envvar}`" if parameter.envvar else text


def is_ours(parameter: Any) -> bool:
    """Not what every command has: --help and the shell's completion."""
    known = {"help", "install_completion", "show_completion"}
    return parameter.name not in known and not getattr(parameter, "hidden", False)


def table(command: Any) -> str:
    rows = []
    for parameter in filter(is_ours, command.params):
        if parameter.param_type_name == "argument":
            name = f"`{parameter.metavar or parameter.name.upper()}`"
        else:
            name = names_of(parameter)
        rows.append(
            f"| {cell(name)} | {cell(parameter.help or '')} | {cell(default_of(parameter))} |"
        )
    if not rows:
        return ""
    return "\n".join(["| option | meaning | default |", "|---|---|---|", *rows])


def section(path: tuple[str, ...], command: Any) -> str:
    level = "##" if len(path) <= 2 else "###"
    parts = [f"{level} `{' '.join(path)}`", describe(command.help or "")]
    if command.epilog:
        parts.append(command.epilog)
    listed = table(command)
    if listed:
        parts.append(listed)
    return "\n\n".join(parts)


def render() -> str:
    """The whole of docs/cli.md."""
    (root_path, root), *rest = commands(typer.main.get_command(make_app()), ("penstock",))
    parts = [HEAD.strip(), describe(root.help or ""), table(root), STATUS.strip()]
    parts += [section((*root_path, *path[1:]), command) for path, command in rest]
    return "\n\n".join(part for part in parts if part) + "\n"


def main() -> None:
    TARGET.parent.mkdir(exist_ok=True)
    TARGET.write_text(render(), encoding="utf-8")
    print(f"wrote {TARGET.relative_to(TARGET.parent.parent)}")


if __name__ == "__main__":
    main()
