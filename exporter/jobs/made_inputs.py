"""Inputs of tasks that the command itself made: indexes of tables, archives as bundles.

Their paths are others when the command is run again, and no worker elsewhere sees them. So a plan names them
by their contents, and workers elsewhere read a copy in the job's directory, with which it is removed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

from msgspec.structs import replace

from exporter.errors import os_error
from exporter.jobs.task import Input, Task
from exporter.layout import INPUTS_DIRECTORY
from exporter.storage.output_directory import Directory, new_file

T = TypeVar("T", bound=Task)


def named_by_content(tasks: Iterable[T], made: Path) -> tuple[list[T], dict[Input, Input]]:
    """The tasks with files below `made` named by their digests, and the file that each such name stands for.

    Raises:
        PublishError: a file cannot be read.
    """
    tasks = list(tasks)
    below = f"{made.absolute()}{os.sep}"
    files = {each for task in tasks for each in task.inputs if each.place.startswith(below)}
    names = {each: _named(each) for each in files}
    return with_inputs(tasks, names), {name: each for each, name in names.items()}


def with_inputs(tasks: Iterable[T], others: Mapping[Input, Input]) -> list[T]:
    """The tasks with other inputs in the places of some."""
    return [replace(task, inputs=tuple(others.get(each, each) for each in task.inputs)) for task in tasks]


def handed_over(named: Mapping[Input, Input], directory: Directory) -> dict[Input, Input]:
    """What workers read in the place of each named input: a copy in the job's directory.

    Raises:
        DiskFull, PublishError, CheckpointError: the directory cannot be written or read.
    """
    return {name: _copied(name, file, directory) for name, file in named.items()}


def _named(file: Input) -> Input:
    try:
        with Path(file.place).open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as error:
        raise os_error(error, Path(file.place)) from error
    return Input(f"{INPUTS_DIRECTORY}/{digest}", file.size, digest)


def _copied(name: Input, file: Input, directory: Directory) -> Input:
    found = directory.look(name.place)
    if found is None or found[0] != name.size:
        with new_file(directory.scratch) as (_, copy):
            try:
                shutil.copyfile(file.place, copy)
            except OSError as error:
                raise os_error(error, copy) from error
            found = name.size, directory.put_file(name.place, copy)
    return Input(f"{directory.place}/{name.place}", *found)
