"""Labels of servers that follow tags: `agent --label LABEL=TAG`.

A label names a version: it gets the version at the tag's position, or the one that deltas bring there. At
each look the server is asked for its labels, and a configuration is sent only if one has to move: an agent
keeps no state, and a server that restarted gets its labels again.

A configuration replaces the previous one completely, and no call of a stock server lists its models. So the
servers' configuration file is needed. It is read anew before each change, because `reload --save` writes it,
and is not sent unless the server serves everything that it lists: it adds no model, and waits for none.

A stock server refuses the labels of all models if one names a version that is not available
(`ServerCore::UpdateModelVersionLabelMap`, tensorflow_serving/model_servers/server_core.cc). No such label is
sent: a label whose tag names such a version, or none, stays where it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from msgspec import Struct

from exporter.errors import CallFailed, ExportError
from exporter.publish.tags import version_named
from exporter.terminal.server_access import ServerAccess
from serving.client import ModelClient
from serving.model_config import read_servers_config
from serving.reload import COMING, Reloader, problem_of, statuses
from serving.status import Code, VersionState, VersionStatus

_NO_MODEL = "no/model"
"""A name that no model has: every server answers NOT_FOUND, and some list their models with it."""


class LabelRules(Struct, frozen=True):
    """The tag of each label, the servers' configuration file, and each model's directory by its name."""

    tags: Mapping[str, str]
    config: Path
    models: Mapping[str, Path]


class Labelled(Struct, frozen=True):
    """The new version of each label that moved, and the reasons why other labels did not, as sentences."""

    moved: Mapping[str, int]
    problems: Sequence[str]


def follow_tags(client: ModelClient, rules: LabelRules, access: ServerAccess, deadline_s: float) -> Labelled:
    """Point the labels of the client's model on its server at the versions of their tags.

    Returns the labels that moved; a label that cannot move is a problem in the result. If one has to move,
    the server is sent the whole configuration, and this waits until it is served, for `deadline_s` at most.
    Nothing is sent if the server serves a model that the file does not list, or lacks one that it lists; that
    is a problem, too, unless that model is loading. The configuration also has the present labels of the
    agent's other models by their tags, and no label of a version that is not available. `access` has the
    files for TLS and a token.

    Raises:
        UsageError: the configuration file, or a file for TLS or the token, cannot be used.
        LfsPointer: one of these files is a pointer of Git LFS.
        ServerError: the server does not answer or refuses (CallFailed), or does not serve the configuration
            in time.
    """
    wanted, current, problems = _labels(client, rules)
    moved = {label: version for label, version in wanted.items() if current.get(label) != version}
    if not moved:
        return Labelled({}, problems)
    config = read_servers_config("--model-config-file", rules.config, [*rules.models])
    connect = partial(ModelClient, client.address, deadline_s=deadline_s, access=access)
    if others := _served(connect) - {entry.name for entry in config.model_config_list.config}:
        why = f"labels do not move: {rules.config} does not list {min(others)}, which the server serves"
        return Labelled({}, [*problems, why])
    for entry in config.model_config_list.config:
        with connect(entry.name) as other:
            if entry.name in rules.models:  # also of other models: what is not sent, the server forgets
                entry.version_labels.update(
                    wanted if entry.name == client.model else _labels(other, rules)[0]
                )
            found = statuses(other)
        for label, version in [*entry.version_labels.items()]:
            if version not in _in(found, VersionState.AVAILABLE):
                del entry.version_labels[label]
        if problem := problem_of(entry, found):
            if not _in(found, *COMING):  # otherwise a version is loading, and the next look sees it
                problems.append(f"labels do not move: {problem}, and {rules.config} lists that model")
            return Labelled({}, problems)
    Reloader(config, connect, deadline_s).run()
    return Labelled(moved, problems)


def _labels(client: ModelClient, rules: LabelRules) -> tuple[dict[str, int], dict[str, int], list[str]]:
    """Return the wanted version of each label on a server, the present one, and problems as sentences.

    `client` is of one model on the server. A label that cannot move keeps its present version, and is left
    out if it has none. CallFailed if the server does not answer, or refuses.
    """
    problems: list[str] = []
    there = statuses(client)
    available = _in(there, VersionState.AVAILABLE)
    found = {label: client.labelled(label) for label in rules.tags} if available else {}
    current = {label: version for label, version in found.items() if version is not None}
    wanted = dict(current)
    for label, tag in rules.tags.items():
        try:
            version = version_named(tag, rules.models[client.model])
        except (ExportError, OSError) as error:
            problems.append(f"the label {label} does not move: {_said(error)}")
            continue
        if version in available:
            wanted[label] = version
        elif version not in _in(there, *COMING):
            problems.append(
                f"the label {label} does not move: {tag} names version {version}, "
                "which is not available there"
            )
    return wanted, current, problems


def _served(connect: Callable[[str], ModelClient]) -> frozenset[str]:
    """Return the names of a server's models if it lists them; empty for a stock server, which does not.

    `connect` returns a client of the server for a model's name. CallFailed if the server does not answer, or
    refuses for another reason than an unknown model.
    """
    with connect(_NO_MODEL) as client:
        try:
            client.status()
        except CallFailed as error:
            if error.code != Code.NOT_FOUND.name:
                raise
            return frozenset(error.served)
    return frozenset()


def _said(error: Exception) -> str:
    parts = (error.message, error.cause) if isinstance(error, ExportError) else (str(error),)
    return ": ".join(filter(None, parts))


def _in(found: Iterable[VersionStatus], *states: VersionState) -> set[int]:
    return {each.version for each in found if each.state in states}
