"""Run a command line in this process and see what a user would see."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any

from exporter.cli import app as cli
from exporter.terminal.edge import run
from exporter.terminal.parameters import App
from tests.support.printed_documents import checked, checked_error


@dataclass(frozen=True)
class Ran:
    """What a command left on its streams, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document on stdout."""
        return checked(json.loads(self.out))

    @property
    def error(self) -> Any:
        """The JSON object in the last line of stderr."""
        return checked_error(json.loads(self.err.strip().splitlines()[-1]))


def run_app(app: App, *arguments: object) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            run(app, [str(argument) for argument in arguments])
        except SystemExit as left:
            code = left.code
    assert isinstance(code, int)
    return Ran(code, out.getvalue(), err.getvalue())


def export_model(*arguments: object) -> Ran:
    return run_app(cli.app, *arguments)
