"""`serve-model reload`: send a running model server a new configuration, from a file or from options."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from msgspec import Struct

from exporter.errors import NotUpdatable, UsageError
from exporter.publish.served import MOST_VERSION, version_number
from exporter.storage.files import replace_file, writing
from exporter.storage.local_paths import path_parser
from exporter.terminal.edge import AS_TEXT, OutputFlags, command
from exporter.terminal.output import escape
from exporter.terminal.parameters import pairs
from exporter.terminal.server_access import WITHOUT_TLS, ServerAccess
from serving.address import Address
from serving.documents import Reload, ReloadedModel

_MOST_LATEST = (1 << 32) - 1  # a uint32 in the configuration
_ANY_PLACE = re.compile(r"/|[a-zA-Z][a-zA-Z0-9.+-]*://")


class WholeFlags(Struct, frozen=True):
    """Options for the file of the whole configuration."""

    model_config_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=path_parser("--model-config-file"),
            help="A ModelServerConfig in text form: all models to serve.",
        ),
    ] = None
    save: Annotated[
        bool,
        typer.Option(
            "--save",
            help="Write the configuration, with --model-name's entry, to that file once it is served.",
        ),
    ] = False
    only: Annotated[
        bool,
        typer.Option(
            "--only", help="Serve only --model-name; without this, options for a model need a file."
        ),
    ] = False

    def config(self, entry: EntryFlags) -> Any:
        """Return the configuration to send: the file's, or an empty one, with the entry of --model-name.

        Raises:
            UsageError: options exclude each other or need another one, a label is malformed or has a tag
                where nothing is published, the file cannot be used, or the configuration lists no model.
            LfsPointer: the file is a pointer of Git LFS.
            PositionUnknown: a label's tag does not exist, or no version reaches its position.
            ManifestError, CheckpointError, PublishError: the model in which a tag is looked up cannot be
                read.
        """
        config = self._given(has_model=entry.model_name is not None)
        if entry.model_name is not None:
            entry.put_into(config, entry.model_name)
        elif entry != EntryFlags():
            raise UsageError("options for a model need its name", hint="name it: --model-name NAME")
        if not config.model_config_list.config:
            raise UsageError("the configuration lists no model", hint="see serve-model reload --help")
        return config

    def _given(self, *, has_model: bool) -> Any:
        """Return the file's configuration, or an empty one with --only.

        `has_model` is True with --model-name. UsageError if options exclude each other, the file cannot be
        used, or there is neither a file nor --only with --model-name; LfsPointer if the file is a pointer of
        Git LFS.
        """
        from exporter.wire.protos import message_class
        from serving.model_config import read_config_file

        file = self.model_config_file
        if self.save and file is None:
            raise UsageError("--save needs --model-config-file", hint="name the file to write")
        if file is not None and self.only:
            raise UsageError("--only and --model-config-file exclude each other", hint="leave one out")
        if file is not None:
            return read_config_file(file)
        if not (self.only and has_model):
            raise UsageError(
                "there is no complete configuration to send",
                cause="a server unloads every model that the configuration does not list",
                hint="name a file with --model-config-file, or serve one model: --only --model-name NAME",
            )
        return message_class("serving.ModelServerConfig")()


class EntryFlags(Struct, frozen=True):
    """Options for the entry of one model in the configuration."""

    model_name: Annotated[str | None, typer.Option(metavar="NAME", help="The model's name in requests.")] = (
        None
    )
    model_base_path: Annotated[
        str | None, typer.Option(metavar="MODEL", help="Its base path on the server's machine.")
    ] = None
    version: Annotated[
        list[int],
        typer.Option(
            metavar="VERSION", min=0, max=MOST_VERSION, help="Serve this version; repeat it for several."
        ),
    ] = []
    latest: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=_MOST_LATEST, help="Serve the newest N versions.")
    ] = None
    all_versions: Annotated[bool, typer.Option("--all-versions", help="Serve every version.")] = False
    label: Annotated[
        list[str],
        typer.Option(
            metavar="LABEL=VERSION",
            help="A name for a version; repeat it for several. A tag, or another name of a position, is "
            "looked up in the base path: it is the version that is there, or that deltas lead there.",
        ),
    ] = []

    def put_into(self, config: Any, name: str) -> None:
        """Change the entry of the model `name` in `config` by the options, or add one; its other fields stay.

        If labels are given, they replace all labels of the entry. A tag is looked up in the base path, also
        in a store.

        Raises:
            UsageError: a new entry lacks a base path, options exclude each other, a label is not
                LABEL=VERSION, or its version is no int64, or its tag is malformed, or the base path has no
                publications.
            PositionUnknown: there is no such tag, or no version from which its position can be reached.
            ManifestError, CheckpointError, PublishError: the base path cannot be read.
        """
        policy, base_path = self._policy(), self.model_base_path
        found = [entry for entry in config.model_config_list.config if entry.name == name]
        if not found and base_path is None:
            raise UsageError(f"model {name} has no base path", hint="name it: --model-base-path DIR")
        new = config.model_config_list.config.add
        entry = found[0] if found else new(name=name, model_platform="tensorflow")
        if base_path is not None:
            entry.base_path = base_path if _ANY_PLACE.match(base_path) else str(Path(base_path).absolute())
        if policy is not None:
            entry.model_version_policy.CopyFrom(policy)
        if self.label:
            entry.version_labels.clear()
            for label, version in pairs("--label", self.label).items():
                is_number = version.isascii() and version.isdecimal()
                number = version_number(version) if is_number else _version_at(version, entry.base_path)
                if number is None:
                    raise UsageError(
                        f"--label {label}={version[:80]} names no version",
                        cause=f"expected a number up to {MOST_VERSION}, or a tag",
                        hint=f"as in --label {label}=42",
                    )
                entry.version_labels[label] = number

    def _policy(self) -> Any:
        from exporter.wire.protos import message_class

        if bool(self.version) + (self.latest is not None) + self.all_versions > 1:
            raise UsageError(
                "--version, --latest and --all-versions exclude each other", hint="choose one of them"
            )
        policy = message_class("serving.FileSystemStoragePathSourceConfig.ServableVersionPolicy")()
        if self.version:
            policy.specific.versions.extend(sorted(set(self.version)))
        elif self.latest is not None:
            policy.latest.num_versions = self.latest
        elif self.all_versions:
            policy.all.SetInParent()
        else:
            return None
        return policy


def _version_at(named: str, base_path: str) -> int:
    """Return the version of a model from which the fewest deltas reach the position `named`.

    The position is named as for `export-model rollback --to`; `base_path` may be a URL. UsageError if the
    name is malformed, or nothing is published there; PositionUnknown for an unknown name; ManifestError,
    CheckpointError or PublishError if the model cannot be read.
    """
    from exporter.publish.tags import version_named
    from exporter.transfer.opened import opened

    try:
        with opened(base_path, read_only=True) as model:
            path = model.path
            return model.carry(lambda: version_named(named, path))
    except NotUpdatable as error:
        raise UsageError(f"{named!r} is not a version, and no tag: {error.message}") from None


def reload(
    address: Address,
    whole: WholeFlags,
    entry: EntryFlags,
    no_path_check: Annotated[
        bool,
        typer.Option(
            "--no-path-check",
            help="Do not check here that new models' base paths exist: they are elsewhere, or appear later.",
        ),
    ] = False,
    deadline: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.001, help="Fail when the reload takes longer than this.")
    ] = 60.0,
    access: ServerAccess = WITHOUT_TLS,
    printing: OutputFlags = AS_TEXT,
) -> None:
    """Send a running server a new configuration, without a restart, and wait until the server serves it.

    Afterwards the server serves exactly the models of the configuration, and has unloaded all others. The
    configuration comes from a file (a ModelServerConfig in text form, as for TF Serving's
    --model_config_file), from options for one model, or from both: --model-name changes that model's entry in
    the file, or adds one. The command also works with TF Serving's own servers.

    A label can be given the version of a tag (--label stable=prod). It stays there until the next reload;
    serve-model agent --label follows the tag. Labels move last: a label whose new version is not available
    yet keeps its old version until it is.

    A stock server waits for a new model's base path, and accepts no other configuration until the path
    appears; after an entry without a platform it refuses every later configuration until it is restarted. So
    the command checks both before it sends anything: platforms always, base paths if the directory above is
    on this machine.

    \b
    Examples:
      serve-model reload 127.0.0.1:8500 --model-config-file models.config
      serve-model reload 127.0.0.1:8500 --model-config-file models.config --save \\
          --model-name ranker --model-base-path /models/ranker --version 42 --version 43 --label stable=43
      serve-model reload 127.0.0.1:8500 --only --model-name ranker --model-base-path /models/ranker --latest 2
    """
    with command(printing) as sink:
        from serving.client import ModelClient
        from serving.reload import Reloader

        config = whole.config(entry)
        connect = partial(ModelClient, address, deadline_s=deadline, access=access)
        done = Reloader(config, connect, deadline, checks_paths=not no_path_check).run()
        if whole.save and whole.model_config_file is not None:  # after the reload: a refused one is not kept
            _save(config, whole.model_config_file)
        models = [ReloadedModel(one.model, one.versions, one.labels) for one in done]
        lines = [
            f"{one.model}: {_words('version', one.versions)} available"
            + "".join(f"; {name} is {number}" for name, number in one.labels.items())
            for one in models
        ]
        sink.result(Reload(address, models), [escape(line) for line in lines], is_done=True)


def _save(config: Any, file: Path) -> None:
    from google.protobuf import text_format

    with writing(file):
        replace_file(file, text_format.MessageToString(config).encode(), durably=True)


def _words(noun: str, numbers: Any) -> str:
    text = ", ".join(map(str, numbers))
    return f"{noun} {text} is" if len(numbers) == 1 else f"{noun}s {text} are"
