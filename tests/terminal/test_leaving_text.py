"""Text of others leaves by one escape: terminal, log, text/plain, page, metrics and JSON."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import unicodedata
from collections.abc import Iterator
from contextlib import redirect_stderr
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from exporter.errors import ExportError
from exporter.terminal.output import Output, OutputMode, escape, labelled, quote_logs
from serving.agent.http import Site, page
from serving.agent.metrics import Metrics
from serving.http_port import HttpRequest
from tests.support.lying_server import HOSTILE_TEXT
from tests.support.status_pages import journal_of, recorded, scenes

ROOT = Path(__file__).parent.parent.parent


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def assert_harmless(text: str) -> None:
    """No control but line breaks and the program's own styles; no line that begins as the text had it."""
    bare = re.sub(r"\x1b\[[0-9;]*m", "", text)
    odd = {each for each in bare if unicodedata.category(each) in ("Cc", "Cf", "Zl", "Zp") and each != "\n"}
    assert not odd, repr(text[:300])
    assert not any(line.startswith(("up 1", "# HELP up")) for line in bare.split("\n"))


BAR = re.compile(r"\x1b\[\?25[lh]|\x1b\[[0-9]*[AKG]|\r")
"""What a progress bar moves the cursor by."""


class Shown(Struct):
    text: str


@pytest.mark.parametrize("mode", OutputMode)
@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_command_prints_no_control_of_others(mode: OutputMode, stream: type[io.StringIO]) -> None:
    out, err = stream(), stream()
    sink = Output(mode, stdout=out, stderr=err)
    sink.result(Shown(HOSTILE_TEXT), [escape(HOSTILE_TEXT), labelled("text", HOSTILE_TEXT)])
    sink.note(HOSTILE_TEXT)
    sink.warn(HOSTILE_TEXT)
    sink.trouble(HOSTILE_TEXT)
    sink.table(HOSTILE_TEXT, {"text": "left"}, [[HOSTILE_TEXT]])
    sink.error(ExportError(HOSTILE_TEXT, cause=HOSTILE_TEXT, hint=HOSTILE_TEXT))
    with sink.progress(HOSTILE_TEXT, 1) as bar:
        bar.advance(1)
    for each in (out, err):
        written = re.sub(
            r"\x1b\[\?25[lh]|\x1b\[[0-9]*[AKG]|\r", "", each.getvalue()
        )  # those of a progress bar
        assert_harmless(written)


def test_a_log_has_no_control_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's own
    quote_logs()
    told = io.StringIO()
    with redirect_stderr(told):
        logging.getLogger("serving.test").warning("refused: %s", HOSTILE_TEXT)
        try:
            raise ValueError(HOSTILE_TEXT)
        except ValueError:
            logging.getLogger("serving.test").exception("failed")
    assert "refused: " in told.getvalue()
    assert_harmless(told.getvalue())


def hostile(value: Any, kept: frozenset[str] = frozenset()) -> Any:
    """The same value with a hostile text in place of each text but a few words, and the fields `kept`."""
    if isinstance(value, Enum) or not isinstance(value, str | Struct | tuple | dict):
        return value
    if isinstance(value, str):
        return value if value in ("AVAILABLE", "END", "LOADING", "START", "UNLOADING") else HOSTILE_TEXT
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(hostile(each, kept) for each in value)
    if isinstance(value, dict):
        return {key: hostile(each, kept) for key, each in value.items()}
    if isinstance(value, Struct):
        names = set(value.__struct_fields__) - kept
        changed = {name: hostile(getattr(value, name), kept) for name in names}
        return msgspec.structs.replace(value, **changed)
    return value


@pytest.mark.parametrize("scene", scenes())
def test_no_answer_of_the_agents_port_has_a_control_of_others(scene: str) -> None:
    """Whatever a server, a store, a publisher or a file has said."""
    everything = site_of(hostile(scenes()[scene]))
    for path in ("/", "/findings", "/healthz", "/readyz", "/freshz", "/livez", "/status.json", "/x"):
        answer = everything(HttpRequest("GET", path, {}))
        text, kind = b"".join(answer.body).decode(), dict(answer.headers)["Content-Type"]
        if "json" in kind:
            assert json.loads(text)
        if "html" in kind:
            assert "<script>\\u2028" not in text
            text = text.replace("\n# HELP up", "").replace("\nup 1", "")  # a page's lines are not metrics
        assert_harmless(text)
    said = site_of(hostile(scenes()[scene], NAMES))
    text = b"".join(said(HttpRequest("GET", "/metrics", {})).body).decode()
    assert [*text_string_to_metric_families(text)]
    assert_harmless(text)


# Labels of metrics: whoever starts the agent chooses them.
NAMES = frozenset({"name", "model", "address"})


def site_of(view: Any) -> Site:
    def look() -> Any:
        return view

    return Site(look, Metrics(look), partial(page, look, recorded(view), journal_of(view), 30.0), 30.0)


# Where a stream is written to, or asked about, and where a text/plain is put together.
WRITERS = {
    "exporter/terminal/output.py": "all that commands print, and the text of text/plain",
    "exporter/terminal/edge.py": "streams that are closed, or have no character of a text",
    "exporter/terminal/tensorflow_import.py": "flushes what TensorFlow says while it is imported",
    "exporter/cli/help_command.py": "texts of the package",
    "exporter/cli/watched.py": "metrics",
    "serving/cli.py": "asks for the encoding",
    "serving/agent/http.py": "made by `plain`; metrics",
    "serving/rest.py": "made by `plain`; metrics",
}


def test_nothing_else_makes_a_text_for_people() -> None:
    found = {
        str(path.relative_to(ROOT))
        for room in ("exporter", "serving")
        for path in (ROOT / room).rglob("*.py")
        if any(writes(ast.parse(path.read_text())))
    }
    assert found == WRITERS.keys()


def writes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield what names a standard stream, calls `print`, or says text/plain."""
    for node in ast.walk(tree):
        is_stream = isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stdout", "sys.stderr")
        is_print = isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
        is_plain = isinstance(node, ast.Constant) and str(node.value).startswith("text/plain")
        if is_stream or is_print or is_plain:
            yield node
