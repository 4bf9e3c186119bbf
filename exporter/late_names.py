"""Imports on first use: of the names of a package, and of TensorFlow."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import Any


def late_names(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's `__getattr__`, which imports a name from its module in `homes` on first use.

    `homes` is {name: module}. The function raises AttributeError for any other name, and ImportError if the
    import fails.
    """

    def get(name: str) -> Any:
        if name not in homes:
            message = f"module {package!r} has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=sys.modules[package])
        return getattr(import_module(homes[name]), name)

    return get


def short_help(package: str) -> None:
    """Make `help(package)` show each public name in a few lines, and nothing that classes inherit.

    `package` is the name of an imported package with `__all__`; the class of its module object is changed.
    KeyError if it is not imported.
    """
    sys.modules[package].__class__ = _ShortHelp


class _ShortHelp(ModuleType):
    @property
    def __doc__(self) -> str:  # type: ignore[override]
        return "\n\n".join([(self.__dict__["__doc__"] or "").rstrip(), *_summaries(self)])

    def __dir__(self) -> list[str]:
        """Return the public names; none for pydoc, which would print all that classes inherit below it."""
        frame = sys._getframe()
        for _ in range(3):  # getmembers, and what it calls, stand between pydoc and this
            if frame.f_back is not None:
                frame = frame.f_back
                if frame.f_code.co_name == "docmodule":
                    return []
        return [*super().__dir__()]


def _summaries(package: ModuleType) -> Iterator[str]:
    """Yield the help on each name in a package's `__all__`, a text of lines; classes first, then functions.

    Each has the name with its signature, at most 100 columns wide, and the first line of the docstring. A
    name that cannot be imported is yielded without them. Each name is imported.
    """
    import inspect
    from textwrap import fill

    found: dict[str, Any] = dict.fromkeys(package.__all__)
    for name in found:
        with suppress(Exception):  # a library that it needs is not installed
            found[name] = getattr(package, name)
    for name, thing in sorted(found.items(), key=lambda one: not isinstance(one[1], type)):
        shown = f"class {name}" if isinstance(thing, type) else name
        if members := getattr(thing, "__members__", None):  # an enumeration's
            shown += f": {', '.join(repr(one.value) for one in members.values())}"
        else:
            with suppress(TypeError, ValueError):  # it cannot be called, or is written in C
                shown += _call(inspect.signature(thing), inspect.unwrap(thing))
        told = None if thing is None else inspect.getdoc(thing)
        first, *_ = (told or "").splitlines() or [""]
        yield fill(shown, 100, subsequent_indent=" " * 8, break_on_hyphens=False) + f"\n    {first}"


def _call(signature: Any, function: Any) -> str:
    """Return a signature as text, such as `(model, *, step=None) -> Plan`, without types of arguments.

    Parameters that `function` itself does not have, which its `**options` take, are shown as `**options`.
    """
    own, shown = getattr(function, "__code__", None), []
    for each in signature.parameters.values():
        if own is not None and each.name not in own.co_varnames:
            shown.append("**options")
            break
        if each.kind is each.KEYWORD_ONLY and not any(one.startswith("*") for one in shown):
            shown.append("*")
        default = getattr(each.default, "value", each.default)  # an enumeration's value, as one would type it
        shown.append(str(each.replace(annotation=each.empty, default=default)).replace("<factory>", "{}"))
    returned = signature.return_annotation
    is_told = own is not None and returned is not signature.empty
    return f"({', '.join(shown)})" + (f" -> {returned}" if is_told else "")


class _LateModule:
    """A module that is imported when one of its names is first used; ImportError then if it is missing."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._name), name)


tf: Any = _LateModule("tensorflow")
"""TensorFlow, which takes seconds to import: most commands never use it."""
