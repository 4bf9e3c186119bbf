"""`exporter/options/keywords.py`: the options as keyword arguments, for type checkers and editors."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from msgspec import Struct

from exporter.options import ExportRequest, Jobs, Updates, meanings

_HEAD = '''"""The options of `exporter.options` as keyword arguments, with the values that each takes.

Made from the code by `python -m tools.reference`; edit `exporter/options/__init__.py` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from exporter.options import (
{names}
)
from exporter.options.given import StrPath
'''
_PARTS: dict[str, type[Struct]] = {
    "UpdatesKeywords": Updates,
    "JobsKeywords": Jobs,
    "ExportKeywords": ExportRequest,
}
_OWN = {"ckpt_dir", "out", "model"}
"""What a function has as parameters of its own."""


def module() -> str:
    """The text of the module."""
    parts = ["\n".join(_class(name, struct)) for name, struct in _PARTS.items()]
    used = {kind.__name__ for struct in _PARTS.values() for kind in _own_types(struct)}
    names = "\n".join(f"    {name}," for name in sorted(used))
    return "\n\n\n".join([_HEAD.format(names=names).rstrip(), *parts]) + "\n"


def _class(name: str, struct: type[Struct]) -> Iterator[str]:
    yield f"class {name}(TypedDict, total=False):"
    yield f'    """Keyword arguments of `{struct.__name__}`."""\n'
    told = meanings(struct)
    for field, kind in get_type_hints(struct).items():
        if field in struct.__struct_fields__ and field not in _OWN:
            yield f"    {field}: {_text(kind)}"
            yield from _told(told[field])


def _told(text: str) -> Iterator[str]:
    text = text.replace('"', "'")
    yield textwrap.fill(f'"""{text}"""', 108, initial_indent="    ", subsequent_indent="    ")


def _text(kind: Any) -> str:
    if get_origin(kind) in (Union, UnionType):
        return " | ".join(_text(member) for member in get_args(kind))
    if get_origin(kind) is tuple:
        return f"Sequence[{_text(get_args(kind)[0])}]"
    if isinstance(origin := get_origin(kind), type) and issubclass(origin, Mapping):
        return "Mapping[str, str | float]"
    if kind is Path:
        return "StrPath"
    if issubclass(kind, Enum):
        return f"{kind.__name__} | Literal[{', '.join(json.dumps(member.value) for member in kind)}]"
    return "None" if kind is NoneType else str(kind.__name__)


def _own_types(struct: type[Struct]) -> Iterator[type]:
    for field, kind in get_type_hints(struct).items():
        for member in get_args(kind) or (kind,):
            if field not in _OWN and isinstance(member, type) and issubclass(member, Enum | Struct):
                yield member
