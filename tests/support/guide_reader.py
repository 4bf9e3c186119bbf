"""A reader of the guide, who types each page's blocks in their order, in a directory of the page's own.

Pages that continue another one are followed in its directory, after it.
"""

from __future__ import annotations

import contextlib
import io
import re
import socket
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.support.guide_artefacts import TRAIN, lay_out, train
from tests.support.guide_commands import run_command, start_server
from tests.support.guide_pages import ROOT, Block, Command, Page, followed

_PORT = re.compile(r"\b(?:85|95)\d\d\b")
_VARIES = re.compile(r"\b\d+\.\d\d? s\b|127\.0\.0\.1:\d+")
"""What differs from run to run in the output that the guide shows."""


class Reader:
    """Follows a page and those that continue it. What a block needs is what the blocks before it left."""

    def __init__(self, page: Page, directory: Path, factory: pytest.TempPathFactory) -> None:
        self._directory = directory
        self._factory = factory
        self._done: list[Block] = []
        self._failed: Block | None = None
        self._ports: dict[str, str] = {}
        self._servers: list[BaseProcess] = []
        (directory / "examples").symlink_to(ROOT / "examples")
        for name in page.starts_with:
            lay_out(name, directory, factory)

    def follow(self, block: Block) -> None:
        """Run a block, and those before it that were not run yet."""
        for each in followed(*(page.name for page in Page(block.page).story)):
            if each in self._done or (each.page == block.page and each.line > block.line):
                continue
            if self._failed is not None:
                pytest.skip(f"{self._failed} failed")
            self._failed = each
            self._run(each)
            self._failed = None
            self._done.append(each)

    def close(self) -> None:
        """End the servers that the page started."""
        for server in self._servers:
            server.terminate()
        for server in self._servers:
            server.join(timeout=300)
            assert server.exitcode == 0

    def _run(self, block: Block) -> None:
        if block.marker == "file":
            (self._directory / block.argument).write_text(block.text)
        elif block.language == "console":
            assert block.commands, f"{block}: a console block without a line that begins with `$ `"
            for command in block.commands:
                self._type(block, command)
        elif block.language == "python":
            self._run_python(block)
        else:
            raise AssertionError(f"{block}: nobody knows how to run {block.language!r}; say so in a comment")

    def _type(self, block: Block, command: Command) -> None:
        text = _PORT.sub(lambda port: self._port(port[0]), command.text)
        if text.endswith("&"):
            self._servers.append(start_server(text.rstrip(" &"), self._directory))
            return
        if text.startswith(TRAIN):
            out = text.removeprefix(TRAIN).strip()
            _expect_shown(block, command.shown, train(self._directory, out, self._factory))
            return
        ran = run_command(text, self._directory)
        if ran.code != 0:
            raise AssertionError(f"{block}: exit code {ran.code}\n$ {text}\n{ran.out}\n{ran.err}")
        _expect_shown(block, command.shown, ran.out + ran.err)

    def _run_python(self, block: Block) -> None:
        named = re.match(r"# (examples/\S+\.py)\n", block.text)
        if named:
            _expect_excerpt(block, (ROOT / named[1]).read_text())
            return
        code = compile("\n" * block.line + block.text, block.page, "exec")
        printed = io.StringIO()
        with contextlib.chdir(self._directory), contextlib.redirect_stdout(printed):
            exec(code, {"__name__": "__main__"})
        _expect_shown(block, block.shown, printed.getvalue())

    def _port(self, named: str) -> str:
        if named not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[named] = str(probe.getsockname()[1])
        return self._ports[named]


def _expect_shown(block: Block, shown: str, printed: str) -> None:
    """Every line that the guide shows is printed, in this order; a line `...` stands for any."""
    lines = iter(_settled(printed))
    for line in _settled(shown):
        if line != "..." and line not in lines:
            raise AssertionError(
                f"{block}: the guide shows {line!r}, which was not printed in this place\n{printed}"
            )


def _settled(text: str) -> list[str]:
    lines = [" ".join(_VARIES.sub("VARIES", line).split()) for line in text.splitlines()]
    return [line for line in lines if line]


def _expect_excerpt(block: Block, source: str) -> None:
    lines = iter(source.splitlines())
    for line in block.text.splitlines()[1:]:
        if line.strip() != "..." and line not in lines:
            raise AssertionError(f"{block}: {line!r} is not, in this order, in the file that is shown")
