"""Names that somebody else chose, in what commands print: none of them moves a cursor or begins a line."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

from exporter.checkpoint.tensor_bundle import BundleWriter
from exporter.errors import ExportError, lines_of, printable
from exporter.publish.delta_log import read_log
from exporter.storage.local_paths import quoted
from exporter.terminal.output import Failure, Output, OutputMode, labelled
from serving.cli import app as serve_model
from serving.server import ModelServer
from tests.support.agents import process
from tests.support.commands import Terminal, export_model, run_app
from tests.support.logs import set_hold
from tests.support.serving_models import write_saved_model
from tests.support.setting import Setting, followed

FORGED = "ok: true"
HOSTILE = {
    "a new line": f"a\n{FORGED}",
    "a carriage return": f"a\r{FORGED}",
    "a separator of lines": f"a\u2028{FORGED}\u2029{FORGED}\x85{FORGED}",
    "an escape sequence": f"a\x1b[2K\x1b[1G{FORGED}\x1b]0;title\x07\x1b[31m",
    "C1": f"a\x9b2K\x90{FORGED}",
    "backspace, tab, vertical tab, delete": "a\b\b\t\v\f\x7f",
    "the other direction": f"a\u202e{FORGED}\u2066\u200f\u061c",
    "nothing to see": "a\u200b\u200d\u2060\ufeff\u00ad\U000e0041",
    "our own markup": f"[red]a[/] \\[bold]\\\n[bold red]{FORGED}[/]",
}
SURROGATE = f"a\udc9b\udcff\n{FORGED}"
"""As a path that is not UTF-8 is read."""
TEXT = "".join(HOSTILE.values()).replace("/", "")
EVERYTHING = TEXT + "\udcff"
"""As a directory of a volume, which need not be UTF-8, is called."""
MODEL = """
import tensorflow as tf

def build():
    v1 = tf.compat.v1
    ids = v1.placeholder(tf.int64, [None], "ids")
    return {"ids": ids}, {"rows": tf.gather(v1.get_variable("ok_true", [4]), ids)}
"""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def assert_clean(printed: str, *, shows: bool = True) -> None:
    """No character but what is seen, ends of lines and our colours; no line that a name began."""
    plain = COLOUR.sub("", printed)
    assert not [line for line in plain.split("\n") if not line.isprintable()], repr(plain)
    assert FORGED in printed or not shows, "the name was printed"
    assert not re.search(rf"(?m)^{FORGED}", plain), plain


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A base, deltas to 20 and 30, and a trainer; every path has all of it in its name."""
    directory = tmp_path_factory.mktemp("hostile") / EVERYTHING
    followed(directory, (20, 30), published=20)
    return Setting(directory)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    prefix = tmp_path_factory.mktemp("checkpoint") / "model.ckpt-1"
    with BundleWriter(prefix) as writer:
        for name in HOSTILE.values():
            writer.add(name, np.arange(4, dtype=np.float32))
    return prefix


@pytest.mark.parametrize("text", [*HOSTILE.values(), SURROGATE], ids=[*HOSTILE, "surrogates"])
@pytest.mark.parametrize("is_terminal", [True, False], ids=["terminal", "pipe"])
def test_every_way_of_printing(text: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "1000")
    text += f"\n{FORGED}"
    kind = Terminal if is_terminal else io.StringIO
    sink = Output(OutputMode.HUMAN, stdout=kind(), stderr=kind())
    sink.note(text)
    sink.warn(text)
    sink.trouble(text)
    sink.error(ExportError(text, cause=text, hint=text))
    sink.error(ExportError(text, cause=lines_of([text, text])))
    sink.table(text, {"a": "left"}, [[text]])
    sink.result(Failure(text, text, text, text, 1), [labelled(text, text), text])
    for stream in (sink.stdout, sink.stderr):
        assert_clean(stream.getvalue())
    documents = Output(OutputMode.JSON, stdout=kind(), stderr=kind())
    documents.result(Failure(text, text, text, text, 1))
    documents.error(ExportError(text, cause=text, hint=text))
    for stream in (documents.stdout, documents.stderr):
        assert stream.getvalue().replace("\n", "").isprintable()
        assert json.loads(stream.getvalue())["cause"] == text


def test_a_progress_bar_shows_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """rich moves the cursor by itself; of the name nothing but what is seen comes through."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "1000")
    sink = Output(OutputMode.HUMAN, stdout=io.StringIO(), stderr=Terminal())
    with sink.progress(EVERYTHING, 10) as bar:
        bar.advance(10)
    assert printable(EVERYTHING) in COLOUR.sub("", sink.stderr.getvalue())
    assert EVERYTHING[:30] not in sink.stderr.getvalue()


def test_lines_that_are_meant_stay(capsys: pytest.CaptureFixture[str]) -> None:
    Output().error(ExportError("found", cause=lines_of(["one\ntwo", "three"]), hint="h"))
    assert capsys.readouterr().err == "error: found\ncause: \n  one\\ntwo\n  three\nhint:  h\n"


@pytest.mark.parametrize("text", [*HOSTILE.values(), SURROGATE], ids=[*HOSTILE, "surrogates"])
def test_what_is_proposed_can_be_pasted(text: str) -> None:
    """A proposed command names the path that it was proposed for, whatever is in it."""
    command = f"printf %s {quoted(text)}"
    assert command.isprintable()
    done = subprocess.run(["bash", "-c", command], capture_output=True, check=True)
    assert done.stdout == os.fsencode(text)


def test_commands_over_a_published_model(place: Setting) -> None:
    model, train = place.model, place.train
    for command in (
        ("inspect", model),
        ("inspect", place.base, "--tensors"),
        ("inspect", train),
        ("history", model),
        ("verify", model),
        ("doctor", model, "--ckpt-dir", train),
        ("diff", model, train),
        ("--ckpt-dir", train, "--out", model, "--incr", "--dry-run"),
        ("--ckpt-dir", train, "--out", model, "--incr"),
        ("rollback", model, "--to", 20, "--reason", TEXT),
        ("history", model),
        ("inspect", model),
        ("--ckpt-dir", train, "--out", model),
        ("inspect", EVERYTHING),
        ("verify", train, "--debug"),
        (EVERYTHING,),
    ):
        ran = export_model(*command)
        assert_clean(ran.out + ran.err, shows=command[:2] not in {("inspect", train), ("verify", model)})


def test_a_command_of_history_lifts_the_hold(place: Setting) -> None:
    """What is proposed for a path with all of it in its name does what it says."""
    set_hold(read_log(place.model), 10)
    shown = export_model("history", place.model).out
    set_hold(read_log(place.model), None)
    command = re.search(r"export-model (resume .*)", shown)
    assert command is not None, shown
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {command[1]}"], capture_output=True, check=True)
    assert [os.fsdecode(word) for word in words.stdout.split(b"\0")[:-1]] == ["resume", str(place.model)]


def test_names_of_a_checkpoint(checkpoint: Path, place: Setting, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    for command in (
        ("inspect", checkpoint, "--tensors"),
        ("diff", checkpoint, place.train / "model.ckpt-10"),
        ("diff", checkpoint, place.base, "--exit-code"),
        ("--ckpt-dir", checkpoint, "--model", f"{tmp_path}/model.py:build", "--out", tmp_path, "--debug"),
    ):
        ran = export_model(*command)
        assert_clean(ran.out + ran.err)


@pytest.mark.landing
def test_a_model_and_a_server(tmp_path: Path) -> None:
    """Of a model's name, of what a graph says and of a server's answers."""
    base = tmp_path / "ranker"
    write_saved_model(base / "7")
    with ModelServer(base, name=TEXT) as server:
        server.wait_available(60)
        asked = ("--model", TEXT, "--json-input")
        for document in ({"instances": [TEXT]}, {"instances": [{TEXT: 1}]}):
            (tmp_path / "request").write_text(json.dumps({"signature_name": "text", **document}))
            ran = run_app(serve_model, "predict", server.address, *asked, tmp_path / "request")
            assert_clean(ran.out + ran.err)
            if ran.code == 0:
                assert json.loads(ran.out) == {"predictions": [TEXT + "!"]}
        for command in (
            ("status", server.address, "--model-name", TEXT),
            ("status", server.address, "--model-name", f"{TEXT}x"),
            ("update", server.address, "--model-name", TEXT),
        ):
            ran = run_app(serve_model, *command)
            assert_clean(ran.out + ran.err)
        with process("run", base, "--model-name", TEXT, "--port", "0") as started:
            assert started.stdout is not None
            assert_clean(started.stdout.readline())
        targets = ("--target", server.address, "--target", "127.0.0.1:9")
        with process("agent", "--model-base-path", f"{TEXT}={base}", *targets, "--port", "0") as started:
            assert started.stderr is not None
            log = ""
            while log.count(FORGED) < 5:
                log += started.stderr.readline()
            assert_clean(log)
