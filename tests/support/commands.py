"""Run a command line in this process and see what a user would see."""

from __future__ import annotations

import io
import json
import re
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import typer

from exporter.bundle import mapped_tables
from exporter.cli import app as cli
from exporter.errors import Exit
from serving import cli as serving_cli
from tests.support.printed_documents import checked, checked_error


class Terminal(io.StringIO):
    """What a person looks at."""

    def isatty(self) -> bool:
        return True


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


def run_app(app: typer.Typer, *arguments: object) -> Ran:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            main = cli.main if app is cli.app else serving_cli.main
            main([str(argument) for argument in arguments])
        except SystemExit as left:
            code = left.code
    assert isinstance(code, int)
    return Ran(code, out.getvalue(), err.getvalue())


def export_model(*arguments: object) -> Ran:
    return run_app(cli.app, *arguments)


def export_small(*arguments: object) -> Ran:
    """As `export_model`, where `--map-tables` maps tables of any size."""
    with patch.object(mapped_tables, "LEAST_BYTES", 1):
        return export_model(*arguments)


class Bad(Exception):
    """What must not happen."""


def run_command(*arguments: object) -> int:
    """A command line must end in a code of the table, and in a named error if in any; the code."""
    ran = export_model(*arguments)
    if ran.code not in set(Exit):
        raise Bad(f"exit code {ran.code}")
    if "Traceback" in ran.err or re.search(r'(error: |"message": ")unexpected ', ran.err):
        raise Bad(ran.err)
    if ran.code not in (Exit.DONE, Exit.DIFFERENT) and "error" not in ran.err:
        raise Bad(f"exit code {ran.code} and no error: {ran.err!r}")
    return ran.code
