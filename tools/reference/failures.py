"""Two pages from the tree of errors: the exit codes, and what to do about each error, with all its texts."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from exporter import errors
from exporter.errors import CallFailed, Exit, ExportError, UsageError
from exporter.training.trainer_side import Refused
from exporter.wire.update_status import UpdateStatus
from tools.reference.advice import ADVICE, GROUPS, Group
from tools.reference.markdown import code, table, text

ROOT = Path(__file__).parent.parent.parent
SOURCES = ("exporter", "serving")


@dataclass(frozen=True, slots=True)
class Message:
    """A text that an error is raised with, `…` for what varies, and the hint that it brings along, if any."""

    text: str
    hint: str


_LONG = 40
"""Texts of one class from which on they are divided by how they begin."""

_EXIT_CODES = """\
# Exit codes

Both commands end with one of these codes. A script needs nothing else: no text has to be parsed. With
`--json` the last line of stderr is one object with `error` (the name of the class), `message`, `cause`,
`hint` and `exit_code`; [its fields](documents.md#failure).

{table}
What a script may rely on:

- 0 is also the code of a command that found nothing to do: the checkpoint was already published, there is no
  delta to merge, this node of the cluster is not the chief. The document's `status` tells which.
- After 1 to 7 nothing is half-written, and running the same command again is safe.
- 10 comes from `export-model diff --exit-code` alone. `export-model verify` and `doctor` end with 6 if
  something is damaged on disk; `doctor` with 3 if it is the checkpoint alone, with 7 if it is model servers
  alone.
- `serve-model status` ends with 7 unless a version is AVAILABLE, `serve-model update` with 7 if the model
  stopped before deltas that are published.
- A command that was interrupted (SIGINT, SIGTERM) removes its staging directory and ends with 130.
  `serve-model run` ends with 0 after SIGTERM: that is how containers are stopped.
"""
_TROUBLESHOOTING = """\
# Troubleshooting

Look for the text after `error:`. What varies in it (names, paths, numbers) is `…` here. Each error has a
class, which `--json` names, and an [exit code](exit-codes.md). `export-model doctor MODEL` looks for most of
what can be wrong with a published model, and names the command that helps.

{index}
"""
_STATUSES = """\
## Statuses of an update

The signature `incremental_update` answers with a status, `<word>: <why>`. `serve-model update` prints it, the
agent and `--notify` report it. With a position to go to, everything but `reached`, `passed` and `merged` is
an error `INVALID_ARGUMENT` with this text. From `damaged` on it is why a delta was refused, if nothing else
led on; the model is as it was.

"""


def exit_codes() -> str:
    """The page of exit codes."""
    kinds = list(all_errors())
    rows = (
        (
            str(int(code_)),
            code_.meaning,
            ", ".join(
                f"[{kind.__name__}](troubleshooting.md#{kind.__name__.lower()})"
                for kind in kinds
                if kind.exit_code is code_
            ),
        )
        for code_ in Exit
    )
    return _EXIT_CODES.format(table=table(("code", "meaning", "errors"), rows))


def troubleshooting() -> str:
    """The page of errors, grouped by what one sees; an index first."""
    groups: dict[Group, list[type[ExportError]]] = {group: [] for group in GROUPS}
    for kind in all_errors():
        groups[next(group for group in GROUPS if issubclass(kind, group.roots))].append(kind)
    index = [
        (_link(group.title), ", ".join(_link(kind.__name__) for kind in kinds))
        for group, kinds in groups.items()
    ]
    index.append((_link("Statuses of an update"), ", ".join(code(status.value) for status in UpdateStatus)))
    parts = [_TROUBLESHOOTING.format(index=table(("what you see", "errors"), index))]
    for group, kinds in groups.items():
        parts += [f"## {group.title}\n", f"{group.sees}\n"]
        for kind in kinds:
            parts += _section(kind)
    rows = ((code(status.value), text(status.meaning), text(status.remedy)) for status in UpdateStatus)
    parts.append(_STATUSES + table(("status", "meaning", "what to do"), rows))
    return "\n".join(parts)


def _section(kind: type[ExportError]) -> Iterator[str]:
    advice = ADVICE[kind]
    yield f"### {kind.__name__}\n"
    yield f"{text((inspect.getdoc(kind) or '').partition(chr(10))[0])} Exit code {int(kind.exit_code)}.\n"
    yield f"- *Why:* {advice.why}"
    yield f"- *What to do:* {advice.do}"
    yield f"- *Hint, unless the text has its own:* {text(kind.default_hint)}\n"
    found = messages().get(kind.__name__, [])
    for beginning, those in _by_beginning(found).items() if len(found) > _LONG else [("text", found)]:
        if those:
            yield table((beginning, "hint of its own"), ((code(m.text), text(m.hint)) for m in those))


def _by_beginning(found: list[Message]) -> dict[str, list[Message]]:
    options = [message for message in found if message.text.startswith("--")]
    names = [message for message in found if message.text.startswith(("…", "'…"))]
    words = [message for message in found if message not in options and message not in names]
    return {"text with an option first": options, "with a name first": names, "with a word first": words}


def _link(title: str) -> str:
    return f"[{title}](#{re.sub(r'[^a-z -]', '', title.lower()).replace(' ', '-')})"


def all_errors() -> Iterator[type[ExportError]]:
    """Every class of errors.py, parents before children."""
    kinds = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ExportError)
    ]

    def under(parent: type[ExportError]) -> Iterator[type[ExportError]]:
        yield parent
        for kind in kinds:
            if parent in kind.__bases__:
                yield from under(kind)

    return under(ExportError)


_TRAINER_SIDE = Refused.__module__.rpartition(".")[2]
"""It imports nothing of ours: what it refuses, users of `exporter.training` meet as a UsageError."""


@cache
def messages() -> dict[str, list[Message]]:
    """The texts that each class is raised with anywhere in the code."""
    names = {kind.__name__ for kind in all_errors()}
    found: dict[str, dict[str, Message]] = {}
    for path in sorted(path for source in SOURCES for path in (ROOT / source).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                is_refusal = path.stem == _TRAINER_SIDE and node.func.id == Refused.__name__
                name = UsageError.__name__ if is_refusal else node.func.id
                for message in _messages(node) if name in names else ():
                    found.setdefault(name, {}).setdefault(message.text, message)
    return {name: sorted(texts.values(), key=lambda m: m.text) for name, texts in found.items()}


def _messages(call: ast.Call) -> Iterator[Message]:
    assert isinstance(call.func, ast.Name)
    position = 1 if call.func.id == CallFailed.__name__ else 0
    hints = [_template(keyword.value) for keyword in call.keywords if keyword.arg == "hint"]
    for argument in call.args[position : position + 1]:
        for branch in (argument.body, argument.orelse) if isinstance(argument, ast.IfExp) else (argument,):
            template = _template(branch)
            if any(letter.isalpha() for letter in template):
                yield Message(template, next((hint for hint in hints if hint != "…"), ""))


def _template(node: ast.expr) -> str:
    """A text as the code writes it, `…` for each part that is computed."""
    match node:
        case ast.Constant(value=str(words)):
            return " ".join(words.split()) if "\n" in words else words
        case ast.JoinedStr(values=values):
            return "".join(map(_template, values))
        case ast.FormattedValue(value=ast.Call(func=ast.Name(id=errors.to_install.__name__)) as call):
            return _template(call)
        case ast.FormattedValue(conversion=conversion):
            return "'…'" if conversion == ord("r") else "…"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            return _template(left) + _template(right)
        case ast.IfExp(body=body):
            return _template(body)
        case ast.Call(func=ast.Name(id=errors.to_install.__name__), args=[extra]):
            return errors.to_install(_template(extra))
    return "…"
