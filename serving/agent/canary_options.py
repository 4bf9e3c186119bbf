"""`--canary`: which model's canary is asked what. What is wrong with that ends the command at its start."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from exporter.errors import ExportError, UsageError
from exporter.golden import Gates, GoldenRequest, check_signatures, read_golden
from exporter.local_paths import local_path
from exporter.publish.versions import newest_version
from exporter.terminal.server_access import ServerAccess
from serving.agent.canary_keeper import CanaryRules


def canary_rules(
    options: Sequence[str],
    models: Mapping[str, Path],
    *,
    drift: float | None,
    patience_s: float,
    deadline_s: float,
    access: ServerAccess,
) -> dict[str, CanaryRules]:
    """The rules by model; `options` are `[NAME=]FILE`, and may leave out the name if there is one model.

    Raises:
        UsageError: a file cannot be read or does not fit what is published, a model is not known, or its
            directory may not be written.
    """
    rules: dict[str, CanaryRules] = {}
    for text in options:
        name, file = _named(text, models)
        if name in rules:
            raise UsageError(f"--canary names a file for {name!r} twice", hint="put all requests into one")
        requests = read_golden(local_path("--canary", file))
        _check_published(name, models[name], requests)
        rules[name] = CanaryRules(Gates(requests, drift), patience_s, deadline_s, access)
    return rules


def _named(text: str, models: Mapping[str, Path]) -> tuple[str, str]:
    name, separator, file = text.partition("=")
    if separator and name in models:
        return name, file
    if len(models) > 1:
        raise UsageError(
            f"--canary {text} does not say for which model",
            cause=f"there are {', '.join(models)}",
            hint="name one of them: --canary NAME=FILE",
        )
    return next(iter(models)), text


def _check_published(name: str, model: Path, requests: Sequence[GoldenRequest]) -> None:
    """Compare with what is published, as far as it can be seen; the agent waits for the rest."""
    if not model.is_dir():
        return
    if not os.access(model, os.W_OK):
        raise UsageError(
            f"the canary of {name!r} cannot write {model}",
            cause="its hold lies there, and rollbacks are published there",
            hint="mount it so that the agent may write, or leave out --canary",
        )
    try:
        newest = newest_version(model)
    except ExportError:
        return
    if newest is not None:
        check_signatures(requests, newest.path)
