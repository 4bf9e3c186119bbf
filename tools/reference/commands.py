"""A page for each of the two commands: its use, examples, and options in the groups of `--help`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import typer

from tools.reference.markdown import code, code_block, table, text

_COMMON = ("--json", "--quiet", "--debug", "--help", "--help-all", "-V")
"""Options that are told once on a page, not for each of its commands."""
_NOTE = re.compile(r"\s*\[((?:default: |required|x[<>]=|\S+<=x)(?:(?!\]  \[).)*)\]$")
_OTHER = "Output"
"""The heading of options that stand in no panel of `--help`."""
_ARGUMENT_TYPE = re.compile(r" <[^>]*>$")


@dataclass(frozen=True, slots=True)
class Option:
    """An option or argument as `--help` tells of it; `notes` are its default and limits."""

    name: str
    help: str
    notes: str
    is_argument: bool
    group: str

    @property
    def long_name(self) -> str:
        """`--name`, or an argument's metavar."""
        names = [word for word in self.name.replace(",", "").split() if word.startswith("-")]
        return max(names, key=len) if names else self.name

    def row(self) -> tuple[str, str, str]:
        """Its line in a table."""
        first, *words = self.help.split("\n")
        told = (
            f"<br>{code(word)}: {text(meaning)}"
            for word, _, meaning in (each.partition(": ") for each in words)
        )
        return code(self.name), text(first) + "".join(told), text(self.notes)


def page(app: typer.Typer, name: str) -> str:
    """The page of an application and all its subcommands."""
    root: Any = typer.main.get_command(app)
    context = _context(root, name)
    names = list(root.list_commands(context))
    linked = ", ".join(f"[{sub}](#{name}-{sub})" for sub in names)
    parts = [f"# {name}\n", *_command(root, context, "[OPTIONS] [COMMAND ...]", 2), f"Commands: {linked}.\n"]
    shared = {option.long_name: option for option in _options(root, context)}
    for sub in names:
        command = root.get_command(context, sub)
        inner = _context(command, f"{name} {sub}")
        parts += [f"## {name} {sub}\n", *_command(command, inner, "[OPTIONS]", 3)]
        shared |= {option.long_name: option for option in _options(command, inner)}
    rows = (shared[option].row() for option in _COMMON)
    parts += ["## Options of every command\n", _option_table(rows)]
    return "\n".join(parts)


def _command(command: Any, context: Any, usage: str, level: int) -> Iterator[str]:
    """A command's part of a page; `level` is that of its heading for options, if they have several groups."""
    options = [option for option in _options(command, context) if option.long_name not in _COMMON]
    arguments = [option for option in options if option.is_argument]
    yield code_block(" ".join((context.info_name, usage, *(argument.name for argument in arguments))))
    yield from _help(command.help)
    if arguments:
        yield table(("argument", "what it is"), (argument.row()[:2] for argument in arguments))
    groups = list(_groups([option for option in options if not option.is_argument]))
    if len(groups) > 1:
        yield f"{'#' * level} Options\n"
    for heading, rows in groups:
        if heading != _OTHER:
            yield f"{'#' * level}# {heading}\n"
        yield _option_table(option.row() for option in rows)


def _option_table(rows: Iterable[tuple[str, str, str]]) -> str:
    return table(("option", "what it does", "default, limits"), rows)


def _groups(options: list[Option]) -> Iterator[tuple[str, list[Option]]]:
    """The root command's options by heading; a subcommand's, which are few, under none."""
    headings = dict.fromkeys(option.group for option in options)
    for heading in sorted(headings, key=lambda heading: heading != _OTHER):
        yield heading, [option for option in options if option.group == heading]


def _help(help_: str) -> Iterator[str]:
    """A help text: its paragraphs, and examples as they stand."""
    for paragraph in help_.strip().split("\n\n"):
        heading, *lines = paragraph.splitlines()
        if heading == "Exit codes:":
            yield "Exit codes are on [a page of their own](exit-codes.md).\n"
        elif heading == "Examples:":
            yield code_block("\n".join(line.removeprefix("  ") for line in lines))
        else:
            yield text(" ".join(paragraph.split())) + "\n"


def _context(command: Any, name: str) -> Any:
    return command.make_context(name, [], resilient_parsing=True)


def _options(command: Any, context: Any) -> Iterator[Option]:
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is None:
            continue
        name, help_ = record
        notes: list[str] = []
        while found := _NOTE.search(help_):
            notes = [*found[1].split("; "), *notes]
            help_ = help_[: found.start()]
        is_argument = parameter.param_type_name == "argument"
        yield Option(
            _ARGUMENT_TYPE.sub("", name) if is_argument else name,
            help_,
            ", ".join(map(_in_words, notes)),
            is_argument,
            getattr(parameter, "rich_help_panel", None) or _OTHER,
        )


def _in_words(note: str) -> str:
    """A default as it is, and `x>=1` as `at least 1`."""
    note = re.sub(r"^x>=(\S+)$", r"at least \1", re.sub(r"^(\S+)<=x<=(\S+)$", r"\1 to \2", note))
    return re.sub(r"^default: \(?(.*?)\)?$", r"\1", note)
