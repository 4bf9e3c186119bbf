"""`serve-model reload`: another configuration for a running model server, from a file or from options."""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from exporter.errors import UsageError
from exporter.files import sync, write_durably
from exporter.terminal.edge import AS_TEXT, OutputOptions, command, pairs
from exporter.terminal.parameters import Argument, Option, Options
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from serving.address import with_port
from serving.documents import Reload, ReloadedModel

_ANY_PLACE = re.compile(r"/|[a-zA-Z][a-zA-Z0-9.+-]*://")
_WHOLE, _A_MODEL = "Configuration", "Entry of one model"


def reload(
    address: Annotated[
        str,
        Argument(
            "HOST[:PORT]",
            "gRPC address of a model server; the port is 8500 if left out.",
            parser=with_port,
        ),
    ],
    model_config_file: Annotated[
        Path | None,
        Option(metavar="FILE", help="A ModelServerConfig as text: all models to serve.", group=_WHOLE),
    ] = None,
    save: Annotated[
        bool,
        Option(
            help="Write the configuration to that file once it is served, with --model's entry.", group=_WHOLE
        ),
    ] = False,
    only: Annotated[
        bool,
        Option(
            help="Serve --model and no other; without this, options for a model want a file.", group=_WHOLE
        ),
    ] = False,
    model: Annotated[
        str | None, Option(metavar="NAME", help="The model's name in requests.", group=_A_MODEL)
    ] = None,
    model_base_path: Annotated[
        str | None,
        Option(metavar="DIR", help="Its base path on the server's machine.", group=_A_MODEL),
    ] = None,
    version: Annotated[
        tuple[int, ...],
        Option(metavar="VERSION", min=0, help="Serve this version; repeat it for several.", group=_A_MODEL),
    ] = (),
    latest: Annotated[
        int | None, Option(metavar="N", min=1, help="Serve the newest N versions.", group=_A_MODEL)
    ] = None,
    all_versions: Annotated[bool, Option(help="Serve every version.", group=_A_MODEL)] = False,
    label: Annotated[
        tuple[str, ...],
        Option(metavar="LABEL=VERSION", help="A name for a version; repeat it for several.", group=_A_MODEL),
    ] = (),
    deadline: Annotated[
        float, Option(metavar="SECONDS", min=0.001, help="Fail when it takes longer than this.")
    ] = 60.0,
    access: Annotated[ServerAccess, Options()] = WITHOUT_TLS,
    printing: OutputOptions = AS_TEXT,
) -> None:
    """Give a running server another configuration, without a restart, and wait until it is served.

    The server serves exactly the models of the configuration then: what is left out is unloaded. It comes
    from a file (a ModelServerConfig as text, as TF Serving's --model_config_file takes it), from options
    for one model, or from both: --model changes that model's entry in the file, or adds one. TF Serving's
    own servers take this command, too.

    Labels move last: a label that names a version which is not available yet stays where it is until that
    version is available.

    \b
    Examples:
      serve-model reload 127.0.0.1:8500 --model-config-file models.config
      serve-model reload 127.0.0.1:8500 --model-config-file models.config --save \\
          --model ranker --model-base-path /models/ranker --version 42 --version 43 --label stable=43
      serve-model reload 127.0.0.1:8500 --only --model ranker --model-base-path /models/ranker --latest 2
    """
    with command(printing) as sink:
        from rich.markup import escape

        from serving.client import ModelClient
        from serving.reload import Reloader

        config = _config(model_config_file, only=only, save=save, has_model=model is not None)
        if model is not None:
            _set_entry(config, model, model_base_path, _policy(version, latest, all_versions), label)
        elif model_base_path or version or latest or all_versions or label:
            raise UsageError("options for a model lack its name", hint="name it: --model NAME")
        if not config.model_config_list.config:
            raise UsageError("the configuration lists no model", hint="see serve-model reload --help")
        connect = partial(ModelClient, address, deadline_s=deadline, access=access)
        done = Reloader(config, connect, deadline).run()
        if save and model_config_file is not None:
            _save(config, model_config_file)
        models = [ReloadedModel(one.model, one.versions, one.labels) for one in done]
        lines = [
            f"{one.model}: {_words('version', one.versions)} available"
            + "".join(f"; {name} is {number}" for name, number in one.labels.items())
            for one in models
        ]
        sink.result(Reload(address, models), [escape(line) for line in lines], is_done=True)


def _config(file: Path | None, *, only: bool, save: bool, has_model: bool) -> Any:
    """What to begin with: the file's configuration, or an empty one."""
    from exporter.wire.protos import message_class
    from serving.model_config import read_config_file

    if save and file is None:
        raise UsageError("--save goes with --model-config-file", hint="name the file to write")
    if file is not None and only:
        raise UsageError("--only goes without --model-config-file", hint="leave one of them out")
    if file is not None:
        return read_config_file(file)
    if not (only and has_model):
        raise UsageError(
            "there is no whole configuration to send",
            cause="a server unloads every model that it does not find in it",
            hint="name a file with --model-config-file, or serve one model alone: --only --model NAME",
        )
    return message_class("serving.ModelServerConfig")()


def _set_entry(config: Any, name: str, base_path: str | None, policy: Any, labels: tuple[str, ...]) -> None:
    """Replace a model's entry by what the options say, or add one; what they leave out stays."""
    found = [entry for entry in config.model_config_list.config if entry.name == name]
    if not found and base_path is None:
        raise UsageError(f"model {name} has no base path", hint="name it: --model-base-path DIR")
    entry = found[0] if found else config.model_config_list.config.add(name=name, model_platform="tensorflow")
    if base_path is not None:
        entry.base_path = base_path if _ANY_PLACE.match(base_path) else str(Path(base_path).absolute())
    if policy is not None:
        entry.model_version_policy.CopyFrom(policy)
    if labels:
        entry.version_labels.clear()
        for label, version in pairs("--label", labels).items():
            if not version.isdecimal():
                raise UsageError(f"--label {label}={version}: {version!r} is not a version")
            entry.version_labels[label] = int(version)


def _policy(versions: tuple[int, ...], latest: int | None, all_versions: bool) -> Any:
    from exporter.wire.protos import message_class

    if bool(versions) + (latest is not None) + all_versions > 1:
        raise UsageError(
            "--version, --latest and --all-versions are three policies", hint="choose one of them"
        )
    policy = message_class("serving.FileSystemStoragePathSourceConfig.ServableVersionPolicy")()
    if versions:
        policy.specific.versions.extend(sorted(set(versions)))
    elif latest is not None:
        policy.latest.num_versions = latest
    elif all_versions:
        policy.all.SetInParent()
    else:
        return None
    return policy


def _save(config: Any, file: Path) -> None:
    from google.protobuf import text_format

    staged = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        write_durably(staged, text_format.MessageToString(config).encode())
        staged.replace(file)
        sync(file.parent)
    finally:
        staged.unlink(missing_ok=True)


def _words(noun: str, numbers: Any) -> str:
    text = ", ".join(map(str, numbers))
    return f"{noun} {text} is" if len(numbers) == 1 else f"{noun}s {text} are"
