"""The options of commands that work on many bytes: how, and on which engine."""

from __future__ import annotations

import re
from functools import partial
from typing import Annotated

import typer
from msgspec import Struct

from exporter.cli.export_flags import WORK
from exporter.errors import UsageError
from exporter.local_paths import local_name
from exporter.options import EngineName, Jobs
from exporter.storage.url import Url
from exporter.terminal.edge import pairs

_SIZE = re.compile(r"([1-9][0-9]{0,9})(B|KiB|MiB|GiB)", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30}

_Option = partial(typer.Option, rich_help_panel=WORK)


class JobFlags(Struct, frozen=True):
    """How work on many bytes is run, as it is typed."""

    engine: Annotated[
        EngineName | None,
        _Option(
            help="Move, cast, compare and check as tasks of this engine; what was begun is gone on with."
        ),
    ] = None
    workers: Annotated[
        int, _Option(metavar="N", min=0, help="Tasks that run at once; 0: as many as there are processors.")
    ] = 0
    engine_address: Annotated[
        str | None,
        _Option(metavar="ADDRESS", help="The cluster of the engine: ray://HOST:10001, tcp://HOST:8786."),
    ] = None
    engine_option: Annotated[
        list[str], _Option(metavar="NAME=VALUE", help="An option of the engine's own. Repeatable.")
    ] = []
    job_dir: Annotated[
        str | None,
        _Option(
            metavar="DIR|URL",
            help="Keep tasks' results here, where all workers see them; an export's lie below the model.",
        ),
    ] = None
    task_size: Annotated[str, _Option(metavar="SIZE", help="What one task reads, as in 64MiB.")] = "64MiB"

    def jobs(self) -> Jobs:
        """What the options say.

        Raises:
            UsageError: an option is malformed, or goes with --engine, which is not there.
        """
        size = _SIZE.fullmatch(self.task_size)
        if size is None:
            raise UsageError(f"--task-size {self.task_size!r} is not a size", hint="as in --task-size 256MiB")
        if self.engine is None and (self.engine_address or self.engine_option or self.job_dir):
            raise UsageError("--engine-address, --engine-option and --job-dir go with --engine")
        settings = pairs("--engine-option", self.engine_option)
        directory = self.job_dir or ""
        if Url.parse(directory) is None:
            directory = local_name("--job-dir", directory)
        task_bytes = int(size[1]) * _UNITS[size[2].lower()]
        return Jobs(self.engine, self.workers, self.engine_address or "", settings, task_bytes, directory)


LOCALLY = JobFlags()
