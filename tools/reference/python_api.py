"""`python.md`: the functions and types of `exporter`, from their signatures and docstrings."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Callable, Iterator
from enum import Enum
from typing import Any, cast

from msgspec import NODEFAULT, Struct
from msgspec.structs import fields

import exporter
import exporter.training
from exporter.options import ExportRequest, meanings
from exporter.options.given import Checked
from exporter.options.keywords import ExportKeywords
from tools.reference.markdown import code, code_block, table, text

_FUNCTIONS = {
    "Publish": "export export_incremental plan execute watch",
    "Merge, roll back, resume": "merge rebase rollback resume",
    "Name positions": "tag untag tags",
    "Look": "inspect history diff doctor verify_model open_checkpoint",
    "Object stores": "push pull opened",
    "Clusters": "is_chief node_role",
}
_HEAD = """# Python API

The package `exporter`, as `help(exporter.export)` shows it. [From Python](../scripts.md#from-python) has
examples; [Threads and async](../scripts.md#threads-and-async) says which calls may run at once. Each name is
imported when it is first used. A function that fails raises a class of `exporter.errors`:
[all errors](troubleshooting.md).

"""
_OWN = ("ckpt_dir", "out", "model")
_METHODS = {"IncrementWriter": "save write"}
"""Methods that programs call; those of hooks and callbacks are called by TensorFlow."""


def page() -> str:
    """The page."""
    listed = {name for names in _FUNCTIONS.values() for name in names.split()}
    types = [name for name in exporter.__all__ if isinstance(getattr(exporter, name), type)]
    if {*listed, *types} != set(exporter.__all__):
        raise ValueError(f"not on the page: {sorted(set(exporter.__all__) - listed - set(types))}")
    parts = [_HEAD]
    for heading, names in _FUNCTIONS.items():
        parts.append(f"## {heading}\n\n")
        parts += (_function(f"exporter.{name}", getattr(exporter, name)) for name in names.split())
    parts.append(
        "## Options of an export\n\n`export`, `export_incremental`, `plan` and `watch` take them by name.\n\n"
    )
    parts.append(_options() + "\n")
    parts.append("## Types\n\n")
    parts += (_type(f"exporter.{name}", getattr(exporter, name)) for name in types)
    parts.append("## For trainers\n\nNames of `exporter.training`; most need TensorFlow.\n\n")
    for name in exporter.training.__all__:
        if name not in exporter.__all__:
            thing = getattr(exporter.training, name)
            parts.append(_function(f"exporter.training.{name}", thing))
            methods = _METHODS.get(name, "").split()
            parts += (_function(f"{name}.{method}", getattr(thing, method)) for method in methods)
    return "".join(parts).rstrip("\n") + "\n"


def _function(name: str, function: Any) -> str:
    return f"### {name}\n\n{code_block(_signature(name, function))}\n{_told(function)}"


def _type(name: str, kind: Any) -> str:
    parts = [f"### {name}\n\n{_told(kind)}"]
    if issubclass(kind, Enum):
        parts.append("Values: " + ", ".join(f"`{member.value}`" for member in kind) + ".\n\n")
    elif issubclass(kind, Struct) and kind is not ExportRequest:
        told = meanings(cast(Any, kind)) if isinstance(kind, Checked) else {}
        rows = [
            (f"`{each.name}`", code(_written(kind, each.name)), _default(each), text(told.get(each.name, "")))
            for each in fields(kind)
        ]
        parts.append(table(("field", "type", "default", "meaning"), rows) + "\n")
    return "".join(parts)


def _options() -> str:
    told = meanings(ExportRequest)
    rows = []
    for each in fields(ExportRequest):
        if each.name not in _OWN:
            kind = ExportKeywords.__annotations__[each.name].__forward_arg__
            rows.append((f"`{each.name}`", code(kind), _default(each), text(told[each.name])))
    return table(("option", "type", "default", "meaning"), rows)


def _default(field: Any) -> str:
    value = field.default if field.default_factory is NODEFAULT else field.default_factory()
    return "" if value is NODEFAULT else code(_value(value))


def _value(value: Any) -> str:
    if isinstance(value, Enum):
        return repr(value.value)
    if isinstance(value, Struct):
        return f"{type(value).__name__}()"
    return "..." if callable(value) else repr(value)


def _written(kind: type, field: str) -> str:
    """A field's type as its class has it, without what the command line knows of it."""
    written = next(each.__annotations__[field] for each in kind.__mro__ if field in each.__annotations__)
    written = written.__name__ if type(written) is type else written
    plain = re.sub(r"^(?:typing\.)?Annotated\[(.+), \w+\(.*$", r"\1", str(written), flags=re.DOTALL)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", plain)


def _kind(kind: Any) -> str:
    shown = kind.__name__ if isinstance(kind, type) and not typing.get_args(kind) else str(kind)
    return re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", shown)


def _signature(name: str, function: Callable[..., Any]) -> str:
    """Options of an export are told once, and stand for themselves."""
    signature = inspect.signature(function)
    options = {each.name for each in fields(ExportRequest)} - {*_OWN}
    parameters = [each for name, each in signature.parameters.items() if name != "self"]
    takes_options = options <= signature.parameters.keys()
    own = [each for each in parameters if not (takes_options and each.name in options)]
    shown = [*_parameters(own), *(["**options"] if takes_options else [])]
    returned = (
        ""
        if signature.return_annotation is signature.empty
        else f" -> {_annotation(signature.return_annotation)}"
    )
    line = f"{name}({', '.join(shown)}){returned}"
    if len(line) <= 100:
        return line
    return f"{name}(\n" + "".join(f"    {each},\n" for each in shown) + f"){returned}"


def _parameters(parameters: list[inspect.Parameter]) -> Iterator[str]:
    has_star = False
    for each in parameters:
        if each.kind is each.KEYWORD_ONLY and not has_star:
            has_star = True
            yield "*"
        star = "*" * (each.kind is each.VAR_POSITIONAL) + "**" * (each.kind is each.VAR_KEYWORD)
        has_star = has_star or star == "*"
        kind = "" if each.annotation is each.empty else f": {_annotation(each.annotation)}"
        value = "" if each.default is each.empty else f"{' = ' if kind else '='}{_value(each.default)}"
        yield f"{star}{each.name}{kind}{value}"


def _annotation(kind: Any) -> str:
    return str(kind).strip("'") if isinstance(kind, str) else _kind(kind)


def _told(thing: Any) -> str:
    """A docstring: its sentences, then the errors; options are told elsewhere."""
    told = inspect.getdoc(thing) or ""
    told = re.split(r"\n(?:Options, by name|By name):\n", told)[0].strip()
    sentences, _, rest = told.partition("\nRaises:\n")
    sentences, _, arguments = sentences.partition("\nArgs:\n")
    paragraphs = [
        text(" ".join(each.split()).replace("( ", "("))
        for each in re.split(r"\n\s*\n", sentences)
        if each.strip()
    ]
    parts = [f"{each}\n\n" for each in paragraphs]
    for heading, section in (("argument", arguments), ("raises", rest)):
        rows = [(f"`{name}`", text(" ".join(meaning.split()))) for name, meaning in _entries(section)]
        if rows:
            parts.append(table((heading, "meaning" if heading == "argument" else "when"), rows) + "\n")
    return "".join(parts)


def _entries(section: str) -> list[tuple[str, str]]:
    """Names and texts of a section of a docstring; a text goes on in lines that stand further in."""
    return re.findall(r"^    ([\w, .]+): (.+(?:\n {5,}.+)*)", section, re.MULTILINE)
